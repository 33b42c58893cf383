"""The machinery of recurrent layers: layers stacked, two directions, dropout, lengths, and gradients by any scan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, TypedDict

import numpy as np

from sparsebp import backend
from sparsebp.core.arguments import check_flag, check_generator, check_integer, check_number
from sparsebp.core.errors import OptionError, ShapeError
from sparsebp.core.types import Array, Backward, Seed
from sparsebp.nn.arrays import parameter_dtype
from sparsebp.nn.keeping import NothingKept, keeps
from sparsebp.nn.layer import Layer, check_gy, check_input
from sparsebp.nn.layers.identity import dropout_mask
from sparsebp.nn.recurrent.back.backward import FUSED, BackwardOptions, choose, run_backward, run_backward_for_weights
from sparsebp.nn.recurrent.back.runs import RunsBack
from sparsebp.nn.recurrent.cell_math import CellMath, initial_weights
from sparsebp.nn.recurrent.lengths import parse_lengths, reverse_time
from sparsebp.nn.recurrent.stream import Stream
from sparsebp.nn.recurrent.tape import (
    GivenState,
    RecurrentSaved,
    RunGradients,
    State,
    StateGradients,
    SummedGradients,
    Weights,
)


class RecurrentOptions(TypedDict, total=False):
    """The keyword arguments of `RNN`, `GRU` and `LSTM` that have no place among torch.nn's; see `Recurrent`."""

    backward: Backward
    up_levels: int | None
    chunks: int | None
    workers: int | None
    memory_limit: int | None
    device: Any
    dtype: Any
    rng: Seed


class Recurrent(Layer):
    """Base of `RNN`, `GRU` and `LSTM`: torch.nn's arguments, parameters and layouts, and a choice of the way back.

    Parameters
    ----------
    cell
        The cell's specifics (given by the subclass).
    input_size, hidden_size, num_layers
        As in torch.nn.
    bias, batch_first, dropout, bidirectional
        As in torch.nn. Dropout acts between layers while training.
    backward
        ``"bp"``: plain back-propagation, the recursion in one kernel. ``"chunked"``: fused reduce-then-scan.
        ``"linear"``, ``"blelloch"``, ``"hybrid"``: the general scan over materialised Jacobians. ``"auto"``: on a
        host ``"bp"``, or with `workers` what is estimated to take least; on a GPU always the latter.
    up_levels
        Levels of the hybrid's up-sweep.
    chunks
        Chunks of the chunked scan; default about √T, or what the cost model says.
    workers, memory_limit
        Passed to `plan_scan`; the limit in bytes.
    device
        None or ``"cpu"``: layers are built on the host, and moved by `to`.
    dtype
        float32 or float64.
    rng
        Generator or seed of the initial values and of dropout.

    Raises
    ------
    OptionError
        A size is no integer from 1 on, there are more than 65 536 layers, a flag is no truth value, `dropout` is
        outside 0 … 1, or an option is unknown.

    Notes
    -----
    Parameters as in torch.nn: ``weight_ih_l{k}`` (gH, input), ``weight_hh_l{k}`` (gH, H), ``bias_ih_l{k}``,
    ``bias_hh_l{k}`` (gH,), with the suffix ``_reverse`` for the second direction; g is 1 (RNN), 3 (GRU) or 4 (LSTM).
    With `proj_size` there is ``weight_hr_l{k}`` (proj_size, H), and h has that size.
    """

    generator: np.random.Generator
    saved_class: ClassVar[type[RecurrentSaved]] = RecurrentSaved
    gradients_class: ClassVar[type[StateGradients]] = StateGradients

    def __init__(
        self, cell: CellMath, input_size: int, hidden_size: int, num_layers: int = 1, *, bias: bool = True,
        batch_first: bool = False, dropout: float = 0.0, bidirectional: bool = False, backward: Backward = "auto",
        up_levels: int | None = None, chunks: int | None = None, workers: int | None = None,
        memory_limit: int | None = None, device: Any = None, dtype: Any = np.float32, rng: Seed = None,
        proj_size: int = 0,
    ) -> None:  # fmt: skip
        super().__init__()
        input_size, hidden_size, num_layers = (
            check_integer(name, size, 1, most)
            for name, size, most in (
                ("input_size", input_size, None), ("hidden_size", hidden_size, None), ("num_layers", num_layers, 2**16),
            )
        )  # fmt: skip
        bias, self.dropout = check_flag("bias", bias), check_number("dropout", dropout, 0, 1)
        self.cell, self.input_size, self.hidden_size, self.num_layers = cell, input_size, hidden_size, num_layers
        self.batch_first = check_flag("batch_first", batch_first)
        self.bidirectional = check_flag("bidirectional", bidirectional)
        self.options = BackwardOptions(backward, up_levels, chunks, workers, memory_limit)
        self.generator = check_generator("rng", rng)
        self.directions, self.output_size = 2 if bidirectional else 1, proj_size or hidden_size
        real = parameter_dtype(dtype, device)
        for run in range(num_layers * self.directions):
            features = input_size if run < self.directions else self.directions * self.output_size
            weights = initial_weights(cell, features, hidden_size, bias, real, self.generator, proj_size)
            self.params.update(weights.named(self._suffix(run)))

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
            Valid steps of each sample (B integers in 1 … T), or None for all. What x holds behind them has no
            influence.

        Returns
        -------
        y
            Last layer's states (T, B, directions · H), batch first if asked for; zero behind each sample's length. It
            may be a view of what is saved: do not write to it.
        saved
            A `RecurrentSaved`; ``saved.h_n`` are the last states.

        Raises
        ------
        ShapeError, DTypeError, DeviceError, OptionError
            An argument does not fit, T is 0 or the batch is empty.
        """
        return self._batch_second(*self.forward_time_major(x, None if h0 is None else (h0,), lengths))

    def _batch_second(self, y: Array, saved: Any) -> tuple[Array, Any]:
        """Return y as the layer's users have it."""
        return (backend.namespace(y).ascontiguousarray(y.transpose(1, 0, 2)) if self.batch_first else y), saved

    def forward_time_major(
        self, x: Array, initial: GivenState | None = None, lengths: Any = None
    ) -> tuple[Array, RecurrentSaved]:
        """Run all layers as `forward` does, but return y (T, B, directions · H) also with ``batch_first``.

        `initial` has one array, or None, for each name of the cell's states. Who needs the last states alone saves a
        copy.
        """
        weight = self.params["weight_ih_l0"]
        xp = check_input(x, dtype=weight.dtype, shape=(None, None, self.input_size), like=weight)
        if 0 in x.shape[:2]:
            raise ShapeError("x is empty", expected="at least one step and one sample", got=x.shape,
                             remedy="Skip empty batches and sequences")  # fmt: skip
        inputs = xp.ascontiguousarray(x.transpose(1, 0, 2) if self.batch_first else x)
        steps, batch, _ = inputs.shape
        shapes = self.state_shapes(batch)
        for name, shape, array in zip(self.cell.states, shapes, initial or (), strict=False):
            if array is not None:
                check_input(array, name=f"{name}0", dtype=weight.dtype, shape=shape, like=weight)
        valid = parse_lengths(lengths, steps, batch, xp)
        if valid is not None:
            inputs = valid.mask(inputs)  # so that NaN in the padding cannot spread
        kept = keeps()
        choice = choose(
            self.options, self.cell, (steps, batch, self.hidden_size), weight.dtype, xp,
            input_size=self.input_size, layers=self.num_layers, directions=self.directions,
        ) if kept else None  # fmt: skip
        last = tuple(xp.empty(shape, dtype=weight.dtype) for shape in shapes)
        saved = self.saved_class(last, choice, valid, [] if kept else NothingKept(), [])
        for layer in range(self.num_layers):
            mask = None
            if layer > 0 and self.training and self.dropout > 0:
                mask = dropout_mask(self.generator, inputs, self.dropout, batch_axis=1)
                inputs = inputs * mask
            saved.masks.append(mask)
            inputs = self._forward_layer(layer, inputs, initial, saved)
        return inputs, saved

    def state_shapes(self, batch: int) -> list[tuple[int, int, int]]:
        """Return the shapes of h0, and of an LSTM's c0, for a batch."""
        return [(self.num_layers * self.directions, batch, width) for width in self.cell.widths(self._weights(0))]

    def _forward_layer(self, layer: int, x: Array, initial: GivenState | None, saved: RecurrentSaved) -> Array:
        xp, lengths = backend.namespace(x), saved.lengths
        outputs: list[Array] = []
        for direction, run in enumerate(self._runs(layer)):
            of_run = None if initial is None else [None if array is None else array[run] for array in initial]
            given, weights = reverse_time(x, lengths) if direction else x, self._weights(run)
            if isinstance(saved.tapes, NothingKept):
                y, ends = self.cell.infer(given, of_run, weights, lengths)
            else:
                k = self.cell.kernels_for(given, weights, self.hidden_size)
                tape = self.cell.forward(k, given, of_run, weights)
                y, ends = tape.h, tape.ends(lengths)
                if lengths is not None:
                    self.cell.close(tape, lengths)
                saved.tapes.append(tape)
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
            So many samples' states do not fit in memory.
        """
        if self.bidirectional:
            raise OptionError("A stream has no end to come back from", expected="a layer of one direction",
                              got="bidirectional=True", remedy="Build the layer with bidirectional=False")  # fmt: skip
        return Stream(self, [self._suffix(run) for run in range(self.num_layers)], batch, state)

    def step(self, x: Array, state: Stream) -> Array:
        """Take a state of `stream` one step on: ``state.step(x)``, see there."""
        return state.step(x)

    # ---- I and W -------------------------------------------------------------------------------------------------

    def capture_obstacle(self) -> str | None:
        """Plans and masks are the host's; kernels are chosen by the shape alone, unless there are lengths."""
        if self.backward not in ("auto", "bp", "chunked"):
            return f"plans its scan over stored Jacobians on the host (backward={self.backward!r})"
        if self.training and self.dropout > 0 and self.num_layers > 1:
            return "draws the seeds of its masks between layers on the host"
        return None

    def gradients(self, gy: Array | None, saved: RecurrentSaved, grad_h_n: Array | None = None) -> StateGradients:
        """Return the gradients from `gy` (of y's shape) and `grad_h_n` (of h_n's shape); either may be None.

        The inner scans run once for all of them: at x, at the parameters, and at the initial state. Those of the first
        layer, where kernels sum its weights' gradients on the way, run again where the parameters are asked for first
        and x later: see `RunsBack`.

        Raises
        ------
        OptionError
            Both gradients are None.
        ShapeError, DTypeError, DeviceError
            A gradient does not fit.
        """
        return self._gradients(gy, saved, {"grad_h_n": grad_h_n})

    def _gradients(self, gy: Array | None, saved: RecurrentSaved, named: dict[str, Array | None]) -> Any:
        """Return the gradients from gy and from those at the last state's arrays, by the names of these."""
        arriving, last = self._checked_gy(gy, saved, named), tuple(named.values())
        xp = backend.namespace(saved.h_n)
        runs = RunsBack(
            lambda for_weights: self._scan(arriving, saved, last, for_weights),
            lambda found: self._scan_first_again(arriving, saved, last, found), xp,
        )  # fmt: skip
        every = range(len(saved.tapes))

        def at_input() -> Array:
            gx = self._layer_input_grad(0, runs.with_ga(self._runs(0)), saved)
            return xp.ascontiguousarray(gx.transpose(1, 0, 2)) if self.batch_first else gx

        def at_weights() -> dict[str, Array]:
            of_run = runs.sums()
            for run, grads in runs.with_ga([run for run in every if run not in of_run]).items():
                of_run[run] = self.cell.weight_grad(grads.ga, saved.tapes[run], self._weights(run), grads.at_h)
            return {name: grad for run in every for name, grad in of_run[run].named(self._suffix(run)).items()}

        def at_initial() -> State:
            return tuple(xp.stack(arrays) for arrays in zip(*runs.at_initial(every), strict=True))

        return self.gradients_class(self, gy, saved, at_input, at_weights, state=at_initial)

    def _scan(
        self, arriving: Array | None, saved: RecurrentSaved, last: GivenState, for_weights: bool
    ) -> tuple[dict[int, RunGradients], dict[int, SummedGradients]]:
        """Take the gradients through all runs, from the last layer to the first.

        What arrives below a layer needs ga of its runs; those of the first one may leave sums alone, `for_weights`. On
        the host they leave the same sums, to the bit, where the input is asked for first.
        """
        found: dict[int, RunGradients] = {}
        summing = for_weights or backend.is_host(backend.namespace(saved.h_n))
        for layer in reversed(range(self.num_layers)):
            if layer == 0 and summing and all(self._sums_inside(run, saved) for run in self._runs(0)):
                sums = {
                    run: run_backward_for_weights(
                        saved.backward_choice, self.cell, saved.tapes[run], self._weights(run),
                        *self._arriving_at(run, direction, arriving, saved, last), keep=not for_weights,
                    )
                    for direction, run in enumerate(self._runs(0))
                }  # fmt: skip
                kept = {run: RunGradients(of.ga, of.initial) for run, of in sums.items() if of.ga is not None}
                return found | kept, sums
            found |= self._scan_layer(layer, arriving, saved, last)
            if layer > 0:
                arriving = self._layer_input_grad(layer, found, saved)
        return found, {}

    def _scan_layer(
        self, layer: int, arriving: Array | None, saved: RecurrentSaved, last: GivenState
    ) -> dict[int, RunGradients]:
        return {
            run: run_backward(
                self.options, saved.backward_choice, self.cell, saved.tapes[run], self._weights(run),
                *self._arriving_at(run, direction, arriving, saved, last),
            )
            for direction, run in enumerate(self._runs(layer))
        }  # fmt: skip

    def _scan_first_again(
        self, arriving: Array | None, saved: RecurrentSaved, last: GivenState, found: dict[int, RunGradients]
    ) -> dict[int, RunGradients]:
        """Take the gradients through the first layer, with ga; those of the layers above are found."""
        if self.num_layers > 1:
            arriving = self._layer_input_grad(1, found, saved)
        return self._scan_layer(0, arriving, saved, last)

    def _sums_inside(self, run: int, saved: RecurrentSaved) -> bool:
        choice = saved.backward_choice
        return choice.algorithm in FUSED and self.cell.sums_inside(saved.tapes[run], choice.chunks)

    def _checked_gy(self, gy: Array | None, saved: RecurrentSaved, named: dict[str, Array | None]) -> Array | None:
        """Return gy time-major and without what arrived behind the lengths."""
        steps, batch, hidden = saved.shape
        if gy is None and all(array is None for array in named.values()):
            raise OptionError("No gradient was given", expected=f"gy, {', '.join(named)} or more of them", got="None",
                              remedy="Pass the gradient of the loss with respect to y or to saved.h_n")  # fmt: skip
        for (name, array), state in zip(named.items(), saved.last, strict=True):
            if array is not None:
                check_input(array, name=name, dtype=state.dtype, shape=state.shape, like=state)
        if gy is None:
            return None
        width = self.directions * hidden
        shape = (batch, steps, width) if self.batch_first else (steps, batch, width)
        check_gy(gy, shape, saved.h_n.dtype, saved.h_n)
        gy = gy.transpose(1, 0, 2) if self.batch_first else gy
        return gy if saved.lengths is None else saved.lengths.mask(gy)

    def _arriving_at(
        self, run: int, direction: int, arriving: Array | None, saved: RecurrentSaved, last: GivenState
    ) -> tuple[Array | None, GivenState]:
        """Return gy and what arrives at the last state of one run, in its direction."""
        tape, lengths, size = saved.tapes[run], saved.lengths, self.output_size
        xp = backend.namespace(tape.h)
        gy = None if arriving is None else arriving[..., direction * size : (direction + 1) * size]
        if gy is not None:
            gy = reverse_time(gy, lengths) if direction else xp.ascontiguousarray(gy)
        at_h, *rest = (None if array is None else xp.ascontiguousarray(array[run]) for array in last)
        if lengths is not None and at_h is not None:  # the kernels' last step is not every sample's last step
            gy = xp.zeros_like(tape.h) if gy is None else gy.copy()
            gy[lengths.values - 1, lengths.samples] += at_h
            at_h = None
        return gy, (at_h, *rest)  # what arrives at c goes through the padding as it is, see `CellMath.close`

    def _layer_input_grad(self, layer: int, found: dict[int, RunGradients], saved: RecurrentSaved) -> Array:
        """Return the gradient at a layer's input, before its dropout: (T, B, features)."""
        first, *second = (self.cell.input_grad(found[run].ga, self._weights(run)) for run in self._runs(layer))
        for backwards in second:
            first += reverse_time(backwards, saved.lengths)
        mask = saved.masks[layer]
        if mask is not None:
            first *= mask
        return first

    def choices(self, saved: RecurrentSaved, prefix: str = "") -> Iterator[tuple[str, str, str]]:
        """Yield what `backward` came to."""
        _ = saved.tapes[0]  # refused where nothing was kept
        yield prefix, saved.backward_choice.algorithm, saved.backward_choice.reason

    # ---- Jacobians -----------------------------------------------------------------------------------------------

    def hidden_jacobians_t(self, saved: RecurrentSaved, layer: int = 0, direction: int = 0) -> list[Any]:
        """Return the T transposed Jacobians of h[t] with respect to h[t-1], per sample: the scan's elements.

        They are in the order in which the direction runs (the second one from the end of each sequence). With lengths,
        elements behind a sample's end are zero. An LSTM's are of the state (h, c), on `sparsebp.patterns.lstm_pattern`
        (with proj_size dense); behind a sample's end the part from c to c is the identity.
        """
        from sparsebp.nn.recurrent.back.jacobian import hidden_jacobians_t

        run = self._runs(layer)[direction]
        return hidden_jacobians_t(self.cell, saved.tapes[run], self._weights(run))

    def jacobian_t(self, saved: RecurrentSaved, memory_limit: int | None = None) -> Any:
        """Return the transposed Jacobian of y with respect to x, (T · input_size) × (T · directions · H), per sample.

        Block-triangular: upper for the first direction, lower for the second. Its size grows with T²; training never
        needs it.

        Raises
        ------
        MemoryLimitError
            It would need more than `memory_limit` bytes (default: the layer's, else 2 GiB).
        """
        from sparsebp.nn.recurrent.back.jacobian import layer_jacobian_t

        limit = memory_limit or self.options.memory_limit
        product = None
        for layer in range(self.num_layers):
            runs = self._runs(layer)
            tapes, weights = [saved.tapes[run] for run in runs], [self._weights(run) for run in runs]
            own = layer_jacobian_t(self.cell, tapes, weights, saved.lengths, saved.masks[layer], limit)
            product = own if product is None else product @ own
        return product

    @property
    def batch_axes(self) -> tuple[int, int]:  # type: ignore[override]
        """First with ``batch_first``, else behind the time."""
        return (0, 0) if self.batch_first else (1, 1)

    # ---- runs: a layer in one direction, numbered as torch.nn has them along h_n -------------------------------------

    def _runs(self, layer: int) -> range:
        return range(layer * self.directions, (layer + 1) * self.directions)

    def _weights(self, run: int) -> Weights:
        return Weights.of(self.params, self._suffix(run))

    def _suffix(self, run: int) -> str:
        layer, direction = divmod(run, self.directions)
        return f"_l{layer}" + ("_reverse" if direction else "")
