"""What a rank does in one step: actions, and what it sends, receives and sums with others, in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from sparsebp.schedule.actions import Action, Cell


class Message(NamedTuple):
    """An array that one rank sends to another.

    Attributes
    ----------
    source
        The action that makes it: F sends its stage's output, I the gradient with respect to its stage's input.
    sender, receiver
        Ranks.
    tag
        Its number among the messages from `sender` to `receiver` in a step, from 0, in the order of their sending. The
        next step has the same ones: both ranks begin the messages of a pair in the same order in every step, so a
        transport that keeps the order of each pair and tag never mixes steps.
    """

    source: Action
    sender: int
    receiver: int
    tag: int

    @property
    def boundary(self) -> int:
        """The stage whose output, or whose output's gradient, is sent."""
        return self.source.stage if self.source.kind == "F" else self.source.stage - 1


class Compute(NamedTuple):
    """Run a cell of the schedule."""

    cell: Cell

    def __str__(self) -> str:
        return str(self.cell)


class Post(NamedTuple):
    """Begin to receive: the buffer is there from now on."""

    message: Message

    def __str__(self) -> str:
        return f"post {self.message.source} from {self.message.sender}"


class Await(NamedTuple):
    """Wait until a message is there: what comes next reads it."""

    message: Message

    def __str__(self) -> str:
        return f"await {self.message.source} from {self.message.sender}"


class Send(NamedTuple):
    """Begin to send; the array may be freed after `Sent`."""

    message: Message

    def __str__(self) -> str:
        return f"send {self.message.source} to {self.message.receiver}"


class Sent(NamedTuple):
    """Wait until a message has left."""

    message: Message

    def __str__(self) -> str:
        return f"sent {self.message.source} to {self.message.receiver}"


class Reduce(NamedTuple):
    """Begin to sum the gradients of a stage over all replicas: the action S."""

    action: Action

    def __str__(self) -> str:
        return f"reduce {self.action}"


class Reduced(NamedTuple):
    """Wait for the sums of a stage: what comes next uses them.

    In a step that begins with updates it stands before its `Reduce`: the sums are those of the step before, and the
    first step has none to wait for.
    """

    action: Action

    def __str__(self) -> str:
        return f"reduced {self.action}"


Instruction: TypeAlias = Compute | Post | Await | Send | Sent | Reduce | Reduced


@dataclass(frozen=True)
class RankProgram:
    """What one rank does in one step, in order. ``str`` gives one line an instruction.

    Attributes
    ----------
    rank
        Number of the worker.
    instructions
        In the order of their beginning. A `Post`, `Send` or `Reduce` returns at once.
    """

    rank: int
    instructions: tuple[Instruction, ...]

    def __str__(self) -> str:
        return "\n".join([f"rank {self.rank}", *(f"  {one}" for one in self.instructions)])
