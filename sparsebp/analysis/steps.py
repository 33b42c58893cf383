"""The hidden-state Jacobians of one layer of a recurrent model along a sequence, all of them or a few at a time."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np

from sparsebp import backend
from sparsebp.core.arguments import check_choice, check_integer
from sparsebp.core.errors import MemoryLimitError, NonFiniteError, OptionError
from sparsebp.core.types import Array
from sparsebp.jacobians import TransposedJacobian
from sparsebp.jacobians.api import DEFAULT_MEMORY_LIMIT
from sparsebp.nn import Layer, SequenceClassifier, Sequential
from sparsebp.nn.recurrent.cell_math import CellMath
from sparsebp.nn.recurrent.recurrent import Recurrent
from sparsebp.nn.recurrent.tape import Tape, Weights
from sparsebp.patterns import SparsityPattern

Format = Literal["stacked", "csr"]

PART = 1 << 25
"""Bytes of Jacobians in float64 that `SteppedRun.parts` makes at a time."""


def hidden_jacobians(
    model: Any, x: Any, h0: Any = None, *, layer: int = 0, direction: int = 0, format: Format = "stacked",
    memory_limit: int | None = None,
) -> Any:  # fmt: skip
    """Return the Jacobian of every step's hidden state with respect to the one before it.

    Parameters
    ----------
    model
        An `RNN`, `GRU` or `LSTM`, or a `SequenceClassifier` or `Sequential` with one of them inside; or PyTorch's own,
        whose weights are taken over. It runs as in evaluation, without dropout.
    x
        The model's input, as its forward takes it: (T, B, input_size) for a recurrent layer, or batch first if it says
        so; (T, input_size) is a batch of one.
    h0
        Initial states as the recurrent layer's forward takes them, of an LSTM the pair (h0, c0); None for zeros.
    layer, direction
        Which of stacked layers, and which of two directions: of the second the steps run backwards.
    format
        ``"stacked"``: one dense array. ``"csr"``: the transposed Jacobians on their sparsity pattern.
    memory_limit
        Most bytes that they may take; None: 2 GiB.

    Returns
    -------
    numpy.ndarray or list of TransposedJacobian
        (T, B, n, n), entry [t, b, i, j] the derivative of state i after step t with respect to state j before it, of
        sample b, of the model's dtype and library; n is H, of an LSTM 2 H: first h, then c. Or, for every step, the
        (n, n) transposed Jacobians of all samples.

    Raises
    ------
    OptionError
        The model has no such layer, or an option is none of those above.
    MemoryLimitError
        They would take more than `memory_limit`; said before they are made.
    ShapeError, DTypeError, DeviceError
        x or h0 does not fit the model.

    See Also
    --------
    lyapunov, gradient_flow : they take Jacobians a few steps at a time, whatever the length.
    """
    check_choice("format", format, ("stacked", "csr"))
    limit = DEFAULT_MEMORY_LIMIT if memory_limit is None else check_integer("memory_limit", memory_limit, 0)
    run = SteppedRun(model, x, h0, layer, direction)
    entries = run.steps * run.batch * run.values_a_step
    if format == "stacked":
        entries += 2 * run.steps * run.batch * run.size**2  # by place, and in the order of the result
    need = entries * run.itemsize
    if need > limit:
        raise MemoryLimitError(
            "The Jacobians of all steps would need too much memory", expected=f"at most {limit} bytes",
            got=f"{need} bytes for T = {run.steps}, B = {run.batch}, {run.size} states",
            remedy="Pass fewer steps or samples, or raise memory_limit; lyapunov and gradient_flow need little",
        )  # fmt: skip
    values, pattern = run.values(0, run.steps)
    return [TransposedJacobian(pattern, step) for step in values] if format == "csr" else _stacked(values, pattern)


class SteppedRun:
    """One run of a recurrent layer over a sequence, whose Jacobians are made when they are asked for.

    Parameters
    ----------
    model, x, h0, layer, direction
        As for `hidden_jacobians`; `h0` may also be a `numpy.random.Generator`, which draws the states from U(-1, 1).

    Attributes
    ----------
    steps, batch, size
        T, B and the number n of states of a sample.
    values_a_step
        Entries of one sample's Jacobian.
    """

    def __init__(self, model: Any, x: Any, h0: Any, layer: int, direction: int) -> None:
        own = own_layer(model)
        with _evaluating(own):
            x = array_of(x)
            backend.namespace(x=x)
            recurrent, inputs = _recurrent_of(own, x)
            run = _number(recurrent, layer, direction)
            inputs, h0 = _batched(recurrent, inputs, h0 if isinstance(h0, np.random.Generator) else array_of(h0))
            states = _drawn(recurrent, inputs, h0) if isinstance(h0, np.random.Generator) else h0
            _, saved = recurrent.forward(inputs, states)
        self._cell: CellMath = recurrent.cell
        self._tape: Tape = saved.tapes[run]
        self._weights = Weights.of(recurrent.params, f"_l{layer}" + "_reverse" * direction)
        self.steps, self.batch, _ = self._tape.h.shape
        self.itemsize = self._tape.h.dtype.itemsize
        _, pattern = self.values(0, 1)
        self.size, self.values_a_step = pattern.shape[0], pattern.nnz

    def values(self, begin: int, end: int) -> tuple[Array, SparsityPattern]:
        """Return the transposed Jacobians of the steps from `begin` to before `end`, (t, nnz, B), and their pattern."""
        return self._cell.state_jacobians(_part(self._tape, begin, end), self._weights)

    def parts(self, backwards: bool = False) -> Iterator[np.ndarray]:
        """Yield the Jacobians (t, B, n, n) of a few steps at a time, on the host, in float64; each part in time order.

        Parameters
        ----------
        backwards
            From the last part to the first.

        Raises
        ------
        NonFiniteError
            An entry is NaN or infinite.
        """
        length = max(1, PART // max(1, 8 * self.batch * self.size**2))
        begins = range(0, self.steps, length)
        for begin in reversed(begins) if backwards else begins:
            found = _stacked(*self.values(begin, min(begin + length, self.steps)))
            part = backend.to_host(found).astype(np.float64)  # synchronize!
            if not np.isfinite(part).all():
                raise NonFiniteError(
                    "The Jacobians are not finite", expected="finite states along the whole sequence",
                    got=f"NaN or infinity between the steps {begin} and {begin + len(part)}",
                    remedy="Look at the model's weights and states there",
                )  # fmt: skip
            yield part


def own_layer(model: Any) -> Layer:
    """Return a model of ours, or ours with the weights of one of PyTorch.

    Raises
    ------
    OptionError
        It is something else, or a module that we have no layer for.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(model, torch.nn.Module):
        from sparsebp.torch.sparse.counterparts import layer_of

        return layer_of(model)
    if not isinstance(model, Layer):
        raise _no_recurrent(type(model).__name__)
    return model


def array_of(value: Any) -> Any:
    """Return a tensor's array, or those of a pair; anything else as it is."""
    torch = sys.modules.get("torch")
    if isinstance(value, (tuple, list)):  # an LSTM's state
        return tuple(map(array_of, value))
    if torch is not None and isinstance(value, torch.Tensor):
        from sparsebp.interop.torch import from_torch

        return from_torch(value)
    return value


def _recurrent_of(model: Layer, x: Array) -> tuple[Recurrent, Array]:
    """Return the (first) recurrent layer of a model, and the input that comes to it."""
    if isinstance(model, Recurrent):
        return model, x
    if isinstance(model, SequenceClassifier):
        return model.rnn, x
    if isinstance(model, Sequential):
        for _, stage in model.stages():
            if isinstance(stage, (Recurrent, SequenceClassifier)):
                return _recurrent_of(stage, x)
            x = stage(x)
    raise _no_recurrent(type(model).__name__)


def _no_recurrent(got: str) -> OptionError:
    return OptionError(
        "The model has no recurrent layer", expected="an RNN, GRU or LSTM, ours or PyTorch's, or a SequenceClassifier "
        "or Sequential with one", got=got, remedy="Pass the recurrent layer and its input",
    )  # fmt: skip


def _number(recurrent: Recurrent, layer: int, direction: int) -> int:
    """Return the number of the run of a layer in a direction."""
    layer = check_integer("layer", layer, 0, recurrent.num_layers - 1)
    return layer * recurrent.directions + check_integer("direction", direction, 0, recurrent.directions - 1)


def _batched(recurrent: Recurrent, x: Any, h0: Any) -> tuple[Any, Any]:
    """Return a lone sequence (T, features) as a batch of one, and so its initial state; a batch as it is."""
    if getattr(x, "ndim", 3) != 2:
        return x, h0
    if isinstance(h0, tuple):
        h0 = tuple(part[:, None] for part in h0)
    elif hasattr(h0, "ndim"):
        h0 = h0[:, None]
    return (x[None] if recurrent.batch_first else x[:, None]), h0


def _drawn(recurrent: Recurrent, x: Array, rng: np.random.Generator) -> Any:
    """Draw initial states in the range of a tanh: at 0 a layer without input would stay where it is."""
    if x.ndim != 3:  # the forward will say so
        return None
    weights = Weights.of(recurrent.params, "_l0")
    xp, dtype = backend.namespace(weights.weight_hh), weights.weight_hh.dtype
    runs, batch = recurrent.num_layers * recurrent.directions, x.shape[0 if recurrent.batch_first else 1]
    states = tuple(backend.as_namespace(rng.uniform(-1, 1, (runs, batch, width)).astype(dtype), xp)
                   for width in recurrent.cell.widths(weights))  # fmt: skip
    return states if len(states) > 1 else states[0]


@contextlib.contextmanager
def _evaluating(model: Layer) -> Iterator[None]:
    """Let the model run without dropout inside the ``with`` block."""
    modes = [(layer, layer.training) for _, layer in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for layer, mode in modes:
            layer.training = mode


def _part(tape: Tape, begin: int, end: int) -> Tape:
    """Return the steps from `begin` to before `end` of a run, as views; with the state before them where it is kept."""
    steps = len(tape.x)

    def cut(value: Any) -> Any:
        if value is None or isinstance(value, Tape):
            return value if value is None else _part(value, begin, end)
        if isinstance(value, tuple):
            return tuple(map(cut, value))
        return value[begin : end + len(value) - steps]

    return dataclasses.replace(tape, **{f.name: cut(getattr(tape, f.name)) for f in dataclasses.fields(tape)})


def _stacked(values: Array, pattern: SparsityPattern) -> Array:
    """Return transposed Jacobians (t, nnz, B) as Jacobians (t, B, n, n)."""
    xp, (steps, _, batch), (size, _) = backend.namespace(values), values.shape, pattern.shape
    if pattern.kind != "dense":
        placed = xp.zeros((steps, size * size, batch), dtype=values.dtype)
        placed[:, xp.asarray(pattern.row_of_entry.astype(np.int64) * size + pattern.indices)] = values
        values = placed
    return xp.ascontiguousarray(values.reshape(steps, size, size, batch).transpose(0, 3, 2, 1))
