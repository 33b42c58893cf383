"""The stages of a model, as an executor sees them, and which of its parameters an optimizer trains."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sparsebp.core.errors import OptionError
from sparsebp.core.locks import cached_property
from sparsebp.core.types import Array
from sparsebp.nn.chain.lengths import taking_lengths


@dataclass(frozen=True)
class Stage:
    """A part of a model that runs by itself.

    Attributes
    ----------
    name, layer
        As `Layer.stages` gives them.
    parameters
        The model's name of every parameter that is trained by the name that the layer's `weight_grad` uses. Two of them
        are one where the layer, or the model, shares it.
    frozen
        Whether it has parameters and none of them is trained.
    """

    name: str
    layer: Any
    parameters: dict[str, str]
    frozen: bool = False


class Stages:
    """All stages of a model, in the order of forward.

    Parameters
    ----------
    model
        A `Layer`, or anything with ``forward``, ``weight_grad`` and ``parameters``: that is one stage.
    trained
        The names of the parameters that are trained, in the model's order; None: all. The others are as good as none.

    Attributes
    ----------
    names
        The names of all parameters that are trained.
    first
        The number of the first stage with such parameters: no gradient is needed at its input, nor before it.
    """

    def __init__(self, model: Any, trained: Iterable[str] | None = None) -> None:
        self.model = model
        self.names = tuple(model.parameters() if trained is None else trained)
        parts = model.stages() if hasattr(model, "stages") else [("", model)]
        shared = model.shared_names() if hasattr(model, "shared_names") else {name: name for name in self.names}
        self.all = [_stage(name, layer, shared, frozenset(self.names)) for name, layer in parts]
        self.first = min((number for number, stage in enumerate(self.all) if stage.parameters), default=len(self.all))

    def __len__(self) -> int:
        return len(self.all)

    def __getitem__(self, number: int) -> Stage:
        return self.all[number]

    @property
    def unweighted(self) -> frozenset[int]:
        """The stages without parameters that are trained."""
        return frozenset(number for number, stage in enumerate(self.all) if not stage.parameters)

    @property
    def frozen(self) -> frozenset[int]:
        """The stages with parameters none of which is trained."""
        return frozenset(number for number, stage in enumerate(self.all) if stage.frozen)

    @property
    def scans(self) -> bool:
        """Whether the gradients between the stages come from a scan, all at once."""
        return len(self.all) > 1 and getattr(self.model, "backward", "bp") != "bp"

    @property
    def ours(self) -> bool:
        """Whether all layers of the model are this package's, none of the user's own."""
        modules = getattr(self.model, "modules", None)
        return modules is not None and is_ours(self.model) and all(is_ours(layer) for _, layer in modules())

    @cached_property
    def taking_lengths(self) -> frozenset[int]:
        """The stages whose forward takes the lengths of padded sequences; a model of one stage is taken at its word.

        Raises
        ------
        OptionError
            A stage neither does, nor works on each step by itself.
        """
        if len(self.all) == 1:
            return frozenset({0})
        return frozenset(taking_lengths([(stage.name, stage.layer) for stage in self.all])[0])

    def shared(self) -> list[str]:
        """Return the parameters that several stages hold."""
        held = Counter(name for stage in self.all for name in set(stage.parameters.values()))
        return [name for name in self.names if held[name] > 1]

    def updated_at(self, order: Iterable[int], *, last: bool) -> dict[int, list[str]]:
        """Return which parameters each stage's update takes, if stages are updated in this order.

        What several stages hold is updated with the last of them, or else with the first. What none of them holds is
        left out.
        """
        place: dict[str, int] = {}
        for number in order:
            for name in self.all[number].parameters.values():
                if last or name not in place:
                    place[name] = number
        taken: dict[int, list[str]] = {}
        for name in self.names:
            if name in place:
                taken.setdefault(place[name], []).append(name)
        return taken


def _stage(prefix: str, layer: Any, shared: dict[str, str], trained: frozenset[str]) -> Stage:
    own = layer.shared_names() if hasattr(layer, "shared_names") else layer.parameters()
    parameters = {name: shared[f"{prefix}.{name}" if prefix else name] for name in own}
    mine = {key: name for key, name in parameters.items() if name in trained}
    return Stage(prefix, layer, mine, frozen=bool(parameters) and not mine)


def trained_parameters(model: Any, optimizer: Any) -> dict[str, Array]:
    """Return the parameters that `optimizer` trains, by name, in the model's order.

    Its ``params`` say so, arrays by name; an optimizer of the user's own that has none trains all.

    Raises
    ------
    OptionError
        The model has none, or some of the optimizer's are not the model's: they would be updated, and nothing learnt.
    """
    live = model.parameters()
    if not live:
        raise OptionError("The model has no parameters", expected="at least one", got="none",
                          remedy="There is nothing to train")  # fmt: skip
    params = getattr(optimizer, "params", None)
    if not isinstance(params, Mapping):
        return dict(live)
    check_live(model, params)
    return {name: array for name, array in live.items() if name in params}


def is_ours(part: Any) -> bool:
    """Return whether a layer, loss or optimizer is of a class of this package."""
    return type(part).__module__.partition(".")[0] == __name__.partition(".")[0]


def check_live(model: Any, params: Mapping[str, Array]) -> None:
    """Raise `OptionError` unless all `params` are the arrays that `model` computes with."""
    live = model.parameters()
    wrong = [name for name, array in params.items() if live.get(name) is not array]
    if not wrong:
        return
    replaced = [name for name in wrong if name in live]
    unknown = [name for name in wrong if name not in live]
    raise OptionError(
        "The optimizer would train arrays that the model does not use",
        expected="the arrays of model.parameters(), by those names, or some of them",
        got="; ".join(
            f"{what}: {_shown(names)}"
            for what, names in (("other arrays than the model's", replaced), ("not in the model", unknown))
            if names
        ),
        remedy="Build the optimizer on model.parameters() once the model is what it is to be: to(...) and a new array "
        "in layer.params replace parameters; assign into them (param[...] = values) to keep them",
    )


def check_even(optimizer: Any, names: Iterable[str]) -> None:
    """Raise `OptionError` unless all parameters have been updated equally often, as far as `optimizer` says."""
    steps = getattr(optimizer, "steps", None)
    counts = {name: steps[name] for name in names if name in steps} if isinstance(steps, Mapping) else {}
    if len(set(counts.values())) < 2:
        return
    most = max(counts.values())
    behind = [name for name, count in counts.items() if count < most]
    raise OptionError(
        "An update was broken off half-way: some parameters are a step behind the others",
        expected=f"{most} updates of every parameter", got=f"fewer of {_shown(behind)}",
        remedy="Load model and optimizer as they were before it (fit(resume=True) takes the last checkpoint), or build "
        "a new optimizer to go on from the parameters as they are",
    )  # fmt: skip


def _shown(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
