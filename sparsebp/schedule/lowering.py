"""From a schedule to a program a rank: sends, receives and sums are placed, and proved free of deadlock."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from sparsebp.core.errors import ScheduleError
from sparsebp.schedule.actions import Action, Cell, StepGraph, actions_of, parts_of
from sparsebp.schedule.schedule import Schedule, validate

# One order of all cells of a schedule: what each rank runs one after the other, whatever streams it has.

_TIMES = {"F": 1, "I": 1, "W": 1, "B": 2, "S": 1, "U": 0}


def merge(schedule: Schedule) -> tuple[list[int], list[int]]:
    """Return the order in which the cells begin, and when, if F, I, W and S take one unit of time, B two, U none.

    Transfers take no time, and the streams of a worker do not slow each other down. Of cells that begin together S goes
    first, then the lower worker and the earlier lane. So a worker of one stream keeps its order, those of several are
    interleaved as they would run side by side. A sum begins as soon as what it adds is there and the sum before it in
    its lane has begun, not ended; what reads it takes it to come one unit after the sum before it.
    """
    graph = schedule.cells
    waits = list(graph.waits)
    begin, end = [0] * len(waits), [0] * len(waits)
    sums = [_is_sum(cell) for cell in graph.cells]
    ready = [(0, not sums[number], number) for number, count in enumerate(waits) if count == 0]
    heapq.heapify(ready)
    ends_before = list(end)  # when the last of what a sum waits for has ended: also the sum before it
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


# What a rank does in one step: actions, and what it sends, receives and sums with others, in order.


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
    run = _Run(*_operations(programs), one_stream)
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

_Steps: TypeAlias = list[list[tuple[int, bool, int]]]
"""For every rank: number of the instruction, whether it waits, number of its message."""


def _operations(programs: Sequence[RankProgram]) -> tuple[list[Message], _Steps]:
    """Return all messages, and what ranks do with them; refuse programs in which something is not there once."""
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
            if isinstance(one, (Reduce, Reduced)):
                sums[one.action].append(type(one).__name__)
            elif not isinstance(one, Compute):
                (receives, waits), message = _KINDS[type(one)], one.message
                if rank != message[1 + receives]:
                    raise _wrong(f"“{one}” is on rank {rank}", message, f"rank {message[1 + receives]}")
                done[message, receives].append(waits)
                steps[-1].append((place, waits, numbers.setdefault(message, len(numbers))))
        for action, kinds in sums.items():
            if sorted(kinds) != ["Reduce", "Reduced"]:
                got, problem = f"{action}: {', '.join(kinds)} on rank {rank}", "A sum needs one Reduce and one Reduced"
                raise ScheduleError(
                    problem, expected="both, once each", got=got, actions=[action], remedy="Lower the schedule anew"
                )
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
    return ScheduleError(
        problem, expected=expected, got=got, actions=[message.source], remedy="Lower the schedule anew"
    )


class _Run:
    """One run of the programs.

    Attributes
    ----------
    at
        How many of its steps each rank has done.
    streams
        Of every message, at the sender and at the receiver: operations that have begun, and not ended.
    """

    def __init__(self, messages: list[Message], steps: _Steps, one_stream: bool) -> None:
        self.messages, self.steps = messages, steps
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
    return ScheduleError("The programs are deadlocked where nothing is buffered", expected="an order without a cycle",
                         got=waits,
                         remedy="Let all ranks begin messages in one common order, as lower(…, one_stream=True) does",
                         actions=sources[seen[rank] :])  # fmt: skip


# The pass that places sends, receives and sums among the actions of a schedule.


def lower(schedule: Schedule, *, one_stream: bool = False) -> tuple[RankProgram, ...]:
    """Return what every rank does in one step of a schedule, communication included.

    - **Order.** The cells of all streams of a worker become one order, see `merge`; a worker of one stream keeps its.
    - **Send** right after the cell that makes the message; what several cells read is sent once, and nothing between
      stages of one worker.
    - **Post** before the rank's first cell that does not begin before the message's source begins, in the times of
      `merge`: the transfer has all the time that there is between source and reader, and no buffer lies waiting for an
      action that has not begun.
    - **Await** right before the first cell that reads the message.
    - **Sent** right after the first await of something that the receiver has sent after reading the message: that
      proves that it has arrived, so the wait costs no time. Where no such answer comes, at the end of the step.
    - **Reduce** as soon as the weight gradients are there, in the order of the S of its lane; **Reduced** right before
      what reads the sums, an update or a forward, else at the end. All replicas run the same program, of which one is
      described: their sums begin in the same order.

    Parameters
    ----------
    schedule
        Of any number of workers.
    one_stream
        Whether the sends and receives of a rank run one after the other, each until its other half has come, in the
        order of the program, as on one stream of NCCL. A receive is then never posted in front of a send whose message
        is made before that which is received: all ranks begin messages in one common order. Without it, those of each
        pair of ranks and direction may wait for each other, as tags of MPI do not even ask for.

    Returns
    -------
    One program a worker, in their order. `check_rendezvous` has passed them.

    Raises
    ------
    ScheduleError
        The schedule cannot run.
    """
    validate(schedule)
    begun = _begun(schedule, *merge(schedule), one_stream)
    programs = with_waits(schedule.graph, begun)
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
    posts: list[defaultdict[int, list[Message]]] = [defaultdict(list) for _ in own]  # by the place of the cell behind
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
         for one in (*map(Post, posts[worker].get(place, ())), _run(graph.cells[number]),
                     *map(Send, sends.get(number, ())))]
        for worker, numbers in enumerate(own)
    ]  # fmt: skip


def _run(cell: Cell) -> Instruction:
    return Reduce(cell) if isinstance(cell, Action) and cell.kind == "S" else Compute(cell)


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
    """Yield what a part of a cell needs, of this step, and sums of the step before where it begins with updates."""
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
