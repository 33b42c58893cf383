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
        Its number among the messages from `sender` to `receiver`.
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


class Post(NamedTuple):
    """Begin to receive: the buffer is there from now on."""

    message: Message


class Await(NamedTuple):
    """Wait until a message is there: what comes next reads it."""

    message: Message


class Send(NamedTuple):
    """Begin to send; the array may be freed after `Sent`."""

    message: Message


class Sent(NamedTuple):
    """Wait until a message has left."""

    message: Message


class Reduce(NamedTuple):
    """Begin to sum the gradients of a stage over all replicas: the action S."""

    action: Action


class Reduced(NamedTuple):
    """Wait for the sums of a stage: what comes next uses them."""

    action: Action


Instruction: TypeAlias = Compute | Post | Await | Send | Sent | Reduce | Reduced


@dataclass(frozen=True)
class RankProgram:
    """What one rank does in one step, in order.

    Attributes
    ----------
    rank
        Number of the worker.
    instructions
        In the order of their beginning. A `Post`, `Send` or `Reduce` returns at once.
    """

    rank: int
    instructions: tuple[Instruction, ...]
