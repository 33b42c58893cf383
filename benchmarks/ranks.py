"""A sequence of a million steps on two ranks, against one worker that holds all of it.

``python -m benchmarks time-parallel``. RNN(1, 20) and GRU(38, 20), B = 1, float32; two processes of MPI, a thread each,
and one worker with one thread and with as many threads as there are ranks.
"""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.harness import Benchmark, Overview, Row, Run, columns, import_torch, refuse_difference
from benchmarks.processes import on_ranks
from benchmarks.workloads import CELLS, mlp, stacked, torch_twin
from sparsebp import nn, optim
from sparsebp.comm.transport import Handle, Transport
from sparsebp.core import timing
from sparsebp.core.check import Array
from sparsebp.core.tables import Column
from sparsebp.core.threads import most_threads, set_threads
from sparsebp.core.timing import Timing, ratio
from sparsebp.runtime.actions import Stages, Step, StepFunction
from sparsebp.runtime.pipeline import PipelineExecutor
from sparsebp.runtime.replicas import ReplicaExecutor, ReverseFirstKExecutor
from sparsebp.runtime.time_parallel import TimeParallel, stretch
from sparsebp.schedule import Action, Schedule
from sparsebp.schedule.builders import build, data_parallel, place_updates, reverse_first_k

# A transport that counts the volume that a rank sends, by kind of call.


def _counting(name: str) -> Any:
    def call(self: Counted, array: Array, *arguments: Any) -> Any:
        self.calls[name] += 1
        self.values[name] += array.size
        return getattr(self._carrier, name)(array, *arguments)

    return call


def _passing(name: str) -> Any:
    return lambda self, *arguments, **options: getattr(self._carrier, name)(*arguments, **options)


class Counted(Transport):
    """Passes every call on to another transport; counts calls and array elements of those that send, by their names."""

    def __init__(self, transport: Transport) -> None:
        self._carrier = transport
        self.rank, self.size, self.on_device = transport.rank, transport.size, transport.on_device
        self.reset()

    def reset(self) -> None:
        """Begin to count anew."""
        self.calls, self.values = Counter[str](), Counter[str]()

    isend, allreduce, exscan = map(_counting, ("isend", "allreduce", "exscan"))
    reduce_scatter, allgather = map(_counting, ("reduce_scatter", "allgather"))
    irecv, share, broadcast = map(_passing, ("irecv", "share", "broadcast"))
    barrier, abort, close = map(_passing, ("barrier", "abort", "close"))


# The ranks of the benchmark of data-parallel training, see `benchmarks.processes`.

SGD: dict[str, Any] = {"lr": 1e-3, "momentum": 0.9}
_FEW = 64  # bytes


class Network:
    """A transport with a network of a stated bandwidth behind it, which takes no core: sums come that much later."""

    def __init__(self, inner: Transport, bandwidth: float | None) -> None:
        self.inner, self.rank, self.size, self.on_device = inner, inner.rank, inner.size, inner.on_device
        self.share, self.barrier, self.broadcast = inner.share, inner.barrier, inner.broadcast
        self.bandwidth, self.free = bandwidth, 0.0

    def allreduce(self, array: Any) -> Handle:
        """Begin to sum."""
        if self.bandwidth is None or array.nbytes <= _FEW:
            return self.inner.allreduce(array)
        if self.bandwidth == 0:
            return _Later(None, 0.0)
        seconds = 2 * (self.size - 1) / self.size * array.nbytes / self.bandwidth
        self.free = max(self.free, time.perf_counter()) + seconds
        return _Later(self.inner.allreduce(array), self.free)


class _Later:
    def __init__(self, inner: Handle | None, due: float) -> None:
        self.inner, self.due = inner, due

    def wait(self) -> None:
        if self.inner is not None:
            self.inner.wait()
        time.sleep(max(0.0, self.due - time.perf_counter()))

    def done(self) -> bool:
        return (self.inner is None or self.inner.done()) and time.perf_counter() >= self.due


def waiting(schedule: Schedule) -> Schedule:
    """Return `schedule` with its synchronisations behind the gradients, on the stream that computes."""
    main, link = schedule.lanes
    last = max(place for place, cell in enumerate(main.cells) if str(cell).strip("0123456789") == "W")
    cells = main.cells[: last + 1] + link.cells + main.cells[last + 1 :]
    return replace(schedule, lanes=(replace(main, cells=cells),), name="conventional")


class Sides:
    """All sides: our schedules on one model and one optimizer's state, and PyTorch's replicas.

    `runs` has functions of a number of steps; `k` is the one that reverse first-k found.
    """

    def __init__(self, transport: Transport, given: Mapping[str, Any]) -> None:
        self.transport = transport
        rng = np.random.default_rng([1, transport.rank])
        x = rng.standard_normal((given["batch"], given["width"]), np.float32)
        self.batches = [(x, rng.integers(given["width"], size=given["batch"]))]
        model = mlp(given["width"], given["depth"])
        self.runs: dict[str, Callable[[int], object]] = {}
        if given["peer"]:
            self.runs["torch"] = self._torch(model)
        optimizer = optim.SGD(model.parameters(), **SGD)
        parts: tuple[Any, Any, Any] = (model, nn.CrossEntropyLoss(), optimizer)
        network: Any = Network(transport, given["bandwidth"])
        first = ReverseFirstKExecutor(*parts, network)
        first.step(self.batches)
        first.flush()
        if given["peer"]:
            self.runs["torch"](1)
            self._compare(model)
        while first.k is None:
            first.step(self.batches)
        first.flush()
        size: dict[str, Any] = {"stages": len(first.stages), "unweighted": first.stages.unweighted}
        self.k, costs = first.k, first.costs
        schedules = {
            "waits": waiting(data_parallel(**size, fusion="none")),
            "overlap": data_parallel(**size),
            "priority": place_updates(reverse_first_k(**size, k=0, costs=costs), "forward"),
            "reverse": first.schedule,
        }
        silent: Any = Network(transport, 0)
        for name, schedule in schedules.items():
            for kind, carrier in (("", network), (", alone", silent)):
                executor = ReplicaExecutor(*parts, schedule, carrier)
                self.runs[name + kind] = self._steps(executor)
        buckets = ReplicaExecutor(*parts, schedules["overlap"], network).buckets
        self.bytes = sum(bucket.flat.nbytes for bucket in buckets.all)

        def sums(count: int) -> None:
            for _ in range(count):
                for bucket in buckets.all:
                    bucket.summed = False  # zeros, which they stay
                    buckets.begin(bucket)
                buckets.wait_all()

        self.runs["sums"] = sums

    def _steps(self, executor: ReplicaExecutor) -> Callable[[int], object]:
        def run(count: int) -> None:
            for _ in range(count):
                executor.step(self.batches)
            executor.flush()

        return run

    def _torch(self, model: nn.Sequential) -> Callable[[int], object]:
        torch = import_torch()
        torch.set_num_threads(1)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = self.transport.broadcast(free.getsockname()[1])
        torch.distributed.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=self.transport.rank, world_size=self.transport.size
        )
        self.twin = torch_twin(model)
        replica = torch.nn.parallel.DistributedDataParallel(self.twin)
        optimizer, loss = torch.optim.SGD(replica.parameters(), **SGD), torch.nn.CrossEntropyLoss()
        x, target = map(torch.from_numpy, self.batches[0])

        def run(count: int) -> None:
            for _ in range(count):
                optimizer.zero_grad()
                loss(replica(x), target).backward()
                optimizer.step()

        return run

    def _compare(self, model: nn.Sequential) -> None:
        theirs = {name: array.numpy() for name, array in self.twin.state_dict().items()}
        difference = max(float(abs(array - theirs[name]).max()) for name, array in model.parameters().items())
        refuse_difference("A step of replicas", "PyTorch", difference)

    def seconds(self, name: str, count: int) -> float:
        """Return the seconds of a step of the slowest rank; all ranks call this."""
        self.transport.barrier()
        began = time.perf_counter()
        self.runs[name](count)
        return max(self.transport.share((time.perf_counter() - began) / count))


def replicas_on_ranks(transport: Transport, given: Mapping[str, Any]) -> dict[str, Any]:
    """Measure all sides in turn; return the seconds of every round, the k that was found, and the bytes summed."""
    set_threads(1)
    sides = Sides(transport, given)
    for name in sides.runs:
        sides.seconds(name, 1)
    timers = {name: partial(sides.seconds, name, given["steps"]) for name in sides.runs}
    timings = timing.in_turn(timers, rounds=given["rounds"], least_rounds=given["rounds"])  # the same on all ranks
    if given["peer"]:
        import_torch().distributed.destroy_process_group()
    seconds = {name: timed.seconds for name, timed in timings.items()}
    return {"seconds": seconds, "k": sides.k, "bytes": sides.bytes}


# The ranks of ``python -m benchmarks scaling-measured``, see `benchmarks.processes`.

TRANSFERS = 20
"""Round trips of each size."""


class TimedPipeline(PipelineExecutor):
    """A `PipelineExecutor` that notes when the parts of each cell ran; one machine's processes have the same clock."""

    spans: list[tuple[str, float, float]]  # action, start and end; B as I and W

    def _runs(self, part: Action, count: int, names: dict[int, list[str]]) -> list[StepFunction]:
        runs = super()._runs(part, count, names)

        def timed(step: Step) -> None:
            start = time.perf_counter()
            for run in runs:
                run(step)
            self.spans.append((str(part), start, time.perf_counter()))

        return [timed]


def chain_of(given: Mapping[str, Any]) -> nn.Sequential:
    """Return an MLP or, where the settings have a `length` of sequences, GRUs one above the other."""
    if "length" in given:
        return stacked("GRU", given["depth"], given["width"], given["width"])
    return mlp(given["width"], given["depth"])


def schedule_of(name: str, given: Mapping[str, Any], ranks: int) -> Schedule:
    """Return the schedule of this name that the ranks run, updates at its end."""
    stages, group = Stages(chain_of(given)), 1 if "length" in given else 2  # a linear layer and its activation
    found = build(name, strict=False, workers=ranks, stages=len(stages), microbatches=given["microbatches"],
                  unweighted=stages.unweighted, input_gradient=False, group=group)  # fmt: skip
    return place_updates(found)


def steps(name: str, transport: Transport, given: Mapping[str, Any]) -> Iterator[list[tuple[str, float, float]]]:
    """Run steps of a schedule and yield the spans of each, of all ranks."""
    model = chain_of(given)
    optimizer = optim.SGD(model.parameters(), **SGD)
    schedule = schedule_of(name, given, transport.size)
    executor = TimedPipeline(model, nn.CrossEntropyLoss(), optimizer, schedule, transport)
    rng = np.random.default_rng(1)
    shape = (*((given["length"],) if "length" in given else ()), given["batch"], given["width"])
    batches = [(rng.standard_normal(shape, np.float32), rng.integers(given["width"], size=given["batch"]))
               for _ in range(given["microbatches"])]  # fmt: skip
    for number in range(-2, given["steps"]):  # two to warm up
        executor.spans = []
        transport.barrier()
        executor.step(batches)
        every = transport.share(executor.spans)
        if number >= 0:
            yield [span for spans in every for span in spans]


def transfers(transport: Transport, sizes: list[int]) -> list[tuple[int, float]]:
    """Return bytes and seconds, half the fastest round trip's, of messages between the first two ranks."""
    found = []
    for size in sizes:
        array, trips = np.zeros(size // 4, np.float32), []
        for _ in range(TRANSFERS):
            transport.barrier()
            start = time.perf_counter()
            for sender in (0, 1):
                if transport.rank == sender:
                    transport.isend(array, 1 - sender, 0).wait()
                elif transport.rank == 1 - sender:
                    transport.irecv(array, sender, 0).wait()
            trips.append(time.perf_counter() - start)
        found.append((size, min(trips) / 2))
    return found


def pipelines_on_ranks(transport: Transport, given: Mapping[str, Any]) -> dict[str, Any]:
    """Run all schedules; return the spans of every step, and the transfers."""
    set_threads(1)
    link = transfers(transport, given["sizes"])
    spans = {name: list(steps(name, transport, given)) for name in given["schedules"]}
    return {"spans": spans, "transfers": link}


# Data-parallel training of two ranks: the share of the sums of gradients that is hidden behind computation.
#
# ``python -m benchmarks data-parallel``. It starts ``mpiexec`` itself: two processes of one thread each, an MLP whose
# sums take a good part of a step. Ours are measured with sums that nothing goes on beside, with sums beside the
# backward pass and the next forward, with those first that the next forward needs first, and with reverse first-k, k
# searched with measured costs; the peer is PyTorch's ``DistributedDataParallel`` with gloo, in the same processes. The
# share hidden is ``1 - (step - computing) / sums``, where *computing* is the same schedule with sums that carry nothing
# (ranks still wait for each other once a step, for its losses), and *sums* those of a step with nothing beside them.
#
# On one machine the bytes are copied by the same cores that compute, so little can be hidden there. With a network of a
# stated bandwidth each sum comes, besides, as much later as its bytes take there, for which no core works.

RANKS = 2
TARGETS = {"hidden": 0.6, "share": 0.2}
"""Of the sums, hidden by one of the schedules at least, where they are such a share of a step that hides nothing."""
HIDING = ("overlap", "priority", "reverse")
SCHEDULES = {"waits": "no overlap", "overlap": "overlap", "priority": "priority", "reverse": "reverse first-k"}


def measure_data_parallel(run: Run) -> Iterator[Row]:
    for batch in run.settings["batches"]:
        for gigabits in run.settings["gigabits"]:
            yield measure_data_parallel_row(run.settings, batch, gigabits, run.rounds["rounds"])


def measure_data_parallel_row(settings: Mapping[str, Any], batch: int, gigabits: float | None, rounds: int) -> Row:
    given = {
        "width": settings["width"], "depth": settings["depth"], "batch": batch, "rounds": rounds,
        "steps": settings["steps"], "bandwidth": None if gigabits is None else gigabits * 1e9 / 8,
        "peer": gigabits is None,
    }  # fmt: skip
    found = on_ranks(RANKS, replicas_on_ranks, progress=True, given=given)
    timings = {name: Timing(tuple(seconds)) for name, seconds in found["seconds"].items()}
    network = "this machine's memory" if gigabits is None else f"{gigabits:g} Gbit/s"
    row: Row = {"network": network, "batch": batch, "bytes": found["bytes"], "k": found["k"]}
    row |= {name: timing.to_dict() for name, timing in timings.items()}
    row |= {f"{name}_hidden": hidden(timings, name) for name in HIDING}
    row["share"] = timings["sums"].median / timings["waits"].median
    best = min((name for name in SCHEDULES), key=lambda name: timings[name].median)
    row["torch_ratio"] = ratio(timings["torch"], timings[best]) if "torch" in timings else None
    return row | {"met": judge_data_parallel(row)}


def hidden(timings: Mapping[str, Timing], name: str) -> dict[str, Any]:
    """Return the share of the sums that a schedule hides, round by round."""
    sides = (timings[name], timings[f"{name}, alone"], timings["sums"])
    rounds = zip(*(side.seconds for side in sides), strict=True)
    return Timing(tuple(1 - (step - computing) / sums for step, computing, sums in rounds)).to_dict()


def judge_data_parallel(row: Mapping[str, Any]) -> str:
    most = max(row[f"{name}_hidden"]["median"] for name in HIDING)
    if row["share"] < TARGETS["share"]:
        return "no target: sums are short"
    return harness.outcome([] if most >= TARGETS["hidden"] else [f"hidden ≥ {TARGETS['hidden']:.0%}"])


def share(value: Mapping[str, float] | float) -> str:
    """Write a share as ``72 % (65–80)``: the median, and the quartiles where there are some."""
    if not isinstance(value, Mapping):
        return f"{value:.0%}"
    return f"{value['median']:.0%} ({100 * value['low']:.0f}–{100 * value['high']:.0f})"


DATA_PARALLEL = Benchmark(
    name="data-parallel",
    title="Data-parallel training on {ranks} ranks: an MLP of {depth} layers of {width}, float32, one thread a rank",
    leaves_out="loading data",
    settings={"ranks": RANKS, "targets": TARGETS, "optimizer": "SGD, momentum"},
    sizes={"width": 1024, "depth": 6, "batches": (8, 64), "gigabits": (None, 10.0), "steps": 5},
    quick={"width": 24, "depth": 3, "batches": (4,), "gigabits": (None,), "steps": 1},
    rounds={"rounds": 11},
    quick_rounds={"rounds": 1},
    threads=None,
    measure=measure_data_parallel,
    columns=columns(
        Column("sums, share of a step", "share", share),
        *(Column(f"{SCHEDULES[name]}: hidden", f"{name}_hidden", share) for name in HIDING),
        numbers={"batch": "batch per rank", "k": "k"},
        seconds={
            "sums": "gradient sums only", **SCHEDULES,
            "overlap, alone": "computation only", "torch": "PyTorch's replicas",
        },
        times={"torch_ratio": "fastest, over PyTorch's replicas"},
        sizes={"bytes": "gradients"},
    ),
    short=("network", "batch", "share", "overlap_hidden", "reverse_hidden", "torch_ratio", "met"),
    overview=Overview(task="A data-parallel training step", peer="PyTorch's replicas (`gloo`)", ratio="torch_ratio",
                      label="{network}, batch {batch}", page="workers.md#data-parallel-training"),
    picture=harness.bars(
        "{network}, {batch} samples a rank",
        {**SCHEDULES, "overlap, alone": "computation only", "torch": "PyTorch's replicas"},
        "ms per step, median", (*harness.BLUES, harness.TORCH), unit=1e3,
    ),
)  # fmt: skip


WAYS = ("maps", "vectors")
TIME_CELLS = CELLS | {"MinGRU": CELLS["GRU"]}
STEP_TARGET = 1.7
"""Times faster than one worker, of a minGRU's step by vectors."""
PARTS = ("forward", "backward", "step")


def measure_time_parallel(run: Run) -> Iterator[Row]:
    settings = run.settings
    for ranks in settings["ranks"]:
        if ranks > most_threads():
            run.note(f"{ranks} ranks: left out, this machine has {most_threads()} cores")
            continue
        found = on_ranks(
            ranks, time_parallel_on_ranks, threads=ranks, length=settings["length"], batch=settings["batch"],
            rounds=run.rounds["rounds"], seconds=5400.0,
        )  # fmt: skip
        for cell, measured in found.items():
            yield from rows(cell, ranks, settings["length"], measured)


def rows(cell: str, ranks: int, length: int, found: dict[str, Any]) -> Iterator[Row]:
    """Return the rows of one run on ranks, one a way."""
    timings = {
        side: {part: timing.Timing(tuple(seconds)) for part, seconds in parts.items()}
        for side, parts in found["seconds"].items()
    }
    for way in WAYS:
        row: Row = {
            "model": f"{cell}{TIME_CELLS[cell]}", "length": length, "ranks": ranks, "way": way,
            "gradient_difference": found["difference"][way], "kept": found["kept"][way],
            "kept_whole": found["kept_whole"], "sent": found["sent"][way], **found["volume"][way],
        }  # fmt: skip
        refuse_difference(f"The gradient of {row['model']} on {ranks} ranks", "one worker", row["gradient_difference"])
        for part in PARTS:
            row[part] = timings[way][part].to_dict()
            for side in ("one", "same"):
                row[f"{part}_{side}"] = timings[side][part].to_dict()
                row[f"{part}_{side}_ratio"] = timing.ratio(timings[side][part], timings[way][part])
        if cell == "MinGRU" and way == "vectors":
            row |= harness.reaches(row, "step_one_ratio", STEP_TARGET)
        yield row


# ---- on every rank -------------------------------------------------------------------------------------------------


def time_parallel_on_ranks(transport: Transport, length: int, batch: int, rounds: int) -> dict[str, Any]:
    """Measure all cells, one after the other."""
    return {cell: _time_parallel(transport, cell, length, batch, rounds) for cell in TIME_CELLS}


def _time_parallel(transport: Transport, cell: str, length: int, batch: int, rounds: int) -> dict[str, Any]:
    """Measure one cell: both ways on all ranks, and rank 0 alone while the others wait, in turn."""
    features, hidden = TIME_CELLS[cell]
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
        """Run forward, and back to all gradients, of half the mean square of all states."""
        set_threads(threads)
        began = meet(transport)
        if mine is not None:
            y, saved = model.forward(mine)
            kept[side] = sum(array.nbytes for run in saved.runs for array in run.arrays())
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


TIME_PARALLEL = Benchmark(
    name="time-parallel",
    title="A sequence of {length:,} steps on two ranks, against one worker: B = {batch}, hidden size 20, float32",
    leaves_out="nothing; a step is forward and the gradients of all parameters and the input, summed over the ranks",
    settings={"batch": 1, "dtype": "float32"},
    sizes={"length": 1_000_000, "ranks": (2,)},
    quick={"length": 301, "ranks": (2,)},
    rounds={"rounds": 7},
    threads=None,
    measure=measure_time_parallel,
    columns=columns(
        words={"way": "exchanged"},
        seconds={
            "forward": "forward", "forward_one": "forward, one worker", "backward": "backward",
            "backward_one": "backward, one worker", "step": "step", "step_one": "step, one worker",
        },
        times={
            "backward_one_ratio": "backward, over one worker", "step_one_ratio": "step, over one worker",
            "step_same_ratio": "step, over one worker with as many threads",
        },
        sizes={
            "sent_exscan": "sent, maps", "sent_isend": "sent, vectors", "sent_allreduce": "sent, weights",
            "kept": "saved per rank",
            "kept_whole": "saved by one worker",
        },
        formats={"{:.1e}": {"gradient_difference": "difference"}},
    ),
    short=("model", "ranks", "way", "backward", "backward_one", "backward_one_ratio", "step_one_ratio", "sent_exscan",
           "met"),
    picture=harness.bars(
        "{model}, {ranks} ranks exchange {way}",
        {"forward": "ranks: forward", "forward_one": "one worker: forward",
         "backward": "ranks: backward", "backward_one": "one worker: backward"},
        "ms, median", unit=1e3,
    ),
)  # fmt: skip
