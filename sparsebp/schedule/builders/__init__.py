"""Builders: every technique is a function that returns a schedule.

All take keyword arguments only. `BUILDERS` collects them by name; what each needs, ``inspect.signature`` tells.
"""

from collections.abc import Callable

from sparsebp.schedule.builders.conventional import conventional
from sparsebp.schedule.builders.dualpipe2018 import dualpipe2018
from sparsebp.schedule.builders.fast_forward import fast_forward, modulo
from sparsebp.schedule.builders.fusion import Fusion, place_updates
from sparsebp.schedule.builders.gpipe import gpipe
from sparsebp.schedule.builders.list_scheduling import list_schedule
from sparsebp.schedule.builders.one_f_one_b import interleaved_one_f_one_b, one_f_one_b, pipedream
from sparsebp.schedule.builders.ooo import out_of_order
from sparsebp.schedule.builders.regions import Region, RegionProfile
from sparsebp.schedule.builders.reverse_first_k import largest_k, reverse_first_k, search_k
from sparsebp.schedule.builders.synchronisation import synchronise
from sparsebp.schedule.builders.two_streams import two_stream_list
from sparsebp.schedule.builders.zero_bubble import zero_bubble_h1, zero_bubble_h2
from sparsebp.schedule.schedule import Schedule

BUILDERS: dict[str, Callable[..., Schedule]] = {
    "conventional": conventional,
    "ooo": out_of_order,
    "ooo-list": two_stream_list,
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
    "RegionProfile",
    "conventional",
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
