"""An exponential moving average of a model's weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from sparsebp.core import backend, masks
from sparsebp.core.absent import initial_values, is_absent
from sparsebp.core.check import Array, check_flag, check_integer
from sparsebp.core.errors import FileFormatError, OptionError
from sparsebp.core.reprs import call_text
from sparsebp.optim.optimizer import check_fraction, check_named
from sparsebp.optim.rules import SGD
from sparsebp.optim.state import check_like

VERSION = 1


class EMA:
    """Averages of weights, ``a ← decay · a + (1 − decay) · w`` with every `update`; the first one copies the weights.

    As ``torch.optim.swa_utils.AveragedModel`` with ``get_ema_multi_avg_fn(decay)``: parameters are averaged, buffers
    (running statistics) are copied. Averages are of the dtype and on the device of the parameters; all of them take one
    pass over memory and one call.

    Parameters
    ----------
    model
        A layer or model, or arrays by name, as ``model.parameters()``.
    decay
        How much of the average an update keeps.
    warm_up
        Whether update n, from 0, keeps no more than ``(1 + n) / (10 + n)``, so that the first weights are soon
        forgotten (`num_updates` of ``tf.train.ExponentialMovingAverage``).

    Attributes
    ----------
    averages : dict
        The averages by name.
    updates : int
        How many there have been.

    Raises
    ------
    OptionError
        `decay` is not in [0, 1), or there are no parameters.

    Examples
    --------
    >>> import sparsebp as sb
    >>> model = sb.nn.Linear(3, 2, rng=0)
    >>> ema = sb.optim.EMA(model, decay=0.99)
    >>> adam = sb.optim.Adam(model.parameters())
    >>> # after every adam.step(grads): ema.update()
    >>> with ema.averaged():
    ...     weights = model.state_dict()
    """

    def __init__(self, model: Any, decay: float = 0.999, *, warm_up: bool = False) -> None:
        check_fraction("decay", decay)
        self.decay, self.warm_up, self.updates = float(decay), check_flag("warm_up", warm_up), 0
        self._model, self._inside = model, False
        self._arrays = self._parameters()
        self.averages = {name: array.copy() for name, array in self._arrays.items()}
        self._buffers = {name: array.copy() for name, array in self._statistics().items()}
        # a -= lr (a - w): a step of this rule, with weight decay 1, up the "gradient" w.
        self._rule = SGD(self.averages, lr=1 - decay, weight_decay=1.0, maximize=True)

    def __repr__(self) -> str:
        """Show the constructor's call without the model, and the updates so far."""
        return f"<{call_text(self, ['model'])} after {self.updates} updates>"

    def _parameters(self) -> dict[str, Array]:
        model = self._model
        return dict(model if isinstance(model, Mapping) else model.parameters())

    def _statistics(self) -> dict[str, Array]:
        layers = self._model.modules() if hasattr(self._model, "modules") else ()
        return {f"{path}.{name}".strip("."): array for path, layer in layers for name, array in layer.buffers.items()}

    def _hold(self) -> None:
        """Make the averages of parameters that were without memory when this was built: their initial values."""
        lacking = [array for array in self.averages.values() if is_absent(array)]
        if not lacking:
            return
        made = {id(stand_in): values for stand_in, values in initial_values(lacking)}
        self._rule._fill(made)
        self.averages = {name: made.get(id(array), array) for name, array in self.averages.items()}

    def _live(self) -> dict[str, Array]:
        """Return the model's parameters, checked if some of its arrays have been replaced."""
        live = self._parameters()
        if live.keys() != self.averages.keys():
            raise OptionError("The model's parameters are not those that are averaged",
                              expected=", ".join(self.averages), got=", ".join(live),
                              remedy="Build another EMA on the model")  # fmt: skip
        if any(array is not self._arrays[name] for name, array in live.items()):
            for name, array in live.items():
                backend.namespace(array, self.averages[name])
                check_like(name, array, self.averages[name])
            self._arrays = live
        return live

    def is_of(self, model: Any) -> bool:
        """Whether the averages are of this model's parameters."""
        live = model.parameters()
        return self._model is model or all(live.get(name) is array for name, array in self._parameters().items())

    def update(self) -> None:
        """Take the model's present weights into the averages.

        Raises
        ------
        OptionError, ShapeError, DTypeError, DeviceError
            The model's parameters are not those that are averaged, or it is inside of `averaged`.
        """
        if self._inside:
            raise OptionError("The model has its averages now, and they would be averaged", expected="its own weights",
                              got="update inside of averaged()")  # fmt: skip
        self._hold()
        live, n = self._live(), self.updates
        if n == 0:
            _write(self.averages, live)
        else:
            self._rule.lr = 1 - (min(self.decay, (1 + n) / (10 + n)) if self.warm_up else self.decay)
            self._rule.step(live)
        if self._buffers:
            _write(self._buffers, self._statistics())
        self.updates = n + 1

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Give the model its averages inside of the ``with`` block, and its own weights back afterwards.

        They are written into its arrays, also into buffers. Changes inside of the block are lost.
        """
        arrays = self._live() | self._statistics()
        before = {name: array.copy() for name, array in arrays.items()}
        inside, self._inside = self._inside, True
        try:
            self.apply()
            yield
        finally:
            self._inside = inside
            _write(self._live() | self._statistics(), before)  # they may be other arrays by now

    def apply(self) -> None:
        """Give the model its averages for good. Pruned weights stay 0."""
        self._hold()
        live = self._live()
        _write(live, self.averages)
        _write(self._statistics(), self._buffers)
        for array in live.values() if masks.owners else ():
            masks.clear(array)

    def state_dict(self) -> dict[str, Any]:
        """Return a flat dict: ``"updates"``, and copies of all averages and buffers as ``"averages.<name>"``."""
        self._hold()
        arrays = {f"averages.{name}": array.copy() for name, array in (self.averages | self._buffers).items()}
        return {"EMA.version": VERSION, "updates": self.updates, **arrays}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; nothing is written unless everything fits.

        Raises
        ------
        FileFormatError
            It is the state of something else, or of other parameters.
        ShapeError, DTypeError
            An array does not fit.
        """
        check_named("The state's entries", state)
        self._hold()
        targets = {f"averages.{name}": array for name, array in (self.averages | self._buffers).items()}
        if state.keys() != targets.keys() | {"EMA.version", "updates"} or state["EMA.version"] != VERSION:
            raise FileFormatError("The state does not fit this EMA", expected=f"EMA.version = {VERSION}, updates, "
                                  f"{', '.join(targets)}", got=", ".join(map(str, state)) or "nothing",
                                  remedy="Use the model that the state was made with")  # fmt: skip
        for name, target in targets.items():
            check_like(name, state[name], target)
        updates = check_integer("updates", state["updates"], 0, 2**62)
        _write(targets, state)
        self.updates = updates


def _write(targets: Mapping[str, Array], arrays: Mapping[str, Any]) -> None:
    """Copy arrays into those of the same names."""
    for name, target in targets.items():
        if name in arrays:  # a mask has come since
            target[...] = backend.as_namespace(arrays[name], backend.namespace(target))
