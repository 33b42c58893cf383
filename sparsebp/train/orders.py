"""From the trainer's options to the schedule of a step."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, get_args

from sparsebp.core.arguments import check_integer, check_sequence, shown
from sparsebp.core.errors import OptionError
from sparsebp.optim.combined import ChainedScheduler
from sparsebp.runtime.stages import Stages
from sparsebp.schedule import Schedule
from sparsebp.schedule.builders import Fusion, conventional
from sparsebp.schedule.files.action_csv import read_csv

__all__ = ["Fusion", "check_order", "check_parts", "found_order", "order_of", "scheduler_of"]


def check_parts(model: Any, loss: Any, optimizer: Any, callbacks: Any) -> None:
    """Refuse what cannot be trained with, before anything is done.

    Raises
    ------
    OptionError
        The message says which, and what it lacks.
    """
    for name, thing, wanted in (
        ("model", model, ("forward", "parameters", "state_dict")), ("loss", loss, ("forward",)),
        ("optimizer", optimizer, ("lr",)),
    ):  # fmt: skip
        lacking = [attribute for attribute in wanted if not hasattr(thing, attribute)]
        if lacking or isinstance(thing, type):
            raise OptionError(
                f"The {name} cannot be used", expected=", ".join(wanted),
                got=f"the class {thing.__name__} itself" if isinstance(thing, type) else
                f"{type(thing).__name__} without {', '.join(lacking)}", remedy=f"Pass a {name} of sparsebp",
            )  # fmt: skip
    for callback in check_sequence("callbacks", callbacks, "callbacks"):
        if not hasattr(callback, "sees_model"):
            raise OptionError("Not a callback", expected="a sparsebp.train.Callback", got=type(callback).__name__,
                              remedy="Derive it from Callback")  # fmt: skip


def scheduler_of(given: Any, optimizer: Any) -> Any:
    """Return the learning-rate schedule of a trainer: the one given, or those given chained; None for none.

    Raises
    ------
    OptionError
        It is none, or one of another optimizer, whose rates it would change.
    """
    if given is None or (isinstance(given, list | tuple) and not given):
        return None
    chained = ChainedScheduler(given if isinstance(given, list | tuple) else [given])
    if chained.optimizer is not None and chained.optimizer is not optimizer:
        raise OptionError("The learning-rate schedule is of another optimizer", expected="the trainer's optimizer",
                          got=f"another {type(chained.optimizer).__name__}", remedy="Build it on this one")  # fmt: skip
    return chained if isinstance(given, list | tuple) else given


def check_order(fusion: Any, accumulate: int, schedule: Any, clip_norm: float | None) -> None:
    """Refuse options that do not go together, before there is a model to run.

    Raises
    ------
    OptionError
        The message says which, and why.
    """
    if fusion not in get_args(Fusion):
        raise OptionError("Unknown fusion", expected=" or ".join(map(repr, get_args(Fusion))), got=shown(fusion),
                          remedy="Pass one of them")  # fmt: skip
    check_integer("accumulate", accumulate, 1)
    if not isinstance(schedule, str | os.PathLike | Schedule):
        raise OptionError("Not a schedule", expected="'conventional', 'ooo', a path, or a sparsebp.schedule.Schedule",
                          got=type(schedule).__name__, remedy="Pass one of them")  # fmt: skip
    if fusion == "backward" and clip_norm is not None:
        raise OptionError(
            "Backward-fusion updates before the norm of all gradients is known", expected="clip_norm=None",
            got=clip_norm, remedy="Use fusion='forward', which clips by the norm, or leave clip_norm out",
        )  # fmt: skip
    if schedule == "ooo" and accumulate > 1:
        raise OptionError("Out-of-order scheduling is for one micro-batch a step", expected="accumulate=1",
                          got=accumulate, remedy="Use schedule='conventional', or a smaller batch")  # fmt: skip
    if schedule == "ooo" and clip_norm is not None:
        raise OptionError(
            "Out-of-order scheduling updates before the norm of all gradients is known", expected="clip_norm=None",
            got=clip_norm, remedy="Use schedule='conventional', or leave clip_norm out",
        )  # fmt: skip
    if schedule != "conventional" and fusion != "none":
        raise OptionError("A schedule places the updates itself", expected="fusion='none' beside it",
                          got=shown(fusion), remedy="Leave fusion out, or use schedule='conventional'")  # fmt: skip


def order_of(
    stages: Stages, fusion: Fusion, accumulate: int, schedule: str | os.PathLike[str] | Schedule
) -> Schedule:  # fmt: skip
    """Return the schedule that the trainer's options ask for, but for ``"ooo"``; `check_order` has seen them.

    Raises
    ------
    OptionError
        A given one has another number of micro-batches.
    FileFormatError, ScheduleError
        A file holds no schedule.
    """
    if schedule == "conventional":
        return conventional(stages=len(stages), microbatches=accumulate, fusion=fusion, unweighted=stages.unweighted)
    given = schedule if isinstance(schedule, Schedule) else read_csv(schedule)
    if given.graph.microbatches != accumulate:
        raise OptionError("The schedule has another number of micro-batches", expected=f"accumulate={accumulate}",
                          got=given.graph.microbatches, remedy="Pass accumulate= as the schedule has it")  # fmt: skip
    return given


def found_order(path: Path, stages: Stages) -> Schedule | None:
    """Return the out-of-order schedule that an earlier run has left at `path`, None if there is none of this model."""
    if not path.exists():
        return None
    found = read_csv(path)
    same = (len(stages), 1, stages.unweighted) == (found.graph.stages, found.graph.microbatches, found.graph.unweighted)
    return found if same else None
