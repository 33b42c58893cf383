"""Builders by name, with the options that each of them has."""

from __future__ import annotations

import inspect
from typing import Any

from sparsebp.core.errors import OptionError
from sparsebp.schedule.builders import BUILDERS, Fusion, place_updates
from sparsebp.schedule.costs import Costs
from sparsebp.schedule.schedule import Schedule

SIZES = {"workers": 4, "stages": 8, "microbatches": 8}
"""What builders that have no default take."""


def build(name: str, *, costs: Costs | None = None, fusion: Fusion | None = None, strict: bool = True,
          **options: Any) -> Schedule:  # fmt: skip
    """Return the schedule of a builder.

    Parameters
    ----------
    name
        A key of `BUILDERS`.
    costs
        For the builders that plan with them.
    fusion
        Where the updates go, see `place_updates`. None: as the builder has it.
    strict
        Whether to refuse options that the builder has not; else they are left out.
    options
        Of the builder. Those that are None are left out; `SIZES` stand in for required ones.

    Raises
    ------
    OptionError
        The builder is unknown, or does not take an option; and what the builder raises.
    """
    if name not in BUILDERS:
        raise OptionError("Unknown builder", expected=", ".join(BUILDERS), got=repr(name), remedy="Pass one of them")
    parameters = inspect.signature(BUILDERS[name]).parameters
    given = {key: value for key, value in options.items() if value is not None}
    unknown = sorted(given.keys() - parameters.keys())
    if unknown and strict:
        raise OptionError(
            f"The builder {name} does not take {' and '.join(unknown)}", expected=", ".join(parameters),
            got=", ".join(f"{key}={given[key]!r}" for key in unknown), remedy="Leave the option out",
        )  # fmt: skip
    given = {key: value for key, value in given.items() if key in parameters}
    for key, size in SIZES.items():
        if key in parameters and parameters[key].default is inspect.Parameter.empty:
            given.setdefault(key, size)
    if costs is not None and "costs" in parameters:
        given["costs"] = costs
    if fusion is not None and "fusion" in parameters:
        return BUILDERS[name](**given, fusion=fusion)
    schedule = BUILDERS[name](**given)
    return schedule if fusion is None else place_updates(schedule, fusion)
