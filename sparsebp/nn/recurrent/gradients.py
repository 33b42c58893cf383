"""The gradients of a stack of runs: each layer goes back when it is first needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from sparsebp import kernels
from sparsebp.core import backend, graphs
from sparsebp.core import masks as masking
from sparsebp.core.check import Array
from sparsebp.core.locks import forkable_lock
from sparsebp.nn.gradients import Gradients, NamedGradients, is_tied, without_pruned
from sparsebp.nn.layer import swap_batch_time
from sparsebp.nn.recurrent import runs
from sparsebp.nn.recurrent.lengths import reverse_time
from sparsebp.nn.recurrent.saved import (
    GivenState,
    Need,
    RecurrentSaved,
    RunGradients,
    State,
    Weights,
    suffix,
    weight_names,
)


class RecurrentGradients(NamedGradients):
    """Gradients of a recurrent layer.

    If the weights are asked for first, kernels sum the first layer's gradients on the way, where they can, and store
    nothing for the gradient at the input. If that is asked for afterwards, or what a caller was given and may have
    written to is asked for again, the layer goes back again, to the same bits.
    """

    def __init__(
        self, rnn: Any, gy: Array | None, saved: RecurrentSaved, arriving: Array | None, last: GivenState,
        at_h_n: Callable[[], Array] | None = None,
    ) -> None:  # fmt: skip
        Gradients.__init__(self, rnn, gy, saved)
        self._names, self._more = ("h0", "c0")[: len(saved.last)], None
        self._arriving, self._last, self._at_h_n = arriving, last, at_h_n
        self._xp, self._lock = backend.namespace(saved.last[0]), forkable_lock()
        self._k: Any = kernels.get(self._xp).unchecked
        self._layers: dict[int, list[RunGradients]] = {}
        self._mark: Any = None  # of the work on a GPU, for other streams

    def input_grad(self) -> Array:
        """Return the gradient at the layer's input."""
        with self._lock:
            found = self._back(0, "input")
            stored = _take_stored(found)
        return swap_batch_time(self._at_input(0, found, stored), self.layer.batch_first)

    def weight_grad(self) -> dict[str, Array]:
        """Return the gradients of the parameters, by name."""
        rnn, named = self.layer, {}
        with self._lock:
            for layer in reversed(range(rnn.num_layers)):
                self._back(layer, "weights")
            found: list[tuple[RunGradients, Weights | None]] = []
            for layer in range(rnn.num_layers):
                for one in self._layers[layer]:
                    found.append((one, one.weights))
                    one.weights = None  # the caller may write to them
        for run, (one, sums) in enumerate(found):
            if sums is None:
                grads = runs.weight_grad(self._k, rnn.cell, one, self.saved.runs[run], rnn._weights(run))
            else:
                grads = sums
            for name, grad in zip(weight_names(suffix(run, rnn.directions)), grads, strict=True):
                if grad is not None:
                    named[name] = grad
        named = rnn.summed(named) if is_tied(rnn.params) else named
        return without_pruned(rnn, named) if masking.owners else named

    def others(self) -> State:
        """Return the gradients at the state before the first step."""
        with self._lock:
            for layer in reversed(range(self.layer.num_layers)):
                self._back(layer, "initial")
            states = [one.initial for _, layer in sorted(self._layers.items()) for one in layer]
        found = tuple(self._xp.stack(arrays) for arrays in zip(*states, strict=True))
        return tuple(a.take(self.saved.lengths.packed.back, 1) for a in found) if self.saved.runs[0].segments else found

    def _back(self, layer: int, need: Need) -> list[RunGradients]:
        """Return gradients of a layer's runs that hold what is needed, going back through it unless they are there."""
        found = self._layers.get(layer)
        if found is not None and found[0].has(need):
            graphs.wait(self._xp, self._mark)
            return found
        rnn, saved = self.layer, self.saved
        if self._at_h_n is not None:
            self._last, self._at_h_n = (self._at_h_n(), *self._last[1:]), None
        gy = self._arriving
        if layer + 1 < rnn.num_layers:
            above = self._back(layer + 1, "input")
            gy = self._at_input(layer + 1, above, _take_stored(above))
        # The first layer's kernels may sum the gradients of its weights, and a diagonal cell's in all layers. If the
        # gradient at x is asked for first, only the host does so, and stores ga, or the one at x, as well; if it is
        # asked for afterwards, ga alone.
        first = found is None and layer == 0 and self._xp is np
        want: runs.Want = "both" if rnn.cell.diagonal or first else "input"
        if layer == 0 and need == "weights":
            want = "weights"
        before, found = found, []
        for run in range(layer * rnn.directions, (layer + 1) * rnn.directions):
            found.append(runs.backward(
                self._k, rnn.cell, saved.runs[run], rnn._weights(run), *self._arriving_at(run, gy), want,
                saved.backward_choice, rnn.options,
            ))  # fmt: skip
        if before is not None and before[0].summed:
            for one in found:
                one.summed = True  # the same bits, if the weights are asked for again
        self._layers[layer] = found
        if self._xp is not np:
            self._mark = graphs.record(self._xp)
        return found

    def _arriving_at(self, run: int, arriving: Array | None) -> tuple[Array | None, list[Array | None]]:
        """Return gy and the gradient at the last state of one run, in the order of its steps."""
        xp, saved, size = self._xp, self.saved, self.layer.output_size
        direction, lengths, last = run % self.layer.directions, saved.lengths, list(self._last)
        gy = None if arriving is None else arriving[..., direction * size : (direction + 1) * size]
        if saved.runs[run].segments:
            packed = lengths.packed
            gy = None if gy is None else packed.take(gy, direction)
            return gy, [None if array is None else array[run][packed.order] for array in last]
        shared = gy is not None and gy.strides[0] == 0  # by all steps, as behind a mean
        if gy is not None and not (shared and self.layer.cell.diagonal):
            gy = reverse_time(gy, lengths) if direction else xp.ascontiguousarray(gy)
        for number, array in enumerate(last):
            if array is not None:
                last[number] = xp.ascontiguousarray(array[run])
        if lengths is not None and last[0] is not None:  # the kernels' last step is not every sample's last step
            gy = xp.zeros_like(saved.runs[run].h) if gy is None else gy.copy()
            gy[lengths.values - 1, lengths.samples] += last[0]
            last[0] = None
        return gy, last  # the gradient at c passes through the padding unchanged, see `CellMath.close`

    def _at_input(self, layer: int, found: list[RunGradients], stored: list[Array | None]) -> Array:
        """Return the gradient at a layer's input, before its dropout: (T, B, features)."""
        rnn, saved = self.layer, self.saved
        total: Array = None
        for direction, (run, one, sums) in enumerate(zip(rnn._runs(layer), found, stored, strict=True)):
            at_x = rnn.cell.input_grad(one.ga, rnn._weights(run)) if sums is None else sums
            if saved.runs[run].segments:
                at_x = saved.lengths.packed.spread(at_x, direction)
            elif direction:
                at_x = reverse_time(at_x, saved.lengths)
            if direction:
                total += at_x
            else:
                total = at_x
        mask = saved.masks[layer]
        if mask is not None:
            total *= mask
        return total


def _take_stored(found: list[RunGradients]) -> list[Array | None]:
    """Take the gradients away that kernels have stored at the inputs of runs: the caller may write to them."""
    stored = [one.x for one in found]
    for one in found:
        one.x = None
    return stored
