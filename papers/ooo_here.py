"""Out-of-Order BackProp: what is run on this machine for its figures alone, one device and two ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks import schedule as orders
from benchmarks.tools import peers
from papers.figure import Claim, Context, Found, faster
from sparsebp.core import threads, timing
from sparsebp.runtime.actions import Stages
from sparsebp.runtime.search import MEMORY_RATIO, all_schedules
from sparsebp.schedule import actions_of, simulate

Case = tuple[Callable[[], Any], tuple[int, ...], int]
"""What makes a network, the shape of a batch, and its samples."""
_ROUNDS = {"rounds": 9, "least_rounds": 5, "warmup": 1, "budget": 6.0}
_QUICK = {"rounds": 2, "least_rounds": 2, "warmup": 1}
_REORDERED = ("joint", "list")


def where_it_gains(context: Context) -> Found:
    """Fig. 7: networks whose kernels leave a core free in a row; §8.2: both gradients of a layer at the same time."""
    claims, rows = [], []
    rounds = _QUICK if context.quick else _ROUNDS
    with peers.threads(threads.most_threads()):
        for name, (make, shape, samples) in _cases(context.quick).items():
            row = orders.measure_row(make, shape, rounds, samples=samples)
            best = min(_REORDERED, key=lambda side: row[side]["median"])
            rows.append({"network": name, "gain": row["conventional"]["median"] / row[best]["median"]})
            claims.append(faster(
                f"{name}: out of order over conventional", "1.03–1.58×", 1.03, row["conventional"], row[best],
                ran=f"{orders.SIDES[best]}; conventional: {orders.SIDES['conventional']}",
                why="The weight gradients are too short, or slow the other stream down"))  # fmt: skip
        for name, (make, shape, samples) in _chains(context.quick).items():
            claims.append(_barrier(name, make(), shape, samples, rounds))
    return Found(tuple(claims), {"rows": rows})


def _cases(quick: bool) -> dict[str, Case]:
    """Return networks with work that one core alone can do, beside weight gradients that take long."""
    if quick:
        return {"GRU, 2 × 4, T = 5, 30 classes": (lambda: recurrent(2, 4, 30), (5, 2, 4), 2)}
    return {
        "GRU, 2 × 64, T = 200, one sample, 20 000 classes: a head whose W is long beside the recursions":
            (lambda: recurrent(2, 64, 20_000), (200, 1, 64), 1),
        "GRU, 4 × 256, T = 50: W of one layer beside the recursion of the next":
            (lambda: recurrent(4, 256, 10), (50, 32, 256), 32),
        "MLP, 32 × 512, batch 16: products too small for two cores":
            (lambda: orders.narrow(32, 512), (16, 512), 16),
    }  # fmt: skip


def _chains(quick: bool) -> dict[str, Case]:
    """Return plain chains: a layer's two gradients can be asked for by themselves."""
    from sparsebp import models

    if quick:
        return {"MLP, 4 × 16": (lambda: orders.narrow(4, 16), (8, 16), 8)}
    return {
        "MLP, 64 × 256": (lambda: orders.narrow(64, 256), (128, 256), 128),
        "LeNet-5": (lambda: models.lenet5(rng=0), (32, 1, 28, 28), 32),
        "VGG-11": (lambda: models.vgg11(rng=0), (8, 3, 32, 32), 8),
    }


def recurrent(layers: int, hidden: int, classes: int) -> Any:
    """Return GRU layers one above the other, and a linear layer on the last step."""
    from benchmarks.tools.staged import LastStep
    from sparsebp import nn

    head = nn.Linear(hidden, classes, rng=np.random.default_rng(0))
    return nn.Sequential(*(nn.GRU(hidden, hidden, rng=number) for number in range(layers)), LastStep(), head)


def _barrier(name: str, model: Any, shape: tuple[int, ...], samples: int, rounds: dict[str, Any]) -> Claim:
    """Time a forward and a backward, a layer's I and W at the same time, over one after the other."""
    from sparsebp import nn

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
    return Claim(
        f"{name}: I and W of a layer at the same time, a barrier after each", "at most 1.03×", f"{ratio:.2f}×",
        ratio <= 1.03, "" if ratio <= 1.03 else "Here two cores have a gradient each, and nothing is issued",
        "one thread a gradient; over one after the other on all cores",
    )  # fmt: skip


def memory(context: Context) -> Found:
    """Fig. 9: the simulated peaks of orders that move weight gradients, of the costs and bytes that are measured."""
    claims = []
    for name, (make, shape, _) in orders.networks(context.quick).items():
        rng = np.random.default_rng(0)
        found = orders.find(make, (rng.standard_normal(shape, np.float32), rng.integers(10, size=shape[0])))
        graph = found.schedule.graph
        every = all_schedules({"stages": graph.stages, "unweighted": graph.unweighted}, found.costs, MEMORY_RATIO)
        if "joint" not in every:
            claims.append(Claim(f"{name}: peak over the conventional order's", "at most 1.1", "no order", None,
                                "Joint scheduling finds none below the cap", orders.SIDES["joint"]))  # fmt: skip
            continue
        joint, usual = (simulate(every[order], found.costs) for order in ("joint", "fused"))
        done = ((event.start, action) for event in joint.events for action in actions_of(event.cell))
        weights = sorted((start, action.stage) for start, action in done if action.kind == "W")
        order = [stage for _, stage in weights]
        more, moved = joint.peak / usual.peak, sum(a < b for a, b in pairwise(order))
        ran = f"{orders.SIDES['joint']} (“{every['joint'].name}”), {moved} of {len(order)} W behind one that is earlier"
        for paper, most in (("at most 1.1", MEMORY_RATIO), ("less than 1.001", 1.001)):
            met: bool | None = more <= most
            why = "" if met else "Delayed weight gradients keep both of their operands"
            if not moved:
                met, why = None, "Nothing is reordered"
            claims.append(Claim(f"{name}: peak over the conventional order's, updates placed alike", paper,
                                f"{more:.4f}", met, why, ran))  # fmt: skip
    return Found(tuple(claims))


def cross_layer(context: Context) -> Found:
    """Fig. 5 on two processes: an MLP, one micro-batch, one thread a rank."""
    from benchmarks.processes.ranks import on_ranks

    given: dict[str, Any] = {"width": 1024, "depth": 8, "batch": 128, "microbatches": 1, "steps": 40,
                             "sizes": (1 << 10,), "schedules": ("gpipe", "fast-forward", "modulo")}  # fmt: skip
    if context.quick:
        given |= {"width": 16, "depth": 4, "batch": 4, "steps": 3}
    spans = on_ranks(2, "benchmarks.processes.pipelines", given=given)["spans"]
    times: dict[str, timing.Timing] = {}
    for name, steps in spans.items():
        times[name] = timing.Timing(tuple(
            max(end for _, _, end in step) - min(start for _, start, _ in step) for step in steps))  # fmt: skip
    what = f"MLP, {given['depth']} × {given['width']}, batch {given['batch']}, one micro-batch on two ranks"
    return Found(tuple(
        faster(f"{what}: {name} over conventional", f"{paper:.2f}× ({units})", paper, times["gpipe"].to_dict(),
               times[name].to_dict(), ran=f"{name}; conventional cross-layer model parallelism",
               why="Ranks hand messages over in two processes, and layers do not take equal units")
        for name, paper, units in (("fast-forward", 1.21, "23 / 19 units"), ("modulo", 1.44, "23 / 16 units"))
    ))  # fmt: skip
