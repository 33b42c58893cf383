"""Builders: every technique is a function that returns a schedule.

All take keyword arguments only. `BUILDERS` collects them by name; what each needs, ``inspect.signature`` tells.
"""

from collections.abc import Callable

from sparsebp.schedule.builders.fusion import Fusion, place_updates
from sparsebp.schedule.builders.joint import Region, RegionTimes
from sparsebp.schedule.builders.list_scheduling import fast_forward, list_schedule, modulo
from sparsebp.schedule.builders.one_worker import conventional, two_stream_list
from sparsebp.schedule.builders.ooo import out_of_order
from sparsebp.schedule.builders.pipelines import (
    dualpipe2018,
    gpipe,
    interleaved_one_f_one_b,
    one_f_one_b,
    pipedream,
    zero_bubble_h1,
    zero_bubble_h2,
)
from sparsebp.schedule.builders.replicas import data_parallel, largest_k, reverse_first_k, search_k, synchronise
from sparsebp.schedule.schedule import Schedule

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
