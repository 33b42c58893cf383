"""Schedules of a training step as data: actions, their graph, and their order on every worker.

A *schedule* assigns actions, in order, to lanes; a lane is one stream of one worker. A *program* is a schedule compiled
for one device (`sparsebp.runtime`), or for one of several ranks, including its messages (`lower`). *Fusion* is the
placement of the updates in a schedule. An *order* is a plain sequence of stages or samples.
"""

from sparsebp.schedule.costs import Costs, Durations, Link, Network, StageBytes, read_costs, write_costs
from sparsebp.schedule.cuts import partition
from sparsebp.schedule.files import for_torch, programs_to_csv, read_csv, to_csv, write_csv, write_programs
from sparsebp.schedule.lowering import Message, RankProgram, check_rendezvous, lower
from sparsebp.schedule.plot import chrome_trace, gantt, summary, text_chart, write_trace
from sparsebp.schedule.schedule import (
    KINDS,
    Action,
    Cell,
    Kind,
    Lane,
    Overlap,
    Schedule,
    StepGraph,
    actions_of,
    parse,
    parts_of,
    validate,
)
from sparsebp.schedule.simulation import Errors, Event, MemoryCurve, Simulation, Transfer, compare, depth, simulate

__all__ = [
    "KINDS",
    "Action",
    "Cell",
    "Costs",
    "Durations",
    "Errors",
    "Event",
    "Kind",
    "Lane",
    "Link",
    "MemoryCurve",
    "Message",
    "Network",
    "Overlap",
    "RankProgram",
    "Schedule",
    "Simulation",
    "StageBytes",
    "StepGraph",
    "Transfer",
    "actions_of",
    "check_rendezvous",
    "chrome_trace",
    "compare",
    "depth",
    "for_torch",
    "gantt",
    "lower",
    "parse",
    "partition",
    "parts_of",
    "programs_to_csv",
    "read_costs",
    "read_csv",
    "simulate",
    "summary",
    "text_chart",
    "to_csv",
    "validate",
    "write_costs",
    "write_csv",
    "write_programs",
    "write_trace",
]


def __dir__() -> list[str]:
    return sorted(__all__)
