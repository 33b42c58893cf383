"""A sequence of a million steps on two ranks, against one worker that holds all of it.

``python -m benchmarks time-parallel``. RNN(1, 20) and GRU(38, 20), B = 1, float32; two processes of MPI, a thread each,
and one worker with one thread and with as many threads as there are ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks.processes.counted import Counted
from benchmarks.processes.ranks import on_ranks
from benchmarks.tools import pictures
from benchmarks.tools.benchmark import Benchmark, Result, Row, Run, refuse_difference
from benchmarks.tools.workload import CELLS
from sparsebp import nn
from sparsebp.comm.transport import Transport
from sparsebp.core import tables, timing
from sparsebp.core.tables import Column
from sparsebp.core.threads import most_threads, set_threads
from sparsebp.runtime.time_parallel import TimeParallel, stretch

WAYS = ("maps", "vectors")
PARTS = ("forward", "backward", "step")


def measure(run: Run) -> Iterator[Row]:
    """Measure both cells by both ways."""
    settings = run.settings
    for cell in CELLS:
        for ranks in settings["ranks"]:
            if ranks > most_threads():
                run.note(f"{ranks} ranks: left out, this machine has {most_threads()} cores")
                continue
            found = on_ranks(
                ranks, __name__, threads=ranks, cell=cell, length=settings["length"], batch=settings["batch"],
                rounds=run.rounds["rounds"],
            )  # fmt: skip
            yield from rows(cell, ranks, settings["length"], found)


def rows(cell: str, ranks: int, length: int, found: dict[str, Any]) -> Iterator[Row]:
    """Return the rows of one run on ranks, one a way."""
    timings = {
        side: {part: timing.Timing(tuple(seconds)) for part, seconds in parts.items()}
        for side, parts in found["seconds"].items()
    }
    for way in WAYS:
        row: Row = {
            "model": f"{cell}({CELLS[cell][0]}, {CELLS[cell][1]})", "length": length, "ranks": ranks, "way": way,
            "gradient_difference": found["difference"][way], "kept": found["kept"][way],
            "kept_whole": found["kept_whole"], "sent": found["sent"][way], **found["volume"][way],
        }  # fmt: skip
        refuse_difference(f"The gradient of {row['model']} on {ranks} ranks", "one worker", row["gradient_difference"])
        for part in PARTS:
            row[part] = timings[way][part].to_dict()
            for side in ("one", "same"):
                row[f"{part}_{side}"] = timings[side][part].to_dict()
                row[f"{part}_{side}_ratio"] = timing.ratio(timings[side][part], timings[way][part])
        yield row


# ---- on every rank -------------------------------------------------------------------------------------------------


def work(transport: Transport, cell: str, length: int, batch: int, rounds: int) -> dict[str, Any]:
    """Measure one cell: both ways on all ranks, and rank 0 alone while the others wait, in turn."""
    features, hidden = CELLS[cell]
    layer, counted = getattr(nn, cell)(features, hidden, rng=0), Counted(transport)
    x, share = (
        np.random.default_rng(0).standard_normal((length, batch, features), np.float32),
        stretch(length, transport),
    )
    own = x[share].copy()
    models = {way: TimeParallel(layer, counted, way) for way in WAYS}  # type: ignore[arg-type]
    grads: dict[str, dict[str, Any]] = {}
    kept: dict[str, int] = {}

    def go(side: str, model: Any, mine: Any, threads: int) -> dict[str, float]:
        """Run forward, and back to all gradients; what arrives is the gradient of the mean square of all states."""
        set_threads(threads)
        began = meet(transport)
        if mine is not None:
            y, saved = model.forward(mine)
            kept[side] = sum(array.nbytes for tape in saved.tapes for array in tape.arrays())
        middle = meet(transport)
        if mine is not None:
            g = model.gradients(y * np.float32(1 / length), saved)
            grads[side] = g.weights
            _ = g.input
        ended = meet(transport)
        set_threads(1)
        return {"forward": middle - began, "backward": ended - middle, "step": ended - began}

    whole = x if transport.rank == 0 else None
    sides: dict[str, Callable[[], dict[str, float]]] = {
        "maps": lambda: go("maps", models["maps"], own, 1),
        "vectors": lambda: go("vectors", models["vectors"], own, 1),
        "one": lambda: go("one", layer, whole, 1),
        "same": lambda: go("same", layer, whole, transport.size),
    }
    volume, sent = {}, {}
    for name, run in sides.items():  # the first run compiles, and is counted
        counted.reset()
        run()
        if name in WAYS:
            itemsize = x.itemsize
            most = transport.share({call: itemsize * count for call, count in counted.values.items()})
            volume[name] = {f"sent_{call}": max(one.get(call, 0) for one in most) for call in SENT}
            sent[name] = max(sum(one.values()) for one in most)
    seconds: dict[str, dict[str, list[float]]] = {name: {part: [] for part in PARTS} for name in sides}
    names = list(sides)
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            for part, took in sides[name]().items():
                seconds[name][part].append(took)
    difference = {way: _difference(grads[way], grads.get("one", grads[way])) for way in WAYS}
    most_kept = {way: max(transport.share(kept[way])) for way in WAYS}
    return {
        "seconds": seconds, "difference": difference, "kept": most_kept, "kept_whole": kept.get("one", 0),
        "volume": volume, "sent": sent,
    }  # fmt: skip


SENT = ("exscan", "isend", "allreduce")


def meet(transport: Transport) -> float:
    """Wait for all ranks, and return the time."""
    transport.barrier()
    return time.perf_counter()


def _difference(found: dict[str, Any], wanted: dict[str, Any]) -> float:
    """Return the largest difference of gradients, relative to the largest value of each."""
    return max(
        float(np.abs(grad - found[name]).max() / max(np.abs(grad).max(), np.finfo(grad.dtype).tiny))
        for name, grad in wanted.items()
    )


def picture(result: Result) -> Any:
    """Draw forward and backward, on ranks by either way and on one worker."""
    found = result["rows"]
    labels = [f"{row['model']}  T={row['length']}\n{row['ranks']} ranks, {row['way']}" for row in found]
    sides = (("one worker", "_one", ("#9a3412", "#fdba74")), ("ranks", "", ("#1e40af", "#93c5fd")))
    bars = [
        (f"{name}: {part}", colour, [row[f"{part}{suffix}"]["median"] * 1e3 for row in found])
        for name, suffix, colours in sides
        for part, colour in zip(("forward", "backward"), colours, strict=True)
    ]
    drawing, ax = pictures.bar_chart(labels, bars, "milliseconds (median)", each=0.7)
    pictures.legend_below(drawing)
    ax.grid(axis="x", alpha=0.3)
    return drawing


BENCHMARK = Benchmark(
    name="time-parallel",
    title="A sequence of {length} steps on ranks, against one worker: B = {batch}, hidden size 20, float32",
    leaves_out="nothing; step = forward, all parameters' gradients and the input's, sums over the ranks included",
    settings={"batch": 1, "dtype": "float32"},
    sizes={"length": 1_000_000, "ranks": (2,)},
    quick={"length": 301, "ranks": (2,)},
    rounds={"rounds": 7},
    threads=None,
    measure=measure,
    columns=(
        Column("model", "model", number=False),
        Column("ranks", "ranks"),
        Column("by", "way", number=False),
        Column("forward", "forward", tables.seconds),
        Column("forward, one worker", "forward_one", tables.seconds),
        Column("backward", "backward", tables.seconds),
        Column("backward, one worker", "backward_one", tables.seconds),
        Column("backward, over one worker", "backward_one_ratio", tables.times),
        Column("step", "step", tables.seconds),
        Column("step, one worker", "step_one", tables.seconds),
        Column("step, over one worker", "step_one_ratio", tables.times),
        Column("over one of as many threads", "step_same_ratio", tables.times),
        Column("map", "sent_exscan", tables.size),
        Column("vectors", "sent_isend", tables.size),
        Column("weights", "sent_allreduce", tables.size),
        Column("kept by a rank", "kept", tables.size),
        Column("kept by one worker", "kept_whole", tables.size),
        Column("difference", "gradient_difference", "{:.1e}".format),
    ),
    tables={
        "Forward, and back": (
            "model", "ranks", "way", "forward", "forward_one", "backward", "backward_one", "backward_one_ratio",
        ),
        "The whole step": (
            "model", "ranks", "way", "step", "step_one", "step_one_ratio", "step_same_ratio", "gradient_difference",
        ),
        "What the rank that sends most sends, and what forward keeps": (
            "model", "ranks", "way", "sent_exscan", "sent_isend", "sent_allreduce", "kept", "kept_whole",
        ),
    },
    short=("model", "ranks", "way", "backward", "backward_one", "backward_one_ratio", "sent_exscan"),
    picture=picture,
)  # fmt: skip
