"""The options of builders: they have the same meaning everywhere, so they are checked by name, in one place."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from sparsebp.core.check import check_choice, check_flag, check_integer, check_number, check_sequence
from sparsebp.core.errors import OptionError
from sparsebp.schedule.costs import Costs
from sparsebp.schedule.regions import RegionTimes

P = ParamSpec("P")
S = TypeVar("S")

_LEAST = {"stages": 1, "microbatches": 1, "workers": 1, "chunks": 1, "group": 1, "streams": 1, "k": -(2**31)}


def builder(build: Callable[P, S]) -> Callable[P, S]:
    """Check the options of a builder before it runs; None stays where it is the default."""
    parameters = inspect.signature(build).parameters

    @functools.wraps(build)
    def checked(*args: P.args, **options: P.kwargs) -> S:
        given: dict[str, Any] = options
        for name in given.keys() & parameters.keys():
            if given[name] is not None or "None" not in str(parameters[name].annotation):
                given[name] = _checked(name, given[name])
        if given.get("k") is not None and not 0 <= given["k"] <= given["stages"]:
            searches = ", or None to search" * ("None" in str(parameters["k"].annotation))
            expected = f"k in 0…{given['stages']}{searches}"
            raise OptionError("There are not that many first stages", expected=expected, got=given["k"])
        return build(*args, **options)

    return checked


def _checked(name: str, value: Any) -> Any:
    if name in _LEAST:
        return check_integer(name, value, _LEAST[name])
    if name in ("unweighted", "recomputed"):
        stages = check_sequence(name, value, "numbers of stages")
        return tuple(check_integer(f"a stage of {name}", stage, 0) for stage in stages)
    if name == "regions":
        if not isinstance(value, (list, tuple)):
            return check_integer(name, value, 1)
        regions = (check_sequence("a region", region, "stages") for region in value)
        return [[check_integer("a stage of a region", stage, 0) for stage in region] for region in regions]
    if name == "priority":
        return check_choice(name, value, ("first-ready", "first-stage"))
    if name == "input_gradient":
        return check_flag(name, value)
    if name in ("memory_ratio", "memory_limit"):
        return check_number(name, value, finite=False)
    kind: Any = {"costs": Costs, "times": RegionTimes, "throughput": Callable}.get(name, object)
    if not isinstance(value, kind):
        raise OptionError(f"{name} is of another kind", expected=kind.__name__, got=type(value).__name__)
    return value
