"""The pass that places sends, receives and sums among the actions of a schedule."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence

from sparsebp.schedule.actions import Action, Cell, parts_of
from sparsebp.schedule.graph import StepGraph
from sparsebp.schedule.lowering.merge import Turns, merge
from sparsebp.schedule.lowering.programs import (
    Await,
    Compute,
    Instruction,
    Message,
    Post,
    RankProgram,
    Reduce,
    Reduced,
    Send,
    Sent,
)
from sparsebp.schedule.lowering.rendezvous import check_rendezvous
from sparsebp.schedule.schedule import Schedule
from sparsebp.schedule.validate import validate


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
    begun = _begun(schedule, merge(schedule), one_stream)
    programs = with_waits(schedule.graph, begun)
    check_rendezvous(programs, one_stream=one_stream)
    return programs


def _begun(schedule: Schedule, turns: Turns, one_stream: bool) -> list[list[Instruction]]:
    """Return the instructions of every rank that begin something: cells, posts, sends and sums."""
    graph = schedule.cells
    workers = [schedule.lanes[lane].worker for lane in graph.lanes]
    own: list[list[int]] = [[] for _ in range(schedule.workers)]
    for number in turns.order:
        own[workers[number]].append(number)
    begins = [[turns.begin[number] for number in numbers] for numbers in own]
    posts: list[defaultdict[int, list[Message]]] = [defaultdict(list) for _ in own]  # by the place of the cell behind
    sends: dict[int, list[Message]] = {}
    places, sending = [0] * len(own), [0] * len(own)  # cells so far; of them, up to the last that sends
    tags: defaultdict[tuple[int, int], int] = defaultdict(int)
    for number in turns.order:
        worker = workers[number]
        places[worker] += 1
        for send in graph.sends.get(number, ()):
            pair = worker, send.receiver
            message = Message(send.source, *pair, tags[pair])
            tags[pair] += 1
            place = bisect_left(begins[send.receiver], turns.begin[number])
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
    """Return the programs of ranks that begin some instructions in order, with the waits in their places: see `lower`.

    Parameters
    ----------
    graph
        Says what a cell reads.
    begun
        For every rank its `Compute`, `Post`, `Send` and `Reduce`.
    """
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
