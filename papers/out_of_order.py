"""Out-of-Order BackProp (Oh et al., EuroSys 2022)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
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
from benchmarks.workloads import mlp, stacked
from papers.claims import Context, Found, Ours, Run, drawn_timelines, quotient, ratio
from papers.dualpipe import DRAW_RANGES
from sparsebp import models, nn
from sparsebp.core import threads, timing
from sparsebp.runtime.actions import Stages
from sparsebp.runtime.executor import PlainExecutor
from sparsebp.runtime.search import MEMORY_RATIO, all_schedules
from sparsebp.schedule import Action, Costs, Kind, Network, StepGraph, actions_of, simulate
from sparsebp.schedule.builders import (
    fast_forward,
    gpipe,
    interleaved_one_f_one_b,
    modulo,
    one_f_one_b,
    reverse_first_k,
)
from sparsebp.schedule.one_worker import search_k
from sparsebp.schedule.regions import RegionTimes, Timeline, joint_schedule, make_regions

_REORDERED = ("joint", "list")

# ---- one device, measured --------------------------------------------------------------------------------------------

Case = tuple[Callable[[], Any], tuple[int, ...], int]
"""A network's constructor, the shape of a batch, and its samples."""
_ROUNDS = {"rounds": 9, "least_rounds": 5, "warmup": 1, "budget": 6.0}
_QUICK = {"rounds": 2, "least_rounds": 2, "warmup": 1}


def _fastest(row: Mapping[str, Any]) -> Mapping[str, float]:
    """Return the time of the faster order that moves weight gradients."""
    return min((row[name] for name in _REORDERED), key=lambda found: found["median"])


def single_device(result: Result) -> Found:
    """Fig. 7: the fastest order that moves weight gradients, over the conventional one; §8.2: two streams without."""
    rows = {row["network"]: row for row in result["rows"]}
    gains = {name: quotient(row["conventional"], _fastest(row)) for name, row in rows.items()}
    found = {}
    for key, name in (("DenseNet", "DenseNet"), ("MobileNet", "MobileNet")):
        network = next((one for one in gains if one.startswith(name)), None)
        if network is not None:
            found[key] = replace(gains[network], other=network)
    mean = math.exp(fmean(math.log(one.value) for one in gains.values()))
    found["mean"] = Ours(mean, unit="×", other=", ".join(f"{name} {one.value:.2f}×" for name, one in gains.items()))
    dense = next((row for name, row in rows.items() if name.startswith("DenseNet")), None)
    if dense is not None:
        found["two streams"] = quotient(dense["conventional"], dense["two"], ran=orders.ORDERS["two"])
        found["reordered"] = quotient(dense["conventional"], _fastest(dense))
    return Found(found, {"rows": [{"network": name, "gain": one.value} for name, one in gains.items()]})


def where_it_gains(context: Context) -> dict[str, Any]:
    """Networks whose kernels leave a core free in a row; §8.2: both gradients of a layer at the same time."""
    rounds = _QUICK if context.quick else _ROUNDS
    with harness.using_threads(threads.most_threads()):
        rows = []
        for name, (make, shape, samples) in _cases(context.quick).items():
            row = orders.measure_schedule_row(make, shape, rounds, samples=samples)
            rows.append({"network": name, "gain": row["conventional"]["median"] / _fastest(row)["median"]})
        barriers = {name: _barrier(make(), shape, samples, rounds)
                    for name, (make, shape, samples) in _chains(context.quick).items()}  # fmt: skip
    return {"rows": rows, "barriers": barriers}


_APART = "one thread per gradient, over one after the other on all cores"


def gains_here(data: Mapping[str, Any]) -> Found:
    gains, barriers = {row["network"].split(":")[0]: row["gain"] for row in data["rows"]}, data["barriers"]
    said = ", ".join(f"{name} {gain:.2f}×" for name, gain in gains.items())
    together = ", ".join(f"{name} {gain:.2f}×" for name, gain in barriers.items())
    return Found({"range": Ours(max(gains.values()), unit="×", other=said),
                  "barrier": Ours(max(barriers.values()), unit="×", other=together, ran=_APART)})  # fmt: skip


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


def _barrier(model: Any, shape: tuple[int, ...], samples: int, rounds: dict[str, Any]) -> float:
    """Return the gain of a layer's I and W at the same time, over one after the other, in a forward and a backward."""
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

        found = timing.measure({"both": both, "one": lambda: list(gradients(None))}, **rounds)
    return found["one"].median / found["both"].median


# ---- what does not depend on time ------------------------------------------------------------------------------------


def memory(context: Context) -> dict[str, Any]:
    """Fig. 9: simulated peaks of the reordered step over the conventional one's, from measured costs and bytes."""
    rows = []
    for name, (make, shape, _) in orders.schedule_networks(context.quick).items():
        rng = np.random.default_rng(0)
        found = orders.find(make, (rng.standard_normal(shape, np.float32), rng.integers(10, size=shape[0])))
        graph = found.schedule.graph
        every = all_schedules({"stages": graph.stages, "unweighted": graph.unweighted}, found.costs, MEMORY_RATIO)
        if "joint" in every:
            joint, usual = (simulate(every[order], found.costs) for order in ("joint", "fused"))
            done = ((event.start, action) for event in joint.events for action in actions_of(event.cell))
            order = [stage for _, stage in sorted((start, a.stage) for start, a in done if a.kind == "W")]
            rows.append({"network": name, "peak": joint.peak / usual.peak, "weights": len(order),
                         "moved": sum(a < b for a, b in pairwise(order))})  # fmt: skip
    return {"rows": rows}


def peaks(data: Mapping[str, Any]) -> Found:
    moved = [row for row in data["rows"] if row["moved"]]
    if not moved:
        return Found({})
    said = ", ".join(f"{row['network']} {100 * row['peak'] - 100:.2g} %" for row in moved)
    return Found({"peak": Ours(100 * max(row["peak"] for row in moved) - 100, unit=" %", other=said)})


def unchanged(data: Any) -> Found:
    """§8: weights after some steps are bitwise the same in every order."""
    rng = np.random.default_rng(0)
    x, target = rng.standard_normal((8, 16), np.float32), rng.integers(10, size=8)
    weights = {}
    size: dict[str, Any] = {"stages": len(Stages(mlp(16, 6, 10)).all), "unweighted": ()}
    size["unweighted"] = tuple(i for i, stage in enumerate(Stages(mlp(16, 6, 10)).all) if not stage.layer.parameters())
    for name, order in all_schedules(size, Costs()).items():
        model = mlp(16, 6, 10)
        executor = PlainExecutor(model, nn.CrossEntropyLoss(), orders.optimizer_of(model), order)
        with threads.one_core():
            for _ in range(5):
                executor.step([(x, target)])
            executor.flush()
        executor.close()
        weights[name] = b"".join(np.asarray(value).tobytes() for value in model.state_dict().values())
    same = sum(found == weights["conventional"] for found in weights.values())
    return Found({"weights": Ours(same == len(weights), text=f"{same} of {len(weights)} orders bitwise equal")})


def joint(data: Any) -> Found:
    """Alg. 1, transcribed, and our order of the second stream, for random times of 4 regions and 12 layers."""
    tight, roomy = (sum(_same_order(seed, scale) for seed in range(200)) for scale in (1.0, 100.0))
    return Found({"same": Ours(tight, text=f"{tight} of 200 random instances",
                               other=f"{roomy} of 200 where no kernel outlasts its region")})  # fmt: skip


def _same_order(seed: int, scale: float) -> bool:
    rng = np.random.default_rng(seed)
    graph, regions = StepGraph(12, first="I"), make_regions(12, 2)
    sub, gain = rng.uniform(0.1, 1.0, (len(regions), 12)), rng.permuted(np.arange(48.0)).reshape(-1, 12)
    main, number = scale * rng.uniform(1.0, 4.0, len(regions)), {region: i for i, region in enumerate(regions)}
    times = RegionTimes(lambda region: main[number[region]], lambda k, region: sub[number[region], k],
                        lambda k, region: gain[number[region], k])  # fmt: skip
    timeline = Timeline(graph, regions, times, Costs(), k=1, input_gradient=False)
    return joint_schedule(timeline) == _algorithm_1(timeline, sub, gain)


def _algorithm_1(timeline: Timeline, sub: np.ndarray, gain: np.ndarray) -> list[int]:
    """Algorithm 1; a kernel is runnable in a region if it is ready there and its layer's next forward is not over."""
    count = len(timeline.regions)
    chosen: list[list[int]] = [[] for _ in range(count)]
    now, unscheduled, open_regions = [0.0] * count, set(timeline.beside), set(range(count))
    while unscheduled:
        best: tuple[float, int, int] | None = None
        for i in sorted(open_regions):
            usable = [
                k
                for k in unscheduled
                if max(timeline.ready[k], timeline.begin[i] + now[i]) + sub[i, k] <= timeline.deadline[k]
            ]
            if not usable:
                continue
            now[i] = max(now[i], min(timeline.ready[k] for k in usable) - timeline.begin[i])
            if now[i] >= timeline.length[i]:
                continue
            for k in usable:
                if timeline.ready[k] <= timeline.begin[i] + now[i] and (best is None or gain[i, k] > best[0]):
                    best = (float(gain[i, k]), i, k)
        if best is None:
            break
        _, i, k = best
        chosen[i].append(k)
        unscheduled.remove(k)
        now[i] += sub[i, k]
        if now[i] >= timeline.length[i]:
            open_regions.remove(i)
    return [k for one in chosen for k in one]


def first_k(data: Any) -> Found:
    """Alg. 2 and §5.1: the order of reverse first-k, its bound, its search; Fig. 4 with durations that are chosen."""
    network = [4, 1, 4, 4, 4]  # the text gives no durations; with these all of its statements hold
    costs = Costs(lambda action: network[action.stage] if action.kind == "S" else {"F": 2, "I": 1, "W": 2}[action.kind])
    settings: list[tuple[int, Any]] = [(0, "first-ready"), (0, "first-stage"), (3, "first-stage"), (4, "first-stage")]
    a, b, c, d = [simulate(reverse_first_k(stages=5, k=k, costs=costs, priority=priority), costs).makespan
                  for k, priority in settings]  # fmt: skip
    (lane,) = [lane for lane in reverse_first_k(stages=5, k=3).lanes if any(c.kind == "F" for c in _actions(lane))]
    order = [f"{action.kind}{action.stage + 1}" for action in _actions(lane) if action.kind in "IW"]
    best, found, tried = 0, 0, 0
    for seed in range(200):  # concave throughputs of up to 60 layers
        rng = np.random.default_rng(seed)
        stages = int(rng.integers(10, 60))
        top = int(rng.integers(0, stages))
        calls: list[int] = []
        k = search_k(partial(_concave, top, calls), stages)
        best, found, tried = best + 1, found + (k == top), max(tried, len(set(calls)))
    return Found({
        "order": Ours(order, text=" ".join(order)),
        "search": Ours(found == best, text=f"the best k in {found} of {best}, at most {tried} tried"),
        "saved": Ours(other=f"with durations chosen so that all hold: {a - b:g}"),
        "further": Ours(other=f"likewise: {b - c:g}; with four layers {b - d:g}"),
        "ratios": Ours(other=f"likewise: {a / c:.2f}× and {b / c:.2f}×"),
    })  # fmt: skip


def _actions(lane: Any) -> list[Action]:
    return [action for cell in lane.cells for action in actions_of(cell)]


def _concave(top: int, calls: list[int], k: int) -> float:
    calls.append(k)
    return -float((k - top) ** 2)


# ---- units of time ---------------------------------------------------------------------------------------------------

_DURATIONS: dict[Kind, float] = {"F": 1, "I": 1, "W": 1, "U": 0}
_UNITS = Costs(_DURATIONS)
"""By kind; a joint backward takes as long as its two parts."""
_FIG_5: dict[str, Any] = {"workers": 2, "stages": 8}
_FIG_12: dict[str, Any] = {"workers": 4, "stages": 16, "microbatches": 4}


def eight_layers(data: Any) -> Found:
    """Fig. 5, and with two micro-batches Fig. 6."""
    found = [simulate(schedule, _UNITS) for schedule in _eight_layers()]
    spans = [round(one.makespan) for one in found]
    two = [round(simulate(schedule, _UNITS).makespan) for schedule in _eight_layers(2)]
    dealt = found[2]
    begin = max(event.end for event in dealt.events if any(a.kind == "F" for a in actions_of(event.cell)))
    busy = [0.0, 0.0]
    for event in dealt.events:
        if event.start >= begin:
            busy[dealt.schedule.lanes[event.lane].worker] += event.end - event.start
    share = 100 * min(busy) / (dealt.makespan - begin)
    return Found({
        "conventional": Ours(spans[0], ran="cross-layer model parallelism"),
        "fast-forward": Ours(spans[1], ran="fast-forward"), "modulo": Ours(spans[2], ran="modulo"),
        "utilised": Ours(share, unit=" %", ran="modulo", text=f"{100 * busy[0] / (dealt.makespan - begin):.0f} % and "
                         f"{100 * busy[1] / (dealt.makespan - begin):.0f} %"),
        "two micro-batches": Ours(two[0] > two[1] > two[2], text=", ".join(map(str, two))),
    })  # fmt: skip


def _eight_layers(microbatches: int = 1) -> list[Any]:
    size = _FIG_5 | {"microbatches": microbatches}
    return [gpipe(**size, input_gradient=False), fast_forward(**size), modulo(**size)]


def sixteen_layers(data: Any) -> Found:
    """Fig. 12 and §8.4.1; the paper draws 8 layers, and states the ratios of 16."""
    a, b, c = [simulate(schedule, _UNITS).makespan for schedule in _sixteen_layers()]
    return Found({"fast-forward": Ours(round(a / b, 2), unit="×", ran="fast-forward", other=f"{a:g} / {b:g} units"),
                  "modulo": Ours(round(a / c, 2), unit="×", ran="modulo",
                      other=f"{a:g} / {c:g} units, {a / c:.3f}")})  # fmt: skip


def _sixteen_layers() -> list[Any]:
    return [gpipe(**_FIG_12, input_gradient=False), fast_forward(**_FIG_12), modulo(**_FIG_12)]


# ---- two ranks, measured ---------------------------------------------------------------------------------------------


def cross_layer(context: Context) -> dict[str, Any]:
    """Fig. 5 on two processes: an MLP, one micro-batch, one thread a rank."""
    given: dict[str, Any] = {"width": 1024, "depth": 8, "batch": 128, "microbatches": 1, "steps": 40,
                             "sizes": (1 << 10,), "schedules": ("gpipe", "fast-forward", "modulo")}  # fmt: skip
    if context.quick:
        given |= {"width": 16, "depth": 4, "batch": 4, "steps": 3}
    times = _on_two_ranks(given)
    return {name: timing.ratio(times["gpipe"], times[name]) for name in ("fast-forward", "modulo")}


def recurrent_cross_layer(context: Context) -> dict[str, Any]:
    """Fig. 11a: recurrent layers on two processes, a whole batch at once; GPipe has four micro-batches."""
    given: dict[str, Any] = {"width": 128, "depth": 16, "length": 20, "batch": 128, "steps": 20, "sizes": (1 << 10,)}
    if context.quick:
        given |= {"width": 8, "depth": 4, "length": 3, "batch": 8, "steps": 2}
    whole = _on_two_ranks(given | {"microbatches": 1, "schedules": ("gpipe", "fast-forward", "modulo")})
    parts = _on_two_ranks(given | {"microbatches": 4, "batch": given["batch"] // 4, "schedules": ("gpipe",)})
    return {"GPipe": timing.ratio(parts["gpipe"], whole["modulo"]),
            "cross-layer": timing.ratio(whole["gpipe"], whole["modulo"]),
            "slower": timing.ratio(parts["gpipe"], whole["gpipe"])}  # fmt: skip


def _on_two_ranks(given: dict[str, Any]) -> dict[str, timing.Timing]:
    """Return the lengths of steps of some schedules on two processes."""
    spans = on_ranks(2, pipelines_on_ranks, given=given)["spans"]
    return {
        name: timing.Timing(
            tuple(max(end for _, _, end in step) - min(start for _, start, _ in step) for step in steps))
        for name, steps in spans.items()
    }  # fmt: skip


def ratios(data: Mapping[str, Any]) -> Found:
    """Return the gains of Fig. 5 and 11a as they were measured; the first is named after what ran."""
    return Found({key: ratio(found, ran=key if key == "fast-forward" else "") for key, found in data.items()})


def executed_pipelines(result: Result) -> Found:
    """Fig. 11a executed on two ranks: an MLP, over GPipe as measured."""
    rows, found = {row["schedule"]: row for row in result["rows"]}, {}
    off = ", ".join(f"{row['schedule']} {row['difference']:+.0%}" for row in result["rows"])
    for name in ("fast-forward", "modulo"):
        if name in rows:
            found[name] = Ours(rows["gpipe"]["measured"] / rows[name]["measured"], unit="×", ran=name,
                               other=f"simulated over measured: {off}" if name == "modulo" else "")  # fmt: skip
    return Found(found)


def data_parallel_here(result: Result) -> Found:
    """§8.3 on two ranks of this machine, in its memory and with a stated network between them; most samples a step."""
    found: dict[str, Ours] = {}
    for row in sorted(result["rows"], key=lambda row: int(row["batch"])):
        where = "memory" if row["network"].startswith("this") else "10 Gbit/s"
        fewer = f"{row['batch']} samples: "
        given = quotient(row["priority"], row["reverse"], ran=f"reverse first-{row['k']}; first stage first")
        found[where] = replace(given, other=f"{found[where].other}{found[where].said}" if where in found else fewer)
    return Found(found)


# ---- the paper's clusters, simulated ---------------------------------------------------------------------------------


def data_parallel(result: Result) -> Found:
    """Fig. 10: reverse first-k over prioritised sums."""
    rows = [row for row in result["rows"] if row["compared"].startswith("reverse")]
    ready = {(row["setting"], row["workers"]): row["ours"] for row in rows if "first ready" in row["compared"]}
    rows = [row for row in rows if "first stage" in row["compared"]]
    return Found({
        f"{row['setting']}, {row['workers']}": Ours(
            row["ours"], unit="×", other=f"sums in the order of their readiness on both sides: "
            f"{ready[row['setting'], row['workers']]:.2f}×") for row in rows
    }, {"rows": rows})  # fmt: skip


def pipelines(result: Result) -> Found:
    """Fig. 11 and 13: over GPipe."""
    rows = [row for row in result["rows"] if row["source"].startswith("Oh") and row.get("paper")
            and not row["compared"].startswith("reverse") and not row["setting"].startswith("FFNN")]  # fmt: skip
    names = [row["compared"].removesuffix(" over GPipe") for row in rows]
    found = {f"{name}; {row['setting']}, {row['workers']}": Ours(row["ours"], unit="×", ran=name.split(",")[0])
             for name, row in zip(names, rows, strict=True)}  # fmt: skip
    for (encoders, workers), batch in _PRETRAINED.items():
        key = f"modulo; BERT-{encoders}, 8 a node, 25 Gb, {workers}"
        if key in found:
            gains = [_over_gpipe(encoders, workers, batch, count) for count in (workers // 2, workers, 2 * workers)]
            found[key] = replace(found[key], low=min(gains), high=max(gains),
                                 other="half to twice as many micro-batches as GPUs: not in the text")  # fmt: skip
    return Found(found, {"rows": rows})


def _over_gpipe(encoders: int, workers: int, batch: int, microbatches: int) -> float:
    costs = _CLOUD.costs(bert(encoders), batch / microbatches)
    size: dict[str, Any] = {"stages": encoders, "workers": workers, "microbatches": microbatches}
    base, dealt = gpipe(**size), modulo(**size, costs=costs, input_gradient=True)
    return simulate(base, costs).makespan / simulate(dealt, costs).makespan


_PRETRAINED = {(12, 8): 512, (24, 16): 1024, (48, 32): 1872}
"""Samples of a batch, by encoders and workers (§8.4.2)."""


_GPU = Machine("V100", PRODUCTS * 15.7e12, 900e9, Network())
_CLOUD = replace(_GPU, network=Network(10e-6, 25e9, 8, 50e-6, 25 * GIGABIT))
_MEGATRON = {(48, 8): (2, 3, 6), (48, 16): (3,), (48, 24): (2,)}
"""Parts of the model a worker, by encoders and workers: the text does not say how many, so all count."""


def sums(data: Any) -> Found:
    """§8.3: ResNet-50 on 16 V100, and the idle time that reverse first-k saves."""
    layers = flat(resnet())
    costs = V100.costs(layers, 128, 1, 16)
    before, after = (replicas(name, layers, V100, 16, 128) for name in ("dp-priority", "dp-reverse"))
    computing = V100.alone(layers, 128)
    wait, left = (1e3 * (one.seconds - computing) for one in (before, after))
    first = 1e3 * sum(costs.duration(Action(stage, "W", 0)) for stage in range(1, 45))
    whole = 1e3 * sum(costs.duration(Action(stage, "S")) for stage in range(len(layers)))
    return Found({
        "wait": Ours(wait, unit=" ms", other=f"all sums {whole:.0f} ms; computing {1e3 * computing:.0f} ms, to "
                     "whose 380 the rate is fitted"),
        "weights": Ours(first, unit=" ms"), "k": Ours(after.detail or 0),
        "less": Ours(max(wait - first, 0.0), unit=" ms"),
        "more": Ours(max(wait - first - left, 0.0), unit=" ms"), "left": Ours(left, unit=" ms"),
        "gain": Ours(before.seconds / after.seconds, unit="×"),
        "memory": Ours(100 * (after.peak / before.peak - 1), unit=" %"),
    })  # fmt: skip


def stated_pipelines(data: Any) -> Found:
    """§8.4: BERT against other systems, on other networks of GPUs, and in memory."""
    layers, found = bert(24), dict[str, Ours]()
    size: dict[str, Any] = {"stages": 24, "workers": 4, "microbatches": 4}
    for name, link in LINKS.items():  # §8.4.1: four V100, batch 96 in four micro-batches
        costs = replace(_GPU, network=link).costs(layers, 24)
        found[f"transfer {name}"] = Ours(4 * 24 * layers[0].output / link.bandwidth / costs.duration(Action(1, "F", 0)))
    costs = replace(_GPU, network=LINKS["NVLink"]).costs(layers, 24)
    base, fast, dealt = (simulate(schedule, costs) for schedule in (
        gpipe(**size), fast_forward(**size, costs=costs, input_gradient=True),
        modulo(**size, costs=costs, input_gradient=True)))  # fmt: skip
    found["one GPU"] = Ours(_GPU.alone(layers, 96) / dealt.makespan, unit="×")
    found["memory fast-forward"] = Ours(100 * (fast.peak / base.peak - 1), unit=" %", ran="fast-forward")
    found["memory modulo"] = Ours(100 * (dealt.peak / base.peak - 1), unit=" %")
    slow = replace(_GPU, network=LINKS["10 Gb Ethernet"]).costs(layers, 24)
    one, two = (simulate(modulo(**size, costs=slow, group=group, input_gradient=True), slow).makespan
                for group in (1, 2))  # fmt: skip
    found["groups"] = Ours(two / one)
    dreams: list[float] = []
    megatron: list[list[tuple[float, float]]] = []  # at a point, by parts: over interleaved 1F1B; fast-forward in it
    points = [(12, 8, 512), (24, 16, 1024), (48, 32, 1872), (48, 8, 1872), (48, 16, 1872), (48, 24, 1872)]
    for encoders, workers, batch in points:  # §8.4.2
        layers = bert(encoders)
        costs = _CLOUD.costs(layers, batch / workers)
        size = {"stages": encoders, "workers": workers, "microbatches": workers}
        ours = simulate(modulo(**size, costs=costs, input_gradient=True), costs).makespan
        if encoders < 48 or workers == 32:
            dreams.append(asynchronous("pipedream", layers, _CLOUD, workers, workers, batch / workers).seconds / ours)
        if encoders == 48 and workers in (8, 16):
            found[f"DAPPLE {workers}"] = Ours(simulate(one_f_one_b(**size), costs).makespan / ours, unit="×")
        if (encoders, workers) in _MEGATRON:
            megatron.append([])
            for chunks in _MEGATRON[encoders, workers]:
                theirs = simulate(interleaved_one_f_one_b(**size, chunks=chunks), costs).makespan
                group = encoders // (workers * chunks)  # the same parts of the model on the same workers
                mixed = simulate(modulo(**size, costs=costs, group=group, input_gradient=True), costs).makespan
                megatron[-1].append((theirs / ours, theirs / mixed))
    found |= {
        "PipeDream 8": Ours(dreams[0], unit="×"), "PipeDream": Ours(fmean(dreams), unit="×"),
        "PipeDream 16, 32": Ours(max(dreams[1:]), unit="×", text=", ".join(f"{one:.2f}×" for one in dreams[1:])),
        "Megatron low": _of_any(megatron, 0, min), "Megatron high": _of_any(megatron, 0, max),
        "forwarding mean": _of_any(megatron, 1, fmean, "fast-forward, the same parts"),
        "forwarding most": _of_any(megatron, 1, max, "fast-forward, the same parts"),
    }  # fmt: skip
    return Found(found)


def _of_any(
    points: list[list[tuple[float, float]]], which: int, rule: Callable[[list[float]], float], ran: str = ""
) -> Ours:
    """Return a rule of all points with the fewest parts; its spread is that over every number of parts."""
    found = [rule([point[which] for point in chosen]) for chosen in product(*points)]
    return Ours(found[0], min(found), max(found), unit="×", ran=ran, other="8 GPUs: 2, 3 or 6 parts a worker")


_GAINS = harness.bars("{network}", {"gain": ""}, "speed-up over the conventional order", line=1.0)
RUNS = {
    "ooo-alg1": Run(joint),
    "ooo-fig4": Run(first_k),
    "ooo-fig5": Run(eight_layers, draw=lambda data: drawn_timelines(_eight_layers(), _UNITS)),
    "ooo-fig5-here": Run(ratios, cross_layer, seconds=17, needs=("mpi",)),
    "ooo-fig7": Run(single_device, rests_on="schedule", draw=_GAINS, seconds=240, needs=("torch", "data")),
    "ooo-fig7-here": Run(gains_here, where_it_gains, draw=_GAINS, seconds=90),
    "ooo-s8": Run(unchanged, seconds=1),
    "ooo-fig9": Run(peaks, memory, seconds=40),
    "ooo-fig10": Run(data_parallel, rests_on="scaling-papers", draw=DRAW_RANGES, seconds=30),
    "ooo-fig10-here": Run(data_parallel_here, rests_on="data-parallel", seconds=120, needs=("torch", "mpi")),
    "ooo-s83": Run(sums, seconds=2),
    "ooo-fig11": Run(pipelines, rests_on="scaling-papers", draw=DRAW_RANGES, seconds=30),
    "ooo-fig11-here": Run(executed_pipelines, rests_on="scaling-measured", seconds=120, needs=("mpi",)),
    "ooo-fig11-rnn": Run(ratios, recurrent_cross_layer, seconds=60, needs=("mpi",)),
    "ooo-s84": Run(stated_pipelines, seconds=3),
    "ooo-fig12": Run(sixteen_layers, draw=lambda data: drawn_timelines(_sixteen_layers(), _UNITS)),
}
"""By the figure's name."""
