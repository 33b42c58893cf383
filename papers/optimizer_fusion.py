"""Optimizer Fusion: Efficient Training with Better Locality and Parallelism (Jiang et al., 2021)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from benchmarks import harness
from benchmarks.harness import Result
from benchmarks.training import batch_of, ours
from papers.figure import Claim, Context, Figure, Found, claim, drawn_timelines, faster, gained, judged, median
from sparsebp import models as built
from sparsebp import nn, optim
from sparsebp.core import threads, timing
from sparsebp.core.errors import OptionError, SparseBPError
from sparsebp.schedule import Costs, Kind, simulate
from sparsebp.schedule.builders import conventional, place_updates
from sparsebp.train import Trainer

_DURATIONS: dict[Kind, float] = {"F": 1, "I": 0.5, "W": 0.5, "U": 1}
_COSTS = Costs(_DURATIONS)
_SMALL_SHARE = "The update's share of a step is {:.1%} here: that is the most that can be hidden"


def _steps(n: int) -> dict[str, Any]:
    base = conventional(stages=n, input_gradient=True)
    return {"baseline": base, "forward-fusion": place_updates(base, "forward"),
            "backward-fusion": place_updates(base, "backward", stream="update")}  # fmt: skip


def depths(context: Context) -> Found:
    """§3: depth of the step's graph, unit costs, any number of workers."""
    claims = []
    for n in (1, 5, 12, 50):
        found = {name: round(simulate(step, _COSTS).makespan) for name, step in _steps(n).items()}
        claims += [claim(f"n = {n}, baseline: 3n", 3 * n, found["baseline"]),
                   claim(f"n = {n}, backward-fusion: 2n + 1", 2 * n + 1, found["backward-fusion"])]  # fmt: skip
    return Found(tuple(claims))


def global_information(context: Context) -> Found:
    """Table 1: clipping by the global norm is allowed to forward-fusion, and refused to backward-fusion."""

    def trains(fusion: str) -> bool:
        model = nn.Linear(2, 2, rng=0)
        try:
            Trainer(model, nn.MSELoss(), optim.SGD(model.parameters(), lr=0.1), clip_norm=1.0, fusion=fusion)  # type: ignore[arg-type]
        except (OptionError, SparseBPError):
            return False
        return True

    return Found(tuple(claim(f"{way}-fusion with a global norm", allowed, trains(way), ran=f"Trainer(fusion={way!r})")
                       for way, allowed in (("forward", True), ("backward", False))))  # fmt: skip


_WAYS = ("forward", "backward")
_HOOKS = "torch.optim in every parameter's hook after its gradient, over torch.optim after the backward, no foreach"


def _ran(row: Mapping[str, Any], way: str) -> str:
    return f"{way}-fusion, {row['optimizer']}; updates at the end"


def _gain(row: Mapping[str, Any], way: str, paper: str, least: float) -> Claim:
    """Return the gain of fusion in a row, over ours without it."""
    return gained(f"{row['network']}, B = {row['batch']}, {row['optimizer']}: {way}-fusion", paper, least,
                  row[f"{way}_ratio"], ran=_ran(row, way), why=_SMALL_SHARE.format(row["share"]))  # fmt: skip


def _hooks(row: Mapping[str, Any], paper: str, least: float) -> Claim:
    """Return the gain of the paper's form of backward-fusion in a row: hooks in PyTorch, over PyTorch."""
    return faster(f"{row['network']}, B = {row['batch']}, {row['optimizer']}: hooks in PyTorch", paper, least,
                  row["torch"], row["hooks"], ran=_HOOKS,
                  why="A Python hook for every parameter costs more than it saves here")  # fmt: skip


def speed(result: Result) -> Found:
    """Fig. 3, Table 2: MobileNetV2, batch 32; ours, and the paper's own form in PyTorch."""
    rows = [row for row in result["rows"] if row["network"].startswith("MobileNet") and row["batch"] == 32]
    ranges = {"forward": ("1.11–1.17×", 1.11), "backward": ("1.10–1.26×", 1.1)}
    return Found(tuple(
        one for row in rows if row["optimizer"] in _PLOTTED
        for one in (*(_gain(row, way, *ranges[way]) for way in _WAYS), _hooks(row, *ranges["backward"]))
    ))  # fmt: skip


_PLOTTED = ("SGD", "SGD, momentum", "Adagrad", "RMSprop", "Adam", "Adadelta")
"""The optimizers of Fig. 7."""


def _by_network(result: Result, optimizer: str = "Adam") -> dict[str, list[Mapping[str, Any]]]:
    """Return the rows of an optimizer by network, by growing batch."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in sorted(result["rows"], key=lambda row: int(row["batch"])):
        if row["optimizer"] == optimizer:
            found.setdefault(row["network"], []).append(row)
    return found


def saved(result: Result) -> Found:
    """Fig. 4 and §C.2: time saved, independent of the batch in the paper; and the formula of the speed-up."""
    claims = []
    for network, rows in _by_network(result).items():
        sizes = ", ".join(str(row["batch"]) for row in rows)
        update = median(rows[0], "update")
        for way in _WAYS:
            times = [median(row, "none") - median(row, way) for row in rows]
            noise = max(row[side]["high"] - row[side]["low"] for row in rows for side in ("none", way))
            met: bool | None = max(times) - min(times) <= 0.25 * update
            why = "It shrinks with the batch, or is lost"
            if noise > update:
                met, why = None, "Not decided: the quartiles of a step are further apart than a whole update takes"
            claims.append(judged(f"{network}, Adam, B = {sizes}: ms saved by {way}-fusion", "the same for all batches",
                                 ", ".join(f"{1e3 * time:.2f}" for time in times), met, why,
                                 f"{way}-fusion, Adam; the update on its own takes {1e3 * update:.2f} ms"))  # fmt: skip
        first, last = rows[0], rows[-1]
        saving = median(first, "none") - median(first, "backward")
        told = median(last, "none") / (median(last, "none") - saving)
        ours = median(last, "none") / median(last, "backward")
        close: bool | None = abs(told - ours) <= 0.05
        why = "" if close else "What is saved depends on the batch here"
        if saving <= 0:
            close, why = None, "Nothing is saved here, so the formula predicts nothing"
        claims.append(Claim(
            f"{network}, Adam: speed-up at B = {last['batch']} by the formula, with t_saved of B = {first['batch']}",
            f"{told:.2f}×", f"{ours:.2f}×", close, why, _ran(last, "backward")))  # fmt: skip
    return Found(tuple(claims))


def _course(rows: Sequence[Mapping[str, Any]], what: str, ratios: Sequence[float], ran: str) -> Claim:
    """Return a claim on how a speed-up goes with the batch."""
    small, *larger = ratios
    top = max(larger, default=small)
    met = small < 1 < top and larger[-1] < top
    why = ("" if met else "It gains at no batch but the smallest" if top < 1 < small else "It gains at no batch"
           if top < 1 else "It gains at the smallest batch too: there are no Python hooks to pay for"
           if small >= 1 else "It still grows at the largest batch")  # fmt: skip
    sizes = ", ".join(str(row["batch"]) for row in rows)
    return Claim(f"{rows[0]['network']}, Adam, B = {sizes}: {what}", "small batches below 1, then above, then falling",
                 ", ".join(f"{ratio:.2f}" for ratio in ratios), met, why, ran)  # fmt: skip


def batches(result: Result) -> Found:
    """Fig. 5 and §C.2: speed-up over the batch size."""
    claims = [_course(rows, f"{way}-fusion", [median(row, f"{way}_ratio") for row in rows], f"{way}-fusion, Adam")
              for rows in _by_network(result).values() for way in _WAYS]  # fmt: skip
    most = max(result["rows"], key=lambda row: median(row, "backward_ratio"), default=None)
    if most is not None:
        less = 1 - 1 / median(most, "backward_ratio")
        claims.append(judged("the largest reduction of the time of a step (abstract)", "up to 20 %", f"{less:.0%}",
                             less >= 0.2, _SMALL_SHARE.format(most["share"]),
                             f"{_ran(most, 'backward')}; {most['network']}, B = {most['batch']}"))  # fmt: skip
    return Found(tuple(claims), {"rows": [
        {"network": row["network"], "batch": row["batch"], "forward": median(row, "forward_ratio"),
         "backward": median(row, "backward_ratio"), "hooks": median(row, "torch") / median(row, "hooks")}
        for rows in _by_network(result).values() for row in rows
    ]})  # fmt: skip


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


def hooks(result: Result) -> Found:
    """Fig. 5 in the paper's own form: backward-fusion by hooks in PyTorch."""
    return Found(tuple(
        _course(rows, "hooks in PyTorch", [median(row, "torch") / median(row, "hooks") for row in rows], _HOOKS)
        for rows in _by_network(result).values()
    ))  # fmt: skip


def models(result: Result) -> Found:
    """Fig. 6: speed-ups at batch 32, and whether fewer parameters a layer go with a higher one."""
    chosen = [row for rows in _by_network(result).values() for row in rows if row["batch"] == 32]
    known = [row for row in chosen if "layer_parameters" in row]
    claims = [_gain(row, way, "1–1.2× (drawn), on other networks", 1.0) for row in chosen for way in _WAYS]
    data = [{"network": row["network"], "parameters": row["layer_parameters"],
             **{way: median(row, f"{way}_ratio") for way in _WAYS}} for row in known]  # fmt: skip
    for way in _WAYS if len(known) > 2 else ():
        claims.append(_trend(f"parameters a layer against the gain of {way}-fusion, rank correlation", "negative",
                             [row["parameters"] for row in data], [row[way] for row in data], -1,
                             "Here large layers gain: their update is bound by memory, and much of a step",
                             f"{way}-fusion, Adam, B = 32, {len(data)} networks"))  # fmt: skip
    return Found(tuple(claims), {"rows": data})


_CLEAR = 0.6
"""A rank correlation that says something of four to six points."""


def _trend(what: str, paper: str, x: Sequence[float], y: Sequence[float], sign: int, why: str, ran: str) -> Claim:
    """Return a claim on the sign of Spearman's rank correlation."""
    from scipy.stats import spearmanr

    found = float(spearmanr(x, y).statistic)
    met: bool | None = sign * found > 0
    if abs(found) < _CLEAR:
        met, why = None, f"Not decided: below {_CLEAR} either way"
    return judged(what, paper, f"{found:+.2f}", met, why, ran)


def optimizers(result: Result) -> Found:
    """Fig. 7: the paper's optimizers; here without weight decay."""
    claims: list[Claim] = []
    for network in ("MobileNetV2-style", "LeNet-5"):
        rows = [row for row in result["rows"]
                if row["network"] == network and row["batch"] == 32 and row["optimizer"] in _PLOTTED]  # fmt: skip
        paper = "above 1" if network != "LeNet-5" else "above 1, on MobileNetV2"
        claims += [_gain(row, way, paper, 1.0) for row in rows for way in _WAYS]
        if len(rows) > 2:
            claims += [
                _trend(f"{network}: the update's share against the gain of {way}-fusion, rank correlation", "positive",
                       [row["share"] for row in rows], [median(row, f"{way}_ratio") for row in rows], 1,
                       "The shares are of a percent or two: noise orders them", f"{way}-fusion, {len(rows)} optimizers")
                for way in _WAYS
            ]  # fmt: skip
    return Found(tuple(claims))


def transformer(context: Context) -> Found:
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
        times = {name: one.to_dict() for name, one in timing.measure(calls, **rounds).items()}
    share = times["update"]["median"] / times["none"]["median"]
    what = f"Transformer, {size['layers']} × {size['width']}, {size['steps']} steps, B = {batch}, Adam"
    return Found(tuple(
        faster(f"{what}: {way}-fusion", f"{paper}× (base, batch 256)", paper, times["none"], times[way],
               ran=f"{way}-fusion, Adam; updates at the end", why=_SMALL_SHARE.format(share))
        for way, paper in zip(_WAYS, (1.03, 1.019), strict=True)
    ))  # fmt: skip


def gradient_memory(result: Result) -> Found:
    """Beyond the paper: the memory of gradients with backward-fusion."""
    rows = {row["network"]: row for row in result["rows"] if row["batch"] <= 32}
    return Found(tuple(
        Claim(f"{name}: peak of the gradients held, baseline over backward-fusion", "not stated",
              f"{row['none_peak'] / row['backward_peak']:.1f}×", None, "The paper reports only time",
              f"backward-fusion, {row['optimizer']}; updates at the end")
        for name, row in rows.items()
    ))  # fmt: skip


_timed = partial(Figure, kind="measured", rests_on="fusion", seconds=420, needs=("torch",), gpu=True)
FIGURES = (
    Figure("fusion-depth", "Fig. 1 and §3", "exact", "depth of a step: 3n, with backward-fusion 2n + 1", run=depths,
           draw=lambda data: drawn_timelines(list(_steps(5).values()), _COSTS)),
    Figure("fusion-table1", "Table 1", "executed",
           "global information: forward-fusion allows it, backward-fusion does not", run=global_information),
    _timed("fusion-fig3", "Fig. 3 and Table 2", shows=speed, states=
           "MobileNetV2, batch 32, three machines: forward-fusion 1.11–1.17×, backward-fusion 1.10–1.26×"),
    _timed("fusion-fig4", "Fig. 4 and §C.2", shows=saved, states=
           "time saved does not depend on the batch; speed-up (b t_grad + t_opt) / (b t_grad + t_opt − t_saved)"),
    _timed("fusion-fig5", "Fig. 5 and §C.2", shows=batches, draw=draw_batches, states=
           "speed-up over the batch size: small batches are slower, then it falls with the batch"),
    _timed("fusion-hooks", "Fig. 5 and §C.1", shows=hooks, states=
           "the paper's own form, hooks in PyTorch, here on a CPU"),
    _timed("fusion-fig6", "Fig. 6", shows=models, states="speed-up by model: the fewer parameters a layer, the higher"),
    _timed("fusion-fig7", "Fig. 7", shows=optimizers, states=
           "speed-up by optimizer: the more an update costs, the higher"),
    Figure("fusion-memory", "§3", "executed", "memory of gradients", rests_on="fusion", shows=gradient_memory,
           seconds=420, needs=("torch",)),
    Figure("fusion-transformer", "§C.4", "measured", "Transformer: forward-fusion 1.030×, backward-fusion 1.019×",
           run=transformer, seconds=20, gpu=True),
    Figure("fusion-fig2", "Fig. 2", "elsewhere", "reads and writes of a step, and which of them fusion merges",
           why="A diagram without a number; the gradients that are never written are counted in fusion-memory"),
    Figure("fusion-ddp", "§C.5", "elsewhere", "with distributed data-parallel training the speed-up is similar",
           gpu=True, why="Several GPUs, and no number is stated"),
)  # fmt: skip
