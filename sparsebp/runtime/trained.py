"""Which of a model's parameters an optimizer trains, and whether it still does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from sparsebp.core.errors import OptionError
from sparsebp.core.types import Array


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
