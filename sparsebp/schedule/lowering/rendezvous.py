"""The proof that programs of ranks come to their end without any buffering, or the cycle of those that wait."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import TypeAlias

from sparsebp.core.errors import ScheduleError
from sparsebp.schedule.actions import Action
from sparsebp.schedule.lowering.programs import Await, Compute, Message, Post, RankProgram, Reduce, Reduced, Send, Sent

_Stream: TypeAlias = tuple[int, int, int]
"""Operations of a rank that run one after the other: (rank, sender, receiver), or (rank, -1, -1) if all of it do."""


def check_rendezvous(programs: Sequence[RankProgram], *, one_stream: bool = False) -> None:
    """Refuse programs that may wait for ever where nothing is buffered.

    The programs are run without arrays. A send ends only when its receive has been posted, and the other way round.
    `Send` and `Post` begin an operation and go on, `Await` and `Sent` wait for its end. Of those that a rank has begun
    with the same partner in the same direction only the first can end, so they are matched by their order; a transport
    that matches by tags waits for no more than that. Whatever the ranks' speed, the run ends in the same state: an
    operation that can end stays so until it does. One run therefore decides.

    Parameters
    ----------
    programs
        One a rank, in their order.
    one_stream
        Whether of all operations of a rank, to and from whomever, only the first can end: one stream of NCCL.

    Raises
    ------
    ScheduleError
        A message lacks its send, its receive or a wait, or has one twice; two messages have the same tag; or ranks wait
        for each other: the message has the cycle, with the number of the instruction (from 0) at which each waits.

    Notes
    -----
    Sums over replicas (`Reduce`, `Reduced`) are collective calls on a channel of their own. All replicas run the same
    programs, so they begin them in the same order: nothing here waits for them.
    """
    _check_pairs(programs)
    run = _Run(programs, one_stream)
    if run.stuck:
        raise _deadlock(run)


def _check_pairs(programs: Sequence[RankProgram]) -> None:
    """Refuse operations that are not there once each, on the right rank, the wait behind the beginning."""
    for number, program in enumerate(programs):
        if program.rank != number:
            raise ScheduleError("Programs are not in the order of their ranks", expected=f"that of rank {number}",
                                got=f"rank {program.rank}", remedy="Pass one program a rank")  # fmt: skip
    begun = [_begun(program, len(programs)) for program in programs]
    tags: dict[tuple[int, int, int], Message] = {}
    for number, own in enumerate(begun):
        for message in own:
            other = message.receiver if message.sender == number else message.sender
            if message not in begun[other]:
                lacking = "Post" if message.sender == number else "Send"
                raise _wrong(f"A message has no {lacking}", message, f"one on rank {other}", "none")
            same = tags.setdefault((message.sender, message.receiver, message.tag), message)
            if same != message:
                raise _wrong("Two messages have the same tag", message, "another for each message of a pair of ranks",
                             f"tag {message.tag} of {same.source} too")  # fmt: skip


def _begun(program: RankProgram, ranks: int) -> dict[Message, bool]:
    """Return the messages that a rank begins to send or receive; each must be waited for once, behind that."""
    found: dict[Message, bool] = {}  # whether it has been waited for
    sums: dict[Action, list[type]] = {}
    for one in program.instructions:
        if isinstance(one, (Reduce, Reduced)):
            sums.setdefault(one.action, []).append(type(one))
            continue
        if isinstance(one, Compute):
            continue
        message, name = one.message, type(one).__name__
        if program.rank != (message.sender if isinstance(one, (Send, Sent)) else message.receiver):
            raise _wrong(f"A {name} is on a rank that it does not concern", message, "none", f"rank {program.rank}")
        if message.sender == message.receiver or not 0 <= min(message[1:3]) <= max(message[1:3]) < ranks:
            raise _wrong("A message is not between two of the ranks", message, f"two of the ranks 0 to {ranks - 1}",
                         "these")  # fmt: skip
        waited, waits = found.get(message), isinstance(one, (Await, Sent))
        if waited is not (False if waits else None):
            where = "twice" if waited is not None else "before the operation has begun"
            raise _wrong(f"A {name} is there {where}", message, "each operation once, and one wait behind it",
                         f"“{one}” on rank {program.rank}")  # fmt: skip
        found[message] = waits
    for message, waited in found.items():
        if not waited:
            raise _wrong("An operation is not waited for", message, "an Await or a Sent of each", "none")
    for action, kinds in sums.items():
        if len(kinds) != 2 or kinds[0] is kinds[1]:
            raise ScheduleError(
                "A sum does not have one Reduce and one Reduced", expected="both, once each", actions=[action],
                got=f"{action}: {', '.join(kind.__name__ for kind in kinds)} on rank {program.rank}",
                remedy="Lower the schedule anew",
            )  # fmt: skip
    return found


def _wrong(problem: str, message: Message, expected: str, got: str) -> ScheduleError:
    named = f"{message.source} from rank {message.sender} to rank {message.receiver}"
    return ScheduleError(problem, expected=expected, got=f"{got}: {named}", remedy="Lower the schedule anew",
                         actions=[message.source])  # fmt: skip


class _Run:
    """One run of the programs.

    Attributes
    ----------
    at
        The number of the instruction that each rank waits at, or how many it has.
    streams
        Operations that have begun, and not ended.
    stuck
        Whether a rank or an operation has not come to its end.
    """

    def __init__(self, programs: Sequence[RankProgram], one_stream: bool) -> None:
        self.programs, self._one_stream = programs, one_stream
        self.at = [0] * len(programs)
        self.streams: defaultdict[_Stream, deque[Message]] = defaultdict(deque)
        self._ended: set[tuple[int, Message]] = set()  # operations by their rank
        going = deque(range(len(programs)))
        while going:
            self._advance(going.popleft(), going)
        self.stuck = any(self.at[rank] < len(one.instructions) for rank, one in enumerate(programs)) or any(
            self.streams.values()
        )

    def stream(self, rank: int, message: Message) -> _Stream:
        """Return the stream that an operation of a rank belongs to."""
        return (rank, -1, -1) if self._one_stream else (rank, message.sender, message.receiver)

    def _advance(self, rank: int, going: deque[int]) -> None:
        """Run a rank until it has to wait; ranks that can go on thereafter are put into `going`."""
        instructions = self.programs[rank].instructions
        while self.at[rank] < len(instructions):
            one = instructions[self.at[rank]]
            if isinstance(one, (Await, Sent)) and (rank, one.message) not in self._ended:
                return
            self.at[rank] += 1
            if isinstance(one, (Post, Send)):
                self.streams[self.stream(rank, one.message)].append(one.message)
                self._match(one.message, going)

    def _match(self, message: Message, going: deque[int]) -> None:
        """End operations that are the first of their streams on both ranks, beginning with those of a message."""
        candidates = [message]
        while candidates:
            message = candidates.pop()
            both = [(rank, self.streams[self.stream(rank, message)]) for rank in (message.sender, message.receiver)]
            if all(stream and stream[0] == message for _, stream in both):
                for rank, stream in both:
                    stream.popleft()
                    self._ended.add((rank, message))
                    going.append(rank)
                    candidates += [stream[0]] if stream else []


def _deadlock(run: _Run) -> ScheduleError:
    """Return the error with a cycle of ranks that wait for each other."""
    path: list[tuple[int, Message]] = []
    seen: dict[int, int] = {}
    rank = next(rank for rank, _, _ in (stream for stream, waiting in run.streams.items() if waiting))
    while rank not in seen:
        message = _awaited(run, rank)
        seen[rank] = len(path)
        path.append((rank, message))
        rank = message.receiver if message.sender == rank else message.sender
    path = path[seen[rank] :]
    waits = " waits for ".join([*(_describe(run, *step) for step in path), f"rank {path[0][0]}"])
    return ScheduleError(
        "The programs are deadlocked where nothing is buffered", expected="an order without a cycle", got=waits,
        remedy="Let all ranks begin messages in one common order, as lower(…, one_stream=True) does",
        actions=(message.source for _, message in path),
    )  # fmt: skip


def _awaited(run: _Run, rank: int) -> Message:
    """Return the first operation of the stream that a rank waits for."""
    instructions, at = run.programs[rank].instructions, run.at[rank]
    if at < len(instructions):
        one: Await | Sent = instructions[at]  # type: ignore[assignment]  # nothing else waits
        return run.streams[run.stream(rank, one.message)][0]
    return next(waiting[0] for (owner, _, _), waiting in run.streams.items() if owner == rank and waiting)


def _describe(run: _Run, rank: int, message: Message) -> str:
    instructions, at = run.programs[rank].instructions, run.at[rank]
    where = f"instruction {at}, {instructions[at]}" if at < len(instructions) else "its end"
    begun = "send" if message.sender == rank else "receive"
    other = message.receiver if message.sender == rank else message.sender
    return f"rank {rank} ({where}: the {begun} of {message.source} has not ended, of rank {other})"
