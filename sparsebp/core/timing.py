"""Timing two or more sides in turn, in one run, so that drift of the machine affects all of them alike.

Every round runs each side once and starts with the next side. Reported are the median and quartiles over rounds, and
the *ratio of each round* (peer over ours), as median and quartiles too: a ratio of two medians would hide the drift.
Preparation (an untimed forward pass) is not timed, and garbage collection is off while the clock runs.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from sparsebp.core.errors import OptionError

SHORT = 1e-3
"""Runs shorter than this many seconds are timed several at once."""

WARM = 3
"""Untimed runs between the rest and the clock, for runs shorter than `SHORT`; longer ones get one."""


_WINDOW, _ASLEEP, _MOST_REST = 4e-3, 0.1, 0.5
"""Seconds for which other threads are watched, the share of them that idle threads may use, and the longest wait."""


class Clock(Protocol):
    """Times one call."""

    rest: float
    """Seconds of rest before each timing."""

    def __call__(self, run: Callable[[], object]) -> float:
        """Return the seconds of one run."""
        ...


class HostClock:
    """`time.perf_counter` around the call."""

    rest = 30e-3

    def __call__(self, run: Callable[[], object]) -> float:
        """Return the seconds of one run."""
        start = time.perf_counter()
        run()
        return time.perf_counter() - start


@dataclass(frozen=True)
class Call:
    """One side of a comparison."""

    run: Callable[[Any], object]  # timed; takes the result of `prepare`
    prepare: Callable[[], Any] = lambda: None  # not timed, before every run


@dataclass(frozen=True)
class Timing:
    """Seconds of one side, one value per round."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Median over the rounds, in seconds."""
        return float(np.median(self.seconds))

    @property
    def quartiles(self) -> tuple[float, float]:
        """Lower and upper quartile over the rounds, in seconds."""
        low, high = np.quantile(self.seconds, (0.25, 0.75))
        return float(low), float(high)

    def to_dict(self) -> dict[str, float | int]:
        """Return median, quartiles (seconds) and the number of rounds, for JSON."""
        low, high = self.quartiles
        return {"median": self.median, "low": low, "high": high, "rounds": len(self.seconds)}


def ratio(peer: Timing, ours: Timing) -> dict[str, float]:
    """Return median and quartiles of ``peer / ours`` by round; above 1, ours is faster."""
    return Timing(tuple(p / o for p, o in zip(peer.seconds, ours.seconds, strict=True))).to_dict()


def side_by_side(timings: Mapping[str, Timing]) -> dict[str, Any]:
    """Return the columns of a row: each side's time by name, and its ratio to ``"ours"``."""
    ratios = {f"{name}_ratio": ratio(side, timings["ours"]) for name, side in timings.items() if name != "ours"}
    return {name: side.to_dict() for name, side in timings.items()} | ratios


def measure(
    calls: Mapping[str, Call | Callable[[], object]], *, rounds: int = 15, least_rounds: int = 5, warmup: int = 2,
    budget: float = 20.0, clock: Clock | None = None,
) -> dict[str, Timing]:  # fmt: skip
    """Time every side in turn; return a `Timing` per side, all with the same number of rounds."""
    # calls: a function stands for a `Call` without preparation. rounds, least_rounds: runs of each side; after about
    # `budget` seconds no more than `least_rounds`. warmup: untimed runs of each side (compiling, caches, thread pools).
    timers = {name: timer(call, warmup, clock) for name, call in calls.items()}
    return in_turn(timers, rounds=rounds, least_rounds=least_rounds, budget=budget)


def timer(side: Call | Callable[[], object], warmup: int = 2, clock: Clock | None = None) -> Callable[[], float]:
    """Warm a side up; return a function that times it once and returns the seconds per run."""
    chosen = HostClock() if clock is None else clock
    call = side if isinstance(side, Call) else Call(lambda _: side())
    together = _runs_together(call, warmup, chosen)
    return lambda: _time(call, together, chosen)


def in_turn(
    timers: Mapping[str, Callable[[], float]], *, rounds: int = 15, least_rounds: int = 5, budget: float = 20.0
) -> dict[str, Timing]:
    """Time every side in turn, as `measure`, by the functions that `timer` returns, here or in another process."""
    if not 1 <= least_rounds <= rounds:
        raise OptionError("The number of rounds does not fit", expected="1 <= least_rounds <= rounds",
                          got=f"rounds={rounds}, least_rounds={least_rounds}")  # fmt: skip
    seconds: dict[str, list[float]] = {name: [] for name in timers}
    names = list(timers)
    begin = time.perf_counter()
    for done in range(rounds):
        if done >= least_rounds and time.perf_counter() - begin > budget:
            break
        for name in names[done % len(names) :] + names[: done % len(names)]:
            seconds[name].append(timers[name]())
    return {name: Timing(tuple(values)) for name, values in seconds.items()}


def _runs_together(call: Call, warmup: int, clock: Clock) -> int:
    took = SHORT
    for _ in range(max(warmup, 1)):
        took = _time(call, 1, clock)
    return min(1000, math.ceil(SHORT / max(took, 1e-9)))  # several of all that are shorter, so that they are warm


def _time(call: Call, runs: int, clock: Clock) -> float:
    warm = WARM if runs > 1 else 1
    prepared = [call.prepare() for _ in range(warm + runs)]

    def run_all() -> None:
        for item in prepared[warm:]:
            call.run(item)

    _rest(clock.rest)
    collecting = gc.isenabled()
    gc.disable()
    try:
        for item in prepared[:warm]:  # wakes its own threads: a training loop is timed
            call.run(item)
        return clock(run_all) / runs
    finally:
        if collecting:
            gc.enable()


def _rest(seconds: float) -> None:
    """Wait this long, then until other thread pools are idle, without sleeping."""
    # The threads of the previous side keep spinning, PyTorch's for some 10 ms and OpenBLAS's for 100 ms; a training
    # loop of one side does not meet them. A worker woken by a thread that has just slept may be put on the same core
    # and wait there for some 8 ms, which does not happen in a training loop either.
    now = time.perf_counter()
    end, latest = now + seconds, now + seconds + _MOST_REST
    while now < latest:
        others, begin = _of_other_threads(), now
        while now < begin + _WINDOW:
            now = time.perf_counter()
        if now >= end and _of_other_threads() - others < _ASLEEP * (now - begin):
            return


def _of_other_threads() -> float:
    """Return the CPU seconds of this process's other threads."""
    return time.process_time() - time.thread_time()
