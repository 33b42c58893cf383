"""Out-of-Order BackProp (Oh et al., EuroSys 2022)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks import schedules as orders
from benchmarks.harness import Result
from benchmarks.processes import on_ranks
from benchmarks.ranks import pipelines_on_ranks
from benchmarks.scaling import GIGABIT, LINKS, PRODUCTS, V100, Machine, asynchronous, bert, flat, resnet
from benchmarks.scaling import data_parallel as replicas
from benchmarks.schedules import ORDERS
from benchmarks.workloads import mlp, stacked
from papers.figure import (
    Claim,
    Context,
    Figure,
    Found,
    at_least,
    claim,
    draw_ranges,
    drawn_timelines,
    elsewhere,
    faster,
    gain,
    judged,
    median,
    near,
    speed_ups,
)
from sparsebp import models, nn
from sparsebp.core import threads, timing
from sparsebp.runtime.actions import Stages
from sparsebp.runtime.search import MEMORY_RATIO, all_schedules
from sparsebp.schedule import Action, Costs, Kind, Network, actions_of, simulate
from sparsebp.schedule.builders import (
    fast_forward,
    gpipe,
    interleaved_one_f_one_b,
    modulo,
    one_f_one_b,
    reverse_first_k,
)

_REORDERED = ("joint", "list")


# Run on this machine for the figures alone: one device and two ranks.

Case = tuple[Callable[[], Any], tuple[int, ...], int]
"""A network's constructor, the shape of a batch, and its samples."""
_ROUNDS = {"rounds": 9, "least_rounds": 5, "warmup": 1, "budget": 6.0}
_QUICK = {"rounds": 2, "least_rounds": 2, "warmup": 1}


def where_it_gains(context: Context) -> Found:
    """Fig. 7: networks whose kernels leave a core free in a row; §8.2: both gradients of a layer at the same time."""
    claims, rows = [], []
    rounds = _QUICK if context.quick else _ROUNDS
    with harness.using_threads(threads.most_threads()):
        for name, (make, shape, samples) in _cases(context.quick).items():
            row = orders.measure_schedule_row(make, shape, rounds, samples=samples)
            best = min(_REORDERED, key=lambda side: row[side]["median"])
            rows.append({"network": name, "gain": row["conventional"]["median"] / row[best]["median"]})
            claims.append(faster(
                f"{name}: out of order over conventional", "1.03–1.58×", 1.03, row["conventional"], row[best],
                ran=f"{orders.ORDERS[best]}; conventional: {orders.ORDERS['conventional']}",
                why="The weight gradients are too short, or they slow the other stream down"))  # fmt: skip
        for name, (make, shape, samples) in _chains(context.quick).items():
            claims.append(_barrier(name, make(), shape, samples, rounds))
    return Found(tuple(claims), {"rows": rows})


def _cases(quick: bool) -> dict[str, Case]:
    """Return networks with work for one core only, and long weight gradients."""
    if quick:
        return {"GRU, 2 × 4, T = 5, 30 classes": (lambda: stacked("GRU", 2, 4, 30), (5, 2, 4), 2)}
    return {
        "GRU, 2 × 64, T = 200, one sample, 20 000 classes: a head whose W takes as long as the recurrences":
            (lambda: stacked("GRU", 2, 64, 20_000), (200, 1, 64), 1),
        "GRU, 4 × 256, T = 50: W of one layer overlaps the recurrence of the next":
            (lambda: stacked("GRU", 4, 256, 10), (50, 32, 256), 32),
        "MLP, 32 × 512, batch 16: products too small for two cores":
            (lambda: mlp(512, 32, 10), (16, 512), 16),
    }  # fmt: skip


def _chains(quick: bool) -> dict[str, Case]:
    """Return plain chains: a layer's two gradients can be asked for by themselves."""
    if quick:
        return {"MLP, 4 × 16": (lambda: mlp(16, 4, 10), (8, 16), 8)}
    return {
        "MLP, 64 × 256": (lambda: mlp(256, 64, 10), (128, 256), 128),
        "LeNet-5": (lambda: models.lenet5(rng=0), (32, 1, 28, 28), 32),
        "VGG-11": (lambda: models.vgg11(rng=0), (8, 3, 32, 32), 8),
    }


def _barrier(name: str, model: Any, shape: tuple[int, ...], samples: int, rounds: dict[str, Any]) -> Claim:
    """Time a forward and a backward, a layer's I and W at the same time, over one after the other."""
    rng = np.random.default_rng(0)
    x, target = rng.standard_normal(shape, np.float32), rng.integers(10, size=samples)
    loss, layers = nn.CrossEntropyLoss(), [stage.layer for stage in Stages(model).all]

    def gradients(beside: ThreadPoolExecutor | None) -> Iterator[Any]:
        flow, saved = x, []
        for layer in layers:
            flow, kept = layer.forward(flow)
            saved.append(kept)
        gy = loss.input_grad(loss.forward(flow, target)[1])
        for number in reversed(range(len(layers))):
            layer, kept = layers[number], saved.pop()
            weights = beside.submit(layer.weight_grad, gy, kept) if beside and layer.parameters() else None
            gx = layer.input_grad(gy, kept) if number else None
            if layer.parameters():
                yield weights.result() if weights is not None else layer.weight_grad(gy, kept)
            gy = gx

    with ThreadPoolExecutor(1) as pool:

        def both() -> None:
            with threads.one_core():
                list(gradients(pool))

        def one() -> None:
            list(gradients(None))

        timings = timing.measure({"both": both, "one": one}, **rounds)
    ratio = timings["one"].median / timings["both"].median
    return judged(f"{name}: I and W of a layer at the same time, a barrier after each", "at most 1.03×",
                  f"{ratio:.2f}×", ratio <= 1.03, "Here two cores have a gradient each, and nothing is issued",
                  "one thread per gradient, compared with one after the other on all cores")  # fmt: skip


def memory(context: Context) -> Found:
    """Fig. 9: the simulated peaks of orders that move weight gradients, of the costs and bytes that are measured."""
    claims = []
    for name, (make, shape, _) in orders.schedule_networks(context.quick).items():
        rng = np.random.default_rng(0)
        found = orders.find(make, (rng.standard_normal(shape, np.float32), rng.integers(10, size=shape[0])))
        graph = found.schedule.graph
        every = all_schedules({"stages": graph.stages, "unweighted": graph.unweighted}, found.costs, MEMORY_RATIO)
        if "joint" not in every:
            claims.append(Claim(f"{name}: peak over the conventional order's", "at most 1.1", "no order", None,
                                "Joint scheduling finds none below the cap", orders.ORDERS["joint"]))  # fmt: skip
            continue
        joint, usual = (simulate(every[order], found.costs) for order in ("joint", "fused"))
        done = ((event.start, action) for event in joint.events for action in actions_of(event.cell))
        weights = sorted((start, action.stage) for start, action in done if action.kind == "W")
        order = [stage for _, stage in weights]
        more, moved = joint.peak / usual.peak, sum(a < b for a, b in pairwise(order))
        ran = (
            f"{orders.ORDERS['joint']} (“{every['joint'].name}”), {moved} of {len(order)} W after an earlier layer's W"
        )
        for paper, most in (("at most 1.1", MEMORY_RATIO), ("less than 1.001", 1.001)):
            met: bool | None = more <= most
            why = "" if met else "Delayed weight gradients keep both of their operands in memory"
            if not moved:
                met, why = None, "Nothing is reordered"
            claims.append(Claim(f"{name}: peak over the conventional order's, updates placed alike", paper,
                                f"{more:.4f}", met, why, ran))  # fmt: skip
    return Found(tuple(claims))


def cross_layer(context: Context) -> Found:
    """Fig. 5 on two processes: an MLP, one micro-batch, one thread a rank."""
    given: dict[str, Any] = {"width": 1024, "depth": 8, "batch": 128, "microbatches": 1, "steps": 40,
                             "sizes": (1 << 10,), "schedules": ("gpipe", "fast-forward", "modulo")}  # fmt: skip
    if context.quick:
        given |= {"width": 16, "depth": 4, "batch": 4, "steps": 3}
    times = _on_two_ranks(given)
    what = f"MLP, {given['depth']} × {given['width']}, batch {given['batch']}, one micro-batch on two ranks"
    return Found(tuple(
        faster(f"{what}: {name} over conventional", f"{paper:.2f}× ({units})", paper, times["gpipe"],
               times[name], ran=f"{name}; conventional cross-layer model parallelism",
               why="The ranks are two processes that exchange messages, and layers do not take equal time")
        for name, paper, units in (("fast-forward", 1.21, "23 / 19 units"), ("modulo", 1.44, "23 / 16 units"))
    ))  # fmt: skip


def recurrent_cross_layer(context: Context) -> Found:
    """§8.4.1 and Fig. 11a: recurrent layers on two processes, a whole batch at once; GPipe has four micro-batches."""
    given: dict[str, Any] = {"width": 128, "depth": 16, "length": 20, "batch": 128, "steps": 20, "sizes": (1 << 10,)}
    if context.quick:
        given |= {"width": 8, "depth": 4, "length": 3, "batch": 8, "steps": 2}
    whole = _on_two_ranks(given | {"microbatches": 1, "schedules": ("gpipe", "fast-forward", "modulo")})
    parts = _on_two_ranks(given | {"microbatches": 4, "batch": given["batch"] // 4, "schedules": ("gpipe",)})
    what = "GRU, {depth} × {width}, T = {length}, batch {batch} on two ranks".format_map(given)
    cross, ran = "cross-layer model parallelism", "modulo, one micro-batch"
    why = "Two ranks with one core each, not four V100; the paper states no sizes of its cells"
    slower = parts["gpipe"]["median"] / whole["gpipe"]["median"]
    return Found((
        faster(f"{what}: modulo over GPipe", "1.99× (four V100)", 1.99, parts["gpipe"], whole["modulo"],
               ran=f"{ran}; GPipe, four micro-batches", why=why),
        faster(f"{what}: modulo over {cross}", "1.47× (four V100)", 1.47, whole["gpipe"], whole["modulo"],
               ran=f"{ran}; {cross}", why=why),
        judged(f"{what}: a step of GPipe over one of {cross}", "above 1", f"{slower:.2f}", slower > 1,
               "GPUs run the state-independent part of a cell early; these ranks run layer by layer",
               f"GPipe, four micro-batches; {cross}"),
    ))  # fmt: skip


def _on_two_ranks(given: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return the lengths of steps of some schedules on two processes."""
    spans = on_ranks(2, pipelines_on_ranks, given=given)["spans"]
    return {
        name: timing.Timing(tuple(
            max(end for _, _, end in step) - min(start for _, start, _ in step) for step in steps)).to_dict()
        for name, steps in spans.items()
    }  # fmt: skip


# Statements of §8.3 and §8.4, simulated with the costs of the paper's clusters.

_RINGS = "Here sums are rings and can overtake each other, and most weights of a ResNet are in its last layers"
_GPU = Machine("V100", PRODUCTS * 15.7e12, 900e9, Network())
_CLOUD = replace(_GPU, network=Network(10e-6, 25e9, 8, 50e-6, 25 * GIGABIT))
_MEGATRON = {(48, 8): 2, (48, 16): 3, (48, 24): 2}
"""Parts of the model a worker, by encoders and workers: the paper does not say how many Megatron 2 had."""


def sums(context: Context) -> Found:
    """§8.3: ResNet-50 on 16 V100, and the idle time that reverse first-k saves."""
    layers = flat(resnet())
    costs = V100.costs(layers, 128, 1, 16)
    found = {name: replicas(name, layers, V100, 16, 128) for name in ("dp-priority", "dp-reverse")}
    waits = {name: 1e3 * (one.seconds - V100.alone(layers, 128)) for name, one in found.items()}
    before, after = found["dp-priority"], found["dp-reverse"]
    first = 1e3 * sum(costs.duration(Action(stage, "W", 0)) for stage in range(1, 45))
    whole = 1e3 * sum(costs.duration(Action(stage, "S")) for stage in range(len(layers)))
    fitted = "The rates of V100 and Ethernet are fitted to it"
    return Found((
        Claim("ResNet-50, 16 V100: computing, ms", "380", f"{1e3 * V100.alone(layers, 128):.0f}", None, fitted),
        Claim("ResNet-50, 16 V100: all sums, ms", "350", f"{whole:.0f}", None, fitted),
        near("weight gradients of layers 2 to 45, ms", 85, first, "By FLOPs, at one rate for all convolutions"),
        near("k that is best", 45, float(after.detail or 0), _RINGS),
        near("prioritised sums not hidden behind computation, ms", 350, waits["dp-priority"], _RINGS),
        near("with reverse first-k, ms", 200, waits["dp-reverse"], _RINGS),
        judged("peak of memory, reverse first-k over prioritised sums", "below 1.01", f"{after.peak / before.peak:.3f}",
               after.peak / before.peak < 1.01, _RINGS),
        elsewhere("over Horovod", "1.89× and 3.5×", "The simulator does not model Horovod's overheads"),
        elsewhere("DenseNet and MobileNet", "at most 1.10× and 1.053×", "Their layers are not simulated"),
    ))  # fmt: skip


def stated_pipelines(context: Context) -> Found:
    """§8.4: pipelines of BERT against other systems, on other networks of GPUs, and in memory."""
    claims = [*_fine_tuning(), *_pre_training((48, 8) if context.quick else None)]
    return Found((*claims, elsewhere(
        "RNN of 16 cells: over GPipe and over cross-layer model parallelism", "1.99× and 1.47×",
        "The paper does not give the sizes of its cells"), elsewhere(
        "GPT-3 on 12 to 36 GPUs", "limited by 24 decoders", "No number is stated")))  # fmt: skip


def _fine_tuning() -> list[Claim]:
    """§8.4.1: BERT-24 on four V100, batch 96 in four micro-batches."""
    layers, claims = bert(24), []
    size: dict[str, Any] = {"stages": 24, "workers": 4, "microbatches": 4}
    for (name, link), stated in zip(LINKS.items(), (0.05, 0.16, 1.8), strict=True):
        costs = replace(_GPU, network=link).costs(layers, 24)
        bytes_moved = 4 * 24 * layers[0].output
        ratio = bytes_moved / link.bandwidth / costs.duration(Action(1, "F", 0))
        claims.append(near(f"BERT-24, {name}: an encoder's transfer over its forward", stated, ratio,
                           "By nominal bandwidth and FLOPs"))  # fmt: skip
    costs = replace(_GPU, network=LINKS["NVLink"]).costs(layers, 24)
    base, fast, dealt = (simulate(schedule, costs) for schedule in _three(size, costs))
    claims.append(gain("BERT-24, NVLink: modulo on four GPUs over one GPU", 3.2, 3.2,
                       _GPU.alone(layers, 96) / dealt.makespan))  # fmt: skip
    claims.append(_at_most("BERT-24: peak of memory, fast-forward over GPipe", "at most 1.11", 1.11,
                           fast.peak / base.peak))  # fmt: skip
    claims.append(judged("BERT-24: peak of memory, modulo over GPipe", "similar, and below fast-forward's",
                         f"{dealt.peak / base.peak:.3f}", dealt.peak < fast.peak,
                         "Simulated from sizes of tensors"))  # fmt: skip
    slow = replace(_GPU, network=LINKS["10 Gb Ethernet"]).costs(layers, 24)
    one, two = (simulate(modulo(**size, costs=slow, group=group, input_gradient=True), slow).makespan
                for group in (1, 2))  # fmt: skip
    claims.append(near("BERT-24, 10 Gb Ethernet: throughput of single encoders over groups of two", 0.5, two / one,
                       "Here a group of two halves the bytes, and the link remains the bottleneck"))  # fmt: skip
    return claims


def _pre_training(only: tuple[int, int] | None) -> list[Claim]:
    """§8.4.2: larger BERTs on 8 to 32 V100, against PipeDream, DAPPLE (1F1B) and Megatron 2 (interleaved 1F1B)."""
    dreams, claims, forwarded = [], [], []
    points = [(12, 8, 512, (1.63, 1.63), None), (24, 16, 1024, (1.14, 1.25), None), (48, 32, 1872, (1.14, 1.25), None),
              (48, 8, 1872, None, 1.47), (48, 16, 1872, None, 1.29), (48, 24, 1872, None, None)]  # fmt: skip
    for encoders, workers, batch, over_dream, over_dapple in points:
        if only is not None and (encoders, workers) != only:
            continue
        layers = bert(encoders)
        costs = _CLOUD.costs(layers, batch / workers)
        size: dict[str, Any] = {"stages": encoders, "workers": workers, "microbatches": workers}
        ours = simulate(modulo(**size, costs=costs, input_gradient=True), costs).makespan
        where = f"BERT-{encoders}, {workers} workers: modulo over"
        if over_dream:
            dream = asynchronous("pipedream", layers, _CLOUD, workers, workers, batch / workers).seconds
            dreams.append(dream / ours)
            claims.append(gain(f"{where} PipeDream", *over_dream, dream / ours, _DREAM))
        if over_dapple:
            dapple = simulate(one_f_one_b(**size), costs).makespan
            claims.append(gain(f"{where} 1F1B, as DAPPLE runs", over_dapple, over_dapple, dapple / ours))
        if (encoders, workers) in _MEGATRON:
            chunks = _MEGATRON[encoders, workers]
            theirs = simulate(interleaved_one_f_one_b(**size, chunks=chunks), costs).makespan
            group = encoders // (workers * chunks)  # the same parts of the model on the same workers
            mixed = simulate(modulo(**size, costs=costs, group=group, input_gradient=True), costs).makespan
            forwarded.append(theirs / mixed)
            claims.append(gain(f"{where} interleaved 1F1B, {chunks} parts a worker, as Megatron 2 runs", 1.136, 1.292,
                               theirs / ours))  # fmt: skip
    if dreams:
        claims.append(gain("modulo over PipeDream, mean of these", 1.31, 1.31, fmean(dreams), _DREAM))
    if forwarded:
        claims.append(gain("fast-forward on the parts of interleaved 1F1B, mean", 1.204, 1.204, fmean(forwarded)))
        claims.append(gain("the same, the largest", 1.275, 1.275, max(forwarded)))
    return claims


_DREAM = "PipeDream never waits at the end of a step, and here stashed weights cost nothing"


def _three(size: dict[str, Any], costs: Costs) -> tuple[Any, Any, Any]:
    return (gpipe(**size), fast_forward(**size, costs=costs, input_gradient=True),
            modulo(**size, costs=costs, input_gradient=True))  # fmt: skip


def _at_most(what: str, paper: str, most: float, ours: float) -> Claim:
    return judged(what, paper, f"{ours:.3f}", ours <= most, "Simulated from sizes of tensors")


_DURATIONS: dict[Kind, float] = {"F": 1, "I": 1, "W": 1, "U": 0}
_UNITS = Costs(_DURATIONS)
"""By kind; a joint backward takes as long as its two parts."""


def first_k(context: Context) -> Found:
    """Fig. 4 and §5.1: five layers, sums over a network."""
    network = [4, 1, 4, 4, 4]  # the text gives no durations; with these all of its statements hold
    costs = Costs(lambda action: network[action.stage] if action.kind == "S" else {"F": 2, "I": 1, "W": 2}[action.kind])
    settings: list[tuple[int, Any]] = [(0, "first-ready"), (0, "first-stage"), (3, "first-stage")]
    a, b, c = [
        simulate(reverse_first_k(stages=5, k=k, costs=costs, priority=priority), costs).makespan
        for k, priority in settings
    ]
    stated = (
        ("units saved by prioritised sums", "1", a - b), ("and by reversing three layers", "3", b - c),
        ("conventional over reverse first-k", "1.16", a / c), ("prioritised over reverse first-k", "1.12", b / c),
    )  # fmt: skip
    return Found(tuple(Claim(what, paper, f"{ours:.3g}", None, _CHOSEN) for what, paper, ours in stated))


_CHOSEN = "The paper gives no durations: these were chosen so that its statements hold together, so nothing is decided"
_FIG_5: dict[str, Any] = {"workers": 2, "stages": 8}
_FIG_12: dict[str, Any] = {"workers": 4, "stages": 16, "microbatches": 4}


def eight_layers(context: Context) -> Found:
    """Fig. 5, and with two micro-batches Fig. 6."""
    found = [simulate(schedule, _UNITS).makespan for schedule in _eight_layers()]
    names = ("conventional", "fast-forward", "modulo")
    two = [round(simulate(schedule, _UNITS).makespan) for schedule in _eight_layers(2)]
    return Found((
        *(claim(f"8 layers on 2 devices, {name}: units", paper, round(ours))
          for name, paper, ours in zip(names, (23, 19, 16), found, strict=True)),
        Claim(f"with two micro-batches (Fig. 6): units, {', '.join(names)}", "each shorter than the one before",
              ", ".join(map(str, two)), two[0] > two[1] > two[2]),
    ))  # fmt: skip


def _eight_layers(microbatches: int = 1) -> list[Any]:
    size = _FIG_5 | {"microbatches": microbatches}
    return [gpipe(**size, input_gradient=False), fast_forward(**size), modulo(**size)]


def sixteen_layers(context: Context) -> Found:
    """Fig. 12 and §8.4.1; the paper draws 8 layers, and states the ratios of 16."""
    a, b, c = [simulate(schedule, _UNITS).makespan for schedule in _sixteen_layers()]
    return Found((
        claim("16 layers on 4 devices: fast-forward over GPipe", 1.22, round(a / b, 2)),
        claim("16 layers on 4 devices: modulo over GPipe", 1.62, round(a / c, 2),
              why=f"{a:g} / {c:g} units are {a / c:.3f}, which is 1.62 cut off and 1.63 rounded"),
        *(Claim(f"16 layers on 4 devices, {name}: units", "not stated", f"{ours:g}", None, "The paper states ratios")
          for name, ours in (("GPipe", a), ("fast-forward", b), ("modulo", c))),
    ))  # fmt: skip


def _sixteen_layers() -> list[Any]:
    return [gpipe(**_FIG_12, input_gradient=False), fast_forward(**_FIG_12), modulo(**_FIG_12)]


_NO_GAIN = "Each kernel already uses both cores, and issuing one costs little: there is nothing to hide"
_NOT_HERE = "Kernels issued to a V100 by TensorFlow, XLA or Nimble"


def single_device(result: Result) -> Found:
    """Fig. 7 on the CPU: the fastest order that moves weight gradients, over the conventional one."""
    rows, claims = [], []
    for row in result["rows"]:
        best = min(_REORDERED, key=lambda name: median(row, name))
        rows.append({"network": row["network"], "gain": median(row, "conventional") / median(row, best)})
        claims.append(faster(
            f"{row['network']}: out of order over conventional", "1.03–1.58×", 1.03, row["conventional"], row[best],
            ran=f"{ORDERS[best]}; conventional: {ORDERS['conventional']}", why=_NO_GAIN))  # fmt: skip
    return Found(tuple(claims), {"rows": rows})


def statements(result: Result) -> Found:
    """§8.2: streams without reordering, and with it."""
    claims = []
    for row in result["rows"]:
        if not row["network"].startswith("DenseNet"):
            continue
        best = min(_REORDERED, key=lambda name: median(row, name))
        ran = f"{ORDERS['two']}, each weight gradient as soon as it is ready"
        claims += [
            faster(f"{row['network']}: two streams, not reordered, over conventional", "1.39×", 1.39,
                   row["conventional"], row["two"], ran=ran, why=_NO_GAIN),
            faster(f"{row['network']}: out of order over two streams, not reordered", "1.11× (1.54 / 1.39)", 1.11,
                   row["two"], row[best], ran=f"{ORDERS[best]}; {ran}", why=_NO_GAIN),
        ]  # fmt: skip
    return Found((
        *claims,
        elsewhere("pre-compiled kernel issue (Opt1) and multi-stream (Opt2) by themselves", "Opt2: 1.01–1.15×",
                  f"{_NOT_HERE}; our answer to Opt1, CUDA graphs, is python -m benchmarks gpu-graphs"),
        elsewhere("over Nimble, mean", "1.28×", _NOT_HERE),
    ) if claims else ())  # fmt: skip


_QUEUE = "Not the paper's baseline, which lets sums overtake each other"


def data_parallel(result: Result) -> Found:
    """Fig. 10: over BytePS on clusters, simulated; of sums in the order of their readiness nothing is claimed."""
    found = speed_ups(result, lambda row: row["source"].startswith("Oh") and row["compared"].startswith("reverse"))
    claims = (replace(one, met=None, why=_QUEUE) if "first ready" in one.what else one for one in found.claims)
    return Found(tuple(claims), found.data)


def data_parallel_here(result: Result) -> Found:
    """§8.3 on two ranks of this machine, and with a stated network between them."""
    claims = []
    for row in result["rows"]:
        where = f"{row['network']}, {row['batch']} samples"
        claims.append(faster(f"{where}: reverse first-k over prioritised sums", "1.10–1.27× (16 to 48 GPUs)", 1.1,
                             row["priority"], row["reverse"], ran=f"reverse first-{row['k']}; first stage first",
                             why="Two ranks share two cores, and the same cores move the bytes"))  # fmt: skip
        hidden = row["reverse_hidden"]
        share = float(hidden["median"] if isinstance(hidden, Mapping) else hidden)
        claims.append(Claim(f"{where}: share of the sums hidden", "not stated", f"{share:.0%}", None,
                            "Not the paper's measure", f"reverse first-{row['k']}"))  # fmt: skip
    return Found(tuple(claims))


def pipelines(result: Result) -> Found:
    """Fig. 11 and 13: over GPipe, simulated."""
    return speed_ups(result, lambda row: row["source"].startswith("Oh") and not row["compared"].startswith("reverse"))


def executed_pipelines(result: Result) -> Found:
    """§8.4 executed on two ranks: over GPipe as measured, and every step compared with the simulated one."""
    rows = {row["schedule"]: row for row in result["rows"]}
    claims = []
    for name, paper in (("fast-forward", 1.18), ("modulo", 1.5)):
        if "gpipe" in rows and name in rows:
            claims.append(at_least(
                f"MLP of {result['settings']['depth']} layers on {rows[name]['ranks']} ranks: {name} over GPipe",
                paper, rows["gpipe"]["measured"] / rows[name]["measured"], ran=name,
                why="The paper's FFNN has 16 layers on four V100, GPipe's bubble here is only "
                    f"{rows['gpipe']['bubble']:.0%}"))  # fmt: skip
    claims += [
        Claim(f"{row['schedule']} on {row['ranks']} ranks: simulated step against the measured one", "not stated",
              f"{row['difference']:+.0%}", None, "Shows how far the simulator can be trusted", row["schedule"])
        for row in result["rows"]
    ]  # fmt: skip
    return Found(tuple(claims))


_GAINS = harness.bars("{network}", {"gain": ""}, "speed-up over the conventional order", line=1.0)
_ISSUE = (
    "How long TensorFlow takes to issue kernels to a V100; our answer, CUDA graphs, is python -m benchmarks gpu-graphs"
)
FIGURES = (
    Figure("ooo-fig1", "Fig. 1, 2 and 8", "elsewhere", "kernel issue overhead and timeline of DenseNet-121", gpu=True,
           why=_ISSUE),
    Figure("ooo-fig4", "Fig. 3 and 4, Alg. 2", "simulated", "reverse first-k: 16 % and 12 % of a step of five layers",
           run=first_k),
    Figure("ooo-fig5", "Fig. 5 and 6", "exact", "8 layers, 2 devices: 23, 19 and 16 units", run=eight_layers,
           draw=lambda data: drawn_timelines(_eight_layers(), _UNITS)),
    Figure("ooo-fig5-here", "Fig. 5 and §5.2.1", "measured",
           "one micro-batch on two ranks of this machine: 1.21× and 1.44× conventional cross-layer parallelism",
           run=cross_layer, seconds=17, needs=("mpi",)),
    Figure("ooo-table1", "Table 1 and 2", "elsewhere", "the paper's networks, data and clusters", gpu=True,
           why="Titan XP, P100 and V100 in four clusters; ooo-fig10 and ooo-fig11 simulate them from their data "
               "sheets"),
    Figure("ooo-fig7", "Fig. 7", "measured", "one device: 1.03–1.58× over XLA", rests_on="schedule",
           shows=single_device, draw=_GAINS, seconds=240, needs=("torch", "data"), gpu=True),
    Figure("ooo-fig7-here", "Fig. 7 and §8.2", "measured",
           "one device: networks in which an order out of order could gain here, and gradients of a layer side by "
           "side with a barrier", run=where_it_gains, draw=_GAINS, seconds=90),
    Figure("ooo-s82", "§8.2", "measured", "two streams without reordering 1.39×, with it 1.54×; over Nimble 1.28×",
           rests_on="schedule", shows=statements, seconds=240, needs=("torch", "data"), gpu=True),
    Figure("ooo-fig9", "Fig. 9 and §8.2", "executed",
           "memory of the reordered step: at most 1.1 times the conventional peak, and below 0.1 % more in fact",
           run=memory, seconds=40),
    Figure("ooo-fig10", "Fig. 10", "simulated", "data-parallel over BytePS: 1.10–1.27×", rests_on="scaling-papers",
           shows=data_parallel, draw=draw_ranges, seconds=30, gpu=True),
    Figure("ooo-fig10-here", "Fig. 10", "measured", "reverse first-k on two ranks of this machine",
           rests_on="data-parallel", shows=data_parallel_here, seconds=120, needs=("torch", "mpi")),
    Figure("ooo-s83", "§8.3", "simulated", "ResNet-50 on 16 V100: 350 ms of sums become 265 and then 200, k = 45",
           run=sums, seconds=2, gpu=True),
    Figure("ooo-fig11", "Fig. 11 and 13", "simulated", "pipelines over GPipe: 1.41–1.99×", rests_on="scaling-papers",
           shows=pipelines, draw=draw_ranges, seconds=30, gpu=True),
    Figure("ooo-fig11-here", "Fig. 11", "executed",
           "pipelines on two ranks of this machine, compared with GPipe and with the simulator",
           rests_on="scaling-measured", shows=executed_pipelines, seconds=120, needs=("mpi",)),
    Figure("ooo-fig11-rnn", "Fig. 11a", "measured",
           "recurrent layers on two ranks of this machine: modulo allocation 1.99× GPipe and 1.47× cross-layer "
           "model parallelism", run=recurrent_cross_layer, seconds=60, needs=("mpi",)),
    Figure("ooo-s84", "§8.4", "simulated", "compared with PipeDream, DAPPLE and Megatron 2; communication and memory",
           run=stated_pipelines, seconds=3, gpu=True),
    Figure("ooo-fig12", "Fig. 12 and §8.4.1", "exact",
           "16 layers, 4 devices, 4 micro-batches: 1.22× and 1.62× over GPipe", run=sixteen_layers,
           draw=lambda data: drawn_timelines(_sixteen_layers(), _UNITS)),
)  # fmt: skip
