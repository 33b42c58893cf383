"""Sequences that come a step at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sparsebp import kernels
from sparsebp.core.check import Array, check_integer
from sparsebp.core.errors import OptionError
from sparsebp.core.host_pool import empty
from sparsebp.nn.layer import Layer, check_input
from sparsebp.nn.recurrent.saved import GivenState, Weights, pair


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
        if "stream" not in layer.valid_shortcuts:
            raise _refused(layer, "the forward of this package, which the steps repeat")
        if layer.cell.kind is None or layer.__dict__.get("proj_size"):
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
        if "stream" not in layer.valid_shortcuts or layer.device != "cpu":
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
