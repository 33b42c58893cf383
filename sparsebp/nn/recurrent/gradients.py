"""The gradients of a recurrent layer: ways back through its runs, each taken when first needed, once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sparsebp import kernels
from sparsebp.core import backend
from sparsebp.core import masks as masking
from sparsebp.core.check import Array
from sparsebp.core.locks import forkable_lock
from sparsebp.nn.gradients import Gradients, NamedGradients, is_tied, without_pruned
from sparsebp.nn.layer import turned
from sparsebp.nn.recurrent.lengths import reverse_time
from sparsebp.nn.recurrent.runs import FUSED, run_backward
from sparsebp.nn.recurrent.saved import GivenState, RecurrentSaved, RunGradients, State, Weights, suffix, weight_names


class RecurrentGradients(NamedGradients):
    """Gradients of a recurrent layer: ways back through its runs, each taken when first needed, once.

    If the weights are asked for first, kernels sum the first layer's gradients on the way, where they can, and store
    nothing for the gradient at the input. If that is asked for afterwards, these runs go back again.
    """

    def __init__(
        self, rnn: Any, gy: Array | None, saved: RecurrentSaved, arriving: Array | None, last: GivenState,
        at_h_n: Callable[[], Array] | None = None,
    ) -> None:  # fmt: skip
        Gradients.__init__(self, rnn, gy, saved)
        self._names, self._more = ("h0", "c0")[: len(saved.last)], None
        self._arriving, self._last, self._at_h_n = arriving, last, at_h_n
        self._xp, self._lock = backend.namespace(saved.last[0]), forkable_lock()
        self._done, self._mark = False, None
        self._grads: dict[int, RunGradients] = {}  # by the number of the run
        self._at_x: dict[int, Array] = {}  # gradients at the inputs of runs, in place of those at the gates
        self._initial: dict[int, State] = {}
        self._unread: dict[int, Weights] | None = {}  # sums that have not been asked for yet; None once they were

    def input_grad(self) -> Array:
        """Return the gradient at the layer's input."""
        with self._lock:
            self._take(for_weights=False)
            if 0 not in self._grads and 0 not in self._at_x:  # not stored, or given away
                if self.layer.cell.diagonal:  # nor is what a layer above would need
                    self._done = False
                    self._take(for_weights=False)
                else:
                    above = self._layer_input_grad(1, self._stored(1)) if self.layer.num_layers > 1 else self._arriving
                    self._layer_back(0, above)
                    self._mark = backend.record(self._xp)
            stored = self._stored(0)
        gx = self._layer_input_grad(0, stored)
        return turned(gx, self.layer.batch_first)

    def weight_grad(self) -> dict[str, Array]:
        """Return the gradients of the parameters, by name."""
        rnn, tapes, named = self.layer, self.saved.tapes, {}
        with self._lock:
            self._take(for_weights=True)
            if self._unread is None:  # given away, as the caller may write to them: sum anew, to the same bits
                self._done = False
                self._take(for_weights=True)
            sums = self._unread or {}
            self._unread = None if sums else {}
        for run, tape in enumerate(tapes):
            if run in sums:
                grads = sums[run]
            else:
                grads = rnn.cell.weight_grad(self._grads[run].ga, tape, rnn._weights(run), self._grads[run].at_h)
            for name, grad in zip(weight_names(suffix(run, rnn.directions)), grads, strict=True):
                if grad is not None:
                    named[name] = grad
        named = rnn.summed(named) if is_tied(rnn.params) else named
        return without_pruned(rnn, named) if masking.owners else named

    def others(self) -> State:
        """Return the gradients at the state before the first step."""
        with self._lock:
            self._take(for_weights=False)
        states = [self._initial[run] for run in range(len(self.saved.tapes))]
        return tuple(self._xp.stack(arrays) for arrays in zip(*states, strict=True))

    def _take(self, *, for_weights: bool) -> None:
        """Take the gradients through all runs, from the last layer to the first, unless that is done."""
        if self._done:
            backend.wait(self._xp, self._mark)
            return
        if self._at_h_n is not None:
            self._last = self._at_h_n(), *self._last[1:]
        gy, rnn, k, self._unread = self._arriving, self.layer, kernels.get(self._xp), {}
        for layer in reversed(range(rnn.num_layers)):
            # The first layer's kernels may sum the gradients of its weights, and a diagonal cell's in all layers. If
            # the gradient at x is asked for first, only the host does so, and stores ga, or the one at x, as well;
            # both orders give bitwise equal sums.
            keep, runs, choice = layer > 0 or not for_weights, rnn._runs(layer), self.saved.backward_choice
            inside = rnn.cell.diagonal or (layer == 0 and (for_weights or backend.is_host(self._xp)))
            if (
                inside and choice.algorithm in FUSED
                and rnn.cell.sums_inside(k, self.saved.tapes[runs[0]], choice.chunks)
            ):  # fmt: skip
                for run in runs:
                    self._unread[run], self._initial[run], ga, at_x = rnn.cell.summed_backward(
                        k.unchecked, self.saved.tapes[run], rnn._weights(run), *self._arriving_at(run, gy),
                        choice.chunks, keep=keep,
                    )  # fmt: skip
                    if ga is not None:
                        self._grads[run] = RunGradients(ga, self._initial[run])
                    if at_x is not None:
                        self._at_x[run] = at_x
            else:
                self._layer_back(layer, gy)
            if layer > 0:
                gy = self._layer_input_grad(layer, self._stored(layer))
        self._mark, self._done = None if self._xp is np else backend.record(self._xp), True

    def _layer_back(self, layer: int, gy: Array | None) -> None:
        rnn, saved = self.layer, self.saved
        for run in rnn._runs(layer):
            self._grads[run] = run_backward(
                rnn.options, saved.backward_choice, rnn.cell, saved.tapes[run], rnn._weights(run),
                *self._arriving_at(run, gy),
            )  # fmt: skip
            self._initial[run] = self._grads[run].initial

    def _arriving_at(self, run: int, arriving: Array | None) -> tuple[Array | None, list[Array | None]]:
        """Return gy and the gradient at the last state of one run, in the order of its steps."""
        xp, lengths, size = self._xp, self.saved.lengths, self.layer.output_size
        direction = run % self.layer.directions
        gy = None if arriving is None else arriving[..., direction * size : (direction + 1) * size]
        shared = gy is not None and gy.strides[0] == 0  # by all steps, as behind a mean
        if gy is not None and not (shared and self.layer.cell.diagonal):
            gy = reverse_time(gy, lengths) if direction else xp.ascontiguousarray(gy)
        last = list(self._last)
        for number, array in enumerate(last):
            if array is not None:
                last[number] = xp.ascontiguousarray(array[run])
        if lengths is not None and last[0] is not None:  # the kernels' last step is not every sample's last step
            gy = xp.zeros_like(self.saved.tapes[run].h) if gy is None else gy.copy()
            gy[lengths.values - 1, lengths.samples] += last[0]
            last[0] = None
        return gy, last  # the gradient at c passes through the padding unchanged, see `CellMath.close`

    def _stored(self, layer: int) -> list[Array | None]:
        """Give the gradients away that kernels have written at the inputs of a layer's runs."""
        return [self._at_x.pop(run, None) for run in self.layer._runs(layer)]

    def _layer_input_grad(self, layer: int, stored: Sequence[Array | None]) -> Array:
        """Return the gradient at a layer's input, before its dropout: (T, B, features)."""
        rnn = self.layer
        first, *second = (
            rnn.cell.input_grad(self._grads[run].ga, rnn._weights(run)) if at_x is None else at_x
            for run, at_x in zip(rnn._runs(layer), stored, strict=True)
        )
        for backwards in second:
            first += reverse_time(backwards, self.saved.lengths)
        mask = self.saved.masks[layer]
        if mask is not None:
            first *= mask
        return first
