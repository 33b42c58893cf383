"""Sequences that come a step or a part at a time, cells of one step, and input without a batch axis."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np

from sparsebp import kernels
from sparsebp.core import backend
from sparsebp.core.check import Array, Seed, check_flag, check_generator, check_integer
from sparsebp.core.errors import OptionError, ShapeError
from sparsebp.core.host_pool import empty
from sparsebp.core.shortcuts import belongs, defines, record
from sparsebp.nn.cells import CellMath, GivenState, Tape, Weights, pair
from sparsebp.nn.gradients import Gradients, NamedGradients, Shared
from sparsebp.nn.layer import Layer, check_gy, check_input, check_layer
from sparsebp.nn.parameters import parameter_dtype


class Stream:
    """The state of a recurrent layer or cell between the steps of a sequence; `step` takes it one step on.

    Made by ``layer.stream()``. A step allocates nothing, saves nothing for backward, and costs a few microseconds.
    Dropout is off. Changed or replaced parameters count from the next step on.

    Examples
    --------
    >>> import numpy as np, sparsebp as sb
    >>> gru = sb.nn.GRU(3, 5, rng=0)
    >>> stream, x = gru.stream(), np.ones((7, 3), np.float32)
    >>> y = [stream.step(x_t).copy() for x_t in x]
    >>> bool(np.allclose(y, gru(x), atol=1e-6))
    True

    Notes
    -----
    One thread at a time may use a stream. A copy (`copy.deepcopy`, `pickle`) is independent.
    """

    __slots__ = ("_batch", "_bound", "_c", "_dtype", "_h", "_layer", "_out", "_params", "_room", "_run", "_shape",
                 "_suffixes", "_table", "_zeros")  # fmt: skip

    def __init__(self, layer: Any, suffixes: Sequence[str] | None, batch: int | None, state: Any = None) -> None:
        if not belongs(layer, "stream"):
            raise _refused(layer, "the forward of this package, which the steps repeat")
        if layer.cell.kind is None:
            raise _refused(layer, "no projection (proj_size=0)")
        if layer.device != "cpu":
            raise _refused(layer, "a layer on the host")
        host = kernels.on_host().one_step
        rows = 1 if batch is None else check_integer("batch", batch, 1)
        self._layer, self._batch, self._suffixes = layer, batch, suffixes
        hidden, runs = layer.hidden_size, list(suffixes or ("",))
        self._dtype = layer.params["weight_ih" + runs[0]].dtype
        self._shape = (layer.input_size,) if batch is None else (rows, layer.input_size)
        lead = () if suffixes is None else (len(runs),)
        shape = (*lead, hidden) if batch is None else (*lead, rows, hidden)
        state_of = empty(np, (len(layer.cell.states), *shape), self._dtype)  # parts of one: a view cannot be resized
        self._h, self._c = state_of[0], state_of[1] if len(state_of) > 1 else None
        self._out = self._h[...] if suffixes is None else self._h[-1]
        self._out.flags.writeable = False
        self._room = empty(np, (host.room_of(layer.cell.kind, rows, hidden),), self._dtype)
        self._zeros = np.zeros(layer.cell.gates * hidden, self._dtype)  # without biases
        self._table = np.zeros(host.WEIGHTS + host.TABLE_OF_LAYER * len(runs), np.int64)
        self._table[: host.WEIGHTS] = (
            host.KINDS.index(layer.cell.kind), len(runs), rows, hidden, _address(self._h), _address(self._c),
            _address(self._room),
        )  # fmt: skip
        self._run = host.step_of_stream
        self._bind()
        self.reset(state)

    @property
    def h(self) -> np.ndarray:
        """The hidden states (num_layers, B, H), or (num_layers, H) without a batch; a cell's without the first axis.

        They may be read, copied and written to between steps; the next step writes over them.
        """
        return self._h

    @property
    def c(self) -> np.ndarray | None:
        """An LSTM's cell states, laid out as `h`; None of another layer."""
        return self._c

    def reset(self, state: GivenState | None = None) -> None:
        """Set the state: to an array for `h` (of an LSTM the pair for `h` and `c`), or to zeros."""
        given = (state,) if self._c is None else pair("state", state) or (None, None)
        for own, array in zip((self._h, self._c), given, strict=False):
            if array is not None:
                check_input(array, name="state", dtype=own.dtype, shape=own.shape, like=own)
        values = [0 if array is None else np.array(array) for array in given]  # copies: one may be the other's state
        for own, value in zip((self._h, self._c), values, strict=False):
            own[...] = value

    def step(self, x: np.ndarray) -> np.ndarray:
        """Take all layers one step on, and return the last one's h.

        Parameters
        ----------
        x
            The step's input, (B, input_size), or (input_size,) without a batch.

        Returns
        -------
        ndarray
            (B, H), or (H,): a view of the stream's own state, read-only, overwritten by the next step: copy it to keep
            it.
        """
        if (
            type(x) is not np.ndarray or x.dtype is not self._dtype or x.shape != self._shape
            or not x.flags.c_contiguous
        ):  # fmt: skip
            x = np.ascontiguousarray(self._checked(x))
        params = self._layer.params
        if params is not self._params:  # all of them were replaced at once
            self._bind()
        for name, array in self._bound:
            if params[name] is not array:
                self._bind()
                break
        self._run(x, self._table)
        return self._out

    def _checked(self, x: Any) -> Array:
        check_input(x, dtype=self._dtype, shape=self._shape, like=self._h)
        return x

    def _bind(self) -> None:
        """Look up where the parameters are."""
        host, params = kernels.on_host().one_step, self._layer.params
        bound, addresses = [], []
        for suffix in self._suffixes or ("",):
            weights = self._weights(suffix)
            bound += [(name, array) for name, array in weights.named(suffix).items()]
            addresses += [_address(self._zeros if array is None else array) for array in weights[:4]]
        self._table[host.WEIGHTS :] = addresses
        self._bound, self._params = bound, params  # keeps the arrays

    def _weights(self, suffix: str) -> Weights:
        weights = Weights.of(self._layer.params, suffix)
        self._check_dtype(weights.weight_ih.dtype)
        return weights

    def _check_dtype(self, dtype: Any) -> None:
        if dtype != self._dtype or self._layer.device != "cpu":
            raise OptionError("The layer was converted after this stream was made",
                              expected=f"{self._dtype} on the host", got=f"{dtype} on {self._layer.device}",
                              remedy="Make a new one: layer.stream()")  # fmt: skip

    def __reduce__(self) -> tuple[Any, ...]:
        state = self._h if self._c is None else (self._h, self._c)
        return _again, (self._layer, self._suffixes, self._batch, state)


class ArrayStream(Stream):
    """A `Stream` whose layer takes the step itself, by its methods `state_of` and `advance`, in NumPy."""

    __slots__ = ()

    def __init__(self, layer: Any, batch: int | None, state: Any = None) -> None:
        if not belongs(layer, "stream") or layer.device != "cpu":
            raise _refused(layer, "the forward of this package, on the host")
        lead = () if batch is None else (check_integer("batch", batch, 1),)
        self._layer, self._batch, self._c = layer, batch, None
        self._dtype, self._shape = layer.dtype, (*lead, layer.input_size)
        self._h = layer.state_of(lead)
        self.reset(state)

    def step(self, x: np.ndarray) -> np.ndarray:
        """Take the layer one step on, and return its output; see `Stream.step`."""
        self._check_dtype(self._layer.dtype)
        y: np.ndarray = self._layer.advance(self._checked(x), self._h)
        return y

    def __reduce__(self) -> tuple[Any, ...]:
        return ArrayStream, (self._layer, self._batch, self._h)


def _again(layer: Any, suffixes: Sequence[str] | None, batch: int | None, state: Any) -> Stream:
    return Stream(layer, suffixes, batch, state)


def _address(array: np.ndarray | None) -> int:
    return 0 if array is None else int(array.ctypes.data)


def _refused(layer: Layer, expected: str) -> OptionError:
    return OptionError(f"{type(layer).__name__} cannot go step by step", expected=expected, got="another layer",
                       remedy="Run forward(x, h0) on the steps so far")  # fmt: skip


# Long sequences that come a part at a time: the state goes from batch to batch, the gradient does not.


class _Carrying(threading.local):
    carried: CarriedState | None = None


_carrying = _Carrying()


def carrying() -> CarriedState | None:
    """Return the `CarriedState` in whose block the calling thread is; a layer asks if it is given no state."""
    return _carrying.carried


class CarriedState:
    """The states of a model's recurrent layers between batches: each batch goes on with the sequences of the last one.

    Inside ``with carried:`` every recurrent layer that is given no initial state begins with the state in which the
    last such block left it; the first block begins with zeros. Gradients do not go back into the last block
    (truncated back-propagation through time). `sparsebp.train.Trainer` does this with ``fit(…, stateful=True)``.

    Parameters
    ----------
    model
        A layer that is or contains an `RNN`, `GRU`, `LSTM`, `MinGRU`, `MinLSTM`, `LRU` or `SelectiveScan`, in any
        container. What these do not carry starts anew in every batch, such as the windows of a convolution.

    Raises
    ------
    OptionError
        The model has none of these layers, or one that cannot go on: with two directions, the same at two places, or
        a cell, whose state belongs to its caller. Inside of the block: a layer runs twice, or is not of the model.
    ShapeError
        Inside of the block: a batch has another number of samples than the one before.

    Examples
    --------
    >>> import numpy as np, sparsebp as sb
    >>> gru, x = sb.nn.GRU(3, 5, rng=0), np.ones((10, 2, 3), np.float32)
    >>> carried, parts = sb.nn.CarriedState(gru), []
    >>> for part in (x[:4], x[4:]):
    ...     with carried:
    ...         parts.append(gru(part))
    >>> bool(np.allclose(np.concatenate(parts), gru(x), atol=1e-6))
    True
    """

    def __init__(self, model: Layer) -> None:
        self._layers: dict[str, Any] = {}
        for name, layer in check_layer("model", model).modules():
            if layer.state_axis is None:
                continue
            why = "a cell" if isinstance(layer, RecurrentCell) else None
            why = "two directions" if getattr(layer, "bidirectional", False) else why
            why = "the same layer twice" if any(layer is other for other in self._layers.values()) else why
            if why is not None:
                raise OptionError(f"The state of {name or type(layer).__name__} cannot be carried to the next batch",
                                  expected="recurrent layers of one direction, each at one place", got=why)  # fmt: skip
            self._layers[name] = layer
        if not self._layers:
            raise OptionError("The model has no state to carry from batch to batch", expected="a recurrent layer, as "
                              "GRU, MinGRU, LRU or SelectiveScan", got=type(model).__name__)  # fmt: skip
        self._states: dict[str, tuple[Array, ...]] = {}
        self._new: dict[str, tuple[Array, ...]] = {}
        self._around: CarriedState | None = None

    def __enter__(self) -> Self:
        self._around, _carrying.carried = _carrying.carried, self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _carrying.carried = self._around
        if kind is None:
            self._states |= self._new
        self._new = {}

    def reset(self, samples: Any = None) -> None:
        """Begin with zeros again: all samples, or those for which `samples`, booleans (B,), are true.

        After a reset of all, batches may be of another size.

        Raises
        ------
        OptionError, ShapeError
            `samples` are not booleans, or not one for each sample.
        """
        anew = np.asarray(True if samples is None else samples)
        if anew.dtype != bool:
            raise OptionError("The samples to reset are not booleans", expected="booleans (B,)", got=anew.dtype)
        if anew.all():
            self._states = {}
        for name, state in self._states.items():
            axis = self._layers[name].state_axis
            if anew.shape != (state[0].shape[axis],):
                raise ShapeError("The samples to reset are of another batch", expected=(state[0].shape[axis],),
                                 got=anew.shape)  # fmt: skip
            at = (slice(None),) * axis + (backend.namespace(state[0]).asarray(anew),)
            for array in state:
                array[at] = 0

    def take(self, layer: Any, batch: int) -> tuple[Array, ...] | None:
        """Return the state with which a layer begins; None for zeros. Layers call this."""
        name = next((name for name, own in self._layers.items() if own is layer), None)
        if name is None or name in self._new:
            raise OptionError(f"The state of this {type(layer).__name__} cannot be carried to the next batch",
                              expected="a layer of the model that runs once in a block",
                              got="one that is not" if name is None else f"{name or 'the model'} again")  # fmt: skip
        state = self._states.get(name)
        if state is not None and state[0].shape[layer.state_axis] != batch:
            raise ShapeError("The batch cannot go on with the sequences of the last one",
                             expected=f"{state[0].shape[layer.state_axis]} samples", got=batch,
                             remedy="Make all batches of one size (drop_last), or reset the state between")  # fmt: skip
        return state

    def keep(self, layer: Any, state: Sequence[Array]) -> None:
        """Keep copies of the state in which a layer ended. Layers call this."""
        name = next(name for name, own in self._layers.items() if own is layer)
        self._new[name] = tuple(array.copy() for array in state)

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return copies of the states on the host, by layer and number; complex ones as pairs of reals."""
        found = {}
        for name, state in self._states.items():
            for number, array in enumerate(map(backend.to_host, state)):
                wide = array.dtype.kind == "c"
                key = f"{name}.{number}" + (".complex" if wide else "")
                found[key] = array.view(array.real.dtype) if wide else array.copy()
        return found

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Take the states that `state_dict` returned."""
        self._states = {}
        for key in sorted(state):  # by number, whatever order a file has them in
            path = key.removesuffix(".complex")
            name = path.rpartition(".")[0]
            if name not in self._layers:
                raise OptionError("A state is not of this model", expected=", ".join(self._layers), got=name)
            array = np.array(state[key])
            array = array.view(np.result_type(array.dtype, np.complex64)) if path != key else array
            array = backend.to_device(array, self._layers[name].device)
            self._states[name] = (*self._states.get(name, ()), array)


# The base of RNNCell, GRUCell and LSTMCell: one step of a recurrent layer, differentiated by its state too.


class RecurrentCell(Layer):
    """One step, ``h' = cell(x, h)``; torch.nn's ``weight_ih``, ``weight_hh``, ``bias_ih``, ``bias_hh``."""

    # device: None or `"cpu"`: layers are built on the host, and moved by `to`.
    # dtype: float32 or float64.
    # rng: Generator or seed of the initial values.

    replayable = True
    optional = "bias_ih", "bias_hh"
    cell: CellMath
    """The cell's equations, given by the subclass."""

    def __init__(
        self, input_size: int, hidden_size: int, bias: bool = True, device: Any = None, dtype: Any = np.float32, *,
        rng: Seed = None,
    ) -> None:  # fmt: skip
        super().__init__()
        input_size = check_integer("input_size", input_size, 1)
        hidden_size = check_integer("hidden_size", hidden_size, 1)
        bias = check_flag("bias", bias)
        self.input_size, self.hidden_size = input_size, hidden_size
        real = parameter_dtype(dtype, device)
        weights = self.cell.initial_weights(input_size, hidden_size, bias, real, check_generator("rng", rng))
        self.params.update(weights.named())

    def forward(self, x: Array, h: Array | None = None) -> tuple[Array, Tape]:
        """Return the next state (B, hidden_size) for x (B, input_size) and h (B, hidden_size) or None for zeros."""
        return self._forward(x, None if h is None else (h,))

    def stream(self, batch: int | None = None, state: Any = None) -> Stream:
        """Return a `Stream`, as `Recurrent.stream` does: steps that allocate nothing; its state has no layers' axis."""
        return Stream(self, None, batch, state)

    def step(self, x: Array, state: Stream) -> Array:
        """Take a state of `stream` one step on: ``state.step(x)``, see there."""
        return state.step(x)

    def _forward(self, x: Array, state: GivenState | None) -> tuple[Array, Tape]:
        """Run one step from the state, an array for each name of the cell's."""
        weights = Weights.of(self.params)
        xp = check_input(x, dtype=weights.weight_ih.dtype, shape=(None, self.input_size), like=weights.weight_ih)
        if x.shape[0] == 0:
            raise ShapeError(
                "The batch is empty", expected="at least one sample", got=x.shape, remedy="Skip empty batches"
            )
        shape = (x.shape[0], self.hidden_size)
        for name, array in zip(self.cell.states, state or (), strict=False):
            if array is not None:
                check_input(array, name=name, dtype=weights.weight_ih.dtype, shape=shape, like=weights.weight_ih)
        k = kernels.get(xp)
        tape = self.cell.finish(k, weights, *self.cell.begin(k, xp.ascontiguousarray(x)[None], weights), state)
        return tape.h[0], tape

    def gradients(self, gy: Array | None, saved: Tape) -> NamedGradients:
        """Return the gradients at x (B, input_size), at h (B, hidden_size), and at the parameters."""
        return self._gradients(gy, saved, {"gy": gy})

    def _gradients(self, gy: Array | None, saved: Tape, last: dict[str, Array | None]) -> NamedGradients:
        """Return the gradients from `last`, the gradients at the state's arrays by name."""
        weights, xp = Weights.of(self.params), backend.namespace(saved.h)
        if all(array is None for array in last.values()):
            raise OptionError("No gradient was given", expected=" or ".join(last), got="None",
                              remedy="Pass the gradient of the loss with respect to the next state")  # fmt: skip
        arriving = [self._checked(name, array, saved) for name, array in last.items()]
        step = Shared(lambda: self.cell.backward(saved, weights.weight_hh, None, arriving), xp)
        return NamedGradients(
            self, gy, saved, lambda: self.cell.input_grad(step().ga, weights)[0],
            lambda: self.cell.weight_grad(step().ga, saved, weights).named(),
            names=("hidden", "cell")[: len(self.cell.states)], more=lambda: step().initial,
        )  # fmt: skip

    def _checked(self, name: str, grad: Array | None, saved: Tape) -> Array | None:
        """Return the gradient at an array of the state, C-contiguous."""
        if grad is None:
            return None
        if name == "gy":
            return check_gy(grad, saved.h[0].shape, saved.h.dtype, saved.h).ascontiguousarray(grad)
        xp = check_input(grad, name=name, dtype=saved.h.dtype, shape=saved.h[0].shape, like=saved.h)
        return xp.ascontiguousarray(grad)

    def hidden_jacobian_t(self, saved: Tape) -> Any:
        """Return the transposed Jacobian of the new state with respect to the old one, per sample (BPPSA Eq. 11)."""
        # It is (H, H); of an LSTM, whose state is (h, c), (2H, 2H).
        from sparsebp.jacobians import hidden_elements

        return hidden_elements(*self.cell.state_jacobians(saved, Weights.of(self.params)))[0]


# Unbatched sequences and samples, as torch.nn's recurrent layers and cells take them.

L = TypeVar("L", bound=type[Layer])


class UnbatchedSaved(NamedTuple):
    """Saved by the forward of an unbatched input: the value of a batch of one.

    It has the batch's `backward_choice`, and its last states, `h_n` and `c_n` of a layer and `c` of a cell, without the
    batch axis.
    """

    batch: Any
    axis: int  # of the batch in these: in a cell's c it is behind the one step

    def __getattr__(self, name: str) -> Any:
        if name == "backward_choice":
            return self.batch.backward_choice
        if name in ("h_n", "c_n", "c"):
            return getattr(self.batch, name).squeeze(self.axis)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __iter__(self) -> Iterator[Array]:
        """Yield the last states, as the batch's value does."""
        return (array.squeeze(self.axis) for array in self.batch)


class UnbatchedGradients(Gradients):
    """`Gradients` of an unbatched input, from a batch of one: also with respect to the states that the batch's have."""

    __slots__ = ("_axis", "_batch")

    def __init__(self, layer: Layer, gy: Any, saved: UnbatchedSaved, batch: Any, x_axis: int, axis: int) -> None:
        super().__init__(layer, gy, saved, lambda: batch.input_grad().squeeze(x_axis), batch.weight_grad)
        self._batch, self._axis = batch, axis

    def __getattr__(self, name: str) -> Array:
        if name not in ("h0", "c0", "hidden", "cell"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return self._once(name, lambda: getattr(self._batch, name).squeeze(self._axis))


def takes_unbatched(sample_axes: int, state_axis: int) -> Callable[[L], L]:
    """Let a recurrent layer or cell take unbatched inputs and states."""
    # sample_axes: axes of an unbatched x: 2 for a layer, (T, features), 1 for a cell.
    # state_axis: the batch axis of the states: 1 for a layer, 0 for a cell.

    def within(cls: L) -> L:
        forward, gradients = cls.forward, cls.gradients

        @functools.wraps(forward)
        def unbatched_forward(self: Any, x: Array, *state: Any, **options: Any) -> tuple[Array, Any]:
            xp, axis = backend.namespace(x=x), self.batch_axes[0]
            if x.ndim != sample_axes:
                return forward(self, x, *state, **options)
            named = {key: value if key == "lengths" else _with(value, state_axis) for key, value in options.items()}
            first = [_with(value, state_axis) for value in state[:1]]
            y, saved = forward(self, xp.expand_dims(x, axis), *first, *state[1:], **named)
            return y.squeeze(axis), UnbatchedSaved(saved, state_axis if sample_axes > 1 else 1)

        @functools.wraps(gradients)
        def unbatched_gradients(self: Any, gy: Any, saved: Any, *last: Any, **named: Any) -> Gradients:
            if not isinstance(saved, UnbatchedSaved):
                return gradients(self, gy, saved, *last, **named)
            axis = self.batch_axes[0]
            found = gradients(
                self, _with(gy, axis), saved.batch, *(_with(array, state_axis) for array in last),
                **{key: _with(array, state_axis) for key, array in named.items()},
            )  # fmt: skip
            return UnbatchedGradients(self, gy, saved, found, axis, state_axis)

        def lone(self: Any, saved: Any) -> bool:
            """Whether the forward had an unbatched sequence."""
            return isinstance(saved, UnbatchedSaved)

        found: Any = cls
        found.forward, found.gradients = unbatched_forward, unbatched_gradients
        found.lone, found.sample_axes, found.state_axis = lone, sample_axes, state_axis
        # the same for these
        for name in ("forward_time_major", "stream", "gradients_at_last", "replayable", "capture_obstacle"):
            if hasattr(cls, name):
                setattr(cls, name, getattr(cls, name))
        for name in ("hidden_jacobians_t", "hidden_jacobian_t", "jacobian_t", "choices"):
            if defines(cls, name):
                setattr(cls, name, _of_batch(getattr(cls, name)))
        record(cls)
        return cls

    return within


def _of_batch(method: Callable[..., Any]) -> Callable[..., Any]:
    """Let a method take the saved value of an unbatched forward."""

    @functools.wraps(method)
    def of_batch(self: Any, saved: Any, *rest: Any, **options: Any) -> Any:
        return method(self, saved.batch if isinstance(saved, UnbatchedSaved) else saved, *rest, **options)

    return of_batch


def _with(value: Any, axis: int) -> Any:
    """Add a batch axis of length 1 to an array, or to each of several."""
    if value is None:
        return None
    if isinstance(value, (tuple, list)):
        return type(value)(_with(each, axis) for each in value)
    return backend.namespace(value).expand_dims(value, min(axis, value.ndim))
