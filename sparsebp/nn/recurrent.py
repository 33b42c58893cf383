"""RNN, GRU and LSTM: stacked, in two directions, with lengths; their cells; gradients by any scan."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from types import ModuleType
from typing import Any, ClassVar, NamedTuple, TypedDict, Unpack, cast

import numpy as np

from sparsebp import kernels
from sparsebp.core import backend, graphs
from sparsebp.core import masks as masking
from sparsebp.core.check import (
    Array,
    Backward,
    Nonlinearity,
    Seed,
    check_flag,
    check_generator,
    check_integer,
    check_number,
)
from sparsebp.core.errors import OptionError, ShapeError
from sparsebp.core.locks import forkable_lock
from sparsebp.core.shortcuts import belongs, forward_of
from sparsebp.nn.basic import dropout_mask
from sparsebp.nn.bptt import FUSED, BackwardOptions, run_backward
from sparsebp.nn.cells import (
    CellMath,
    GivenState,
    GRUMath,
    LSTMMath,
    ProjectedLSTMMath,
    RecurrentSaved,
    RNNMath,
    RunGradients,
    State,
    Tape,
    Weights,
    pair,
    parse_lengths,
    reverse_time,
    weight_names,
)
from sparsebp.nn.gradients import Gradients, NamedGradients, Shared, gradients_of, is_tied, without_pruned
from sparsebp.nn.layer import (
    Fixed,
    Layer,
    batch_first_axes,
    check_gy,
    check_input,
    check_layer,
    check_sequence_input,
    turned,
)
from sparsebp.nn.linear import Linear
from sparsebp.nn.modes import NothingKept, keeps
from sparsebp.nn.parameters import parameter_dtype
from sparsebp.nn.stream import RecurrentCell, Stream, carrying, takes_unbatched
from sparsebp.scan.rules import HOST_CHOICE, Choice, choose_recurrent_backward


class RecurrentOptions(TypedDict, total=False):
    """Keyword arguments of `RNN`, `GRU` and `LSTM` beyond torch.nn's; see `Recurrent`."""

    backward: Backward
    up_levels: int | None
    chunks: int | None
    workers: int | None
    memory_limit: int | None
    device: Any
    dtype: Any
    rng: Seed


class Recurrent(Layer):
    """Base of `RNN`, `GRU` and `LSTM`: torch.nn's arguments, parameters and layouts; `backward` chooses an algorithm.

    Parameters
    ----------
    input_size, hidden_size, num_layers
        As in torch.nn.
    bias, batch_first, dropout, bidirectional
        As in torch.nn; dropout acts between layers while training.
    backward
        ``"bp"``: plain back-propagation, the recursion in one kernel. ``"chunked"``: fused reduce-then-scan.
        ``"linear"``, ``"blelloch"``, ``"hybrid"``: the general scan over materialised Jacobians. ``"auto"``: on a
        host ``"bp"``; on a GPU, or with `workers`, the recursion or a chunked scan, by their sequential steps.
    up_levels, chunks
        Levels of the hybrid's up-sweep; chunks of the chunked scan (default: about √T, or the rule's number).
    workers, memory_limit
        Passed to `plan_scan`; the limit in bytes.
    device, dtype
        None or ``"cpu"`` (see `Layer.to`); float32 or float64.
    rng
        Generator or seed of the initial values and of dropout.

    Notes
    -----
    Parameters as in torch.nn: ``weight_ih_l{k}`` (gH, input), ``weight_hh_l{k}`` (gH, H), ``bias_ih_l{k}``,
    ``bias_hh_l{k}`` (gH,), with the suffix ``_reverse`` for the second direction; g is 1 (RNN), 3 (GRU) or 4 (LSTM).
    With `proj_size` there is ``weight_hr_l{k}`` (proj_size, H), and h has that size.
    """

    generator: np.random.Generator
    cell: CellMath
    """The cell's equations, given by the subclass."""
    batch_axes = batch_first_axes
    joins_steps = False
    optional = "bias_ih", "bias_hh"
    saved_class: ClassVar[type[RecurrentSaved]] = RecurrentSaved

    def __init__(
        self, input_size: int, hidden_size: int, num_layers: int = 1, bias: bool = True, batch_first: bool = False,
        dropout: float = 0.0, bidirectional: bool = False, *, backward: Backward = "auto",
        up_levels: int | None = None, chunks: int | None = None, workers: int | None = None,
        memory_limit: int | None = None, device: Any = None, dtype: Any = np.float32, rng: Seed = None,
    ) -> None:  # fmt: skip
        super().__init__()
        input_size, hidden_size, num_layers = (
            check_integer(name, size, 1, most)
            for name, size, most in (
                ("input_size", input_size, None), ("hidden_size", hidden_size, None), ("num_layers", num_layers, 2**16),
            )
        )  # fmt: skip
        bias, self.dropout = check_flag("bias", bias), check_number("dropout", dropout, 0, 1)
        self.input_size, self.hidden_size, self.num_layers = input_size, hidden_size, num_layers
        if self.dropout > 0 and num_layers == 1:
            kinds = type(self).__mro__
            own = sum("__init__" in vars(kind) for kind in kinds[: kinds.index(Recurrent)])  # calls in between
            warnings.warn(f"Dropout acts between recurrent layers: dropout={dropout} has no effect with num_layers=1",
                          stacklevel=2 + own)  # fmt: skip
        self.batch_first = check_flag("batch_first", batch_first)
        self.bidirectional = check_flag("bidirectional", bidirectional)
        self.options = BackwardOptions(backward, up_levels, chunks, workers, memory_limit)
        self.generator = check_generator("rng", rng)
        proj_size = getattr(self, "proj_size", 0)  # an LSTM may have one
        self.directions, self.output_size = 2 if bidirectional else 1, proj_size or hidden_size
        real = parameter_dtype(dtype, device)
        for run in range(num_layers * self.directions):
            features = input_size if run < self.directions else self.directions * self.output_size
            weights = self.cell.initial_weights(features, hidden_size, bias, real, self.generator, proj_size)
            self.params.update(weights.named(suffix(run, self.directions)))

    @property
    def backward(self) -> Backward:
        """The backward algorithm asked for."""
        return self.options.algorithm

    # ---- F -------------------------------------------------------------------------------------------------------

    def forward(self, x: Array, h0: Array | None = None, lengths: Any = None) -> tuple[Array, RecurrentSaved]:
        """Run all layers.

        Parameters
        ----------
        x
            (T, B, input_size), or (B, T, input_size) with ``batch_first``.
        h0
            Initial states (num_layers · directions, B, H), or None for zeros.
        lengths
            Valid steps of each sample (B integers in 1 … T), or None for all. Values of x after them have no effect.

        Returns
        -------
        y
            Last layer's states (T, B, directions · H), batch first if asked for; zero past each sample's length. It
            may be a view of a saved array: do not write to it.
        saved
            A `RecurrentSaved`; ``saved.h_n`` are the last states.

        Raises
        ------
        ShapeError, DTypeError, DeviceError, OptionError
            An argument does not fit, T is 0 or the batch is empty.
        """
        return self._handed_out(*self.forward_time_major(x, None if h0 is None else (h0,), lengths))

    def _handed_out(self, y: Array, saved: Any) -> tuple[Array, Any]:
        """Return y batch first if the layer is, and the last state in memory of its own: callers write to it."""
        if self.num_layers * self.directions == 1:
            saved.last = tuple(end.copy() for end in saved.last)
        return turned(y, self.batch_first) if self.batch_first else y, saved

    def forward_time_major(
        self, x: Array, initial: GivenState | None = None, lengths: Any = None
    ) -> tuple[Array, RecurrentSaved]:
        """Run all layers as `forward` does, but return y (T, B, directions · H) also with ``batch_first``.

        The last state of a single run is a view of y, or of an LSTM's c.

        `initial` has one array, or None, for each name of the cell's states.
        """
        weight = self.params["weight_ih_l0"]
        xp = check_sequence_input(x, self.input_size, weight)
        y = x if x.flags.c_contiguous and not self.batch_first else turned(x, self.batch_first)
        steps, batch, _ = y.shape
        shapes = self.state_shapes(batch)
        carried = carrying() if initial is None else None
        initial = initial if carried is None else carried.take(self, batch)
        if initial is not None:
            for name, shape, array in zip(self.cell.states, shapes, initial, strict=True):
                if array is not None:
                    check_input(array, name=f"{name}0", dtype=weight.dtype, shape=shape, like=weight)
        valid = None if lengths is None else parse_lengths(lengths, steps, batch, xp)
        if valid is not None:
            y = valid.mask(y)  # so that NaN in the padding cannot spread
        choice = None
        if keeps():
            choice = choose(
                self.options, self.cell, (steps, batch, self.hidden_size), weight.dtype, xp,
                input_size=self.input_size, layers=self.num_layers, directions=self.directions,
            )  # fmt: skip
        several = self.num_layers * self.directions > 1
        last = tuple(map(xp.empty, shapes, [weight.dtype] * len(shapes))) if several else ()
        saved = self.saved_class(last, choice, valid, NothingKept() if choice is None else [], [])
        for layer in range(self.num_layers):
            mask = None
            if layer > 0 and self.training and self.dropout > 0:
                mask = dropout_mask(self.generator, y, self.dropout, batch_axis=1)
                y = y * mask
            saved.masks.append(mask)
            y = self._forward_layer(xp, layer, y, initial, saved)
        if carried is not None:
            carried.keep(self, saved.last)
        return y, saved

    def state_shapes(self, batch: int) -> list[tuple[int, int, int]]:
        """Return the shapes of h0, and of an LSTM's c0, for a batch."""
        runs = self.num_layers * self.directions
        shapes = [(runs, batch, self.output_size), (runs, batch, self.hidden_size)]  # a projection: h smaller than c
        return shapes[: len(self.cell.states)]

    def _forward_layer(
        self, xp: ModuleType, layer: int, x: Array, initial: GivenState | None, saved: RecurrentSaved
    ) -> Array:
        lengths, outputs = saved.lengths, []
        for direction in range(self.directions):
            run = layer * self.directions + direction
            h0 = None if initial is None else [None if array is None else array[run] for array in initial]
            given, weights = reverse_time(x, lengths) if direction else x, self._weights(run)
            if saved.backward_choice is None:  # nothing is kept
                y, ends = self.cell.infer(given, h0, weights, lengths)
            else:
                k = kernels.get(xp).unchecked
                tape = self.cell.finish(k, weights, *self.cell.begin(k, given, weights), h0)
                y, ends = tape.h, tape.ends(lengths)
                if lengths is not None:
                    self.cell.close(tape, lengths)
                saved.tapes.append(tape)
            if not saved.last:  # a single run
                saved.last = tuple(end[None] for end in ends)
            else:
                for last, end in zip(saved.last, ends, strict=True):
                    last[run] = end
            if lengths is not None:
                y = lengths.mask(y)
            outputs.append(reverse_time(y, lengths) if direction else y)
        return outputs[0] if len(outputs) == 1 else xp.concatenate(outputs, axis=2)

    def stream(self, batch: int | None = None, state: Any = None) -> Stream:
        """Return a `Stream`: the state between steps, for a sequence that comes a step at a time.

        Parameters
        ----------
        batch
            Samples B of a step's input (B, input_size); None for one sample, without that axis.
        state
            The first state, as `Stream.h` has it (of an LSTM the pair of h and c); zeros if None.

        Raises
        ------
        OptionError
            The layer has two directions or a projection, or is not on the host.
        ShapeError, DTypeError
            The state does not fit.
        MemoryLimitError
            The states of that many samples do not fit in memory.
        """
        if self.bidirectional:
            raise OptionError("A stream has no end to come back from", expected="a layer of one direction",
                              got="bidirectional=True", remedy="Build the layer with bidirectional=False")  # fmt: skip
        return Stream(self, [suffix(run, 1) for run in range(self.num_layers)], batch, state)

    def step(self, x: Array, state: Stream) -> Array:
        """Advance a state of `stream` by one step: ``state.step(x)``."""
        return state.step(x)

    # ---- I and W -------------------------------------------------------------------------------------------------

    def capture_obstacle(self) -> str | None:
        """Plans and masks are the host's; kernels are chosen by the shape alone, unless there are lengths."""
        if self.backward not in ("auto", "bp", "chunked"):
            return f"plans its scan over stored Jacobians on the host (backward={self.backward!r})"
        if self.training and self.dropout > 0 and self.num_layers > 1:
            return "draws the seeds of its masks between layers on the host"
        return None

    def gradients(self, gy: Array | None, saved: RecurrentSaved, grad_h_n: Array | None = None) -> NamedGradients:
        """Return the gradients from `gy` (of y's shape) and `grad_h_n` (of h_n's shape); either may be None.

        The inner scans run once for the gradients at x, at the parameters and at the initial state. The first layer's
        may run again if the parameters are asked for first and x later, see `RecurrentGradients`.

        Raises
        ------
        OptionError
            Both gradients are None.
        ShapeError, DTypeError, DeviceError
            A gradient does not fit.
        """
        return self._gradients(gy, saved, {"grad_h_n": grad_h_n})

    def _gradients(self, gy: Array | None, saved: RecurrentSaved, named: dict[str, Array | None]) -> NamedGradients:
        """Return the gradients from gy, and from `named`, the gradients at the last state's arrays."""
        _ = saved.tapes[0]  # refused where nothing was kept
        given = gy is not None
        for (name, array), state in zip(named.items(), saved.last, strict=True):
            if array is not None:
                given = True
                check_input(array, name=name, dtype=state.dtype, shape=state.shape, like=state)
        if not given:
            raise OptionError("No gradient was given", expected=f"gy, {', '.join(named)} or more of them", got="None",
                              remedy="Pass the gradient of the loss with respect to y or to saved.h_n")  # fmt: skip
        arriving = gy  # time-major, and 0 past the lengths
        if gy is not None:
            steps, batch, hidden = saved.shape
            width = self.directions * hidden
            shape = (batch, steps, width) if self.batch_first else (steps, batch, width)
            check_gy(gy, shape, saved.h_n.dtype, saved.h_n)
            arriving = gy.transpose(1, 0, 2) if self.batch_first else gy
            arriving = arriving if saved.lengths is None else saved.lengths.mask(arriving)
        return RecurrentGradients(self, gy, saved, arriving, tuple(named.values()))

    def gradients_at_last(self, saved: RecurrentSaved, at_h_n: Callable[[], Array]) -> NamedGradients:
        """Return the gradients from the one at h_n alone, C-contiguous, computed by `at_h_n` when it is needed."""
        _ = saved.tapes[0]  # refused where nothing was kept
        return RecurrentGradients(self, None, saved, None, (None,) * len(saved.last), at_h_n)

    def choices(self, saved: RecurrentSaved, prefix: str = "") -> Iterator[tuple[str, str, str]]:
        """Yield the algorithm chosen for `backward`."""
        _ = saved.tapes[0]  # refused where nothing was kept
        yield prefix, saved.backward_choice.algorithm, saved.backward_choice.reason

    # ---- Jacobians -----------------------------------------------------------------------------------------------

    def hidden_jacobians_t(self, saved: RecurrentSaved, layer: int = 0, direction: int = 0) -> list[Any]:
        """Return the T transposed Jacobians of h[t] with respect to h[t-1], per sample: the scan's elements.

        They are in the order in which the direction runs (the second one from the end of each sequence). With lengths,
        elements past a sample's end are zero. An LSTM's are of the state (h, c), on `sparsebp.patterns.lstm_pattern`
        (with proj_size dense); past a sample's end the part from c to c is the identity.
        """
        from sparsebp.jacobians import hidden_elements

        run = self._runs(layer)[direction]
        return hidden_elements(*self.cell.state_jacobians(saved.tapes[run], self._weights(run)))

    def jacobian_t(self, saved: RecurrentSaved, memory_limit: int | None = None) -> Any:
        """Return the transposed Jacobian of y with respect to x, (T · input_size) × (T · directions · H), per sample.

        Block-triangular: upper for the first direction, lower for the second. Its size grows with T²; training never
        needs it.

        Raises
        ------
        MemoryLimitError
            It would need more than `memory_limit` bytes (default: the layer's, else 2 GiB).
        """
        from sparsebp.nn.bptt import layer_jacobian_t

        limit = self.options.memory_limit if memory_limit is None else memory_limit
        product = None
        for layer in range(self.num_layers):
            runs = self._runs(layer)
            tapes, weights = [saved.tapes[run] for run in runs], [self._weights(run) for run in runs]
            own = layer_jacobian_t(self.cell, tapes, weights, saved.lengths, saved.masks[layer], limit)
            product = own if product is None else product @ own
        return product

    # ---- runs: a layer in one direction, numbered as torch.nn has them along h_n -------------------------------------

    def _runs(self, layer: int) -> range:
        return range(layer * self.directions, (layer + 1) * self.directions)

    def _weights(self, run: int) -> Weights:
        return Weights(*map(self.params.get, weight_names(suffix(run, self.directions))))


@lru_cache(maxsize=256)
def suffix(run: int, directions: int) -> str:
    """Return the end of a run's names of parameters."""
    layer, direction = divmod(run, directions)
    return f"_l{layer}" + ("_reverse" if direction else "")


class RecurrentGradients(NamedGradients):
    """Gradients of a recurrent layer: ways back through its runs, each taken when first needed, once.

    If the weights are asked for first, kernels sum the first layer's gradients on the way, where they can, and store
    nothing for the gradient at the input. If that is asked for afterwards, these runs go back again.
    """

    def __init__(
        self, rnn: Recurrent, gy: Array | None, saved: RecurrentSaved, arriving: Array | None, last: GivenState,
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
                    self._mark = graphs.record(self._xp)
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
            graphs.wait(self._xp, self._mark)
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
        self._mark, self._done = None if self._xp is np else graphs.record(self._xp), True

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


def choose(
    options: BackwardOptions, cell: CellMath, shape: tuple[int, int, int], dtype: np.dtype, xp: ModuleType,
    **stack: int,
) -> Any:  # fmt: skip
    """Return the `scan.Choice` for states of `shape` (T, B, H); ``auto`` is a rule."""
    # `stack` are `input_size`, `layers` and `directions`.
    if options.algorithm == "auto":
        if cell.diagonal:
            return Choice("bp", 1, "A step's Jacobian is diagonal: one linear recurrence goes back, at the speed of "
                          "memory.", {})  # fmt: skip
        if options.workers is None and backend.is_host(xp):
            return HOST_CHOICE
        return choose_recurrent_backward(
            cast(Any, cell.name), *shape, dtype, xp, options.workers, options.memory_limit, **stack
        )
    steps = shape[0]
    # The square root balances the sequential part inside the chunks with the one over the chunks.
    chunks = min(options.chunks or math.isqrt(steps), steps) if options.algorithm == "chunked" else 1
    return Choice(options.algorithm, chunks, f"backward={options.algorithm!r} was asked for", {})


# SequenceClassifier: a recurrent layer, its last hidden state, and a linear head.


class ClassifierSaved(NamedTuple):
    """Saved by both parts."""

    rnn: RecurrentSaved
    head: Array


class SequenceClassifier(Layer):
    """Classify a sequence by the last layer's last hidden state; with two directions, by both states side by side.

    Parameters
    ----------
    rnn
        An `RNN`, `GRU` or `LSTM`.
    head
        A `Linear` from directions · output_size to the number of classes.

    Notes
    -----
    Parameters are named ``rnn.*`` and ``head.*``. No gradient arrives at the steps' outputs, so none is allocated.
    """

    replayable = True
    joins_steps = True
    rnn: Recurrent
    head: Linear

    def __init__(self, rnn: Recurrent, head: Linear) -> None:
        super().__init__()
        self.children |= {"rnn": check_layer("rnn", rnn), "head": check_layer("head", head)}
        self._parts()

    def _parts(self) -> tuple[Recurrent, Linear]:
        """Return both parts, checked: one may have been replaced."""
        rnn: Any = self.children["rnn"]
        head: Any = self.children["head"]
        if not isinstance(rnn, Recurrent) or not isinstance(head, Linear):
            raise OptionError("A part of the classifier is of another kind",
                              expected="an RNN, GRU or LSTM, and a Linear",
                              got=f"{type(rnn).__name__}, {type(head).__name__}")  # fmt: skip
        width = rnn.directions * rnn.output_size
        if head.in_features != width:
            raise ShapeError("The head does not fit the recurrent layer", expected=f"in_features = {width}",
                             got=head.in_features, remedy=f"Pass Linear({width}, classes)")  # fmt: skip
        return rnn, head

    def forward(self, x: Array, lengths: Any = None) -> tuple[Array, ClassifierSaved]:
        """Return logits (B, classes) for x (T, B, input_size), or batch first if the recurrent layer is."""
        rnn, head = self._parts()
        if belongs(rnn, "forward_time_major"):
            _, rnn_saved = rnn.forward_time_major(x, lengths=lengths)
        else:
            _, rnn_saved = forward_of(rnn, x, **({} if lengths is None else {"lengths": lengths}))
        states = rnn_saved.h_n[-rnn.directions :]
        features = states[0] if len(states) == 1 else states.transpose(1, 0, 2).reshape(states.shape[1], -1)
        logits, head_saved = forward_of(head, features)
        return logits, ClassifierSaved(rnn_saved, head_saved)

    def gradients(self, gy: Array, saved: ClassifierSaved) -> Gradients:
        """Return the gradients: through the head, the last states, and back through time."""
        rnn: Any = self.children["rnn"]
        linear: Any = self.children["head"]
        xp = check_gy(gy, (saved.head.shape[0], linear.out_features), saved.head.dtype, saved.head)
        head = gradients_of(linear, gy, saved.head)

        def at_h_n() -> Array:
            at_last = head.input_grad().reshape(-1, rnn.directions, rnn.output_size).transpose(1, 0, 2)
            if rnn.num_layers == 1:
                return xp.ascontiguousarray(at_last)
            found = xp.zeros(saved.rnn.h_n.shape, saved.head.dtype)
            found[-rnn.directions :] = at_last
            return found

        if belongs(rnn, "gradients_at_last"):  # with a lock of its own
            found = rnn.gradients_at_last(saved.rnn, at_h_n)
            return Gradients(self, gy, saved, found.input_grad, lambda: {"rnn": found, "head": head})
        shared = Shared(lambda: gradients_of(rnn, None, saved.rnn, grad_h_n=at_h_n()), xp)
        return Gradients(self, gy, saved, lambda: shared().input_grad(), lambda: {"rnn": shared(), "head": head})

    def choices(self, saved: ClassifierSaved, prefix: str = "") -> Iterator[tuple[str, str, str]]:
        """Yield the recurrent layer's choices."""
        rnn, _ = self._parts()
        if not belongs(rnn, "choices"):
            return iter(())
        return rnn.choices(saved.rnn, f"{prefix}.rnn" if prefix else "rnn")

    @property
    def batch_axes(self) -> tuple[int, int]:  # type: ignore[override]
        """As the recurrent layer has it; logits are batch first."""
        return self.children["rnn"].batch_axes[0], 0


# The layers and cells, with torch.nn's arguments; their equations are in `sparsebp.nn.cells`.


@takes_unbatched(2, 1)
class RNN(Recurrent):
    """A recurrent layer with the arguments, parameters and layouts of torch.nn.RNN; see `Recurrent`.

    `nonlinearity` is ``"tanh"`` or ``"relu"``.
    """

    nonlinearity: Nonlinearity = Fixed()  # type: ignore[assignment]

    def __init__(
        self, input_size: int, hidden_size: int, num_layers: int = 1, nonlinearity: Nonlinearity = "tanh",
        bias: bool = True, batch_first: bool = False, dropout: float = 0.0, bidirectional: bool = False,
        **options: Unpack[RecurrentOptions],
    ) -> None:  # fmt: skip
        self.nonlinearity = nonlinearity
        self.cell = RNNMath(nonlinearity)
        super().__init__(input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, **options)


@takes_unbatched(2, 1)
class GRU(Recurrent):
    """A recurrent layer with the arguments, parameters and layouts of torch.nn.GRU, all described in `Recurrent`."""

    cell = GRUMath()


class LSTMSaved(RecurrentSaved):
    """Saved by `LSTM.forward`. It unpacks as torch.nn's second result: ``y, (h_n, c_n) = lstm.forward(x)``."""

    @property
    def c_n(self) -> Array:
        """Last cell states (num_layers · directions, B, H); with lengths, each sample's last valid one."""
        return self.last[1]

    def __iter__(self) -> Iterator[Array]:
        """Yield h_n and c_n."""
        return iter(self.last)


@takes_unbatched(2, 1)
class LSTM(Recurrent):
    """A recurrent layer with the arguments, parameters and layouts of torch.nn.LSTM; see `Recurrent`.

    Parameters
    ----------
    proj_size
        If above 0 (and below `hidden_size`), the size of the output and of h: ``h = W_hr (o * tanh(c))``. The recursion
        then runs on ``o * tanh(c)`` with the weights ``W_hh W_hr`` and costs as much as with the full hidden size;
        every backward algorithm works.

    Examples
    --------
    >>> import numpy as np, sparsebp as sb
    >>> lstm = sb.nn.LSTM(3, 5, num_layers=2, rng=0)
    >>> y, (h_n, c_n) = lstm.forward(np.ones((7, 4, 3), np.float32))
    >>> y.shape, h_n.shape, c_n.shape
    ((7, 4, 5), (2, 4, 5), (2, 4, 5))
    """

    saved_class = LSTMSaved

    def __init__(
        self, input_size: int, hidden_size: int, num_layers: int = 1, bias: bool = True, batch_first: bool = False,
        dropout: float = 0.0, bidirectional: bool = False, proj_size: int = 0, **options: Unpack[RecurrentOptions],
    ) -> None:  # fmt: skip
        self.proj_size = check_integer("proj_size", proj_size, 0)
        if self.proj_size and self.proj_size >= check_integer("hidden_size", hidden_size, 1):
            raise OptionError("A projection makes h smaller", expected=f"proj_size < hidden_size = {hidden_size}",
                              got=proj_size)  # fmt: skip
        self.cell = ProjectedLSTMMath() if self.proj_size else LSTMMath()
        super().__init__(input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, **options)

    def forward(self, x: Array, hx: Sequence[Array] | None = None, lengths: Any = None) -> tuple[Array, LSTMSaved]:
        """Run all layers, as `Recurrent.forward`.

        `hx` is the pair of h0 (num_layers · directions, B, proj_size or H) and c0 (num_layers · directions, B, H), or
        None for zeros. `saved` unpacks into ``saved.h_n`` and ``saved.c_n``.
        """
        return self._handed_out(*self.forward_time_major(x, pair("hx", hx), lengths))

    def gradients(
        self, gy: Array | None, saved: RecurrentSaved, grad_h_n: Array | None = None, grad_c_n: Array | None = None
    ) -> NamedGradients:
        """Return the gradients from `gy` (of y's shape), `grad_h_n` and `grad_c_n` (of h_n's and c_n's).

        Each may be None, but not all. As `Recurrent.gradients`, with ``c0`` as well as ``h0``.
        """
        return self._gradients(gy, saved, {"grad_h_n": grad_h_n, "grad_c_n": grad_c_n})


@takes_unbatched(1, 0)
class RNNCell(RecurrentCell):
    """One step of an RNN, as `torch.nn.RNNCell`; see `RecurrentCell`."""

    def __init__(
        self, input_size: int, hidden_size: int, bias: bool = True, nonlinearity: Nonlinearity = "tanh",
        device: Any = None, dtype: Any = np.float32, *, rng: Seed = None,
    ) -> None:  # fmt: skip
        self.cell = RNNMath(nonlinearity)
        super().__init__(input_size, hidden_size, bias, device, dtype, rng=rng)


@takes_unbatched(1, 0)
class GRUCell(RecurrentCell):
    """One step of a GRU, as `torch.nn.GRUCell`; see `RecurrentCell`."""

    cell = GRUMath()


@takes_unbatched(1, 0)
class LSTMCell(RecurrentCell):
    """One step of an LSTM, as `torch.nn.LSTMCell`; see `RecurrentCell`.

    ``forward`` returns the next h as the output and keeps the next c, ``saved.c[0]``; a call returns both, as in torch.
    """

    cell = LSTMMath()

    def __call__(self, x: Array, hx: Sequence[Array] | None = None, **options: Any) -> tuple[Array, Array]:
        """Return the next h and c, (B, hidden_size) each."""
        h, saved = forward_of(self, x, hx=hx, **options)
        return h, saved.c[0]

    def forward(self, x: Array, hx: Sequence[Array] | None = None) -> tuple[Array, Tape]:
        """Return the next h (B, hidden_size) for x (B, input_size) and the pair (h, c) or None for zeros."""
        return self._forward(x, pair("hx", hx))

    def gradients(self, gy: Array | None, saved: Tape, grad_c: Array | None = None) -> NamedGradients:
        """Return the gradients from `gy` at the next h and `grad_c` at the next c; either may be None, but not both.

        ``input``, ``hidden`` and ``cell`` are the gradients at x, h and c, ``weights`` those of the parameters.
        """
        return self._gradients(gy, saved, {"gy": gy, "grad_c": grad_c})
