"""Builders: every technique is a function that returns a schedule.

All take keyword arguments only. `BUILDERS` collects them by name; what each needs, ``inspect.signature`` tells.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from sparsebp.core.errors import OptionError
from sparsebp.schedule.costs import Costs
from sparsebp.schedule.pipelines import (
    dualpipe2018,
    gpipe,
    interleaved_one_f_one_b,
    one_f_one_b,
    pipedream,
    zero_bubble_h1,
    zero_bubble_h2,
)
from sparsebp.schedule.placement import Fusion, place_updates
from sparsebp.schedule.reorder import (
    Region,
    RegionTimes,
    conventional,
    data_parallel,
    fast_forward,
    largest_k,
    list_schedule,
    modulo,
    out_of_order,
    reverse_first_k,
    search_k,
    synchronise,
    two_stream_list,
)
from sparsebp.schedule.schedule import Schedule

__all__ = [
    "BUILDERS",
    "Fusion",
    "Region",
    "RegionTimes",
    "conventional",
    "data_parallel",
    "dualpipe2018",
    "fast_forward",
    "gpipe",
    "interleaved_one_f_one_b",
    "largest_k",
    "list_schedule",
    "modulo",
    "one_f_one_b",
    "out_of_order",
    "pipedream",
    "place_updates",
    "reverse_first_k",
    "search_k",
    "synchronise",
    "two_stream_list",
    "zero_bubble_h1",
    "zero_bubble_h2",
]


BUILDERS: dict[str, Callable[..., Schedule]] = {
    "conventional": conventional,
    "ooo": out_of_order,
    "ooo-list": two_stream_list,
    "data-parallel": data_parallel,
    "reverse-first-k": reverse_first_k,
    "fast-forward": fast_forward,
    "modulo": modulo,
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved-1f1b": interleaved_one_f_one_b,
    "zb-h1": zero_bubble_h1,
    "zb-h2": zero_bubble_h2,
    "pipedream": pipedream,
    "dualpipe-2018": dualpipe2018,
}
"""The builders by the names of their techniques."""


# Builders by name, with the options that each of them has.

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
        raise OptionError("Unknown builder", expected=", ".join(BUILDERS), got=repr(name))
    parameters = inspect.signature(BUILDERS[name]).parameters
    given = {key: value for key, value in options.items() if value is not None}
    unknown = sorted(given.keys() - parameters.keys())
    if unknown and strict:
        raise OptionError(f"The builder {name} does not take {' and '.join(unknown)}", expected=", ".join(parameters),
                          got=", ".join(f"{key}={given[key]!r}" for key in unknown))  # fmt: skip
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
