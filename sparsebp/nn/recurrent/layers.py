"""RNN, GRU and LSTM: stacked, in two directions, with lengths; gradients by any scan."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from types import ModuleType
from typing import Any, ClassVar, TypedDict, Unpack

import numpy as np

from sparsebp import kernels
from sparsebp.core import backend
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
from sparsebp.core.errors import OptionError
from sparsebp.nn.basic import dropout_mask
from sparsebp.nn.gradients import NamedGradients
from sparsebp.nn.layer import (
    Fixed,
    Layer,
    batch_first_axes,
    check_gy,
    check_input,
    check_sequence_input,
    swap_batch_time,
)
from sparsebp.nn.modes import NothingKept, inference
from sparsebp.nn.parameters import parameter_dtype
from sparsebp.nn.recurrent import runs
from sparsebp.nn.recurrent.carried import carrying
from sparsebp.nn.recurrent.cells import CellMath, GRUMath, LSTMMath, RNNMath
from sparsebp.nn.recurrent.gradients import RecurrentGradients
from sparsebp.nn.recurrent.lengths import Lengths, Packed, parse_lengths, reverse_time
from sparsebp.nn.recurrent.runs import BackwardOptions, choose
from sparsebp.nn.recurrent.saved import GivenState, RecurrentSaved, State, Weights, pair, suffix, weight_names
from sparsebp.nn.recurrent.stream import Stream
from sparsebp.nn.unbatched import takes_unbatched
from sparsebp.scan.rules import Choice

SKIPPED = 4_000_000
"""Multiply-adds of steps past the samples' ends from which skipping them pays for bringing rows to their places."""


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
            # Calls in between: that of the class, and those of constructors.
            between = 1 + sum("__init__" in vars(kind) for kind in kinds[: kinds.index(Recurrent)])
            warnings.warn(f"Dropout acts between recurrent layers: dropout={dropout} has no effect with num_layers=1",
                          stacklevel=2 + between)  # fmt: skip
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
        return swap_batch_time(y, self.batch_first) if self.batch_first else y, saved

    def forward_time_major(
        self, x: Array, initial: GivenState | None = None, lengths: Any = None
    ) -> tuple[Array, RecurrentSaved]:
        """Run all layers as `forward` does, but return y (T, B, directions · H) also with ``batch_first``.

        The last state of a single run is a view of y, or of an LSTM's c.

        `initial` has one array, or None, for each name of the cell's states.
        """
        weight = self.params["weight_ih_l0"]
        xp = check_sequence_input(x, self.input_size, weight)
        y = x if x.flags.c_contiguous and not self.batch_first else swap_batch_time(x, self.batch_first)
        steps, batch, _ = y.shape
        carried = carrying.carried if initial is None else None
        initial = initial if carried is None else carried.take(self, batch)
        if initial is not None:
            for name, shape, array in zip(self.cell.states, self.state_shapes(batch), initial, strict=True):
                if array is not None:
                    check_input(array, name=f"{name}0", dtype=weight.dtype, shape=shape, like=weight)
        valid = None if lengths is None else parse_lengths(lengths, steps, batch, xp)
        choice = None
        if inference.depth == 0:
            choice = choose(
                self.options, self.cell, (steps, batch, self.hidden_size), weight.dtype, xp,
                input_size=self.input_size, layers=self.num_layers, directions=self.directions,
            )  # fmt: skip
        saved = self.saved_class((), choice, valid, NothingKept() if choice is None else [], [])
        packed = valid.packed if valid is not None and self._skips_padding(xp, valid, choice) else None
        ends: list[State] = []
        for layer in range(self.num_layers):
            mask = None
            if layer > 0 and self.training and self.dropout > 0:
                mask = dropout_mask(self.generator, y, self.dropout, batch_axis=1)
                y = y * mask
            saved.masks.append(mask)
            y = self._forward_layer(xp, layer, y, initial, saved, packed, ends)
        if len(ends) == 1:
            saved.last = tuple(map(itemgetter(None), ends[0]))
        else:
            saved.last = tuple([xp.stack(arrays) for arrays in zip(*ends, strict=True)])
        if carried is not None:
            carried.keep(self, saved.last)
        return y, saved

    def state_shapes(self, batch: int) -> list[tuple[int, int, int]]:
        """Return the shapes of h0, and of an LSTM's c0, for a batch."""
        runs = self.num_layers * self.directions
        shapes = [(runs, batch, self.output_size), (runs, batch, self.hidden_size)]  # a projection: h smaller than c
        return shapes[: len(self.cell.states)]

    def _forward_layer(
        self, xp: ModuleType, layer: int, x: Array, initial: GivenState | None, saved: RecurrentSaved,
        packed: Packed | None, ends: list[State],
    ) -> Array:  # fmt: skip
        """Run a layer in all directions over x (T, B, n); add the last states to `ends`."""
        k, cell, outputs = kernels.get(xp).unchecked, self.cell, []
        lengths, choice = saved.lengths, saved.backward_choice
        if lengths is not None and packed is None and layer == 0:
            x = lengths.mask(x)  # so that NaN in the padding cannot spread
        for direction in range(self.directions):
            run = layer * self.directions + direction
            weights, segments = self._weights(run), () if packed is None else packed.segments
            start = None if initial is None else [None if array is None else array[run] for array in initial]
            if packed is None:
                given = reverse_time(x, lengths) if direction else x
            else:
                given = packed.take(x, direction)
                start = start and [None if array is None else array[packed.order] for array in start]
            if choice is None and (lengths is None or packed is not None):
                y, last = runs.infer(k, cell, given, weights, start, segments)
            else:
                one = runs.forward(k, cell, given, weights, start, segments)
                y, last = one.h, one.last
                if packed is None and lengths is not None:
                    last = lengths.ends(one.states)
                    cell.close(one.inner or one, lengths)
                if choice is not None:
                    saved.runs.append(one)
            if packed is not None:
                y, back = packed.spread(y, direction), packed.back
                last = tuple([end[back] for end in last])
            elif lengths is not None:
                y = lengths.mask(y)
            outputs.append(reverse_time(y, lengths) if direction and packed is None else y)
            ends.append(last)
        return outputs[0] if len(outputs) == 1 else xp.concatenate(outputs, axis=2)

    def _skips_padding(self, xp: ModuleType, lengths: Lengths, choice: Choice | None) -> bool:
        """Whether sequences of several lengths run as segments: on a host, by the recursion; a GPU runs all at once."""
        rows = self.cell.gates * self.hidden_size
        return (
            lengths.padding * rows * (self.input_size + self.hidden_size) >= SKIPPED
            and (choice is None or choice.algorithm == "bp") and self.cell.kind is not None
            and self.output_size == self.hidden_size and backend.is_host(xp)
        )  # fmt: skip

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
        _ = saved.runs[0]  # refused where nothing was kept
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
            (steps, batch, hidden), lengths = saved.shape, saved.lengths
            width = self.directions * hidden
            shape = (batch, steps, width) if self.batch_first else (steps, batch, width)
            check_gy(gy, shape, saved.h_n.dtype, saved.h_n)
            arriving = gy.transpose(1, 0, 2) if self.batch_first else gy
            arriving = arriving if lengths is None or saved.runs[0].segments else lengths.mask(arriving)
        return RecurrentGradients(self, gy, saved, arriving, tuple(named.values()))

    def gradients_at_last(self, saved: RecurrentSaved, at_h_n: Callable[[], Array]) -> NamedGradients:
        """Return the gradients from the one at h_n alone, C-contiguous, computed by `at_h_n` when it is needed."""
        _ = saved.runs[0]  # refused where nothing was kept
        return RecurrentGradients(self, None, saved, None, (None,) * len(saved.last), at_h_n)

    def choices(self, saved: RecurrentSaved, prefix: str = "") -> Iterator[tuple[str, str, str]]:
        """Yield the algorithm chosen for `backward`."""
        _ = saved.runs[0]  # refused where nothing was kept
        yield prefix, saved.backward_choice.algorithm, saved.backward_choice.reason

    # ---- Jacobians -----------------------------------------------------------------------------------------------

    def hidden_jacobians_t(self, saved: RecurrentSaved, layer: int = 0, direction: int = 0) -> list[Any]:
        """Return the T transposed Jacobians of h[t] with respect to h[t-1], per sample: the scan's elements.

        They are in the order in which the direction runs (the second one from the end of each sequence). With lengths,
        elements past a sample's end are zero. An LSTM's are of the state (h, c), on `sparsebp.patterns.lstm_pattern`
        (with proj_size dense); past a sample's end the part from c to c is the identity.
        """
        from sparsebp.jacobians import hidden_elements
        from sparsebp.nn.recurrent.jacobian import padded, state_jacobians

        run = self._runs(layer)[direction]
        one, k = padded(self.cell, saved, run), kernels.get(backend.namespace(saved.h_n)).unchecked
        return hidden_elements(*state_jacobians(k, self.cell, one, self._weights(run)))

    def jacobian_t(self, saved: RecurrentSaved, memory_limit: int | None = None) -> Any:
        """Return the transposed Jacobian of y with respect to x, (T · input_size) × (T · directions · H), per sample.

        Block-triangular: upper for the first direction, lower for the second. Its size grows with T²; training never
        needs it.

        Raises
        ------
        MemoryLimitError
            It would need more than `memory_limit` bytes (default: the layer's, else 2 GiB).
        """
        from sparsebp.nn.recurrent.jacobian import layer_jacobian_t, padded

        limit = self.options.memory_limit if memory_limit is None else memory_limit
        product, k = None, kernels.get(backend.namespace(saved.h_n)).unchecked
        for layer in range(self.num_layers):
            found = [(padded(self.cell, saved, run), self._weights(run)) for run in self._runs(layer)]
            own = layer_jacobian_t(k, self.cell, found, saved.lengths, saved.masks[layer], limit)
            product = own if product is None else product @ own
        return product

    # ---- runs: a layer in one direction, numbered as torch.nn has them along h_n -------------------------------------

    def _runs(self, layer: int) -> range:
        return range(layer * self.directions, (layer + 1) * self.directions)

    def _weights(self, run: int) -> Weights:
        return Weights(*map(self.params.get, weight_names(suffix(run, self.directions))))


# The layers, with torch.nn's arguments; their equations are in `sparsebp.nn.recurrent.cells`.


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

    cell = LSTMMath()
    saved_class = LSTMSaved

    def __init__(
        self, input_size: int, hidden_size: int, num_layers: int = 1, bias: bool = True, batch_first: bool = False,
        dropout: float = 0.0, bidirectional: bool = False, proj_size: int = 0, **options: Unpack[RecurrentOptions],
    ) -> None:  # fmt: skip
        self.proj_size = check_integer("proj_size", proj_size, 0)
        if self.proj_size and self.proj_size >= check_integer("hidden_size", hidden_size, 1):
            raise OptionError("A projection makes h smaller", expected=f"proj_size < hidden_size = {hidden_size}",
                              got=proj_size)  # fmt: skip
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
