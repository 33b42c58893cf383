"""From a schedule to one program per rank: sends, receives and sums are placed, and checked for deadlocks."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, TypeAlias

from sparsebp.core.errors import ScheduleError
from sparsebp.schedule.schedule import Action, Cell, Schedule, StepGraph, actions_of, parts_of, validate

# One order of all cells of a schedule, for ranks that run all their streams one after the other.

_TIMES = {"F": 1, "I": 1, "W": 1, "B": 2, "S": 1, "U": 0}


def merge(schedule: Schedule) -> tuple[list[int], list[int]]:
    """Return the order in which the cells begin, and when, if F, I, W and S take one unit of time, B two, U none."""
    # Transfers take no time, and streams do not slow each other down. Of cells that begin together S goes first, then
    # the lower worker and the earlier lane. A worker of one stream keeps its order, several streams are interleaved as
    # they would run side by side. A sum begins once its gradients are ready and the sum before it has begun, not ended;
    # its readers expect it one unit after the sum before it.
    graph = schedule.cells
    waits = list(graph.waits)
    begin, end = [0] * len(waits), [0] * len(waits)
    sums = [_is_sum(cell) for cell in graph.cells]
    ready = [(0, not sums[number], number) for number, count in enumerate(waits) if count == 0]
    heapq.heapify(ready)
    ends_before = list(end)  # when everything that a sum waits for has ended, the sum before it included
    order = []
    while ready:
        _, _, number = heapq.heappop(ready)
        order.append(number)
        start = max(begin[number], ends_before[number]) if sums[number] else begin[number]
        end[number] = start + sum(_TIMES[action.kind] for action in actions_of(graph.cells[number]))
        for reader in graph.after(number):
            begun_is_enough = sums[number] and sums[reader]
            begin[reader] = max(begin[reader], begin[number] if begun_is_enough else end[number])
            ends_before[reader] = max(ends_before[reader], end[number])
            waits[reader] -= 1
            if waits[reader] == 0:
                heapq.heappush(ready, (begin[reader], not sums[reader], reader))
    return order, begin


def _is_sum(cell: Cell) -> bool:
    return isinstance(cell, Action) and cell.kind == "S"


# One rank's instructions in one step: actions, sends, receives and sums, in order.


class Message(NamedTuple):
    """An array that one rank sends to another.

    Attributes
    ----------
    source
        The action that makes it: F sends its stage's output, I the gradient with respect to its stage's input.
    sender, receiver
        Ranks.
    tag
        Its number among the messages from `sender` to `receiver` in a step, from 0, in sending order. The next step has
        the same ones: both ranks begin the messages of a pair in the same order in every step, so a transport that
        keeps the order of each pair and tag never mixes steps.
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


@dataclass(frozen=True)
class _Transfer:
    """One end of a message: `receives` says which, `waits` whether it ends the operation or begins it."""

    receives: ClassVar[bool]
    waits: ClassVar[bool]
    message: Message

    def __str__(self) -> str:
        where = f"from {self.message.sender}" if self.receives else f"to {self.message.receiver}"
        return f"{type(self).__name__.lower()} {self.message.source} {where}"


class Post(_Transfer):
    """Begin to receive: the buffer exists from now on."""

    receives, waits = True, False


class Await(_Transfer):
    """Wait until a message has arrived: the next instruction reads it."""

    receives, waits = True, True


class Send(_Transfer):
    """Begin to send; the array may be freed after `Sent`."""

    receives, waits = False, False


class Sent(_Transfer):
    """Wait until a message has left."""

    receives, waits = False, True


class _Sum(NamedTuple):
    action: Action

    def __str__(self) -> str:
        return f"{type(self).__name__.lower()} {self.action}"


class Reduce(_Sum):
    """Begin to sum the gradients of a stage over all replicas: the action S."""


class Reduced(_Sum):
    """Wait for the sums of a stage: the next instruction uses them.

    In a step that begins with updates it stands before its `Reduce`: it waits for the sums of the step before, of which
    the first step has none.
    """


Instruction: TypeAlias = Compute | Post | Await | Send | Sent | Reduce | Reduced


@dataclass(frozen=True)
class RankProgram:
    """The instructions of one rank in one step. ``str`` gives one line per instruction.

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


def check_rendezvous(programs: Sequence[RankProgram], *, one_stream: bool = False) -> None:
    """Refuse programs that may wait forever where nothing is buffered.

    The programs are run without arrays. A send ends only when its receive has been posted, and vice versa. `Send` and
    `Post` begin an operation and go on, `Await` and `Sent` wait for its end. Of the operations that a rank has begun
    with one partner in one direction, only the first can end, so operations are matched by order. A transport that
    matches by tags never waits longer. Whatever the ranks' speed, the run ends in the same state, because an operation
    that can end stays so until it does. One run therefore decides. Sums over replicas are collective calls on a
    separate channel, which all replicas begin in the same order: nothing here waits for them.

    Parameters
    ----------
    programs
        One per rank, in their order.
    one_stream
        Whether only the first of all operations of a rank can end, whichever the partner: one stream of NCCL.

    Raises
    ------
    ScheduleError
        A message lacks its send, its receive or a wait, or has one twice; two messages have the same tag; or ranks wait
        for each other: the message has the cycle, with the number of the instruction (from 0) at which each waits.
    """
    run = _Run(*_operations(programs), one_stream)
    run.go()
    if not all(run.ended):  # a rank that waits, waits for one of these
        raise _deadlock(run, programs)


_Steps: TypeAlias = list[list[tuple[int, bool, int]]]
"""For every rank: number of the instruction, whether it waits, number of its message."""


def _operations(programs: Sequence[RankProgram]) -> tuple[list[Message], _Steps]:
    """Return all messages, and each rank's steps with them; refuse programs with missing or doubled instructions."""
    numbers: dict[Message, int] = {}
    steps: _Steps = []
    done: defaultdict[tuple[Message, bool], list[bool]] = defaultdict(list)  # (message, receives) -> whether each waits
    for rank, program in enumerate(programs):
        if program.rank != rank:
            got = f"rank {program.rank}"
            raise ScheduleError("Programs are not in the order of their ranks", expected=f"rank {rank}", got=got)
        steps.append([])
        sums: defaultdict[Action, list[str]] = defaultdict(list)
        for place, one in enumerate(program.instructions):
            if isinstance(one, _Sum):
                sums[one.action].append(type(one).__name__)
            elif not isinstance(one, Compute):
                message = one.message
                if rank != message[1 + one.receives]:
                    raise _wrong(f"“{one}” is on rank {rank}", message, f"rank {message[1 + one.receives]}")
                done[message, one.receives].append(one.waits)
                steps[-1].append((place, one.waits, numbers.setdefault(message, len(numbers))))
        for action, kinds in sums.items():
            if sorted(kinds) != ["Reduce", "Reduced"]:
                raise ScheduleError("A sum needs one Reduce and one Reduced", expected="both, once each",
                                    got=f"{action}: {', '.join(kinds)} on rank {rank}", actions=[action],
                                    remedy="Lower the schedule again")  # fmt: skip
    tags: dict[tuple[int, ...], Message] = {}
    for message in numbers:
        if message.sender == message.receiver or not 0 <= min(message[1:3]) <= max(message[1:3]) < len(programs):
            raise _wrong("A message is not between two of the ranks", message, f"two of 0 to {len(programs) - 1}")
        for receives, names in ((False, "Send, then Sent"), (True, "Post, then Await")):
            if done[message, receives] != [False, True]:
                expected = f"{names} on rank {message[1 + receives]}"
                raise _wrong("A message does not begin and end once", message, expected)
        if tags.setdefault(message[1:], message) is not message:
            raise _wrong("Two messages have the same tag", message, "one tag for each message of a pair of ranks")
    return list(numbers), steps


def _wrong(problem: str, message: Message, expected: str) -> ScheduleError:
    got = f"{message.source} from rank {message.sender} to rank {message.receiver}, tag {message.tag}"
    return ScheduleError(problem, expected=expected, got=got, actions=[message.source],
                         remedy="Lower the schedule again")  # fmt: skip


class _Run:
    """One run of the programs."""

    # at: How many of its steps each rank has done.
    # streams: Of every message, at the sender and at the receiver: operations that have begun, and not ended.

    def __init__(self, messages: list[Message], steps: _Steps, one_stream: bool) -> None:
        self.messages, self.steps = messages, steps
        self.at = [0] * len(self.steps)
        streams: defaultdict[tuple[int, ...], deque[int]] = defaultdict(deque)
        self.streams = [
            tuple(streams[(rank,) if one_stream else (rank, message.sender, message.receiver)] for rank in message[1:3])
            for message in self.messages
        ]
        self.ended = [False] * len(self.messages)

    def go(self) -> None:
        """Run until nothing can go on."""
        going = deque(range(len(self.steps)))
        while going:
            rank = going.popleft()
            steps = self.steps[rank]
            while self.at[rank] < len(steps):
                _, waits, number = steps[self.at[rank]]
                if waits and not self.ended[number]:
                    break
                self.at[rank] += 1
                if not waits:
                    self.streams[number][self.messages[number].receiver == rank].append(number)
                    self._end(number, going)

    def _end(self, number: int, going: deque[int]) -> None:
        """End operations that are the first of their streams on both ranks, beginning with a message's."""
        candidates = [number]
        while candidates:
            number = candidates.pop()
            out, into = self.streams[number]
            if out and into and out[0] == number == into[0]:
                out.popleft()
                into.popleft()
                self.ended[number] = True
                going.extend(self.messages[number][1:3])
                candidates += [stream[0] for stream in (out, into) if stream]

    def awaited(self, rank: int) -> Message:
        """Return the first message of the stream that a rank waits for."""
        _, _, number = self.steps[rank][self.at[rank]]
        return self.messages[self.streams[number][self.messages[number].receiver == rank][0]]


def _deadlock(run: _Run, programs: Sequence[RankProgram]) -> ScheduleError:
    """Return the error with a cycle of ranks that wait for each other."""
    path: list[str] = []
    sources: list[Action] = []
    seen: dict[int, int] = {}
    rank = next(rank for rank, steps in enumerate(run.steps) if run.at[rank] < len(steps))
    while rank not in seen:
        seen[rank] = len(path)
        message = run.awaited(rank)
        sends = message.sender == rank
        other = message.receiver if sends else message.sender
        place = run.steps[rank][run.at[rank]][0]
        begun = f"send of {message.source} to" if sends else f"receive of {message.source} from"
        at = f"instruction {place}, {programs[rank].instructions[place]}"
        path.append(f"rank {rank} ({at}: its {begun} {other} has not ended)")
        sources.append(message.source)
        rank = other
    waits = " waits for ".join([*path[seen[rank] :], f"rank {rank}"])
    return ScheduleError("The programs are deadlocked where nothing is buffered", expected="an order without a cycle",
                         got=waits,
                         remedy="Let all ranks begin messages in one common order, as lower(…, one_stream=True) does",
                         actions=sources[seen[rank] :])  # fmt: skip


# The pass that places sends, receives and sums among the actions of a schedule.


def lower(schedule: Schedule, *, one_stream: bool = False) -> tuple[RankProgram, ...]:
    """Return each rank's instructions for one step of a schedule, communication included.

    - **Order.** The cells of all streams of a worker become one order, see `merge`; a worker of one stream keeps its.
    - **Send** right after the cell that makes the message; a message that several cells read is sent once. Nothing is
      sent between stages of one worker.
    - **Post** before the rank's first cell that, in the times of `merge`, begins no earlier than the message's source.
      The transfer can then use all the time between source and reader, and no buffer is allocated for an action that
      has not begun.
    - **Await** right before the first cell that reads the message.
    - **Sent** right after the first await of something that the receiver has sent after reading the message: that
      proves that it has arrived, so the wait costs no time. Without such an answer, at the end of the step.
    - **Reduce** as soon as the weight gradients are ready, in the order of the S of its lane; **Reduced** right before
      the reader of the sums, an update or a forward, else at the end.

    Parameters
    ----------
    schedule
        Of any number of workers.
    one_stream
        Whether the sends and receives of a rank run one after the other, each until its other half has come, in the
        order of the program, as on one stream of NCCL. A receive is then never posted before a send whose message is
        made earlier than the received one: all ranks begin messages in one common order. Without it, the messages of
        each pair of ranks and direction may wait for each other; MPI's tags allow more.

    Returns
    -------
    One program per worker, in their order, checked by `check_rendezvous`.

    Raises
    ------
    ScheduleError
        The schedule cannot run.
    """
    validate(schedule)
    programs = with_waits(schedule.graph, _begun(schedule, *merge(schedule), one_stream))
    check_rendezvous(programs, one_stream=one_stream)
    return programs


def _begun(schedule: Schedule, order: list[int], begin: list[int], one_stream: bool) -> list[list[Instruction]]:
    """Return the instructions of every rank that begin something: cells, posts, sends and sums."""
    graph = schedule.cells
    workers = [schedule.lanes[lane].worker for lane in graph.lanes]
    own: list[list[int]] = [[] for _ in range(schedule.workers)]
    for number in order:
        own[workers[number]].append(number)
    begins = [[begin[number] for number in numbers] for numbers in own]
    posts: list[defaultdict[int, list[Message]]] = [defaultdict(list) for _ in own]  # by the place of the next cell
    sends: dict[int, list[Message]] = {}
    places, sending = [0] * len(own), [0] * len(own)  # cells so far; of them, up to the last that sends
    tags: defaultdict[tuple[int, int], int] = defaultdict(int)
    for number in order:
        worker = workers[number]
        places[worker] += 1
        for send in graph.sends.get(number, ()):
            pair = worker, send.receiver
            message = Message(send.source, *pair, tags[pair])
            tags[pair] += 1
            place = bisect_left(begins[send.receiver], begin[number])
            posts[send.receiver][max(place, sending[send.receiver]) if one_stream else place].append(message)
            sends.setdefault(number, []).append(message)
        if number in sends:
            sending[worker] = places[worker]
    return [
        [one for place, number in enumerate(numbers)
         for one in (*map(Post, posts[worker].get(place, ())),
                     (Reduce if _is_sum(graph.cells[number]) else Compute)(graph.cells[number]),  # type: ignore[arg-type]
                     *map(Send, sends.get(number, ())))]
        for worker, numbers in enumerate(own)
    ]  # fmt: skip


def with_waits(graph: StepGraph, begun: Sequence[Sequence[Instruction]]) -> tuple[RankProgram, ...]:
    """Return the programs of ranks that begin some instructions in order, with their waits: see `lower`."""
    read: dict[Message, int] = {}  # the place of its first reader, at the receiver
    sent: dict[Message, int] = {}  # the place of its Send, at the sender
    reading: list[dict[int, list[Instruction]]] = []
    for instructions in begun:
        reading.append({})
        unread = {one.message.source: one.message for one in instructions if isinstance(one, Post)}
        sums = {one.action for one in instructions if isinstance(one, Reduce)}
        for place, one in enumerate(instructions):
            if isinstance(one, Send):
                sent[one.message] = place
            if not isinstance(one, Compute):
                continue
            for part in parts_of(one.cell):
                for needed in _reads(graph, part):
                    if needed in unread:
                        message = unread.pop(needed)
                        read[message] = place
                        reading[-1].setdefault(place, []).append(Await(message))
                    elif needed in sums:
                        sums.remove(needed)
                        reading[-1].setdefault(place, []).append(Reduced(needed))
    return tuple(
        RankProgram(rank, tuple(_waited(instructions, reading[rank], read, sent)))
        for rank, instructions in enumerate(begun)
    )


def _reads(graph: StepGraph, part: Action) -> Iterator[Action]:
    """Yield everything that a part of a cell needs; a U that begins the step needs sums of the step before."""
    yield from graph.predecessors(part)
    if graph.first == "U" and part.kind == "U":
        yield from graph.carried(part)


def _waited(instructions: Sequence[Instruction], reading: dict[int, list[Instruction]], read: dict[Message, int],
            sent: dict[Message, int]) -> Iterator[Instruction]:  # fmt: skip
    """Yield the instructions of a rank with its waits."""
    leaving: defaultdict[int, list[tuple[int, int, Message]]] = defaultdict(list)  # by receiver; a heap of read places
    summing = {}
    for place, one in enumerate(instructions):
        for wait in reading.get(place, ()):
            yield wait
            if isinstance(wait, Await):
                answer = wait.message
                left = leaving[answer.sender]
                while left and left[0][0] < sent[answer]:
                    yield Sent(heapq.heappop(left)[2])
            elif isinstance(wait, Reduced):
                summing[wait.action] = True
        yield one
        if isinstance(one, Send):
            heapq.heappush(leaving[one.message.receiver], (read[one.message], one.message.tag, one.message))
        elif isinstance(one, Reduce):
            summing.setdefault(one.action, False)
    yield from (Sent(message) for left in leaving.values() for _, _, message in sorted(left))
    yield from (Reduced(action) for action, waited in summing.items() if not waited)
