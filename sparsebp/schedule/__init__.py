"""Schedules of a training step as data: actions, their graph, and who does what in which order.

A *schedule* says which lane, a stream of a worker, runs which actions one after the other; a *program* is the schedule
of one device as its executor runs it (`sparsebp.runtime`), or of one rank of several, with what it sends and receives
(`lower`); *fusion* is where a schedule has its updates; an *order* is a plain sequence, of stages or samples.
"""

from sparsebp.schedule.actions import KINDS
from sparsebp.schedule.actions import Action
from sparsebp.schedule.actions import Cell
from sparsebp.schedule.actions import Kind
from sparsebp.schedule.actions import Overlap
from sparsebp.schedule.actions import actions_of
from sparsebp.schedule.actions import parse
from sparsebp.schedule.actions import parts_of
from sparsebp.schedule.costs import Costs
from sparsebp.schedule.costs import Link
from sparsebp.schedule.costs import StageBytes
from sparsebp.schedule.files import read_csv
from sparsebp.schedule.files import to_csv
from sparsebp.schedule.files import write_csv
from sparsebp.schedule.files import Durations
from sparsebp.schedule.files import read_costs
from sparsebp.schedule.files import write_costs
from sparsebp.schedule.files import for_torch
from sparsebp.schedule.files import programs_to_csv
from sparsebp.schedule.files import read_programs
from sparsebp.schedule.files import write_programs
from sparsebp.schedule.actions import StepGraph
from sparsebp.schedule.lower import lower
from sparsebp.schedule.lower import Message
from sparsebp.schedule.lower import RankProgram
from sparsebp.schedule.lower import check_rendezvous
from sparsebp.schedule.costs import Network
from sparsebp.schedule.plot import gantt
from sparsebp.schedule.plot import summary
from sparsebp.schedule.plot import text_chart
from sparsebp.schedule.plot import chrome_trace
from sparsebp.schedule.plot import write_trace
from sparsebp.schedule.actions import Lane
from sparsebp.schedule.schedule import Schedule
from sparsebp.schedule.simulate import Errors
from sparsebp.schedule.simulate import compare
from sparsebp.schedule.simulate import fit_link
from sparsebp.schedule.simulate import MemoryCurve
from sparsebp.schedule.simulate import Event
from sparsebp.schedule.simulate import Simulation
from sparsebp.schedule.simulate import Transfer
from sparsebp.schedule.simulate import depth
from sparsebp.schedule.simulate import simulate
from sparsebp.schedule.schedule import validate

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
