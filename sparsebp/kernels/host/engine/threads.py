"""The threads of the host kernels: helpers that sleep until there is work, and how work is cut into parts.

The thread that calls a kernel cuts its work into parts and begins with them itself. Helpers that come take parts too;
one that does not come, because another process has its core, is not waited for. So a missing core costs no time beyond
the parts that a helper has begun. Helpers sleep between kernels that do not follow each other closely: a thread that
sleeps gets a core as soon as it is woken, even on a busy machine; one that spins does not.

- Every thread has a range of the parts, and when it is done takes from the end of another's: the same rows meet the
  same core again in the next kernel, as with a fixed schedule.
- A helper that is woken on the caller's core, as no other is free, moves to another one and shares it. A scheduler
  would leave it on the caller's core until the caller is done.
- Where other processes made the team lose time nevertheless, the caller works alone until that was one part of
  `PATIENCE` of all time. Up to `CREDIT` nanoseconds before count, too: threads of another library that spin for some
  milliseconds after its last call cost no more than these. A loss counts for `MOST_LOST` at most: longer ones mean that
  the process was stopped.
- One caller has the team at a time. Callers in other threads work alone meanwhile.
- Which thread runs a part changes no result: the parts do not depend on the number of threads.
- Numba's own threads are not used: those of its layers may not survive two callers (workqueue) or a fork (OpenMP). A
  child process after a fork has no helpers, and hires its own at its first large kernel.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types

from sparsebp.core import threads
from sparsebp.kernels.host.engine import compile, shipped
from sparsebp.kernels.host.engine.compile import INNER_JIT, JIT, WORTH, parts_for
from sparsebp.kernels.host.engine.simd import WORD, intrinsic

# Atomic words, and the few functions of the C library that `team` needs, inside Numba functions.
#
# A word is an int64 at an address that is a multiple of eight. All accesses are sequentially consistent.

ORDER = "seq_cst"
POSIX = hasattr(time, "clock_gettime")
"""Whether the C library has what helpers need; on Windows there are none, and the caller does all of the work."""
_WALL, _OWN = (np.int32(getattr(time, name, 0)) for name in ("CLOCK_MONOTONIC", "CLOCK_THREAD_CPUTIME_ID"))

sem_post: Any = types.ExternalFunction("sem_post", types.int32(types.intp))
sem_wait: Any = types.ExternalFunction("sem_wait", types.int32(types.intp))
mutex_lock: Any = types.ExternalFunction("pthread_mutex_lock", types.int32(types.intp))
mutex_unlock: Any = types.ExternalFunction("pthread_mutex_unlock", types.int32(types.intp))
cond_wait: Any = types.ExternalFunction("pthread_cond_wait", types.int32(types.intp, types.intp))
cond_signal: Any = types.ExternalFunction("pthread_cond_signal", types.int32(types.intp))

if POSIX:
    usleep: Any = types.ExternalFunction("usleep", types.int32(types.uint32))
else:

    @numba.njit(**INNER_JIT)
    def usleep(microseconds):
        """Return at once."""
        return np.int32(0)


if sys.platform == "linux":
    sched_getcpu: Any = types.ExternalFunction("sched_getcpu", types.int32())
    sched_setaffinity: Any = types.ExternalFunction(
        "sched_setaffinity", types.int32(types.int32, types.intp, types.intp)
    )
else:

    @numba.njit(**JIT)
    def sched_setaffinity(thread, size, cores):
        """Return -1: nobody may choose cores."""
        return np.int32(-1)

    @numba.njit(**JIT)
    def sched_getcpu():
        """Return -1: nobody knows on which core the calling thread runs."""
        return np.int32(-1)


def _word(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, WORD.as_pointer())


@intrinsic
def atomic_load(typingctx: Any, address: Any) -> Any:
    """Return the word at an address."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.load_atomic(_word(builder, args[0]), ORDER, 8)

    return types.int64(types.int64), codegen


@intrinsic
def atomic_store(typingctx: Any, address: Any, value: Any) -> Any:
    """Write the word at an address."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        builder.store_atomic(args[1], _word(builder, args[0]), ORDER, 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def atomic_add(typingctx: Any, address: Any, value: Any) -> Any:
    """Add to the word at an address; return its old value."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", _word(builder, args[0]), args[1], ORDER)

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def atomic_exchange(typingctx: Any, address: Any, old: Any, new: Any) -> Any:
    """Make the word at an address `new` if it is `old`; return whether it was."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.extract_value(builder.cmpxchg(_word(builder, args[0]), args[1], args[2], ORDER, ORDER), 1)

    return types.boolean(types.int64, types.int64, types.int64), codegen


@intrinsic
def _clock(typingctx: Any, kind: Any) -> Any:
    """Return a clock's nanoseconds; without memory of Numba's, which it might refuse."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if not POSIX:
            return WORD(0)
        place = cgutils.alloca_once(builder, ir.ArrayType(WORD, 2))
        function = ir.FunctionType(ir.IntType(32), [ir.IntType(32), place.type])
        builder.call(cgutils.get_or_insert_function(builder.module, function, "clock_gettime"), [args[0], place])
        seconds, nanoseconds = cgutils.unpack_tuple(builder, builder.load(place), 2)
        return builder.add(builder.mul(seconds, WORD(1_000_000_000)), nanoseconds)

    return types.int64(types.int32), codegen


@numba.njit(**INNER_JIT)
def wall_clock():
    """Return nanoseconds that have passed since some beginning."""
    return _clock(_WALL)


@numba.njit(**INNER_JIT)
def own_clock():
    """Return nanoseconds for which the calling thread has had a core."""
    return _clock(_OWN)


# Which core a helper runs on: another one than its caller's.
#
# A scheduler that finds no idle core wakes a thread where it ran last, or where it is woken from, and for a while after
# all cores were busy it does not look for an idle one. The thread then waits there until its caller is done.

_CORES = 1024
"""Cores of the C library's sets of them."""


def own_cores() -> np.ndarray:
    """Return the set of cores that the calling thread may run on, and space for another set."""
    cores = np.zeros((2, _CORES), np.uint8)
    if hasattr(os, "sched_getaffinity"):
        cores[0, [core for core in os.sched_getaffinity(0) if core < _CORES]] = 1
    return np.packbits(cores, bitorder="little").view(np.int64)


@numba.njit(**INNER_JIT)
def leave(core, cores):
    """Move the calling thread from a core to another one of those it may run on; return whether it has."""
    if not 0 <= core < _CORES:
        return False
    fewer, left = cores + _CORES // 8, 0
    for word in range(0, _CORES // 8, 8):
        bits = atomic_load(cores + word)
        if word == core // 64 * 8:
            bits &= ~(np.int64(1) << np.int64(core % 64))
        atomic_store(fewer + word, bits)
        left |= bits
    return left != 0 and sched_setaffinity(np.int32(0), _CORES // 8, fewer) == 0


PATIENCE = 20
"""At most a twentieth of the time is lost."""
CREDIT = 100_000_000
"""Nanoseconds before a loss that may count as time without one."""
MOST_LOST = 20_000_000
"""Nanoseconds that a team can lose in one job, in this reckoning."""
_LOSS = 200_000  # nanoseconds that count as lost: less than a scheduler takes a core away for
_LINGER = 60_000
"""Nanoseconds for which a helper looks for the next job where jobs follow each other that closely: to wake it takes as
long. Beyond, it sleeps."""
_SAME_CORE = 5_000_000  # nanoseconds for which a team stays apart where a helper was woken on the caller's own core
_SPIN = 20_000  # nanoseconds for which the caller looks, beyond a part's duration, before it leaves its core
_UNDER_WAY = 5_000_000  # nanoseconds for which a thread looks at a word that another one is about to write
_NAP = np.uint32(20)  # microseconds
_LOOKS = 64  # at a word of another thread, between two at the clock

_LINE = 64
GATE, BUSY, JOB, ERROR, STAFF, SLEEPERS, BELL = range(0, 7 * _LINE, _LINE)
RANGES = BELL + 3 * _LINE
"""Offsets in a team's memory, of a cache line each, `BELL` of three; from `RANGES` on, a line for each thread: its
range of parts, and the address of what a part raised.

GATE: the number of the job in the upper half; below, whether it is open, how many helpers came, and how many are there.
JOB: address of the function, address of its arguments, number of ranges, core of the caller, nanoseconds since the job
before, when this one was done. ERROR: code and address of what a part raised.
STAFF: most helpers, when the team meets again, address of `_together`. BELL: the C library's semaphore that helpers
sleep at. It is not a file, whose descriptor a program could close and reuse. macOS has no such semaphores: there the
bell is a mutex, a condition variable, and how often it rang."""
_CODE, _RAISED = ERROR, ERROR + 8
_FUNCTION, _ARGUMENTS, _COUNT, _CORE, _GAP, _DONE = range(JOB, JOB + 48, 8)
_MOST, RESUME, _TOGETHER = STAFF, STAFF + 8, STAFF + 16
_OPEN, _CAME, _HERE = 1 << 32, 1 << 16, 1
_NUMBER = 1 << 33
SEMAPHORES = sys.platform == "linux"
_LOW = 0xFFFF
_HALF = 0xFFFFFFFF


# ---- in Python: hiring ---------------------------------------------------------------------------------------------


class _Team:
    """The memory and the helpers of one process.

    Parameters
    ----------
    most
        How many threads there can be.

    Attributes
    ----------
    helpers
        How many were asked for; there are fewer where the system gives no more threads.
    """

    def __init__(self, most: int) -> None:
        room = np.zeros(RANGES // 8 + 8 * (most + 1), np.int64)
        self._room = room[-room.ctypes.data % _LINE // 8 :]
        self.address = int(self._room.ctypes.data)
        self.helpers = 0
        self._hired = 0
        self._rings = _new_bell(self.address + BELL)
        _rooms.append(room)

    def hire(self, helpers: int) -> None:
        """Set the number of helpers.

        All that a helper needs is compiled and loaded before it starts: a fork that finds it in the middle of that
        would leave locks of the compiler locked in the child for good.

        Raises
        ------
        OSError
            No file can be opened now to load compiled code from.
        """
        threads.prepare()
        _help.compile((types.int64, types.int64))
        self._room[_TOGETHER // 8] = _together_compiled().address
        try:
            while self._rings and self._hired < helpers:
                args = self.address, _core_sets()
                threading.Thread(target=_helper, args=args, name="sparsebp helper", daemon=True).start()
                self._hired += 1
        except RuntimeError:  # no more threads, or the interpreter is about to end: fewer will do
            pass
        self.helpers = helpers
        self._room[_MOST // 8] = min(helpers, self._hired)


def _new_bell(address: int) -> bool:
    """Make a bell at an address; return whether helpers can sleep at it."""
    library = ctypes.CDLL(None)
    if SEMAPHORES:
        made = library.sem_init(ctypes.c_void_p(address), 0, 0)
    else:
        made = library.pthread_mutex_init(ctypes.c_void_p(address), None)
        made = made or library.pthread_cond_init(ctypes.c_void_p(address + _LINE), None)
    if made:
        warnings.warn("The C library has no lock for helper threads: kernels run on one thread", RuntimeWarning,
                      stacklevel=2)  # fmt: skip
    return not made


_rooms: list[np.ndarray] = []
"""The memory of all teams and helpers: never freed, as these may sleep in it until the process ends."""
ALONE = 0
"""The team of nobody but the caller."""
_team: _Team | None = None


def team(parts: int = 2) -> int:
    """Return the address of the team for a kernel that the calling thread is about to start."""
    if parts <= 1 or (helpers := threads.count() - 1) == 0:
        return ALONE
    if _team is not None and _team.helpers == helpers:
        return _team.address
    return _hire(helpers)


def split(work: int, vectors: bool = True) -> tuple[int, int]:
    """Return the team for `work` elementary operations, and into how many parts they are split; see `parts_for`."""
    parts = 1 if vectors and work < WORTH else parts_for(work, vectors)
    return (team(parts), parts) if parts > 1 else (ALONE, 1)


def team_for(parts: int, work: int) -> int:
    """Return the address of the team for this many parts and operations; `ALONE` if it is not worth waking."""
    return team() if parts > 1 and work >= WORTH else ALONE


def _hire(helpers: int) -> int:
    global _team  # noqa: PLW0603
    if not POSIX:
        return ALONE
    with threads.lock:
        if _team is None:
            _team = _Team(threads.most_threads())
        if _team.helpers != helpers:
            try:
                _team.hire(helpers)
            except OSError:
                return ALONE
        return _team.address


PUBLISHED = np.zeros(2, np.int64)
"""For callers without an interpreter: the address of the team, or `ALONE`, and the number of threads."""


def publish() -> None:
    """Let those callers have the team, and follow `set_threads` from now on."""
    _publish(threads.get_threads())
    if _publish not in threads.followers:
        threads.followers.append(_publish)


def _publish(count: int) -> None:
    PUBLISHED[:] = ALONE, 1
    PUBLISHED[:] = ALONE if count == 1 else _hire(count - 1), count


def _after_fork() -> None:
    global _team  # noqa: PLW0603
    _team = None  # its helpers are the parent's
    PUBLISHED[0] = ALONE


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _core_sets() -> int:
    """Return the address of a new array of `own_cores`, kept as long as the process: a helper reads it."""
    sets = own_cores()
    _rooms.append(sets)
    return int(sets.ctypes.data)


def _helper(team: int, cores: int) -> None:
    threads.one_blas_thread_here()
    _help(team, cores)


# The functions below are compiled: their arguments are addresses and numbers.
# mypy: disable-error-code="no-untyped-def"


# ---- in Numba: parts -----------------------------------------------------------------------------------------------


@intrinsic
def _call(typingctx: Any, function: Any, arguments: Any, part: Any, raised: Any) -> Any:
    """Run one part; return Numba's status code, and write the exception to an address."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        kind = context.call_conv.get_function_type(types.none, (types.voidptr, types.intp))
        nothing = cgutils.alloca_once(builder, kind.args[0].pointee)
        target = builder.inttoptr(args[0], kind.as_pointer())
        given = builder.inttoptr(args[1], kind.args[2])
        code = builder.call(target, [nothing, builder.inttoptr(args[3], kind.args[1]), given, args[2]])
        return builder.sext(code, WORD)

    return types.int64(types.int64, types.int64, types.int64, types.int64), codegen


@numba.njit(**INNER_JIT)
def _take(place, first):
    """Take a part off a range, the first one or the last; -1 if there is none."""
    while True:
        both = atomic_load(place)
        low, high = both >> 32, both & _HALF
        if low >= high:
            return -1
        if first:
            if atomic_exchange(place, both, ((low + 1) << 32) | high):
                return low
        elif atomic_exchange(place, both, (low << 32) | (high - 1)):
            return high - 1


@numba.njit(**INNER_JIT)
def _run(team, me, function, arguments, part):
    raised = team + RANGES + _LINE * me + 8  # an array may be refused, and nothing may be raised here
    code = _call(function, arguments, part, raised)
    if code != 0 and atomic_exchange(team + _CODE, 0, code):
        atomic_store(team + _RAISED, atomic_load(raised))


@numba.njit(**INNER_JIT)
def _work(team, me):
    """Run parts until none is left, the thread's range first; return their number."""
    function, arguments = atomic_load(team + _FUNCTION), atomic_load(team + _ARGUMENTS)
    count, done = atomic_load(team + _COUNT), 0
    for other in range(count):
        place = team + RANGES + _LINE * ((me + other) % count)
        part = _take(place, other == 0)
        while part >= 0:
            _run(team, me, function, arguments, part)
            done += 1
            part = _take(place, other == 0)
    return done


@numba.njit(**JIT)
def _apart(team, until):
    """Let the caller work alone until then, or longer if that has been decided."""
    while True:
        resume = atomic_load(team + RESUME)
        if resume >= until or atomic_exchange(team + RESUME, resume, until):
            return


if SEMAPHORES:

    @numba.njit(**INNER_JIT)
    def _ring(bell):
        sem_post(bell)

    @numba.njit(**INNER_JIT)
    def _sleep(bell):
        while sem_wait(bell) != 0:  # interrupted by a signal
            pass

else:

    @numba.njit(**INNER_JIT)
    def _ring(bell):
        mutex_lock(bell)
        atomic_add(bell + 2 * _LINE, 1)
        cond_signal(bell + _LINE)
        mutex_unlock(bell)

    @numba.njit(**INNER_JIT)
    def _sleep(bell):
        mutex_lock(bell)
        while atomic_load(bell + 2 * _LINE) == 0:
            cond_wait(bell + _LINE, bell)
        atomic_add(bell + 2 * _LINE, -1)
        mutex_unlock(bell)


@numba.njit(**JIT)
def _help(team, cores):
    """A helper's loop: sleep, and when woken, work on the open job unless it has enough helpers."""
    while True:
        atomic_add(team + SLEEPERS, 1)
        _sleep(team + BELL)
        seen, end = -1, 0
        while True:
            gate = atomic_load(team + GATE)
            if gate & _OPEN == 0 or gate // _NUMBER == seen:
                if wall_clock() >= end:
                    break
            elif sched_getcpu() == atomic_load(team + _CORE) and not leave(atomic_load(team + _CORE), cores):
                _apart(team, wall_clock() + _SAME_CORE)
                break
            elif atomic_exchange(team + GATE, gate, gate + _CAME + _HERE):
                # the job does not change while a helper works on it
                seen, me = gate // _NUMBER, (gate // _CAME & _LOW) + 1
                if me < atomic_load(team + _COUNT):
                    _work(team, me)
                closely = atomic_load(team + _GAP) < _LINGER
                atomic_add(team + GATE, -_HERE)
                end = wall_clock() + _LINGER if closely else 0


@numba.njit(**INNER_JIT)
def _wake(team, wanted):
    """Ring for as many helpers as are wanted, of those that sleep."""
    while True:
        sleepers = atomic_load(team + SLEEPERS)
        called = min(sleepers, wanted)
        if called <= 0:
            return
        if atomic_exchange(team + SLEEPERS, sleepers, sleepers - called):
            for _ in range(called):
                _ring(team + BELL)
            return


def _together(team, function, arguments, parts, raised):
    """Run all parts; return Numba's code of an error, and write its address to the address `raised`."""
    most, start = min(atomic_load(team + _MOST), parts - 1), wall_clock()
    if most <= 0 or start < atomic_load(team + RESUME) or not atomic_exchange(team + BUSY, 0, 1):
        for part in range(parts):
            code = _call(function, arguments, part, raised)
            if code != 0:
                return code
        return 0
    own = own_clock()
    atomic_store(team + _FUNCTION, function)
    atomic_store(team + _ARGUMENTS, arguments)
    atomic_store(team + _COUNT, most + 1)
    atomic_store(team + _CODE, 0)
    core = sched_getcpu()
    atomic_store(team + _CORE, core if core >= 0 else -2)  # -1 is nobody's
    atomic_store(team + _GAP, start - atomic_load(team + _DONE))
    for i in range(most + 1):
        low, high = i * parts // (most + 1), (i + 1) * parts // (most + 1)
        atomic_store(team + RANGES + _LINE * i, (low << 32) | high)
    atomic_store(team + GATE, (atomic_load(team + GATE) // _NUMBER + 1) * _NUMBER + _OPEN)
    _wake(team, most)
    done = _work(team, 0)
    atomic_add(team + GATE, -_OPEN)
    _finish(team, start, own, done)
    atomic_store(team + _DONE, wall_clock())
    code = atomic_load(team + _CODE)
    atomic_store(raised, atomic_load(team + _RAISED))
    atomic_store(team + BUSY, 0)
    return code


@cache
def _together_compiled() -> Any:
    """Return `_together` as kernels call it, by an address: so it is compiled once, and not into each of them."""
    return shipped.cfunc(types.int64(*[types.int64] * 5), _together, **JIT)


@numba.njit(**INNER_JIT)
def _finish(team, start, own, done):
    """Wait for helpers that have begun a part, and measure the time lost to other processes."""
    ready = wall_clock()
    lost = (ready - start) - (own_clock() - own)
    usual = (ready - start - lost) // max(done, 1)
    now = ready
    while atomic_load(team + GATE) & _LOW:
        if now - ready > usual + _SPIN:
            usleep(_NAP)  # the helper may wait for this very core
        now = wall_clock()
    _lose(team, now, lost + max(now - ready - 2 * usual, 0))


@numba.njit(**JIT)
def _lose(team, now, lost):
    """Let the caller work alone for a while if a job that ends now has lost that many nanoseconds."""
    if lost > _LOSS:
        _apart(team, max(atomic_load(team + RESUME), now - CREDIT) + PATIENCE * min(lost, MOST_LOST))


# Turns: parts of which each may begin when all of the turn before are done, inside one job.
#
# A job of its own for every turn takes some two microseconds. Here each thread of a job goes through all turns, and
# for every part there is a word, in a line of its own: twice the turn it has come to, plus one while it runs. Parts of
# a thread that does not come are run by the others. Their code must not raise anything.


@numba.njit(**INNER_JIT)
def turns_of(team, parts):
    """Return how many threads of a team can share the parts of a turn, words for them, and the address of the first.

    The caller keeps the words alive.
    """
    threads = min(parts, atomic_load(team + _MOST) + 1) if team != ALONE else 1
    words = np.zeros((threads + 1) * _LINE // 8, np.int64)
    return threads, words, (words.ctypes.data + _LINE - 1) // _LINE * _LINE


@numba.njit(**INNER_JIT)
def next_part(words, me, parts, turn):
    """Return a part of a turn that nobody has begun, number `me` first; -1 when all of them are done.

    `words`: the address of the first. The part before must have been reported by `end_part`.
    """
    begun = 2 * turn + 1
    for other in range(parts):
        part = (me + other) % parts
        place = words + _LINE * part
        state = atomic_load(place)
        if state < begun and atomic_exchange(place, state, begun):
            return part
    ready = wall_clock()
    for part in range(parts):
        looks = 0
        while atomic_load(words + _LINE * part) <= begun:
            looks += 1
            if looks % _LOOKS == 0 and wall_clock() - ready > _SPIN:
                usleep(_NAP)  # the other thread may wait for this very core
    return -1


@numba.njit(**INNER_JIT)
def wait_for(word):
    """Wait until a word, which another thread of the job writes, is no longer 0.

    What it waits for is under way, and may take milliseconds: only beyond does the caller leave its core, which counts
    as time that the team has lost.
    """
    looks, ready = 0, wall_clock()
    while atomic_load(word) == 0:
        looks += 1
        if looks % _LOOKS == 0 and wall_clock() - ready > _UNDER_WAY:
            usleep(_NAP)  # the other thread may wait for this very core


@numba.njit(**INNER_JIT)
def end_part(words, part, turn):
    """Report a part as done."""
    atomic_store(words + _LINE * part, 2 * turn + 2)


@intrinsic
def in_parts(typingctx: Any, body: Any, team: Any, parts: Any, args: Any) -> Any:
    """Call ``body(part, *args)`` for every part of ``range(parts)``, on the threads of a team; raise what one raises.

    `body` is a compiled function that returns nothing; `args` is a tuple that all parts share.
    """
    body_signature = body.get_call_type(typingctx, (types.intp, *args.types), {})

    def codegen(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        # The body with its arguments unpacked, as a separate function that has an address.
        convention = context.call_conv
        kind = convention.get_function_type(types.none, (types.voidptr, types.intp))
        name = builder.module.get_unique_name(builder.function.name + ".part")
        function = ir.Function(builder.module, kind, name)
        function.linkage = "internal"
        function.attributes.add("noinline")  # it is called from two places
        convention.decorate_function(function, ("arguments", "part"), (types.voidptr, types.intp))
        inside = ir.IRBuilder(function.append_basic_block("entry"))
        arguments, part = convention.get_arguments(function)
        packed = inside.load(inside.bitcast(arguments, values[3].type.as_pointer()))
        unpacked = cgutils.unpack_tuple(inside, packed, len(args.types))
        context.get_function(body, body_signature)(inside, [part, *unpacked])
        convention.return_value(inside, context.get_constant_null(types.none))

        shared, raised = cgutils.alloca_once_value(builder, values[3]), cgutils.alloca_once_value(builder, WORD(0))
        code = cgutils.alloca_once_value(builder, WORD(0))
        with builder.if_else(builder.icmp_signed("==", values[1], WORD(ALONE))) as (alone, together):
            with alone:
                nothing = cgutils.alloca_once(builder, kind.args[0].pointee)
                excinfo = builder.bitcast(raised, kind.args[1])
                given = builder.bitcast(shared, kind.args[2])
                with cgutils.for_range(builder, values[2]) as loop:
                    ended = builder.sext(builder.call(function, [nothing, excinfo, given, loop.index]), WORD)
                    builder.store(ended, code)
                    with cgutils.if_unlikely(builder, builder.icmp_signed("!=", ended, WORD(0))):
                        loop.do_break()
            with together:
                at = builder.inttoptr(builder.add(values[1], WORD(_TOGETHER)), WORD.as_pointer())
                called = builder.inttoptr(builder.load(at), ir.FunctionType(WORD, [WORD] * 5).as_pointer())
                addresses = (builder.ptrtoint(function, WORD), builder.ptrtoint(shared, WORD))
                place = builder.ptrtoint(raised, WORD)
                builder.store(builder.call(called, [values[1], *addresses, values[2], place]), code)
        ended = builder.load(code)
        with cgutils.if_unlikely(builder, builder.icmp_signed("!=", ended, WORD(0))):
            at = builder.inttoptr(builder.load(raised), kind.args[1].pointee)
            status = convention._get_return_status(builder, builder.trunc(ended, ir.IntType(32)), at)
            convention.return_status_propagate(builder, status)
        return context.get_dummy_value()

    return types.void(body, team, parts, args), codegen


def parallel(**options: Any) -> Callable[[Callable[..., None]], Any]:
    """Return a decorator for the body of a kernel: a function ``body(part, parts, *args)`` that runs one part.

    Python then calls ``body(team, parts, *args)``, compiled with these options.
    """

    def decorate(body: Callable[..., None]) -> Any:
        code = body.__code__
        at_body = _all_parts.__code__.replace(co_filename=code.co_filename, co_firstlineno=code.co_firstlineno)
        inner_body = numba.njit(**{**options, "cache": False, **compile.OPTIONS})(body)
        kernel = FunctionType(at_body, {"in_parts": in_parts, "body": inner_body}, body.__name__)
        kernel.__qualname__, kernel.__module__ = body.__qualname__, body.__module__  # Numba keeps it under these
        return numba.njit(**options)(kernel)

    return decorate


def _all_parts(team, *args):
    in_parts(body, team, args[0], args)  # type: ignore[name-defined]  # noqa: F821
