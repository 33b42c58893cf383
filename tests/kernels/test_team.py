"""The thread team: every part runs once, whoever comes; errors; concurrent and nested callers."""

from __future__ import annotations

import contextlib
import importlib
import os
import pkgutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numba
import numpy as np
import pytest
from numba.core import types

import sparsebp
from sparsebp.core import threads
from sparsebp.kernels.host.engine import compile as host_parts
from sparsebp.kernels.host.engine import threads as teams
from sparsebp.kernels.host.engine.compile import VECTOR_GRAIN, WORTH, parts_for
from sparsebp.kernels.host.engine.threads import (
    ALONE,
    RESUME,
    atomic_add,
    atomic_load,
    end_part,
    in_parts,
    next_part,
    team_for,
    turns_of,
    usleep,
)

JIT: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
pthread_self = types.ExternalFunction("pthread_self", types.uint64())
LONG = 1000  # naps of a part that waits for somebody, some 70 ms: far beyond what a thread takes to come


@numba.njit(**JIT)
def _note_part(part, runs, who, bad):  # type: ignore[no-untyped-def]
    runs[part] += 1
    who[part] = pthread_self()
    if part == bad:
        raise ValueError("a bad part")


@numba.njit(**JIT)
def note(team, parts, *args):  # type: ignore[no-untyped-def]
    in_parts(_note_part, team, parts, args)


@numba.njit(**JIT)
def _meet_part(part, runs, who, here, wanted, caller, held):  # type: ignore[no-untyped-def]
    """Wait until as many threads as are wanted have begun a part; who is not the caller sleeps on."""
    runs[part] += 1
    who[part] = pthread_self()
    atomic_add(here, 1)
    naps = 0
    while atomic_load(here) < wanted and naps < LONG:
        usleep(np.uint32(20))
        naps += 1
    if who[part] != caller:
        usleep(np.uint32(held))


@numba.njit(**JIT)
def meet(team, parts, *args):  # type: ignore[no-untyped-def]
    in_parts(_meet_part, team, parts, args)


@numba.njit(**JIT)
def _nest_part(part, team, runs, who):  # type: ignore[no-untyped-def]
    in_parts(_note_part, team, len(runs[part]), (runs[part], who[part], -1))


@numba.njit(**JIT)
def nest(team, parts, *args):  # type: ignore[no-untyped-def]
    in_parts(_nest_part, team, parts, args)


@numba.njit(**JIT)
def _turn_part(me, threads, words, parts, begun, ended, early, nap):  # type: ignore[no-untyped-def]
    """Count in `early` the parts of a turn that begin before all of the turn before have ended."""
    for turn in range(len(parts)):
        part = next_part(words, me, min(parts[turn], threads), turn)
        while part >= 0:
            atomic_add(begun + 8 * turn, 1)
            if turn > 0 and atomic_load(ended + 8 * (turn - 1)) != min(parts[turn - 1], threads):
                atomic_add(early, 1)
            if nap > 0 and turn % 7 == me:
                usleep(np.uint32(nap))
            atomic_add(ended + 8 * turn, 1)
            end_part(words, part, turn)
            part = next_part(words, me, min(parts[turn], threads), turn)


@numba.njit(**JIT)
def take_turns(team, most, *args):  # type: ignore[no-untyped-def]
    threads, words, first = turns_of(team, most)
    in_parts(_turn_part, team, threads, (threads, first, *args))
    return threads, len(words)


@numba.njit(**JIT)
def myself():  # type: ignore[no-untyped-def]
    return pthread_self()


def record(parts: int) -> tuple[np.ndarray, np.ndarray]:
    return np.zeros(parts, np.int64), np.zeros(parts, np.uint64)


@pytest.fixture(scope="module", params=[1, 3], ids=["one helper", "three helpers"])
def crew(request: pytest.FixtureRequest) -> teams._Team:
    """A team of its own, whose helpers sleep until the process ends."""
    made = teams._Team(request.param + 1)
    made.hire(request.param)
    return made


@pytest.fixture
def team(crew: teams._Team) -> Iterator[int]:
    crew._room[RESUME // 8] = 0
    yield crew.address
    assert crew._room[teams.BUSY // 8] == 0 and crew._room[teams.GATE // 8] >> 32 & 1 == 0  # free, and closed
    assert crew._room[teams.GATE // 8] & 0xFFFF == 0  # and nobody is there


@contextlib.contextmanager
def cores_apart() -> Iterator[tuple[set[int], list[int]]]:
    """Keep the calling thread on one core, and all helpers on the others; yield that core, and the helpers.

    A helper that is woken on the caller's own core moves to another one, where others may compute as well.
    """
    cores = os.sched_getaffinity(0)
    if len(cores) < 2:
        pytest.skip("needs two cores")
    own = {min(cores)}
    helpers = [thread.native_id or 0 for thread in threading.enumerate() if thread.name == "sparsebp helper"]
    try:
        os.sched_setaffinity(0, own)
        for helper in helpers:
            os.sched_setaffinity(helper, cores - own)
        yield own, helpers
    finally:
        for thread in (0, *helpers):
            os.sched_setaffinity(thread, cores)


def called(crew: teams._Team, held: int = 0, before: Callable[[], None] = lambda: None) -> int:
    """Have helpers of a team take part; return how many threads ran the parts.

    One that does not come in time, as others are busy on its core too, is called once more.
    """
    for _ in range(300):
        before()
        crew._room[RESUME // 8] = 0
        parts, here = crew.helpers + 1, np.zeros(1, np.int64)
        runs, who = record(parts)
        meet(crew.address, parts, runs, who, here.ctypes.data, 2, myself(), held)
        assert (runs == 1).all()
        if len(set(who)) > 1:
            break
    return len(set(who))


def met(crew: teams._Team, held: int = 0) -> int:
    """Do that with the helpers on other cores."""
    with cores_apart():
        return called(crew, held)


@pytest.mark.parametrize("parts", [0, 1, 2, 3, 7, 64, 1000])
def test_every_part_runs_once(team: int, parts: int) -> None:
    for address in (team, ALONE):
        for _ in range(20):
            runs, who = record(parts)
            note(address, parts, runs, who, -1)
            assert (runs == 1).all()
    assert (who == myself()).all()


@pytest.mark.parametrize("nap", [0, 50])
@pytest.mark.parametrize("busy", [False, True], ids=["", "another caller has the team"])
def test_every_part_of_a_turn_runs_once_and_after_the_turn_before(
    crew: teams._Team, team: int, nap: int, busy: bool
) -> None:
    rng = np.random.default_rng(0)
    for turns in (1, 2, 30, 500):
        parts = rng.integers(1, 6, turns)
        begun, ended, early = np.zeros(turns, np.int64), np.zeros(turns, np.int64), np.zeros(1, np.int64)
        crew._room[teams.BUSY // 8] = busy
        for address in (team, ALONE):
            begun[:] = ended[:] = 0
            threads, _ = take_turns(address, 5, parts, begun.ctypes.data, ended.ctypes.data, early.ctypes.data, nap)
            assert threads == (min(5, crew.helpers + 1) if address else 1)
            np.testing.assert_array_equal(begun, np.minimum(parts, threads))
            np.testing.assert_array_equal(ended, begun)
            assert early[0] == 0
        crew._room[teams.BUSY // 8] = 0


def test_helpers_come(crew: teams._Team, team: int) -> None:
    assert 2 <= met(crew) <= crew.helpers + 1


def test_a_helper_leaves_the_callers_core(crew: teams._Team, team: int) -> None:
    with cores_apart() as (own, helpers):

        def to_own() -> None:
            for helper in helpers:
                os.sched_setaffinity(helper, own)

        assert called(crew, before=to_own) > 1
        assert any(not os.sched_getaffinity(helper) & own for helper in helpers)


@pytest.mark.parametrize("bad", [0, 31, 63])
def test_an_error_in_a_part_is_raised_by_the_caller(team: int, bad: int) -> None:
    for address in (team, ALONE):
        runs, who = record(64)
        with pytest.raises(ValueError, match="a bad part"):
            note(address, 64, runs, who, bad)
        assert runs[bad] == 1 and runs.max() == 1
        runs, who = record(64)
        note(address, 64, runs, who, -1)
        assert (runs == 1).all()


def test_callers_beside_each_other(team: int) -> None:
    failed = []

    def work() -> None:
        for _ in range(300):
            runs, who = record(50)
            try:
                note(team, 50, runs, who, 7)
            except ValueError:
                pass
            else:
                failed.append("no error")
            runs, who = record(50)
            note(team, 50, runs, who, -1)
            if not (runs == 1).all():
                failed.append(runs)

    callers = [threading.Thread(target=work) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not failed


def test_parts_that_have_parts(team: int) -> None:
    runs, who = np.zeros((9, 11), np.int64), np.zeros((9, 11), np.uint64)
    for _ in range(20):
        runs[:] = 0
        nest(team, len(runs), team, runs, who)
        assert (runs == 1).all()


def test_a_helper_that_keeps_the_caller_waiting_is_left_alone_for_a_while(crew: teams._Team, team: int) -> None:
    begin = time.monotonic_ns()
    assert met(crew, held=400_000) >= 2
    resume, end = crew._room[RESUME // 8], time.monotonic_ns()
    longest = teams.PATIENCE * teams.MOST_LOST - teams.CREDIT  # 0.4 s are longer than a scheduler takes a core away for
    assert begin + longest <= resume <= end + longest
    crew._room[RESUME // 8] = np.iinfo(np.int64).max  # as if that were far in the future
    runs, who = record(64)
    note(team, 64, runs, who, -1)
    assert (runs == 1).all() and (who == myself()).all()
    crew._room[RESUME // 8] = 0
    assert met(crew) >= 2


def test_a_loss_now_and_then_keeps_no_helper_away(crew: teams._Team, team: int) -> None:
    """As threads of another library cause that spin after its calls."""
    allowed = teams.CREDIT // teams.PATIENCE  # nanoseconds, after a while without losses
    now = 10**12

    def lose(lost: int, later: int = 0) -> int:
        """Return for how many nanoseconds the team stays apart after a loss."""
        teams._lose(team, now + later, lost)
        return int(crew._room[RESUME // 8]) - (now + later)

    assert lose(teams._LOSS) == -now  # a busy scheduler
    assert lose(allowed // 2) == -teams.CREDIT // 2
    assert lose(allowed // 2) == 0
    assert lose(allowed // 2) == teams.CREDIT // 2
    assert lose(allowed, later=10 * teams.CREDIT) == 0
    assert lose(100 * teams.MOST_LOST, later=10**10) == teams.PATIENCE * teams.MOST_LOST - teams.CREDIT


def test_who_stays_apart_for_long_is_not_called_back_before(crew: teams._Team, team: int) -> None:
    teams._apart(team, 100)
    teams._apart(team, 50)
    assert crew._room[RESUME // 8] == 100
    teams._apart(team, 101)
    assert crew._room[RESUME // 8] == 101


def test_helpers_outlive_signals(crew: teams._Team, team: int) -> None:
    before = set(threading.enumerate())
    made = teams._Team(2)
    made.hire(1)
    (helper,) = set(threading.enumerate()) - before
    handler = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        for _ in range(1500):
            signal.pthread_kill(helper.ident or 0, signal.SIGUSR1)
            time.sleep(0.0003)  # for each to interrupt its sleep
        assert helper.is_alive()
        assert met(made) == 2  # now no signal is on its way any more, which the handler before would end the process at
    finally:
        signal.signal(signal.SIGUSR1, handler)


def test_helpers_are_hired_by_a_later_kernel_where_files_run_out(monkeypatch: pytest.MonkeyPatch) -> None:
    if threads.count() < 2:
        pytest.skip("needs two threads")
    monkeypatch.setattr(teams, "_team", None)

    def refuse(_: teams._Team, helpers: int) -> None:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as full:
        full.setattr(teams._Team, "hire", refuse)
        assert teams.team() == ALONE
    assert teams.team() != ALONE


def test_fewer_helpers_than_there_are_may_be_asked_for(crew: teams._Team, team: int) -> None:
    hired = crew.helpers
    try:
        crew.hire(0)
        runs, who = record(64)
        note(team, 64, runs, who, -1)
        assert (runs == 1).all() and (who == myself()).all()
    finally:
        crew.hire(hired)
    assert met(crew) >= 2


def test_a_system_without_more_threads_has_a_smaller_team(monkeypatch: pytest.MonkeyPatch) -> None:
    made = teams._Team(3)

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    made.hire(2)
    runs, who = record(64)
    note(made.address, 64, runs, who, -1)
    assert (runs == 1).all() and made.helpers == 2


@pytest.mark.skipif(threads.most_threads() < 2, reason="needs two threads")
def test_who_works_on_what() -> None:
    """Little work, a single part, one thread, threads side by side: the caller alone."""
    before = threads.get_threads()
    try:
        threads.set_threads(2)
        assert parts_for(WORTH - 1) == 1 and parts_for(WORTH) == WORTH // VECTOR_GRAIN and parts_for(10**12) == 64
        assert parts_for(WORTH // 4 - 1, vectors=False) == 1 < parts_for(WORTH // 4, vectors=False)
        assert team_for(2, WORTH) == teams.team() != ALONE
        assert team_for(1, 10**12) == team_for(64, WORTH - 1) == ALONE
        with threads.serial_kernels():
            assert parts_for(10**12) == 1 and teams.team() == team_for(64, 10**12) == ALONE
        threads.set_threads(1)
        assert parts_for(10**12) == 1 and teams.team() == ALONE
    finally:
        threads.set_threads(before)


def test_no_kernel_uses_numbas_threads() -> None:
    """They may not survive two callers (workqueue) or a fork (OpenMP)."""
    found = 0
    for package in ("sparsebp.kernels.host", "sparsebp.patterns", "sparsebp.scan", "sparsebp.nn", "sparsebp.jacobians"):
        for module in pkgutil.walk_packages(importlib.import_module(package).__path__, package + "."):
            for value in vars(importlib.import_module(module.name)).values():
                if isinstance(value, numba.core.dispatcher.Dispatcher):
                    found += 1
                    assert not value.targetoptions.get("parallel"), value
    assert found > 100 and sparsebp.__name__ and not hasattr(host_parts, "PARALLEL")
