"""Optimizer Fusion: Efficient Training with Better Locality and Parallelism (Jiang et al., 2021)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.harness import Result
from benchmarks.training import batch_of, ours
from papers.claims import Context, Found, Ours, Run, drawn_timelines, quotient, ratio
from sparsebp import models as built
from sparsebp import nn, optim
from sparsebp.core import threads, timing
from sparsebp.core.errors import SparseBPError
from sparsebp.runtime.actions import Stages
from sparsebp.runtime.executor import PlainExecutor
from sparsebp.schedule import Costs, Kind, actions_of, simulate
from sparsebp.schedule.builders import conventional, place_updates
from sparsebp.train import Trainer
from sparsebp.train.setup import schedule_of

_WAYS = ("forward", "backward")

# ---- the graph of a step, exact --------------------------------------------------------------------------------------

_DURATIONS: dict[Kind, float] = {"F": 1, "I": 0.5, "W": 0.5, "U": 1}
_COSTS = Costs(_DURATIONS)


def _steps(n: int) -> dict[str, Any]:
    base = conventional(stages=n, input_gradient=True)
    return {"baseline": base, "forward": place_updates(base, "forward"),
            "backward": place_updates(base, "backward", stream="update")}  # fmt: skip


def depths(data: Any) -> Found:
    """§3: depth of the step's graph, unit costs, any number of workers."""
    sizes = (1, 5, 12, 50)
    found = {
        name: [round(simulate(_steps(n)[name], _COSTS).makespan) for n in sizes] for name in ("baseline", "backward")
    }
    said = {
        name: ", ".join(f"n = {n}: {one}" for n, one in zip(sizes, depth, strict=True)) for name, depth in found.items()
    }
    return Found({"baseline": Ours(found["baseline"] == [3 * n for n in sizes], text=said["baseline"]),
                  "backward": Ours(found["backward"] == [2 * n + 1 for n in sizes],
                      text=said["backward"])})  # fmt: skip


def characteristics(data: Any) -> Found:
    """Table 1: what each method has, read off the schedules and asked of the trainer."""
    found, marks = {}, {True: "✓", False: "×"}
    for name, step in _steps(5).items():
        run = simulate(step, _COSTS)
        spans = [(event.start, event.end, action) for event in run.events for action in actions_of(event.cell)]
        updates = [(start, end, action.stage) for start, end, action in spans if action.kind == "U"]
        parallel = any(start < stop and begin < end for start, end, _ in updates
                       for begin, stop, action in spans if action.kind in "FIW")  # fmt: skip
        cells = [action for lane in step.lanes for cell in lane.cells for action in actions_of(cell)]
        follows = [(a.kind, b.kind) for a, b in pairwise(cells) if a.stage == b.stage]
        # an update next to the layer's own forward, or started when its own backward ends
        near = ("U", "F") in follows or all(any(
            end == start and action.kind in "IW" and action.stage == stage for _, end, action in spans)
            for start, _, stage in updates)  # fmt: skip
        found[name] = Ours(
            (near, parallel, _clips(name)), text=" ".join(marks[one] for one in (near, parallel, _clips(name)))
        )
    return Found(found)


def _clips(fusion: str) -> bool:
    """Return whether a training that clips by the global norm is allowed."""
    model = nn.Linear(2, 2, rng=0)
    way: Any = "none" if fusion == "baseline" else fusion
    try:
        Trainer(model, nn.MSELoss(), optim.SGD(model.parameters(), lr=0.1), clip_norm=1.0, fusion=way)
    except SparseBPError:
        return False
    return True


def results(data: Any) -> Found:
    """Alg. 2 and 3, "do not affect the training results": a layer used three times, Adam, twenty steps."""
    rng = np.random.default_rng(0)
    given = [(rng.standard_normal((8, 6)).astype(np.float32), rng.integers(0, 6, 8)) for _ in range(20)]
    weights, counts = {}, {}
    for fusion in ("none", *_WAYS):
        shared = nn.Linear(6, 6, rng=1)
        model = nn.Sequential(shared, nn.Tanh(), shared, nn.Tanh(), nn.Linear(6, 6, rng=2), shared)
        adam = optim.Adam(model.parameters(), lr=0.01)
        order = schedule_of(Stages(model), fusion, 1, "conventional")  # type: ignore[arg-type]
        executor = PlainExecutor(model, nn.CrossEntropyLoss(), adam, order)
        for batch in given:
            executor.step([batch])
        executor.flush()
        weights[fusion] = b"".join(np.asarray(value).tobytes() for value in model.state_dict().values())
        counts[fusion] = set(adam.steps.values())
    same = [way for way in _WAYS if weights[way] == weights["none"]]
    once = [way for way in _WAYS if counts[way] == {len(given)}]
    return Found({"results": Ours(len(same) == 2, text=f"bitwise equal: {' and '.join(same) or 'none'}"),
                  "once": Ours(len(once) == 2,
                      text=f"{len(given)} updates in {len(given)} steps: {' and '.join(once)}")})  # fmt: skip


# ---- measured --------------------------------------------------------------------------------------------------------

_PLOTTED = ("SGD", "SGD, momentum", "Adagrad", "RMSprop", "Adam", "Adadelta")
"""The optimizers of Fig. 7."""
_NET = "MobileNetV2-style"


def _gain(row: Mapping[str, Any], way: str, least: float = 1.0, **options: str) -> Ours:
    """Return the gain of fusion over ours without it, as far as hiding the whole update can explain it."""
    found = ratio(row[f"{way}_ratio"], ran=f"{way}-fusion, {row['optimizer']}", **options)
    most = 1 / (1 - row["share"])
    said = f"The update's share of a step is {row['share']:.1%}: at most {most:.3f}× can be gained"
    if most < least:  # whatever was measured: fusion cannot reach it
        return replace(found, value=most, low=None, high=None, text=found.said, why=said)
    return replace(found, noise=said) if found.value > most else replace(found, why=said)


def _rows(result: Result, network: str = _NET, optimizer: str = "Adam") -> list[Mapping[str, Any]]:
    """Return the rows of a network and an optimizer by growing batch."""
    rows = [row for row in result["rows"] if (row["network"], row["optimizer"]) == (network, optimizer)]
    return sorted(rows, key=lambda row: int(row["batch"]))


def _speed_up(row: Mapping[str, Any], way: str) -> float:
    """Return the median speed-up of a row: of fusion, or of the paper's form, hooks in PyTorch."""
    return float(row["torch"]["median"] / row["hooks"]["median"] if way == "hooks" else row[f"{way}_ratio"]["median"])


def speed(result: Result) -> Found:
    """Fig. 3 and Table 2: MobileNetV2, batch 32, Adam; how much of the update the backward takes over."""
    found = {}
    for row in _rows(result):
        if row["batch"] == 32:
            hooks = _speed_up(row, "hooks")
            found = {way: _gain(row, way, 1.1, other=f"by hooks in PyTorch {hooks:.2f}×" * (way == "backward"))
                     for way in _WAYS}  # fmt: skip
            longer = row["backward"]["median"] - row["none"]["median"] + row["update"]["median"]
            spread = row["none"]["high"] - row["none"]["low"]
            found["growth"] = Ours(
                longer / row["update"]["median"],
                    other=f"an update takes {1e3 * row['update']['median']:.1f} ms, the quartiles "
                f"of a step are {1e3 * spread:.0f} ms apart",
                noise="A step's spread is wider than that" if spread > row["update"]["median"] else "")  # fmt: skip
    return Found(found)


def saved(result: Result) -> Found:
    """Fig. 4: time saved by batch."""
    rows, found = _rows(result), {}
    for way in _WAYS if rows else ():
        times = [1e3 * (row["none"]["median"] - row[way]["median"]) for row in rows]
        update = 1e3 * rows[0]["update"]["median"]
        noise = max(1e3 * (row[side]["high"] - row[side]["low"]) for row in rows for side in ("none", way))
        sizes = ", ".join(str(row["batch"]) for row in rows)
        found[way] = Ours(
            (max(times) - min(times)) / update, text=f"B = {sizes}: {', '.join(f'{one:.2f}' for one in times)} ms",
            other=f"an update takes {update:.2f} ms", ran=f"{way}-fusion, Adam",
            noise=f"The quartiles of a step are up to {noise:.1f} ms apart" if noise > update else "")  # fmt: skip
    return Found(found)


def batches(result: Result) -> Found:
    """Fig. 5: speed-up over the batch size; the largest reduction of a step's time."""
    rows = _rows(result)
    found = {} if len(rows) < 2 else {way: _course(result, rows, way) for way in (*_WAYS, "hooks")}
    if rows:
        last = rows[-1]
        near = {
            key: 100 * (last["forward"][a] / last["backward"][b] - 1)
            for key, a, b in (("median", "median", "median"), ("low", "low", "high"), ("high", "high", "low"))
        }
        found["converge"] = ratio(near, " %", other=f"B = {last['batch']}")  # fmt: skip
    most = max(result["rows"], key=lambda row: row["backward_ratio"]["median"], default=None)
    if most is not None:
        less = {key: 100 * (1 - 1 / most["backward_ratio"][key]) for key in ("median", "low", "high")}
        ran = f"backward-fusion, {most['optimizer']}, {most['network']}, B = {most['batch']}"
        found["reduction"] = ratio(less, " %", ran=ran, other=f"the update's share of that step {most['share']:.0%}")
    return Found(found, {"rows": [
        {"network": row["network"], "batch": row["batch"], **{way: _speed_up(row, way) for way in (*_WAYS, "hooks")}}
        for row in sorted(result["rows"],
            key=lambda row: int(row["batch"])) if row["optimizer"] == "Adam"]})  # fmt: skip


def _course(result: Result, rows: list[Mapping[str, Any]], way: str) -> Ours:
    """Return how a speed-up goes with the batch: below 1, then above, then falling."""
    gains = [quotient(row["torch"], row["hooks"]) if way == "hooks" else _gain(row, way) for row in rows]
    small, *larger = (one.value for one in gains)
    doubt = all(one.noise or (one.low or 0) < 1 < (one.high or 2) for one in gains)
    others = {row["network"]: 0 for row in result["rows"] if row["network"] != _NET}
    return Ours(
        small < 1 < max(larger) > larger[-1], text=", ".join(one.said for one in gains),
        other="; ".join(f"{name}: " + ", ".join(f"{_speed_up(row, way):.2f}" for row in _rows(result,
            name)) for name in others),
        noise="No gain at any batch can be told from noise" if doubt else "",
        ran="torch.optim in hooks, over it after the backward" if way == "hooks" else f"{way}-fusion, Adam",
    )  # fmt: skip


def _rank(x: list[float], y: list[float]) -> float:
    from scipy.stats import spearmanr

    return float(spearmanr(x, y).statistic)


_CLEAR = 0.6
"""A rank correlation that says something of four to six points."""


def networks(result: Result) -> Found:
    """Fig. 6: speed-ups at batch 32, and whether fewer parameters a layer go with a higher one."""
    rows = [
        row for row in result["rows"] if row["optimizer"] == "Adam" and row["batch"] == 32 and "layer_parameters" in row
    ]
    data = [{"network": row["network"], "parameters": row["layer_parameters"],
             **{way: row[f"{way}_ratio"]["median"] for way in _WAYS}} for row in rows]  # fmt: skip
    found = {}
    for way in _WAYS if len(rows) > 2 else ():
        rank = _rank([row["parameters"] for row in data], [row[way] for row in data])
        said = "; ".join(
            f"{row['network'].removesuffix('-style')} {row['parameters'] / 1e3:.3g} thousand {row[way]:.2f}×"
            for row in data
        )
        found[f"{way} trend"] = Ours(rank, other=said,
                                     noise=f"Below {_CLEAR} either way" if abs(rank) < _CLEAR else "")  # fmt: skip
        best = max(rows, key=lambda row: row[f"{way}_ratio"]["median"])
        found[f"{way} most"] = Ours(best["network"] == _NET, text=best["network"].removesuffix("-style"),
                                    noise=_gain(best, way).noise)  # fmt: skip
    return Found(found, {"rows": data})


def optimizers(result: Result) -> Found:
    """Fig. 7: the paper's optimizers; here without weight decay."""
    rows = [row for row in result["rows"] if row["network"] == _NET and row["batch"] == 32
            and row["optimizer"] in _PLOTTED]  # fmt: skip
    found = {}
    for way in _WAYS if len(rows) > 2 else ():
        gains = {row["optimizer"]: _gain(row, way) for row in rows}
        least = min(gains.values(), key=lambda one: one.value)
        said = ", ".join(f"{name} {one.value:.2f}×" for name, one in gains.items())
        found[f"{way} gain"] = replace(least, text=f"the least: {least.said}", other=said, ran=f"{way}-fusion")
        rank = _rank([row["share"] for row in rows], [one.value for one in gains.values()])
        shares = [row["share"] for row in rows]
        found[f"{way} trend"] = Ours(rank, ran=f"{way}-fusion", noise=(
            f"The updates' shares, {min(shares):.1%} to {max(shares):.1%}, are below a step's spread"))  # fmt: skip
    return Found(found)


def transformer(context: Context) -> dict[str, Any]:
    """§C.4: a Transformer's training step, ours, in all three ways."""
    size = {"inputs": 8, "steps": 4, "width": 8, "heads": 2, "layers": 2} if context.quick else {
        "inputs": 512, "steps": 30, "width": 512, "heads": 8, "layers": 6}  # fmt: skip
    rounds = {"rounds": 2, "least_rounds": 2} if context.quick else {"rounds": 11, "budget": 20.0}
    batch = 2 if context.quick else 8
    with harness.using_threads(threads.most_threads()):
        model = built.transformer_classifier(**size, rng=0)  # type: ignore[arg-type]
        given = batch_of(model, (size["steps"], size["inputs"]), batch)
        executors, update = ours(model, "Adam")
        calls: dict[str, Callable[[], object]] = {"update": update}
        calls |= {name: partial(executor.step, [given]) for name, executor in executors.items()}
        times = timing.measure(calls, **rounds)
    return {"network": "Transformer", "optimizer": "Adam", "batch": batch,
            "share": times["update"].median / times["none"].median,
            **{f"{way}_ratio": timing.ratio(times["none"], times[way]) for way in _WAYS}}  # fmt: skip


def transformer_gains(data: Mapping[str, Any]) -> Found:
    return Found({way: _gain(data, way, least) for way, least in zip(_WAYS, (1.03, 1.019), strict=True)})


def draw_batches(data: Mapping[str, Any]) -> Any:
    drawing, axes = harness.figure(1, 3, width=10.0)
    titles = {"forward": "forward-fusion", "backward": "backward-fusion", "hooks": "hooks in PyTorch"}
    for ax, (way, title) in zip(axes[0], titles.items(), strict=True):
        networks = dict.fromkeys(row["network"] for row in data["rows"])
        for network, colour in zip(networks, harness.KINDS, strict=False):
            rows = [row for row in data["rows"] if row["network"] == network]
            ax.plot([r["batch"] for r in rows], [r[way] for r in rows], "o-", color=colour, label=network)
        ax.axhline(1, color="grey", linewidth=0.8)
        ax.set(xscale="log", xlabel="batch size, samples", ylabel="speed-up over no fusion", title=title)
    return drawing


_timed = partial(Run, rests_on="fusion", seconds=700, needs=("torch",))
RUNS = {
    "fusion-depth": Run(depths, draw=lambda data: drawn_timelines(list(_steps(5).values()), _COSTS)),
    "fusion-table1": Run(characteristics),
    "fusion-alg23": Run(results),
    "fusion-fig3": _timed(speed),
    "fusion-fig4": _timed(saved),
    "fusion-fig5": _timed(batches, draw=draw_batches),
    "fusion-fig6": _timed(networks),
    "fusion-fig7": _timed(optimizers),
    "fusion-transformer": Run(transformer_gains, transformer, seconds=20),
}
"""By the figure's name."""
