"""The papers' speed-ups on many GPUs, and simulated ones for the same models, batches and networks.

``python -m benchmarks scaling-papers``. Nothing is timed. Rates are shares of the data sheets', networks have their
nominal bandwidths, except the Ethernet of the data-parallel clusters, which is fitted to the one sum that the paper
times.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from statistics import geometric_mean, median
from typing import Any, NamedTuple

from benchmarks import harness
from benchmarks.harness import Benchmark, Result, Row, Run, columns
from benchmarks.processes import on_ranks
from benchmarks.ranks import pipelines_on_ranks, schedule_of
from sparsebp.core import tables
from sparsebp.schedule import (
    Action,
    Costs,
    Durations,
    Link,
    Network,
    Schedule,
    Simulation,
    StageBytes,
    StepGraph,
    actions_of,
    compare,
    parse,
    parts_of,
    simulate,
)
from sparsebp.schedule.builders import (
    dualpipe2018,
    fast_forward,
    gpipe,
    interleaved_one_f_one_b,
    modulo,
    one_f_one_b,
    pipedream,
    place_updates,
    reverse_first_k,
    synchronise,
    zero_bubble_h1,
    zero_bubble_h2,
)

# Models as lists of layer costs: FLOPs, weights and activations a sample, from their published shapes.
#
# Counted are the matrix products and convolutions (two FLOPs a multiply-add); normalisation, activations and pooling
# cost memory but no time. A model is a chain: its skip connections cost nothing.


class Layer(NamedTuple):
    """Costs of one layer, or of several joined."""

    name: str  # of the (first) layer
    forward: float  # FLOPs a sample of F, I and W
    input_grad: float
    weight_grad: float
    weights: float  # number of values
    output: float  # values a sample of the output
    saved: float

    @property
    def flops(self) -> float:
        """FLOPs a sample of all three."""
        return self.forward + self.input_grad + self.weight_grad


def joined_layers(layers: Sequence[Layer]) -> Layer:
    """Return several layers in a row as one."""
    sums = [sum(values) for values in zip(*(layer[1:] for layer in layers), strict=True)]
    return Layer(layers[0].name, *sums)._replace(output=layers[-1].output)


def cut(layers: Sequence[Layer], parts: int) -> list[Layer]:
    """Return the layers in `parts` contiguous parts, the most expensive of which has the fewest FLOPs.

    Narayanan et al., "PipeDream", SOSP 2019, §3.1, without replication.
    """
    before = [0.0, *accumulate(layer.flops for layer in layers)]
    best: list[tuple[float, tuple[int, ...]]] = [(before[end], (end,)) for end in range(len(layers) + 1)]
    for part in range(2, parts + 1):
        best = [
            min(((max(best[at][0], before[end] - before[at]), (*best[at][1], end)) for at in range(part - 1, end)),
                default=(float("inf"), ()))
            for end in range(len(layers) + 1)
        ]  # fmt: skip
    ends = best[-1][1]
    return [joined_layers(layers[begin:end]) for begin, end in zip((0, *ends), ends, strict=False)]


def conv(name: str, inputs: int, outputs: int, kernel: int, size: int, stride: int = 1, pool: int = 1) -> Layer:
    """Return a convolution of `size` × `size` pixels, up to and with a pooling by `pool`."""
    pixels = (size // stride) ** 2
    flops = 2.0 * kernel**2 * inputs * outputs * pixels
    saved = inputs * size**2 + outputs * pixels
    return Layer(name, flops, flops, flops, kernel**2 * inputs * outputs, outputs * pixels / pool**2, saved)


def dense(name: str, inputs: int, outputs: int) -> Layer:
    """Return a fully connected layer."""
    flops = 2.0 * inputs * outputs
    return Layer(name, flops, flops, flops, inputs * outputs, outputs, inputs + outputs)


def vgg16(size: int = 224, classes: int = 1000) -> list[Layer]:
    """Return VGG-16 for square images: 13 convolutions, 3 fully connected layers (Simonyan and Zisserman, 2015)."""
    layers, channels = [], 3
    for block, (width, count) in enumerate([(64, 2), (128, 2), (256, 3), (512, 3), (512, 3)], 1):
        for number in range(1, count + 1):
            layers.append(conv(f"conv{block}_{number}", channels, width, 3, size, pool=2 if number == count else 1))
            channels = width
        size //= 2
    return [*layers, dense("fc6", 512 * size**2, 4096), dense("fc7", 4096, 4096), dense("fc8", 4096, classes)]


def resnet(depths: Sequence[int] = (3, 4, 6, 3), size: int = 224, classes: int = 1000) -> list[list[Layer]]:
    """Return a bottleneck ResNet, one list of layers a block (He et al., 2016): ResNet-50 by default."""
    blocks = [[conv("conv1", 3, 64, 7, size, 2, pool=2)]]
    size, channels = max(1, size // 4), 64
    for group, depth in enumerate(depths):
        width = 64 * 2**group
        for number in range(depth):
            stride = 2 if group > 0 and number == 0 and size > 1 else 1
            name, inside = f"conv{group + 2}_{number + 1}", size // stride
            block = [conv(f"{name}a", channels, width, 1, size), conv(f"{name}b", width, width, 3, size, stride),
                     conv(f"{name}c", width, 4 * width, 1, inside)]  # fmt: skip
            if number == 0:
                shortcut = conv(name, channels, 4 * width, 1, size, stride)
                block[-1] = joined_layers([block[-1], shortcut])
            blocks.append(block)
            size, channels = inside, 4 * width
    return [*blocks, [dense("fc", channels, classes)]]


def transformer(layers: int, hidden: int, length: int, vocabulary: int, heads: int = 16) -> list[Layer]:
    """Return embedding, `layers` blocks of attention and a four times as wide MLP, and the output layer.

    A block keeps 17 length · hidden and 2.5 heads · length² values a sample, after Korthikanti et al.,
    "Reducing activation recomputation in large transformer models", MLSys 2023, Eq. 1 (34 and 5 bytes, 2 a value).
    """
    products, attention = 24.0 * length * hidden**2, 4.0 * length**2 * hidden
    values = length * hidden
    block = Layer("block", products + attention, products + 2 * attention, products, 12 * hidden**2 + 13 * hidden,
                  values, 17 * values + 2.5 * heads * length**2)  # fmt: skip
    first = Layer("embedding", 0.0, 0.0, 0.0, vocabulary * hidden, values, length)
    flops = 2.0 * values * vocabulary
    last = Layer("output", flops, flops, flops, vocabulary * hidden, length, values + length * vocabulary)
    return [first, *([block] * layers), last]


def bert(layers: int, hidden: int = 1024, length: int = 128) -> list[Layer]:
    """Return the encoders of BERT alone (Devlin et al., 2019)."""
    return transformer(layers, hidden, length, 30_522)[1:-1]


def mlp(layers: int, width: int, inputs: int, classes: int) -> list[Layer]:
    """Return fully connected layers of one width, and the last of another."""
    first = dense("fc1", inputs, width)
    return [first, *(dense(f"fc{i}", width, width) for i in range(2, layers)), dense("last", width, classes)]


def lstm(layers: int, inputs: int, units: int, length: int) -> list[Layer]:
    """Return LSTM layers of `units` that project to as many values as they take (Sak et al., 2014)."""
    weights = 4 * units * 2 * inputs + units * inputs
    flops = 2.0 * weights * length
    return [Layer("lstm", flops, flops, flops, weights, inputs * length, (2 * inputs + 7 * units) * length)] * layers


def flat(blocks: Iterable[Sequence[Layer]]) -> list[Layer]:
    """Return the layers of all blocks."""
    return [layer for block in blocks for layer in block]


# The clusters that are simulated: the rate of a worker, and the network between them.

MOVED = 20
"""Bytes a weight that an update with momentum moves in float32: it reads three values and writes two."""


@dataclass(frozen=True)
class Machine:
    """A worker, and its network. A duration is ``overhead + FLOPs / rate``."""

    name: str  # in words
    rate: float  # FLOPs a second that its kernels reach: a stated share of the data sheet's
    memory: float  # bytes a second, for updates
    network: Network  # between the workers
    overhead: float = 20e-6  # seconds of an action whatever its size, for launches
    value: int = 4  # bytes of a weight, gradient or activation

    def costs(self, stages: Sequence[Layer], samples: float, workers: int = 1, replicas: int = 1,
              slowdown: float = 1.0) -> Costs:  # fmt: skip
        """Return the costs of stages for micro-batches of `samples`, in `replicas` pipelines of `workers`."""
        network = self.network
        if network.node is not None and workers * replicas <= network.node:
            network = replace(network, node=None)  # all in one node: nothing goes through an uplink
        table = [self._durations(stage, samples, network, workers, replicas) for stage in stages]

        def duration(action: Action) -> float:
            return sum(table[part.stage][part.kind] for part in parts_of(action))

        sizes = [StageBytes(self.value * samples * stage.output, self.value * samples * stage.saved,
                            self.value * stage.weights) for stage in stages]  # fmt: skip
        return Costs(duration, tuple(sizes), network, slowdown)

    def _durations(self, stage: Layer, samples: float, network: Network, workers: int, replicas: int
                   ) -> dict[str, float]:  # fmt: skip
        flops = {"F": stage.forward, "I": stage.input_grad, "W": stage.weight_grad}
        found = {kind: self.overhead + samples * number / self.rate for kind, number in flops.items()}
        found["S"] = network.all_reduce(self.value * stage.weights, replicas, workers)
        return found | {"U": self.overhead + MOVED * stage.weights / self.memory}

    def alone(self, layers: Sequence[Layer], samples: float) -> float:
        """Return one worker's time for `samples`, without updates, overheads and communication."""
        return samples * sum(layer.flops for layer in layers) / self.rate


GIGABIT = 1e9 / 8

A100 = Machine(
    "A100, 16-bit values at 40 % of 312 TFLOP/s; 8 a node with 250 GB/s ports, 8 × 200 Gb/s between nodes",
    rate=0.4 * 312e12, memory=1.5e12, value=2,
    network=Network(5e-6, 250e9, 8, 10e-6, 8 * 200 * GIGABIT),
)  # fmt: skip
"""Where the scaling of all schedules is simulated."""


# A training step on many workers, simulated: pipelines, replicas of pipelines, data-parallel workers.
#
# All replicas run the same schedule at the same time, so one of them is simulated; an S takes as long as a sum over
# all of them.

CHUNKS = 2
"""Parts of the model a worker, for schedules that deal out more than one."""
PIPELINES: dict[str, Callable[..., Schedule]] = {
    "gpipe": gpipe, "1f1b": one_f_one_b, "interleaved": partial(interleaved_one_f_one_b, chunks=CHUNKS),
    "zb-h1": zero_bubble_h1, "zb-h2": zero_bubble_h2, "fast-forward": partial(fast_forward, input_gradient=True),
    "modulo": partial(modulo, input_gradient=True),
}  # fmt: skip
"""Synchronous pipelines."""
ASYNCHRONOUS: dict[str, Callable[..., Schedule]] = {"pipedream": pipedream, "dualpipe": dualpipe2018}
"""Pipelines that update after every micro-batch."""
REPLICAS = ("dp-end", "dp-overlap", "dp-priority", "dp-reverse")
"""Data-parallel: sums after the backward, or during it: first ready first, first stage first, reverse first-k."""


@dataclass(frozen=True)
class Found:
    """A simulated step."""

    seconds: float  # of a step among others
    samples: float  # of a step, on all replicas
    bubble: float  # share of the time in which workers do not compute, over one step by itself
    peak: float  # bytes that the fullest worker keeps: activations, gradients, weights; no optimizer state
    detail: int | None = None  # of the schedule: k of reverse first-k

    @property
    def throughput(self) -> float:
        """Samples a second."""
        return self.samples / self.seconds


def period(schedule: Schedule, costs: Costs, steps: int = 2) -> tuple[float, Simulation]:
    """Return the time from a step to the next, the mean over those after the first; and the first by itself."""
    one = simulate(schedule, costs)
    return (simulate(schedule, costs, steps=steps).makespan - one.makespan) / (steps - 1), one


def pipeline(name: str, layers: Sequence[Layer], machine: Machine, workers: int, microbatches: int, samples: float,
             replicas: int = 1) -> Found:  # fmt: skip
    """Simulate a synchronous pipeline, or `replicas` of it side by side."""
    stages = cut(layers, workers * CHUNKS)
    costs = machine.costs(stages, samples, workers, replicas)
    options = {"costs": costs} if name in ("fast-forward", "modulo") else {}
    schedule = PIPELINES[name](workers=workers, stages=len(stages), microbatches=microbatches, **options)
    if replicas > 1:
        schedule = synchronise(schedule, costs=costs)
    seconds, one = period(place_updates(schedule), costs)
    return Found(seconds, samples * microbatches * replicas, one.bubble, one.peak)


def asynchronous(name: str, layers: Sequence[Layer], machine: Machine, workers: int, microbatches: int, samples: float,
                 slowdown: float = 2.0) -> Found:  # fmt: skip
    """Simulate an asynchronous pipeline: a micro-batch among many, times `microbatches`."""
    stages = cut(layers, workers)
    costs = machine.costs(stages, samples, workers, slowdown=slowdown)
    build = partial(ASYNCHRONOUS[name], workers=workers, stages=workers)
    one, more = (simulate(build(microbatches=count * microbatches), costs) for count in (1, 3))
    seconds = (more.makespan - one.makespan) / 2
    return Found(seconds, samples * microbatches, one.bubble, one.peak)


def data_parallel(name: str, layers: Sequence[Layer], machine: Machine, replicas: int, samples: float) -> Found:
    """Simulate data-parallel workers, with one sum for every layer."""
    costs = machine.costs(layers, samples, 1, replicas)
    unweighted = tuple(number for number, layer in enumerate(layers) if not layer.weights)
    if name == "dp-end":
        schedule = sums_at_end(len(layers), frozenset(unweighted))
    else:
        schedule = reverse_first_k(
            stages=len(layers), k=None if "reverse" in name else 0, costs=costs, unweighted=unweighted,
            priority="first-ready" if name in ("dp-overlap", "dp-reverse-ready") else "first-stage",
            throughput=lambda found: -period(_updated(found), costs, 3)[0],
        )  # fmt: skip
    seconds, one = period(_updated(schedule), costs, 3)
    k = int(schedule.name.rpartition("-")[2]) if "reverse" in name else None
    return Found(seconds, samples * replicas, one.bubble, one.peak, k)


def sums_at_end(stages: int, unweighted: frozenset[int] = frozenset()) -> Schedule:
    """Return the conventional order without overlap: all sums after the backward, before the next forward."""
    graph = StepGraph(stages, unweighted=unweighted, first="I", synchronised=True)
    order = [stage for stage in range(stages) if graph.weighted(stage)]
    backward = [Action(stage, kind, 0) for stage in reversed(range(stages)) for kind in ("W", "I")
                if (kind == "I" and stage > 0) or (kind == "W" and graph.weighted(stage))]  # fmt: skip
    sums = [Action(stage, "S") for stage in order]
    cells = [*backward, *sums, *(Action(stage, "F", 0) for stage in range(stages))]
    return Schedule.of(graph, [cells], "sums at the end")


def _updated(schedule: Schedule) -> Schedule:
    """Return a data-parallel schedule with each update right before its forward, so that no sum is waited for early."""
    return replace(place_updates(schedule, "forward"), name=schedule.name)


# Strong and weak scaling of every schedule on 8 to 4096 simulated workers, with the memory of a worker.
#
# ``python -m benchmarks scaling``. Nothing is timed: the costs of layers come from their FLOPs and a stated rate, those
# of transfers and sums from a network with contention, and two runs give the same numbers. A model has few layers, so
# many workers are pipelines side by side: the schedule's workers times its replicas, whose gradients are summed.

ROUNDS = 4
"""Micro-batches of a pipeline for each of its workers, where there are samples enough."""
LABELS = {
    "gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "interleaved", "zb-h1": "ZB-H1", "zb-h2": "ZB-H2",
    "fast-forward": "fast-forward", "modulo": "fast-forward, modulo", "dp-end": "sums at the end",
    "dp-overlap": "sums overlapped", "dp-priority": "first stage first", "dp-reverse": "reverse first-k",
    "pipedream": "PipeDream", "dualpipe": "DualPipe (2018)",
}  # fmt: skip
"""The schedules in words."""
KEPT = ("gpipe", "1f1b", "zb-h2", "modulo", "dp-reverse")
"""Schedules whose memory is shown."""
SHOWN = ("1f1b", "zb-h2", "modulo", "dp-overlap", "dp-reverse")
"""Schedules in the documents' table."""


class Model(NamedTuple):
    """A model and how it is trained."""

    layers: Sequence[Layer]  # `layers` for the sums of data-parallel workers, `stages` for pipelines
    stages: Sequence[Layer]
    workers: int  # of a pipeline at most
    batch: int  # samples of a step where it stays the same for all numbers of workers
    each: int  # samples of a worker's step where the batch grows with the workers
    most: int  # samples of a micro-batch at most


def models() -> dict[str, Model]:
    """Return the models by name."""
    vgg, blocks = vgg16(), resnet()
    gpt = transformer(62, 2560, 1024, 50_257, 32)
    return {
        "VGG-16": Model(vgg, vgg, 4, 4096, 32, 32),
        "ResNet-50-like": Model(flat(blocks), [joined_layers(block) for block in blocks], 8, 4096, 64, 32),
        "GPT-like": Model(gpt, gpt, 32, 256, 4, 1),
    }


def measure_scaling(run: Run) -> Iterator[Row]:
    run.result["settings"] |= {"machine": A100.name, "rate": A100.rate, "rounds": ROUNDS}
    for name, model in models().items():
        if name in run.settings["models"]:
            for kind in ("strong", "weak"):
                for count in run.settings["workers"]:
                    yield {"model": name, "scaling": kind, "workers": count} | simulate_row(model, kind, count)
    run.note(
        "Efficiency: the time of the step's FLOPs at the full rate of all workers, divided by the simulated time from "
        "one step to the next. A dash: there are fewer samples than workers or pipelines; asynchronous pipelines have "
        "no replicas."
    )
    run.note(f"Machine: {A100.name}; {1e6 * A100.overhead:.0f} µs per action in addition to its FLOPs.")
    run.note("Memory: activations, gradients and weights of the fullest worker, no optimizer state, no recomputation.")


def simulate_row(model: Model, kind: str, count: int) -> Row:
    """Simulate every schedule of a model on `count` workers."""
    workers = min(model.workers, count)
    replicas = count // workers
    batch = model.batch if kind == "strong" else model.each * count
    row: Row = {"batch": batch, "pipeline": f"{workers} × {replicas}"}
    calls: dict[str, Callable[[], Found]] = {}
    share = batch // replicas  # samples of a pipeline
    if share:
        samples = min(model.most, max(1, share // (ROUNDS * workers)))
        microbatches = share // samples
        row |= {"microbatches": microbatches, "samples": samples}
        common = (model.stages, A100, workers, microbatches, samples)
        calls |= {name: partial(pipeline, name, *common, replicas) for name in PIPELINES}
        if replicas == 1:
            calls |= {name: partial(asynchronous, name, *common) for name in ASYNCHRONOUS}
    if batch >= count:
        calls |= {name: partial(data_parallel, name, model.layers, A100, count, batch / count) for name in REPLICAS}
    for name, call in calls.items():
        found = call()
        row[name] = A100.alone(model.layers, found.samples) / count / found.seconds
        row[f"{name}_peak"] = found.peak
        if found.detail is not None:
            row["k"] = found.detail
    return row


def draw_scaling(result: Result) -> Any:
    """Draw the schedules of the table, each by its own colour; the others are in the CSV file."""
    rows = result["rows"]
    names = list(dict.fromkeys(row["model"] for row in rows))
    drawing, axes = harness.figure(len(names), 2, width=9.0, height=2.6 * len(names) + 0.9)
    for line, name in enumerate(names):
        for ax, kind in zip(axes[line], ("strong", "weak"), strict=True):
            own = [row for row in rows if (row["model"], row["scaling"]) == (name, kind)]
            for key, colour, marker in zip(("gpipe", *SHOWN), harness.KINDS, "osD^vP", strict=True):
                points = [(row["workers"], 100 * row[key]) for row in own if key in row]
                style = "--" if key in REPLICAS else "-"
                ax.plot(*zip(*points, strict=True), style, color=colour, marker=marker, markersize=4, label=LABELS[key])
            ax.set_xscale("log", base=2)
            ax.set_ylim(0, 100)
            ax.set_title(f"{name}, {kind} scaling", fontsize=9)
            ax.set_xlabel("workers", fontsize=8)
            ax.set_ylabel("efficiency, %", fontsize=8)
    return drawing


SCALING = Benchmark(
    name="scaling",
    title="Schedules on many simulated workers: efficiency of a training step, a share of the full rate",
    leaves_out="everything that the cost model omits: data loading, normalisation, activations, stragglers",
    settings={"targets": {}},
    sizes={"workers": (8, 32, 128, 512, 4096), "models": ("VGG-16", "ResNet-50-like", "GPT-like")},
    quick={"workers": (64,), "models": ("VGG-16",)},
    threads=None,
    measure=measure_scaling,
    columns=columns(
        words={"scaling": "scaling"},
        numbers={
            "workers": "workers", "batch": "batch", "pipeline": "pipeline × replicas", "microbatches": "micro-batches",
            "samples": "samples per micro-batch", "k": "k",
        },
        sizes={f"{name}_peak": f"memory, {LABELS[name]}" for name in (*KEPT, *ASYNCHRONOUS)},
        formats={"{:.1%}": LABELS},
    ),
    short=("model", "scaling", "workers", *SHOWN),
    in_short=lambda row: row["scaling"] == "weak" and row["workers"] in (8, 4096),
    picture=draw_scaling,
)  # fmt: skip


# The simulator against real pipelines: ranks of one machine, with measured durations and transfers.
#
# ``python -m benchmarks scaling-measured``. It starts ``mpiexec`` itself, one thread a rank. Of every second step the
# medians of the durations, of all schedules together, are the costs; the other steps are what they are
# compared with. Processes that share a machine slow each other down, and wait for its other users: that is part of the
# error.

TARGET = 0.15
"""Relative error of the length of a step, as for one worker."""
Spans = Sequence[tuple[str, float, float]]
"""Action, start and end of a step's parts on all ranks."""


def measure_scaling_measured(run: Run) -> Iterator[Row]:
    given = dict(run.settings)
    for ranks in given["ranks"]:
        found = on_ranks(ranks, pipelines_on_ranks, given=given)
        link = fit_link(found["transfers"])
        entries = durations([step for spans in found["spans"].values() for step in spans[::2]])
        size = StageBytes(output=4 * given["batch"] * given["width"])
        for name, spans in found["spans"].items():
            schedule = schedule_of(name, given, ranks)
            costs = Costs(Durations(entries), size, link, slowdown=2)  # ranks run a pair that overlaps as F, then B
            yield {"schedule": name, "ranks": ranks} | row_of(schedule, costs, spans[1::2])
        run.note(f"{ranks} ranks: a message takes {tables.seconds(link.latency)}, and {_bandwidth(link)}.")


def fit_link(transfers: Iterable[tuple[float, float]]) -> Link:
    """Return the link that fits measured transfers best: seconds = latency + bytes / bandwidth.

    Least squares of the relative errors over pairs of bytes and seconds, of two sizes at least. Neither latency nor
    bandwidth falls below 0; where seconds do not grow with the bytes, the bandwidth is infinite.
    """
    pairs = list(transfers)
    # Of latency · a + slope · b = 1, where a = 1 / seconds and b = bytes / seconds.
    a, b = [1 / seconds for _, seconds in pairs], [size / seconds for size, seconds in pairs]
    aa, ab, bb = (sum(x * y for x, y in zip(*both, strict=True)) for both in ((a, a), (a, b), (b, b)))
    determinant = aa * bb - ab * ab
    latency, slope = (sum(a) * bb - sum(b) * ab) / determinant, (sum(b) * aa - sum(a) * ab) / determinant
    if latency < 0:
        latency, slope = 0.0, sum(b) / bb
    if slope <= 0:
        return Link(sum(a) / aa)
    return Link(latency, 1 / slope)


def durations(steps: Sequence[Spans]) -> dict[str, float]:
    """Return the median of every stage's and kind's durations."""
    found: dict[str, list[float]] = defaultdict(list)
    for step in steps:
        for name, start, end in step:
            (action,) = actions_of(parse(name))
            found[f"{action.stage}{action.kind}"].append(end - start)
    return {key: median(values) for key, values in found.items()}


def row_of(schedule: Schedule, costs: Costs, steps: Sequence[Spans]) -> Row:
    """Simulate a schedule and compare it with its measured steps; every number is their median."""
    found = simulate(schedule, costs)
    errors = [compare(found, joined_spans(schedule, step)) for step in steps]
    lengths = [max(end for _, _, end in step) - min(start for _, start, _ in step) for step in steps]
    row: Row = {
        "microbatches": schedule.graph.microbatches, "actions": sum(1 for _ in schedule), "measured": median(lengths),
        "simulated": found.makespan, "difference": found.makespan / median(lengths) - 1,
        "starts": median(error.mean_start for error in errors), "bubble": found.bubble,
    }  # fmt: skip
    return row | {"met": harness.outcome([] if abs(row["difference"]) <= TARGET else [f"error ≤ {TARGET:.0%}"])}


def joined_spans(schedule: Schedule, step: Spans) -> list[tuple[Action, float, float]]:
    """Return the spans of a schedule's actions; a B spans its parts."""
    of_part = {name: (start, end) for name, start, end in step}
    out = []
    for action in schedule:
        own = [of_part[str(part)] for part in parts_of(action)]
        out.append((action, min(start for start, _ in own), max(end for _, end in own)))
    return out


def _bandwidth(link: Link) -> str:
    return f"{tables.size(link.bandwidth)} a second" if link.bandwidth < float("inf") else "nothing for its bytes"


SCALING_MEASURED = Benchmark(
    name="scaling-measured",
    title="Pipelines on ranks of this machine, measured and simulated: an MLP of {depth} layers of {width}, float32",
    leaves_out="loading data; the barrier before each step",
    settings={"target": TARGET, "sizes": (1 << 10, 1 << 14, 1 << 18, 1 << 21)},
    sizes={
        "ranks": (2,), "width": 512, "depth": 8, "batch": 64, "microbatches": 8, "steps": 30,
        "schedules": (
            "gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-h2", "zb-v", "dualpipe-v", "fast-forward", "modulo",
        ),
    },
    quick={
        "ranks": (2,), "width": 16, "depth": 4, "batch": 4, "microbatches": 4, "steps": 2,
        "schedules": ("1f1b", "zb-h1", "dualpipe-v"),
    },
    threads=None,
    measure=measure_scaling_measured,
    columns=columns(
        words={"schedule": "schedule"},
        numbers={"microbatches": "micro-batches", "actions": "actions"},
        seconds={"measured": "measured", "simulated": "simulated"},
        formats={
            "{:+.1%}": {"difference": "error"}, "{:.1%}": {"starts": "mean error of starts"},
            "{:.0%}": {"bubble": "bubble, simulated"},
        },
    ),
    short=("schedule", "ranks", "measured", "simulated", "difference", "starts", "met"),
    picture=harness.bars("{schedule}, {ranks} ranks", {"measured": "measured", "simulated": "simulated"},
                         "ms per step, median", unit=1e3),
)  # fmt: skip


OOO, SPECTRAIN = "Oh et al., 2022", "Chen et al., 2018"
ETHERNET = 0.35
"""Share of 10 Gb/s at which the sums of ResNet-50 on 16 V100 take the 350 ms that Oh et al. (§8.3) measured."""
CONVOLUTIONS = 0.526
"""Share of the data sheet's rate at which 128 images of ResNet-50 take a V100 the 380 ms that they measured."""
PRODUCTS = 0.8
"""Share of it in the matrix products of Transformers."""
WITHIN = 0.1
"""How far outside of the paper's range a gain (the ratio less 1) may be and still count as in it: a share of it.
A share of the ratio itself would let no gain at all pass for one of a few percent."""

TITAN = Machine("Titan XP", CONVOLUTIONS * 12.1e12, 548e9, Network(50e-6, ETHERNET * 10 * GIGABIT))
P100 = Machine("P100", CONVOLUTIONS * 9.3e12, 732e9, Network(50e-6, ETHERNET * 20 * GIGABIT))
V100 = Machine("V100", CONVOLUTIONS * 15.7e12, 900e9,
               Network(10e-6, 25e9, 4, 50e-6, ETHERNET * 10 * GIGABIT))  # fmt: skip
LINKS = {"NVLink": Network(10e-6, 50e9), "PCIe": Network(10e-6, 16e9), "10 Gb Ethernet": Network(50e-6, 1e9)}
"""§8.4.1, in bytes a second."""
P40 = Machine("P40", 0.526 * 11.8e12, 346e9, Network(10e-6, 12e9))
"""Of the DualPipe paper: PCIe 3.0 x16, 12 GB/s of its 15.75."""


def measure_scaling_papers(run: Run) -> Iterator[Row]:
    for row in (*data_parallel_rows(run.quick), *pipeline_rows(run.quick), *dualpipe_rows(run.quick)):
        yield row | {"outcome": judge_scaling_papers(row["ours"], row.get("low"), row.get("high"))}
    for note in NOTES:
        run.note(note)


def judge_scaling_papers(ours: float, low: float | None, high: float | None) -> str:
    if low is None or high is None:
        return "not in the paper"
    gain = ours - 1
    return "above" if gain > (high - 1) * (1 + WITHIN) else "below" if gain < (low - 1) * (1 - WITHIN) else "within"


NOTES = (
    "Reverse first-k: the baseline sends the first stage's sum first (BytePS), sums are ring all-reduces and are not "
    "interrupted; BytePS splits tensors and sends them to servers. One number is fitted: the share of its nominal rate "
    "that Ethernet reaches.",
    "Pipelines: as many micro-batches as workers (the paper shows 4 on 4 and gives no other number), only the "
    "encoders, GPipe without recomputation.",
    "DualPipe: Inception v4 is left out; images are 224 × 224, the size to which CIFAR's must have been enlarged "
    "(Inception v4 does not take 32 × 32); sentences of the LSTM have 100 steps, a length that the paper does not "
    "give. A forward and a backward that run at the same time take as long as one after the other; means are "
    "geometric. “With a barrier”: all workers wait for each other after every unit of time, as in the paper's "
    "Algorithm 1, and a unit of PipeDream is a forward or a backward; computed from durations only, without "
    "transfers.",
)


BASELINES = {
    "reverse first-k, first stage first": ("dp-priority", "dp-reverse"),
    "reverse first-k, first ready first": ("dp-overlap", "dp-reverse-ready"),
}
"""Sums that overtake each other, as BytePS wants them; and in the order in which they become ready."""


def data_parallel_rows(quick: bool = False) -> Iterator[Row]:
    """Yield reverse first-k over the prioritised sums (Oh et al., 2022, §8.3)."""
    small, large = flat(resnet()), flat(resnet((3, 4, 23, 3)))
    points: list[tuple[str, Sequence[Layer], Machine, int, int, float, float]] = [  # the last two: the paper's
        ("ResNet-101, 10 Gb", large, TITAN, 8, 64, 1.153, 1.153),
        ("ResNet-101, 20 Gb", large, P100, 20, 64, 1.271, 1.271),
        ("ResNet-50, 4 a node, 10 Gb", small, V100, 16, 128, 1.265, 1.265),
        ("ResNet-101, 4 a node, 10 Gb", large, V100, 8, 96, 1.198, 1.198),
        ("ResNet-50, 4 a node, 10 Gb", small, V100, 48, 128, 1.1, 1.27),
        ("ResNet-50, NVLink", small, V100, 4, 128, 1.01, 1.05),
    ]
    for setting, layers, machine, count, samples, low, high in points[: 1 if quick else None]:
        for compared, (old, new) in BASELINES.items():
            before, after = (data_parallel(name, layers, machine, count, samples).seconds for name in (old, new))
            yield _row(OOO, compared, f"{machine.name}: {setting}", count, low, high, before / after)


def pipeline_rows(quick: bool = False) -> Iterator[Row]:
    """Yield fast-forwarding and modulo allocation over GPipe (Oh et al., 2022, §8.4)."""
    unit: dict[str, Any] = {"stages": 16, "microbatches": 4, "workers": 4}
    base = simulate(gpipe(**unit, input_gradient=False)).makespan
    yield _row(OOO, "fast-forward over GPipe", "FFNN, unit costs", 4, 1.22, 1.22,
               base / simulate(fast_forward(**unit)).makespan)  # fmt: skip
    yield _row(OOO, "modulo over GPipe", "FFNN, unit costs", 4, 1.62, 1.62, base / simulate(modulo(**unit)).makespan)
    if quick:
        return
    gpu = Machine("V100", PRODUCTS * 15.7e12, 900e9, Network())
    fine_tuning = [("NVLink", 1, 1.59, 1.70), ("PCIe", 1, 1.58, 1.58), ("10 Gb Ethernet", 2, 1.48, 1.48)]
    for name, group, low, high in fine_tuning:
        costs = replace(gpu, network=LINKS[name]).costs(bert(24), 24)
        found = _pipelines(24, 4, 4, costs, group)
        if name == "NVLink":
            yield _row(OOO, "fast-forward over GPipe", "BERT-24, NVLink", 4, 1.15, 1.15, found[0] / found[1])
        where = name + (f", groups of {group}" if group > 1 else "")
        yield _row(OOO, "modulo over GPipe", f"BERT-24, {where}", 4, low, high, found[0] / found[2])
    cloud = replace(gpu, network=Network(10e-6, 25e9, 8, 50e-6, 25 * GIGABIT))
    seconds = {}
    growing: list[tuple[int, int, int, float | None, float | None]] = [  # encoders, workers, batch, the paper's
        (12, 8, 512, 1.73, 1.73), (24, 16, 1024, 1.41, 1.45), (48, 32, 1872, 1.41, 1.45),
        (48, 8, 1872, None, None), (48, 48, 2816, None, None),
    ]  # fmt: skip
    for encoders, count, batch, least, most in growing:
        costs = cloud.costs(bert(encoders), batch / count)
        found = _pipelines(encoders, count, count, costs)
        seconds[encoders, count] = found[2]
        yield _row(OOO, "modulo over GPipe", f"BERT-{encoders}, 8 a node, 25 Gb", count, least, most,
                   found[0] / found[2])  # fmt: skip
    yield _row(OOO, "modulo, 32 workers over 8", "BERT-48, 8 a node, 25 Gb", 32, 2.5, 2.5,
               seconds[48, 8] / seconds[48, 32])  # fmt: skip


def _pipelines(stages: int, workers: int, microbatches: int, costs: Costs, group: int = 1) -> tuple[float, ...]:
    """Return the times of GPipe, of fast-forwarding, and of that with modulo allocation."""
    size: dict[str, Any] = {"stages": stages, "workers": workers, "microbatches": microbatches}
    found = (gpipe(**size), fast_forward(**size, costs=costs, input_gradient=True),
             modulo(**size, costs=costs, group=group, input_gradient=True))  # fmt: skip
    return tuple(simulate(schedule, costs).makespan for schedule in found)


def scaling_papers_networks() -> dict[str, tuple[str, list[Layer]]]:
    """Return the DualPipe paper's networks but Inception v4, and the group that its means are of."""
    return {
        "VGG16": ("CNN", vgg16(224, 10)),
        "ResNet-152": ("CNN", [joined_layers(block) for block in resnet((3, 8, 36, 3), 224, 10)]),
        "SNN": ("FCN/RNN", mlp(32, 2048, 3072, 10)),
        "Transformer": ("FCN/RNN", transformer(12, 512, 20, 30_000, 8)[1:-1]),
        "Residual LSTM": ("FCN/RNN", lstm(8, 512, 1024, 100)),
    }


COMPARED = ("DualPipe over data-parallel", "DualPipe over PipeDream", "DualPipe over PipeDream, with a barrier")
"""Of the DualPipe paper. Its means are geometric: √(1.213 · 5.817) = 2.66 ≈ 2.64, √(1.517 · 1.849) = 1.67 ≈ 1.68."""


def dualpipe_rows(quick: bool = False) -> Iterator[Row]:
    """Yield DualPipe over data-parallel workers and over PipeDream (Chen et al., 2018, §4.2), batch 128 on 4 GPUs."""
    found: dict[str, list[tuple[float, float, float]]] = {"CNN": [], "FCN/RNN": []}
    for group, layers in scaling_papers_networks().values():
        if quick and group == "CNN":
            continue
        apart = data_parallel("dp-overlap", layers, P40, 4, 32).throughput
        dual, dream = (asynchronous(name, layers, P40, 4, 16, 128).throughput for name in ("dualpipe", "pipedream"))
        found[group].append((dual / apart, dual / dream, _with_barriers(layers)))
    theirs = {"CNN": (1.213, 1.517), "FCN/RNN": (5.817, 1.849)}
    for group, ratios in found.items():
        if not ratios:
            continue
        for compared, paper, values in zip(COMPARED, (*theirs[group], theirs[group][1]), zip(*ratios, strict=True),
                                           strict=True):  # fmt: skip
            yield _row(SPECTRAIN, compared, f"{group}, mean", 4, paper, paper, geometric_mean(values))
    every = list(zip(*(ratio for ratios in found.values() for ratio in ratios), strict=True))
    for compared, most, mean, values in zip(COMPARED, (15.77, 2.18, 2.18), (2.64, 1.68, 1.68), every, strict=True):
        yield _row(SPECTRAIN, compared, "the largest", 4, most, most, max(values))
        if not quick:
            yield _row(SPECTRAIN, compared, "all, mean", 4, mean, mean, geometric_mean(values))


def _with_barriers(layers: Sequence[Layer], workers: int = 4) -> float:
    """Return PipeDream's time for a batch over DualPipe's, if all workers wait for each other after every unit."""
    parts = cut(layers, workers)
    forward = [part.forward for part in parts]
    backward = [part.input_grad + part.weight_grad for part in parts]
    units = [max(pair[(worker + parity) % 2][worker] for worker in range(workers))
             for pair in ((forward, backward),) for parity in (0, 1)]  # fmt: skip
    return sum(units) / max(map(sum, zip(forward, backward, strict=True)))


def _row(source: str, compared: str, setting: str, workers: int, low: float | None, high: float | None,
         ours: float) -> Row:  # fmt: skip
    row: Row = {"source": source, "compared": compared, "setting": setting, "workers": workers, "ours": ours}
    if low is None or high is None:
        return row
    return row | {"low": low, "high": high, "paper": f"{low:g}" if low == high else f"{low:g}–{high:g}"}


ASKED_FOR = ("reverse first-k, first ready first", "modulo over GPipe")
"""The comparisons that documents show, in addition to means."""

SCALING_PAPERS = Benchmark(
    name="scaling-papers",
    title="Speed-ups on many GPUs: measured in the papers, and simulated here",
    leaves_out="overheads of the papers' frameworks other than kernels, transfers and gradient sums",
    settings={"within": WITHIN, "ethernet": ETHERNET, "convolutions": CONVOLUTIONS, "products": PRODUCTS},
    threads=None,
    measure=measure_scaling_papers,
    columns=columns(
        words={"source": "paper", "compared": "compared", "setting": "setting", "outcome": "outcome"},
        numbers={"workers": "workers", "paper": "in the paper"},
        formats={"{:.2f}": {"ours": "simulated"}},
    ),
    short=("compared", "setting", "workers", "paper", "ours", "outcome"),
    in_short=lambda row: row["setting"] == "all, mean" or (
        row["workers"] >= 8 and row["compared"] in ASKED_FOR and row["outcome"] != "not in the paper"
    ),
    picture=harness.bars(
        "{compared}: {setting}, {workers} workers",
        {"low": "the paper, least", "high": "the paper, most", "ours": "simulated"},
        "speed-up over the baseline", (harness.PAPER_TINT, harness.PAPER, harness.OURS), line=1.0,
    ),
)  # fmt: skip
