"""Schedules of a training step as data: actions, their graph, and who does what in which order.

A *schedule* says which lane, a stream of a worker, runs which actions one after the other; a *program* is the schedule
of one device as its executor runs it (`sparsebp.runtime`), or of one rank of several, with what it sends and receives
(`lower`); *fusion* is where a schedule has its updates; an *order* is a plain sequence, of stages or samples.
"""

from sparsebp.schedule.actions import KINDS, Action, Cell, Kind, Overlap, actions_of, parse, parts_of
from sparsebp.schedule.costs import Costs, Link, StageBytes
from sparsebp.schedule.files.action_csv import read_csv, to_csv, write_csv
from sparsebp.schedule.files.cost_file import Durations, read_costs, write_costs
from sparsebp.schedule.files.for_torch import for_torch
from sparsebp.schedule.files.program_csv import programs_to_csv, read_programs, write_programs
from sparsebp.schedule.graph import StepGraph
from sparsebp.schedule.lowering.lower import lower
from sparsebp.schedule.lowering.programs import Message, RankProgram
from sparsebp.schedule.lowering.rendezvous import check_rendezvous
from sparsebp.schedule.network import Network
from sparsebp.schedule.pictures.gantt import gantt
from sparsebp.schedule.pictures.summary import summary
from sparsebp.schedule.pictures.text_chart import text_chart
from sparsebp.schedule.pictures.trace import chrome_trace, write_trace
from sparsebp.schedule.schedule import Lane, Schedule
from sparsebp.schedule.simulation.compare import Errors, compare, fit_link
from sparsebp.schedule.simulation.memory import MemoryCurve
from sparsebp.schedule.simulation.simulate import Event, Simulation, Transfer, depth, simulate
from sparsebp.schedule.validate import validate

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
    "fit_link",
    "for_torch",
    "gantt",
    "lower",
    "parse",
    "parts_of",
    "programs_to_csv",
    "read_costs",
    "read_csv",
    "read_programs",
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
