"""The pass that places sends, receives and sums among the actions of a schedule."""

from __future__ import annotations

from sparsebp.schedule.actions import Action
from sparsebp.schedule.lowering.programs import Await, Compute, Instruction, Message, Post, RankProgram, Send, Sent
from sparsebp.schedule.schedule import Schedule


def lower(schedule: Schedule) -> tuple[RankProgram, ...]:
    """Return one program a worker: a placeholder that posts all receives first and sends at once."""
    graph = schedule.cells
    reads: dict[int, list[Message]] = {}
    posts: dict[int, list[Message]] = {}
    sends: dict[int, list[Message]] = {}
    for number, sent in graph.sends.items():
        worker = schedule.lanes[graph.lanes[number]].worker
        for send in sent:
            message = Message(Action(*send.source), worker, send.receiver, number)
            sends.setdefault(number, []).append(message)
            posts.setdefault(send.receiver, []).append(message)
            reads.setdefault(min(send.readers), []).append(message)
    programs = []
    for lane_number, lane in enumerate(schedule.lanes):
        out: list[Instruction] = [Post(message) for message in posts.get(lane.worker, ())]
        for position, cell in enumerate(lane.cells):
            number = graph.first[lane_number] + position
            out += [Await(message) for message in reads.get(number, ())]
            out.append(Compute(cell))
            out += [Send(message) for message in sends.get(number, ())]
        out += [Sent(one.message) for one in out if isinstance(one, Send)]
        programs.append(RankProgram(lane.worker, tuple(out)))
    return tuple(programs)
