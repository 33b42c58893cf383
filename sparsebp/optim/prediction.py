"""Weight prediction for asynchronous pipelines: a stage's weights after s more updates.

A predictor reads the optimizer's weights, learning rate and state, and its own record of earlier gradients. The runtime
reads s off the schedule, see `Predictor.horizon`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Literal, TypeAlias

from sparsebp.core import backend
from sparsebp.core.check import Array, check_choice, check_number
from sparsebp.core.errors import FileFormatError, OptionError
from sparsebp.core.reprs import call_text
from sparsebp.optim.optimizer import Optimizer, check_fraction, check_named, displace
from sparsebp.optim.rules import SGD

Horizon: TypeAlias = Literal["round trip", "update"]
VERSION = 1


class Predictor:
    """Predicts nothing: stages read their newest weights ("vanilla"). Base of the predictors.

    Parameters
    ----------
    optimizer
        The optimizer whose parameters are predicted; its rates and buffers are read at every prediction.

    Attributes
    ----------
    kinds
        The actions that read predicted weights: ``"F"`` forward, ``"I"`` backward. The others read the newest ones.
    horizon
        The moment for which weights are predicted. ``"round trip"``: the updates of the stage until its
        micro-batch's backward has reached stage 0, `Simulation.version_difference`. ``"update"``: the updates until
        the one by the micro-batch's own gradient, `Simulation.staleness`.

    Raises
    ------
    OptionError
        The predictor cannot tell what this optimizer will do.
    """

    kinds: ClassVar[frozenset[str]] = frozenset()
    horizon: ClassVar[Horizon] = "round trip"

    def __init__(self, optimizer: Optimizer) -> None:
        if not isinstance(optimizer, Optimizer):
            raise OptionError("Weights are predicted from an optimizer's state", expected="one of sparsebp.optim",
                              got=type(optimizer).__name__, remedy="Build it on model.parameters()")  # fmt: skip
        self.optimizer = optimizer
        self._kept: dict[str, Array] = {}
        self._counts: dict[str, int] = {}

    def __repr__(self) -> str:
        """Show the constructor's call."""
        return call_text(self)

    def predict(self, names: Iterable[str], s: float, out: Mapping[str, Array] | None = None) -> dict[str, Array]:
        """Return the predicted values of these parameters after `s` more updates.

        Parameters
        ----------
        names
            Names of parameters of the optimizer.
        s
            The number of updates ahead, 0 or more; 0 gives the weights as they are.
        out
            Arrays to write to, like the parameters and apart from them; None: new ones.

        Returns
        -------
        dict
            The predicted weights by name, in the shapes and dtypes of the parameters. The parameters are not touched.

        Raises
        ------
        OptionError
            A name is not the optimizer's, or `s` is negative or not finite.
        """
        s = check_number("s", s, 0.0)
        found = {}
        for name in names:
            weights = self._weights(name)
            into = backend.namespace(weights).empty_like(weights) if out is None else out[name]
            into[...] = weights
            if s:
                self._move(name, weights, s, into)
            found[name] = into
        return found

    def observe(self, names: Iterable[str], grads: Mapping[str, Array]) -> None:
        """Record an update; call it after each one, with its gradients.

        Parameters
        ----------
        names
            The parameters that have been updated.
        grads
            Their gradients by name; copied as needed.

        Raises
        ------
        OptionError
            A name is not the optimizer's, or has no gradient.
        """
        check_named("The gradients", grads)
        for name in names:
            self._weights(name)
            if name not in grads:
                raise OptionError(f"There is no gradient of {name}", expected="one for every name",
                                  got=", ".join(map(str, grads)))  # fmt: skip
            self._note(name, grads[name])

    def state_dict(self) -> dict[str, Any]:
        """Return the predictor's own state, flat, with copied arrays, as an optimizer's `state_dict`."""
        state: dict[str, Any] = {self._mark: VERSION}
        state |= {f"count.{name}": count for name, count in self._counts.items()}
        return state | {f"kept.{name}": array.copy() for name, array in self._kept.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, after the optimizer's own state and the weights have been restored.

        Raises
        ------
        FileFormatError
            It is the state of another predictor, or of other parameters.
        """
        check_named("The state's entries", state)
        params = self.optimizer.params
        kept = {key.removeprefix("kept."): value for key, value in state.items() if key.startswith("kept.")}
        counts = {key.removeprefix("count."): value for key, value in state.items() if key.startswith("count.")}
        fits = all(
            name in params and getattr(array, "shape", None) == params[name].shape and array.dtype == params[name].dtype
            for name, array in kept.items()
        )
        known = {self._mark, *(f"kept.{name}" for name in kept), *(f"count.{name}" for name in counts)}
        if state.get(self._mark) != VERSION or not fits or kept.keys() != counts.keys() or known != state.keys():
            raise FileFormatError("The state does not fit this predictor",
                                  expected=f"{self._mark} = {VERSION}, arrays like parameters",
                                  got=", ".join(sorted(map(str, state)))[:200] or "nothing",
                                  remedy="Use the predictor and the model that the state was made with")  # fmt: skip
        self._counts = {name: int(count) for name, count in counts.items()}
        self._kept = {
            name: backend.as_namespace(array, backend.namespace(params[name])).copy() for name, array in kept.items()
        }

    @property
    def _mark(self) -> str:
        return f"{type(self).__name__}.version"

    def _weights(self, name: str) -> Array:
        try:
            return self.optimizer.params[name]
        except KeyError:
            raise OptionError("A parameter is not the optimizer's", expected=", ".join(self.optimizer.params)[:200],
                              got=repr(name)) from None  # fmt: skip

    def _group(self, name: str) -> Mapping[str, Any]:
        return self.optimizer.param_groups[self.optimizer._group_of[self.optimizer._rows[name]]]

    def _move(self, name: str, weights: Array, s: float, out: Array) -> None:
        """Add the predicted change of s updates to `out`."""

    def _note(self, name: str, grad: Array) -> None:
        """Record the gradient as needed."""


class MomentumPredictor(Predictor):
    """SpecTrain: s steps along the smoothed gradient, Ŵ = W − s·η·v with v ← γ·v + (1 − γ)·g.

    With momentum the optimizer's own buffer b is v: its step is η·b and nothing is kept here. (In the paper's units it
    is v / (1 − γ), for a correspondingly larger η.) Without momentum v is kept here, as a weighted mean: of t
    gradients, by their sum of weights 1 − γᵗ. Weight decay counts as part of the gradient.

    Parameters
    ----------
    optimizer
        `SGD`, with momentum (Nesterov's too, whose steps have b for their trend) or without.
    gamma
        γ where the optimizer has no momentum.

    Raises
    ------
    OptionError
        The optimizer is another one, whose steps are not multiples of v; or `gamma` is not in [0, 1).

    Notes
    -----
    Chen, Yang, Cheng, "Efficient and robust parallel DNN training through model parallelism on multi-GPU platform",
    2018, §3.3, Eq. 1–4. v includes the newest gradient applied: one more step of the buffer, without its gradient,
    would predict less.
    """

    kinds: ClassVar = frozenset("FI")

    def __init__(self, optimizer: Optimizer, gamma: float = 0.9) -> None:
        super().__init__(optimizer)
        if not isinstance(optimizer, SGD):
            raise OptionError("SpecTrain predicts the steps of gradient descent", expected="SGD",
                              got=type(optimizer).__name__, remedy="Use the predictor optimizer_rule")  # fmt: skip
        check_fraction("gamma", gamma)
        self.gamma = gamma

    def _move(self, name: str, weights: Array, s: float, out: Array) -> None:
        group = self._group(name)
        if group["momentum"]:
            out -= (s * group["lr"]) * self.optimizer.buffers["momentum_buffer"][name]
        elif name in self._kept:
            mean = self._kept[name] * (1 / (1 - self.gamma ** self._counts[name]))
            displace(self.optimizer, group, name, s, out, mean)

    def _note(self, name: str, grad: Array) -> None:
        if self._group(name)["momentum"]:
            return
        smoothed = self._kept.get(name)
        if smoothed is None:
            smoothed = self._kept[name] = backend.namespace(grad).zeros_like(grad)
            self._counts[name] = 0
        smoothed *= self.gamma
        smoothed += grad * (1 - self.gamma)
        self._counts[name] += 1


class OptimizerRulePredictor(Predictor):
    """PipeOptim: s times the step that the optimizer's rule takes from its current state; forwards only.

    The step is a formula of the optimizer's buffers after the last update: ``b`` of SGD with momentum,
    ``m̂ / (√v̂ + ε)`` of Adam, plus weight decay ``λ W`` for AdamW. Where a rule reads the gradient itself (SGD
    without or with Nesterov momentum, NAdam, RMSprop without momentum, Adagrad, Adadelta) it is the last one, kept
    here.

    Notes
    -----
    Guan et al., "PipeOptim: ensuring effective 1F1B schedule with optimizer-dependent weight prediction", 2023
    (arXiv 2312.00839): s = D − rank − 1 in PipeDream's schedule, the updates until the micro-batch's own one.
    """

    kinds: ClassVar = frozenset("F")
    horizon: ClassVar[Horizon] = "update"

    def _move(self, name: str, weights: Array, s: float, out: Array) -> None:
        displace(self.optimizer, self._group(name), name, s, out, self._kept.get(name))

    def _note(self, name: str, grad: Array) -> None:
        if self.optimizer.reads_gradient(self._group(name)):
            self._kept[name] = grad.copy()
            self._counts[name] = self._counts.get(name, 0) + 1


class FiniteDifferencePredictor(Predictor):
    """s times the last change of the weights: Ŵ = W + s·(W_t − W_{t−1}), whatever the optimizer. Keeps two copies."""

    kinds: ClassVar = frozenset("FI")

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        self._last = {name: array.copy() for name, array in optimizer.params.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore as `Predictor.load_state_dict`; the current weights are those after the last update."""
        super().load_state_dict(state)
        self._last = {name: array.copy() for name, array in self.optimizer.params.items()}

    def _move(self, name: str, weights: Array, s: float, out: Array) -> None:
        if name in self._kept:
            out += (weights - self._kept[name]) * s

    def _note(self, name: str, grad: Array) -> None:
        weights = self.optimizer.params[name]
        if name not in self._last:  # of a group that has been added since: what it was before is not known
            self._last[name] = weights.copy()
            return
        oldest = self._kept.pop(name, None)
        self._kept[name] = self._last[name]
        self._last[name] = oldest if oldest is not None else backend.namespace(weights).empty_like(weights)
        self._last[name][...] = weights
        self._counts[name] = self._counts.get(name, 0) + 1


PREDICTORS: dict[str, type[Predictor]] = {
    "none": Predictor,
    "momentum": MomentumPredictor,
    "optimizer_rule": OptimizerRulePredictor,
    "finite_difference": FiniteDifferencePredictor,
}
"""The predictors by name."""


def make_predictor(name: str, optimizer: Optimizer) -> Predictor:
    """Return a predictor by its name, a key of `PREDICTORS`, with its own defaults.

    Raises
    ------
    OptionError
        The name is unknown, or the predictor is not for this optimizer.
    """
    return PREDICTORS[check_choice("predictor", name, PREDICTORS)](optimizer)
