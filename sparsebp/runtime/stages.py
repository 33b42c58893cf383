"""The stages of a model, as an executor sees them: what they are called, what they hold, whose gradients are needed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any


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

    @cached_property
    def holders(self) -> dict[str, list[int]]:
        """The stages that hold each parameter, ascending."""
        found: dict[str, list[int]] = {name: [] for name in self.names}
        for number, stage in enumerate(self.all):
            for name in dict.fromkeys(stage.parameters.values()):
                found[name].append(number)
        return found

    def shared(self) -> list[str]:
        """Return the parameters that several stages hold."""
        return [name for name, stages in self.holders.items() if len(stages) > 1]

    def updated_at(self, order: Iterable[int], *, last: bool) -> dict[int, list[str]]:
        """Return which parameters each stage's update takes.

        Parameters
        ----------
        order
            The stages in the order of their updates.
        last
            Whether what several stages hold is updated with the last of them, or else with the first.
        """
        place: dict[str, int] = {}
        for number in order:
            for name in self.all[number].parameters.values():
                if last or name not in place:
                    place[name] = number
        taken: dict[int, list[str]] = {}
        for name in self.names:
            taken.setdefault(place[name], []).append(name)
        return taken


def _stage(prefix: str, layer: Any, shared: dict[str, str], trained: frozenset[str]) -> Stage:
    own = layer.shared_names() if hasattr(layer, "shared_names") else layer.parameters()
    parameters = {name: shared[f"{prefix}.{name}" if prefix else name] for name in own}
    kept = {key: name for key, name in parameters.items() if name in trained}
    return Stage(prefix, layer, kept, frozen=bool(parameters) and not kept)
