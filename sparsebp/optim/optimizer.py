"""The base of optimizers: live parameters, per-parameter buffers, and a flat state that a checkpoint can hold."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any

from sparsebp import backend
from sparsebp.errors import DTypeError, FileFormatError, OptionError, ShapeError
from sparsebp.types import Array


class Optimizer(abc.ABC):
    """Updates parameters in place.

    Parameters
    ----------
    params
        ``model.parameters()``: live C-contiguous arrays by name. Move the model to its device first.
    lr
        Learning rate; settable at any time.
    """

    buffer_names: tuple[str, ...] = ()
    """Buffers kept for every parameter, of its shape."""

    def __init__(self, params: Mapping[str, Array], lr: float) -> None:
        if not params:
            raise OptionError("There is nothing to optimize", expected="at least one parameter", got="none",
                              remedy="Pass model.parameters()")  # fmt: skip
        self.params = dict(params)
        self.lr = non_negative("lr", lr)
        self.steps = 0
        self.buffers: dict[str, dict[str, Array]] = {
            name: {key: backend.namespace(p).zeros_like(p) for key, p in self.params.items()}
            for name in self.buffer_names
        }

    def step(self, grads: Mapping[str, Array]) -> None:
        """Update every parameter from its gradient.

        Parameters
        ----------
        grads
            Gradients with exactly the keys, shapes, dtypes and namespace of the parameters.

        Raises
        ------
        OptionError
            Keys are missing or unexpected.
        ShapeError, DTypeError, LayoutError, DeviceError
            A gradient does not fit. Nothing has been updated then.
        """
        if grads.keys() != self.params.keys():
            missing, unexpected = sorted(self.params.keys() - grads.keys()), sorted(grads.keys() - self.params.keys())
            raise OptionError(
                "The gradients do not belong to the parameters", expected=", ".join(self.params),
                got=f"missing {missing}, unexpected {unexpected}",
                remedy="Pass what weight_grad of the same model returned",
            )  # fmt: skip
        for name, param in self.params.items():
            backend.namespace(param, grads[name])
            backend.check_array(f"gradient of {name}", grads[name], dtype=param.dtype, shape=param.shape)
        self.steps += 1
        for name, param in self.params.items():
            self.update(name, param, grads[name])

    @abc.abstractmethod
    def update(self, name: str, param: Array, grad: Array) -> None:
        """Update one parameter in place; `self.steps` counts from 1."""

    def state_dict(self) -> dict[str, Any]:
        """Return a flat dict: ``lr``, ``steps``, and a copy of each buffer under ``"buffer.parameter"``."""
        state: dict[str, Any] = {"lr": self.lr, "steps": self.steps}
        for buffer, arrays in self.buffers.items():
            state.update({f"{buffer}.{name}": array.copy() for name, array in arrays.items()})
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; nothing is written unless everything fits.

        Raises
        ------
        FileFormatError
            Names are missing or unexpected.
        ShapeError, DTypeError
            A buffer does not fit its parameter.
        """
        targets = {f"{b}.{name}": array for b, arrays in self.buffers.items() for name, array in arrays.items()}
        expected = {"lr", "steps", *targets}
        if state.keys() != expected:
            raise FileFormatError(
                f"The state does not fit {type(self).__name__}", expected=", ".join(sorted(expected)),
                got=f"missing {sorted(expected - state.keys())}, unexpected {sorted(state.keys() - expected)}",
                remedy="Use the optimizer, options and model that the state was made with",
            )  # fmt: skip
        for name, target in targets.items():
            value = state[name]
            if tuple(value.shape) != target.shape:
                raise ShapeError(f"{name} has the wrong shape", expected=target.shape, got=tuple(value.shape),
                                 remedy="Use the model that the state was made with")  # fmt: skip
            if value.dtype != target.dtype:
                raise DTypeError(f"{name} has the wrong dtype", expected=target.dtype, got=value.dtype,
                                 remedy="Use the dtype that the state was made with")  # fmt: skip
        for name, target in targets.items():
            target[...] = backend.as_namespace(state[name], backend.namespace(target))
        self.lr, self.steps = float(state["lr"]), int(state["steps"])


def non_negative(name: str, value: float) -> float:
    """Return `value` as a float if it is finite and not negative, else raise `OptionError`."""
    if not (0 <= value < float("inf")):
        raise OptionError(f"Invalid {name}", expected="a finite number >= 0", got=value, remedy=f"Pass another {name}")
    return float(value)
