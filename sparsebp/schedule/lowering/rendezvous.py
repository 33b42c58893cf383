"""The proof that programs of ranks come to their end without any buffering, or the cycle of those that wait."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import NamedTuple

from sparsebp.core.errors import ScheduleError
from sparsebp.schedule.actions import Action
from sparsebp.schedule.lowering.programs import Await, Message, Post, RankProgram, Reduce, Reduced, Send, Sent


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
    run = _Run(_operations(programs), one_stream)
    run.go()
    if run.stuck:
        raise _deadlock(run, programs)


_KINDS: dict[type, tuple[bool, bool]] = {
    Send: (False, False),
    Sent: (False, True),
    Post: (True, False),
    Await: (True, True),
}
"""Whether it receives, and whether it waits."""


class _Operations(NamedTuple):
    """What programs do with messages, as numbers.

    Attributes
    ----------
    messages
        All of them; the position of one is its number.
    steps
        For every rank ``(number of the instruction, whether it waits, number of the message)``.
    """

    messages: list[Message]
    steps: list[list[tuple[int, bool, int]]]


def _operations(programs: Sequence[RankProgram]) -> _Operations:
    """Return what programs do with messages.

    Raises
    ------
    ScheduleError
        An operation is not there once, on its rank, with its wait behind it.
    """
    numbers: dict[Message, int] = {}
    steps: list[list[tuple[int, bool, int]]] = []
    stages: list[list[int]] = []  # of every message, how far sender and receiver are: 1 begun, 2 waited for
    for rank, program in enumerate(programs):
        if program.rank != rank:
            raise ScheduleError("Programs are not in the order of their ranks", expected=f"that of rank {rank}",
                                got=f"rank {program.rank}", remedy="Pass one program a rank")  # fmt: skip
        steps.append([])
        for place, one in enumerate(program.instructions):
            kind = _KINDS.get(type(one))
            if kind is None:
                continue
            (receives, waits), message = kind, one.message  # type: ignore[union-attr]
            number = numbers.setdefault(message, len(numbers))
            if number == len(stages):
                _check_ranks(message, len(programs))
                stages.append([0, 0])
            if rank != message[1 + receives]:
                raise _wrong("An operation is on a rank that it does not concern", message,
                             expected=f"rank {message[1 + receives]}", got=f"“{one}” on rank {rank}")  # fmt: skip
            if stages[number][receives] != waits:
                raise _wrong("An operation is there twice, or is waited for before it has begun", message,
                             expected="each once, and one wait behind it", got=f"“{one}” on rank {rank}")  # fmt: skip
            stages[number][receives] += 1
            steps[-1].append((place, waits, number))
        _check_sums(program)
    tags: dict[tuple[int, ...], Message] = {}
    for message, number in numbers.items():
        for done, names, rank in zip(stages[number], (("Send", "Sent"), ("Post", "Await")), message[1:3], strict=True):
            if done < 2:
                raise _wrong(f"A message has no {names[done]}", message, expected=f"one on rank {rank}", got="none")
        same = tags.setdefault(message[1:], message)
        if same is not message:
            raise _wrong("Two messages have the same tag", message, got=f"tag {message.tag} of {same.source} too",
                         expected="another for each message of a pair of ranks")  # fmt: skip
    return _Operations(list(numbers), steps)


def _check_ranks(message: Message, ranks: int) -> None:
    if message.sender == message.receiver or not 0 <= min(message[1:3]) <= max(message[1:3]) < ranks:
        raise _wrong("A message is not between two of the ranks", message, expected=f"two of 0 to {ranks - 1}",
                     got="these")  # fmt: skip


def _check_sums(program: RankProgram) -> None:
    sums: dict[Action, list[type]] = {}
    for one in program.instructions:
        if isinstance(one, (Reduce, Reduced)):
            sums.setdefault(one.action, []).append(type(one))
    for action, kinds in sums.items():
        if len(kinds) != 2 or kinds[0] is kinds[1]:
            raise ScheduleError(
                "A sum does not have one Reduce and one Reduced", expected="both, once each", actions=[action],
                got=f"{action}: {', '.join(kind.__name__ for kind in kinds)} on rank {program.rank}",
                remedy="Lower the schedule anew",
            )  # fmt: skip


def _wrong(problem: str, message: Message, *, expected: str, got: str) -> ScheduleError:
    named = f"{message.source} from rank {message.sender} to rank {message.receiver}"
    return ScheduleError(problem, expected=expected, got=f"{got}: {named}", remedy="Lower the schedule anew",
                         actions=[message.source])  # fmt: skip


class _Run:
    """One run of the programs.

    Attributes
    ----------
    at
        How many of its steps each rank has done.
    streams
        Of every message, at the sender and at the receiver: operations that have begun, and not ended.
    """

    def __init__(self, operations: _Operations, one_stream: bool) -> None:
        self.messages, self.steps = operations
        self.at = [0] * len(self.steps)
        streams: defaultdict[tuple[int, ...], deque[int]] = defaultdict(deque)
        self.streams = [
            tuple(streams[(rank,) if one_stream else (rank, message.sender, message.receiver)] for rank in message[1:3])
            for message in self.messages
        ]
        self._ended = [False] * len(self.messages)

    @property
    def stuck(self) -> bool:
        """Whether an operation has not ended; a rank that waits, waits for one."""
        return not all(self._ended)

    def go(self) -> None:
        """Run until nothing can go on."""
        going = deque(range(len(self.steps)))
        while going:
            rank = going.popleft()
            steps = self.steps[rank]
            while self.at[rank] < len(steps):
                _, waits, number = steps[self.at[rank]]
                if waits and not self._ended[number]:
                    break
                self.at[rank] += 1
                if not waits:
                    self.streams[number][self.messages[number].receiver == rank].append(number)
                    self._end(number, going)

    def _end(self, number: int, going: deque[int]) -> None:
        """End operations that are the first of their streams on both ranks, beginning with those of a message."""
        candidates = [number]
        while candidates:
            number = candidates.pop()
            out, into = self.streams[number]
            if out and into and out[0] == number == into[0]:
                out.popleft()
                into.popleft()
                self._ended[number] = True
                going.extend(self.messages[number][1:3])
                candidates += [stream[0] for stream in (out, into) if stream]

    def awaited(self, rank: int) -> int:
        """Return the first operation of the stream that a rank waits for."""
        _, _, number = self.steps[rank][self.at[rank]]
        return self.streams[number][self.messages[number].receiver == rank][0]


def _deadlock(run: _Run, programs: Sequence[RankProgram]) -> ScheduleError:
    """Return the error with a cycle of ranks that wait for each other."""
    path: list[str] = []
    sources: list[Action] = []
    seen: dict[int, int] = {}
    rank = next(rank for rank, steps in enumerate(run.steps) if run.at[rank] < len(steps))
    while rank not in seen:
        seen[rank] = len(path)
        message = run.messages[run.awaited(rank)]
        sends = message.sender == rank
        other = message.receiver if sends else message.sender
        place = run.steps[rank][run.at[rank]][0]
        begun = f"send of {message.source} to" if sends else f"receive of {message.source} from"
        at = f"instruction {place}, {programs[rank].instructions[place]}"
        path.append(f"rank {rank} ({at}: its {begun} {other} has not ended)")
        sources.append(message.source)
        rank = other
    waits = " waits for ".join([*path[seen[rank] :], f"rank {rank}"])
    return ScheduleError(
        "The programs are deadlocked where nothing is buffered", expected="an order without a cycle", got=waits,
        remedy="Let all ranks begin messages in one common order, as lower(…, one_stream=True) does",
        actions=sources[seen[rank] :],
    )  # fmt: skip
