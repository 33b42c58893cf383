"""Schedules of a training step as data: actions, their graph, and who does what in which order."""

from sparsebp.schedule.actions import KINDS, Action, Cell, Kind, Overlap, actions_of, parse
from sparsebp.schedule.graph import StepGraph
from sparsebp.schedule.schedule import Lane, Schedule, parts_of

__all__ = [
    "KINDS",
    "Action",
    "Cell",
    "Kind",
    "Lane",
    "Overlap",
    "Schedule",
    "StepGraph",
    "actions_of",
    "parse",
    "parts_of",
]
