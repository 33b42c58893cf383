"""Timing on a GPU that can be believed: the GPU's time and the host's apart, the clock measured, all rounds kept.

A short kernel takes the GPU less time than its launch takes the host. So calls are timed while they wait behind a
kernel that spins until the host has made all of them: the GPU then goes from one to the next. That kernel counts
cycles, so its own time gives the clock; the one that a device reports is its highest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.harness import Row
from sparsebp.core import backend, timing

COPIES = 20
"""Calls that are timed together."""
_SPIN = """
extern "C" __global__ void spin(long long cycles) {
    const long long begin = clock64();
    while (clock64() - begin < cycles) {
    }
}
"""
_SHORTEST_SPIN, _LONGEST_SPIN = 2_000_000, 128_000_000
"""Cycles: 1 ms, and 65 ms, in which a host gives away more launches than CUDA queues."""


class Queued:
    """Times calls whose launches wait behind a kernel that spins until the host has made all of them."""

    def __init__(self, cupy: ModuleType) -> None:
        self._cupy, self._cycles = cupy, _SHORTEST_SPIN
        self._kernel = cupy.RawModule(code=_SPIN, backend="nvrtc").get_function("spin")

    def spin(self) -> None:
        """Let the current stream wait."""
        self._kernel((1,), (1,), (np.int64(self._cycles),))

    def __call__(self, call: timing.Call, copies: int = COPIES, queue: bool = True) -> Row:
        """Return the seconds of a call: the GPU's, and the host's until it returns; the clock in Hz.

        ``queued``: whether all calls were made while the kernel spun. Where they cannot be, as more launches are not
        queued or the host waits for a result, and without `queue`, the seconds are those of both together.
        """
        event, elapsed = self._cupy.cuda.Event, self._cupy.cuda.get_elapsed_time
        while True:
            prepared = [call.prepare() for _ in range(copies)]
            before, start, stop = event(), event(), event()
            self._cupy.cuda.Device().synchronize()  # synchronize!
            before.record()
            self.spin()
            start.record()
            if not queue:
                start.synchronize()  # synchronize!
            begin = time.perf_counter()
            for item in prepared:
                call.run(item)
            host = time.perf_counter() - begin
            queued = not start.done
            stop.record()
            stop.synchronize()  # synchronize!
            if queued or not queue or self._cycles >= _LONGEST_SPIN:
                break
            self._cycles *= 4
        hertz = self._cycles / (1e-3 * elapsed(before, start))
        return {
            "seconds": 1e-3 * elapsed(start, stop) / copies,
            "host": host / copies,
            "hertz": hertz,
            "queued": queued,
        }


def measured(
    calls: Mapping[str, timing.Call | Callable[[], object]], xp: ModuleType, rounds: Mapping[str, Any], *,
    queue: bool = True,
) -> dict[str, Row]:  # fmt: skip
    """Time every side in turn; return for each median, quartiles and all rounds, and the medians of `Queued`'s others.

    On the host, for tests of what surrounds it, by the host's clock.
    """
    options = {name: value for name, value in rounds.items() if name not in ("warmup", "copies")}
    warmup = max(rounds.get("warmup", 2), 1)
    if backend.is_host(xp):
        found = timing.measure(calls, warmup=warmup, **options)
        return {name: {**each.to_dict(), "all": list(each.seconds)} for name, each in found.items()}
    timed, kept = Queued(xp), {name: list[Row]() for name in calls}

    def timer(name: str, side: timing.Call | Callable[[], object]) -> Callable[[], float]:
        call = side if isinstance(side, timing.Call) else timing.Call(lambda _: side())
        for _ in range(warmup):
            call.run(call.prepare())

        def once() -> float:
            kept[name].append(timed(call, rounds.get("copies", COPIES), queue))
            return float(kept[name][-1]["seconds"])

        return once

    timers = {name: timer(name, side) for name, side in calls.items()}
    found = timing.in_turn(timers, **options)
    rows: dict[str, Row] = {}
    for name, each in found.items():
        others = {key: float(np.median([row[key] for row in kept[name]])) for key in ("host", "hertz")}
        queued = all(row["queued"] for row in kept[name])
        rows[name] = {**each.to_dict(), "all": list(each.seconds), **others, "queued": queued}
    return rows


def ratio(peer: Row, ours: Row) -> dict[str, float]:
    """Return the quartiles of ``peer / ours`` by round, of what `measured` returns."""
    return timing.ratio(timing.Timing(tuple(peer["all"])), timing.Timing(tuple(ours["all"])))


WARM = 4
"""Calls before the clock starts, and before PyTorch captures one."""


def torch_replay(call: Callable[[], object]) -> Callable[[], None]:
    """Capture a call of PyTorch's into a CUDA graph, by the recipe of its notes, and return the replay."""
    torch = harness.import_torch()
    beside, graph, before = torch.cuda.Stream(), torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    beside.wait_stream(before)
    with torch.cuda.stream(beside):  # a capture must find everything made, and memory in the pools of its stream
        for _ in range(WARM):
            call()
    before.wait_stream(beside)
    try:
        with torch.cuda.graph(graph, stream=beside):
            call()
    except Exception:
        torch.cuda.set_stream(before)  # a capture that cannot end stays on its own
        raise
    return partial(_replay, graph, call)


def _replay(graph: Any, call: Callable[[], object]) -> None:
    """Run a graph; `call` comes along because it holds the arrays that the graph reads and writes."""
    graph.replay()


def kernel_names(call: Callable[[], object]) -> list[str]:
    """Return the names of the kernels that a call of PyTorch's launches, by its profiler; on a CPU, operators."""
    torch = harness.import_torch()
    kinds = torch.profiler.ProfilerActivity
    there = [kinds.CPU, *([kinds.CUDA] if torch.cuda.is_available() else [])]
    with torch.profiler.profile(activities=there) as profile:
        call()
        if len(there) > 1:
            torch.cuda.synchronize()
    device = "CUDA" if len(there) > 1 else "CPU"
    events = [event.name for event in profile.events() if event.device_type.name == device]
    return list(dict.fromkeys(events))
