"""Actions of a training step and lanes of them. ``2I0`` is the input gradient of stage 2, micro-batch 0."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from sparsebp.core.arguments import check_integer, shown
from sparsebp.core.errors import FileFormatError, OptionError

Kind: TypeAlias = Literal["F", "I", "W", "B", "S", "U"]
KINDS: dict[Kind, str] = {
    "F": "forward",
    "I": "input gradient",
    "W": "weight gradient",
    "B": "input and weight gradient in one",
    "S": "synchronisation of the weight gradients between workers",
    "U": "update of the weights",
}
"""What the letters mean. F, I, W, B are those of ``torch.distributed.pipelining``."""

_ACTION = re.compile(r"([0-9]{1,9})([FIWBSU])([0-9]{0,9})")
_OVERLAP = re.compile(r"\(([^;()]+);([^;()]+)\)OVERLAP_F_B")


class _Fields(NamedTuple):
    stage: int
    kind: Kind
    microbatch: int | None


class Action(_Fields):
    """One thing to do for one stage of a model. A tuple, so that sets and mappings of many actions are quick.

    Parameters
    ----------
    stage : int
        Number of the stage, from 0 at the input. A stage is one layer or several.
    kind : Kind
        One of `KINDS`.
    microbatch : int or None, default None
        Number of the micro-batch. None for S and U that take the gradients of all micro-batches together.

    Raises
    ------
    OptionError
        The kind is unknown, a number is negative, or F, I, W or B has no micro-batch.
    """

    __slots__ = ()

    def __new__(cls, stage: int, kind: Kind, microbatch: int | None = None) -> Action:
        """Check and make an action."""
        if type(stage) is not int or (microbatch is not None and type(microbatch) is not int):
            stage = check_integer("stage", stage, -(2**31))
            microbatch = None if microbatch is None else check_integer("microbatch", microbatch, -(2**31))
        self = tuple.__new__(cls, (stage, kind, microbatch))
        if not isinstance(kind, str) or kind not in KINDS:
            raise OptionError("Unknown kind of action", expected=", ".join(KINDS), got=shown(kind),
                              remedy="Use one of these letters")  # fmt: skip
        if stage < 0 or (microbatch is not None and microbatch < 0):
            raise OptionError("A stage or micro-batch is negative", expected="0 or more", got=str(self),
                              remedy="Count from 0")  # fmt: skip
        if microbatch is None and kind not in "SU":
            raise OptionError(f"{kind} needs a micro-batch", expected=f"{stage}{kind}0, say", got=str(self),
                              remedy="Pass microbatch=0 if there is one only")  # fmt: skip
        return self

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{'' if self.microbatch is None else self.microbatch}"


def trusted(stage: int, kind: Kind, microbatch: int | None = None) -> Action:
    """Return an action without a check: for loops over very many, whose numbers come from others that are checked."""
    return tuple.__new__(Action, (stage, kind, microbatch))


@dataclass(frozen=True, slots=True)
class Overlap:
    """A forward and a backward that one worker runs at the same time, as in ``(0F1;7B0)OVERLAP_F_B``.

    Where the backward needs the forward (same micro-batch, last stage), the worker runs one after the other.
    """

    forward: Action
    backward: Action

    def __post_init__(self) -> None:
        if self.forward.kind != "F" or self.backward.kind not in "BI":
            raise OptionError("An overlap joins a forward and a backward", expected="F and then B or I", got=str(self),
                              remedy="Put other actions in cells of their own")  # fmt: skip

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})OVERLAP_F_B"


Cell: TypeAlias = Action | Overlap
"""What a lane runs as one."""


@dataclass(frozen=True)
class Lane:
    """What one stream of one worker runs, in order.

    Attributes
    ----------
    worker
        Number of the worker (device, rank), from 0.
    stream
        Its name: ``"main"``, ``"sub"`` (a second stream of the same device), ``"link"`` (the worker's network).
    cells
        Actions, and overlaps of two.
    """

    worker: int
    stream: str
    cells: tuple[Cell, ...]

    def __str__(self) -> str:
        return f"worker {self.worker}, {self.stream}"


def actions_of(cell: Cell) -> tuple[Action, ...]:
    """Return the actions of a cell, one or two."""
    return (cell.forward, cell.backward) if isinstance(cell, Overlap) else (cell,)


def parts_of(cell: Cell) -> tuple[Action, ...]:
    """Return the actions of the graph that a cell does, where a B is I and W."""
    if isinstance(cell, Overlap):
        return cell.forward, *parts_of(cell.backward)
    if cell.kind != "B":
        return (cell,)
    return trusted(cell.stage, "I", cell.microbatch), trusted(cell.stage, "W", cell.microbatch)


def parse(text: str) -> Cell:
    """Return the cell that ``str`` wrote.

    Raises
    ------
    FileFormatError
        The text is none.
    """
    if not isinstance(text, str):
        raise FileFormatError("A cell is no text", expected="2I0, say", got=shown(text), remedy="Pass a text")
    text = text.strip()
    overlap = _OVERLAP.fullmatch(text)
    if overlap:
        return Overlap(_parse_action(overlap[1]), _parse_action(overlap[2]))
    return _parse_action(text)


def _parse_action(text: str) -> Action:
    match = _ACTION.fullmatch(text.strip())
    if match is None:
        raise FileFormatError(
            "A cell is not an action", expected="[stage][F|I|W|B|S|U][micro-batch], as in 2I0, or (0F1;7B0)OVERLAP_F_B",
            got=shown(text), remedy="Write a bubble as an empty cell",
        )  # fmt: skip
    kind: Kind = match[2]  # type: ignore[assignment]
    return Action(int(match[1]), kind, int(match[3]) if match[3] else None)
