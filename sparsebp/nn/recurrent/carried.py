"""Long sequences that come a part at a time: the state goes from batch to batch, the gradient does not."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np

from sparsebp.core import backend
from sparsebp.core.check import Array
from sparsebp.core.errors import OptionError, ShapeError
from sparsebp.core.reprs import nested
from sparsebp.nn.layer import Layer, check_layer
from sparsebp.nn.recurrent.cell_layers import RecurrentCell


class _Carrying(threading.local):
    carried: CarriedState | None = None  # in whose block the calling thread is; for layers that are given no state


carrying = _Carrying()


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

    def __repr__(self) -> str:
        """Show the layers whose states are carried."""
        return nested("CarriedState()", ((name or "model", layer) for name, layer in self._layers.items()))

    def __enter__(self) -> Self:
        self._around, carrying.carried = carrying.carried, self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        carrying.carried = self._around
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
