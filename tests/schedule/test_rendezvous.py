"""The proof that unbuffered programs end, against threads that meet for every message."""

from __future__ import annotations

import random
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules import lane, schedules
from sparsebp.comm.threads import run_ranks
from sparsebp.core.errors import ScheduleError
from sparsebp.schedule import Action, Schedule, StepGraph
from sparsebp.schedule import lowering as module
from sparsebp.schedule.builders import fast_forward, gpipe
from sparsebp.schedule.lowering import (
    Await,
    Compute,
    Message,
    Post,
    RankProgram,
    Reduce,
    Reduced,
    Send,
    Sent,
    check_rendezvous,
    lower,
)


def program(rank: int, *instructions) -> RankProgram:
    return RankProgram(rank, instructions)


A, B = Message(Action(0, "F", 0), 0, 1, 0), Message(Action(1, "I", 0), 1, 0, 0)
C = Message(Action(0, "F", 1), 0, 1, 1)


def refused(*programs: RankProgram, one_stream: bool = False) -> str:
    with pytest.raises(ScheduleError) as caught:
        check_rendezvous(programs, one_stream=one_stream)
    assert caught.value.actions
    return str(caught.value)


def test_two_ranks_that_send_first_and_wait():
    first = program(0, Send(A), Sent(A), Post(B), Await(B))
    second = program(1, Send(B), Sent(B), Post(A), Await(A))
    assert refused(first, second) == (
        "The programs are deadlocked where nothing is buffered. Expected an order without a cycle. Got rank 0 "
        "(instruction 1, sent 0F0 to 1: its send of 0F0 to 1 has not ended) waits for rank 1 (instruction 1, sent 1I0 "
        "to 0: its send of 1I0 to 0 has not ended) waits for rank 0. Let all ranks begin messages in one common order, "
        "as lower(…, one_stream=True) does."
    )
    check_rendezvous((program(0, Send(A), Post(B), Sent(A), Await(B)), program(1, Send(B), Post(A), Sent(B), Await(A))))


def test_one_stream_waits_for_what_is_in_front():
    """Nobody waits for the sends first, but they hold the streams."""
    first = program(0, Compute(A.source), Send(A), Post(B), Await(B), Sent(A))
    second = program(1, Send(B), Post(A), Await(A), Sent(B))
    check_rendezvous((first, second))
    message = refused(first, second, one_stream=True)
    assert "rank 0 (instruction 3, await 1I0 from 1: its send of 0F0 to 1 has not ended) waits for rank 1" in message
    check_rendezvous((first, program(1, Post(A), Send(B), Await(A), Sent(B))), one_stream=True)


def test_messages_of_a_pair_overtake_each_other():
    """Without tags the second would be received as the first."""
    first = program(0, Send(A), Send(C), Sent(A), Sent(C))
    assert "rank 1 (instruction 2, await 0F1 from 0: its receive of 0F1" in refused(
        first, program(1, Post(C), Post(A), Await(C), Await(A))
    )
    check_rendezvous((first, program(1, Post(A), Post(C), Await(C), Await(A))))


def test_a_cycle_of_three_with_one_that_waits_outside():
    messages = [Message(Action(0, "F", m), m, (m + 1) % 3, 0) for m in range(3)]
    ranks = [program(rank, Send(messages[rank]), Sent(messages[rank]), Post(messages[rank - 1]),
                     Await(messages[rank - 1])) for rank in range(3)]  # fmt: skip
    outside = Message(Action(5, "F", 0), 1, 3, 0)
    ranks[1] = replace(ranks[1], instructions=(*ranks[1].instructions, Send(outside), Sent(outside)))
    ranks.append(program(3, Post(outside), Await(outside)))
    message = refused(*ranks)
    assert message.count("waits for") == 3 and "rank 3" not in message


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ((Send(A), Sent(A)), (), "Expected Post, then Await on rank 1"),
        ((), (Post(A), Await(A)), "Expected Send, then Sent on rank 0"),
        ((Send(A),), (Post(A), Await(A)), "then Sent on rank 0"),
        ((Send(A), Sent(A)), (Post(A),), "then Await on rank 1"),
        ((Send(A), Send(A), Sent(A)), (Post(A), Await(A)), "does not begin and end once"),
        ((Sent(A), Send(A)), (Post(A), Await(A)), "does not begin and end once"),
        ((Send(A), Sent(A)), (Post(A), Await(A), Await(A)), "does not begin and end once"),
        ((Post(A), Await(A)), (Send(A), Sent(A)), "“post 0F0 from 0” is on rank 0. Expected rank 1"),
        ((Send(A), Sent(A), Send(A._replace(source=C.source)), Sent(A._replace(source=C.source))),
         (Post(A), Await(A), Post(A._replace(source=C.source)), Await(A._replace(source=C.source))), "the same tag"),
        ((Send(A._replace(receiver=2)), Sent(A._replace(receiver=2))), (), "not between two of the ranks"),
        ((Send(A._replace(receiver=0)), Sent(A._replace(receiver=0))), (), "not between two of the ranks"),
        ((Reduce(Action(0, "S")),), (), "Got 0S: Reduce on rank 0"),
        ((Reduce(Action(0, "S")), Reduced(Action(0, "S")), Reduced(Action(0, "S"))), (), "one Reduce and one Reduced"),
    ],
)  # fmt: skip
def test_what_is_not_there_once(first, second, words):
    assert words in refused(program(0, *first), program(1, *second))


def test_programs_in_another_order():
    with pytest.raises(ScheduleError, match="not in the order of their ranks"):
        check_rendezvous(lower(gpipe(workers=2, stages=2, microbatches=1))[::-1])


# ---- threads that meet -----------------------------------------------------------------------------------------------


class Meetings:
    """Threads that wait for each other; ends them all when none of them can go on."""

    def __init__(self, threads: int) -> None:
        self.changed = threading.Condition()
        self.running, self.deadlocked = threads, False
        self._waiting: list[Callable[[], bool]] = []

    def until(self, ready: Callable[[], bool]) -> bool:
        """Wait, with the condition held; False if it will never be."""
        self._waiting.append(ready)
        self.running -= 1
        self._look()
        self.changed.wait_for(lambda: ready() or self.deadlocked)
        self._waiting.remove(ready)
        self.running += 1
        return ready()

    def leave(self) -> None:
        with self.changed:
            self.running -= 1
            self._look()

    def _look(self) -> None:
        if self.running == 0 and self._waiting and not any(ready() for ready in self._waiting):
            self.deadlocked = True
        self.changed.notify_all()


def ends(programs: list[RankProgram], one_stream: bool) -> bool:
    """Run programs on threads: one a rank, and one a stream, which does its operations one after the other.

    A send and a receive meet: neither ends before the other has come to the front of its stream.
    """
    begun: dict[tuple, list[Message]] = defaultdict(list)  # what has been given to each stream
    streams = {}
    for rank, one in enumerate(programs):
        for step in one.instructions:
            if isinstance(step, (Post, Send)):
                key = (rank,) if one_stream else (rank, *step.message[1:3])
                streams.setdefault(key, []).append(step.message)
    meetings = Meetings(len(programs) + len(streams))
    there, done = set(), set()  # (rank, message) at the front of its stream; messages that have gone over

    def run(rank: int) -> None:
        for step in programs[rank].instructions:
            with meetings.changed:
                message = step.message
                if isinstance(step, (Post, Send)):
                    begun[(rank,) if one_stream else (rank, *message[1:3])].append(message)
                    meetings.changed.notify_all()
                elif not meetings.until(lambda message=message: message in done):
                    break
        meetings.leave()

    def serve(key: tuple, messages: list[Message]) -> None:
        for place, message in enumerate(messages):
            with meetings.changed:
                if not meetings.until(lambda place=place: len(begun[key]) > place):
                    break
                there.add((key[0], message))
                if there.issuperset({(message.sender, message), (message.receiver, message)}):
                    done.add(message)
                meetings.changed.notify_all()
                if not meetings.until(lambda message=message: message in done):
                    break
        meetings.leave()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(len(programs))]
    threads += [threading.Thread(target=serve, args=item, daemon=True) for item in streams.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "the threads of the test hang"
    return not meetings.deadlocked


def random_programs(rng: random.Random, ranks: int, messages: int) -> list[RankProgram]:
    """Return programs in which each rank does what it has to in a random order, the waits behind the beginnings."""
    left: list[list[list]] = [[] for _ in range(ranks)]
    tags: dict[tuple[int, int], int] = defaultdict(int)
    for number in range(messages):
        sender, receiver = rng.sample(range(ranks), 2)
        message = Message(Action(0, "F", number), sender, receiver, tags[sender, receiver])
        tags[sender, receiver] += 1
        left[sender].append([Send(message), Sent(message)])
        left[receiver].append([Post(message), Await(message)])
    keen, programs = rng.random(), []  # on beginning before waiting
    for rank, pairs in enumerate(left):
        order = []
        while any(pairs):
            begins = [pair for pair in pairs if len(pair) == 2 and rng.random() < keen]
            order.append(rng.choice(begins or [pair for pair in pairs if pair]).pop(0))
        programs.append(RankProgram(rank, tuple(order)))
    return programs


def passes(programs: list[RankProgram], one_stream: bool) -> bool:
    try:
        check_rendezvous(programs, one_stream=one_stream)
    except ScheduleError as error:
        assert "deadlocked" in str(error)
        return False
    return True


@settings(max_examples=150)
@given(seed=st.integers(0, 2**32), ranks=st.integers(2, 4), messages=st.integers(0, 6), one_stream=st.booleans())
def test_the_proof_agrees_with_threads(seed, ranks, messages, one_stream):
    programs = random_programs(random.Random(seed), ranks, messages)
    assert passes(programs, one_stream) == ends(programs, one_stream)


def test_both_ends_are_among_the_random_programs():
    found = [passes(random_programs(random.Random(seed), 3, 4), bool(seed % 2)) for seed in range(200)]
    assert 20 < sum(found) < 180


@settings(max_examples=15)
@given(schedules(), st.booleans())
def test_lowered_schedules_run_on_threads(schedule, one_stream):
    plain = [
        RankProgram(one.rank, tuple(step for step in one.instructions if isinstance(step, (Post, Await, Send, Sent))))
        for one in lower(schedule, one_stream=one_stream)
    ]
    assert ends(plain, one_stream)


@settings(max_examples=15)
@given(schedules(), st.integers(1, 3))
def test_lowered_schedules_carry_what_they_should(schedule, steps):
    """Over a transport, step after step with the same tags: every await finds the source's own value."""
    programs = lower(schedule)
    number = {action: place for place, action in enumerate(sorted(schedule.places))}

    def work(transport):
        handles, arrays, seen = {}, {}, []
        for step in range(steps):
            for one in programs[transport.rank].instructions:
                if isinstance(one, (Compute, Reduce, Reduced)):
                    continue
                message = one.message
                sends = isinstance(one, (Send, Sent))
                if isinstance(one, Post):
                    arrays[message] = np.zeros(2)
                    handles[message, sends] = transport.irecv(arrays[message], message.sender, message.tag)
                elif isinstance(one, Send):
                    array = np.array([number[message.source], step], np.float64)
                    handles[message, sends] = transport.isend(array, message.receiver, message.tag)
                else:
                    handles.pop((message, sends)).wait()
                if isinstance(one, Await):
                    seen.append(arrays.pop(message).tolist() == [number[message.source], step])
        assert not handles
        return seen

    found: list = []
    thread = threading.Thread(target=lambda: found.extend(run_ranks(schedule.workers, work)), daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "the ranks wait for ever"
    assert len(found) == schedule.workers and all(all(seen) for seen in found)


def test_every_lowered_schedule_is_proved(monkeypatch):
    """A pass that placed a wait wrongly would be refused, not run."""

    def wrong(graph, begun):
        programs = with_waits(graph, begun)
        first = [one for one in programs[0].instructions if not isinstance(one, Sent)]
        early = [new for one in first for new in ((one, Sent(one.message)) if isinstance(one, Send) else (one,))]
        last = [one for one in programs[1].instructions if not isinstance(one, Post)]
        late = [new for one in last for new in ((Post(one.message), one) if isinstance(one, Await) else (one,))]
        return replace(programs[0], instructions=tuple(early)), replace(programs[1], instructions=tuple(late))

    with_waits = module.with_waits
    monkeypatch.setattr(module, "with_waits", wrong)
    lower(fast_forward(workers=2, stages=2, microbatches=3))
    both = Schedule.of(
        StepGraph(4, 2), [lane("0F0 2F0 0F1 2F1 2B0 2B1 0B0 0B1"), lane("1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1")]
    )
    with pytest.raises(ScheduleError, match="deadlocked"):
        lower(both)
