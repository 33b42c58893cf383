"""DualPipe and SpecTrain: what is trained for its figures: weights predicted, accuracy, steps to convergence."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from statistics import geometric_mean
from typing import Any

import numpy as np

from benchmarks import spectrain
from benchmarks.scaling.papers import P40, networks
from benchmarks.scaling.steps import asynchronous, data_parallel
from benchmarks.tools import pictures
from benchmarks.tools.staged import NETWORKS
from papers.figure import Claim, Context, Found, elsewhere

SIDES = ("synchronous", "vanilla", "stashing", "SpecTrain")
RAN = {
    "vanilla": "DualPipe (2018) in four stages, newest weights",
    "stashing": "PipeDream in four stages, stashed weights",
    "SpecTrain": "DualPipe (2018) in four stages, weights predicted from the momentum",
}  # fmt: skip
_BATCH, _RATES = 128, {"SNN": 1e-3, "VGG-11": 2e-3}
"""The paper's batch, and its rates for SNN and VGG16."""
_SIZES: dict[str, dict[str, Any]] = {"SNN": {"layers": 8, "width": 128}, "VGG-11": {"width": 0.125}}
_STEPS = {"SNN": 400, "VGG-11": 250}
_SEEDS = range(5)
_MARGIN = 0.021
"""What stale weights cost the paper's networks on average: an interval wider than that decides nothing."""
_THEIRS = {  # vanilla, stashing, SpecTrain: accuracy minus that of data-parallel training, Table 1
    "SNN": ("SNN", -0.0003, -0.004, 0.022), "VGG-11": ("VGG16", -0.0024, 0.0016, 0.0056),
}  # fmt: skip
_SMOOTH = 20
"""Steps of the moving average, as in Fig. 12."""
_LEFT_OUT = "Left out, so that two cores need ten minutes"


@cache
def _trained(quick: bool) -> dict[str, dict[str, list[spectrain.Trained]]]:
    """Train every network in every way: Table 1 and Fig. 13 both show it."""
    found: dict[str, dict[str, list[spectrain.Trained]]] = {}
    for name, rate in _RATES.items():
        if quick and name != "SNN":
            continue
        sizes, batch = (NETWORKS[name].quick, 8) if quick else (_SIZES[name], _BATCH)
        steps, seeds = (24, range(2)) if quick else (_STEPS[name], _SEEDS)
        data = NETWORKS[name].data(10 if quick else 1000)
        found[name] = {
            side: [spectrain.train(name, sizes, data, side, rate, batch, steps, seed, measured=False) for seed in seeds]
            for side in SIDES
        }
    return found


def accuracy(context: Context) -> Found:
    """Table 1, at the paper's rates and batch, on networks and data of a size for a CPU."""
    claims, rows = [], []
    for name, sides in _trained(context.quick).items():
        base = np.array([run.accuracy for run in sides["synchronous"]])
        paper, *theirs = _THEIRS[name]
        for side, stated in zip(SIDES[1:], theirs, strict=True):
            lost, width = spectrain.interval(np.array([run.accuracy for run in sides[side]]) - base)
            steps = max(len(run.losses) for run in sides["synchronous"])
            rows.append({"network": name, "side": side, "difference": lost, "interval": width})
            what = f"{name}, rate {_RATES[name]:g}, {steps} steps of digits, {side}: accuracy minus synchronous"
            met, why = (
                kept(lost, width) if side == "SpecTrain" else (None, "Shown beside the claim: no drop is claimed")
            )
            claims.append(Claim(what, f"{stated:+.3f} ({paper})", f"{lost:+.3f} ± {width:.3f}", met, why, RAN[side]))
    return Found((
        *claims,
        elsewhere("Transformer, rate 5e-5", "+0.000 (SpecTrain)", _LEFT_OUT),
        elsewhere("Residual LSTM, rate 5e-3", "−0.022 (SpecTrain)", _LEFT_OUT),
        elsewhere("ResNet-152 and Inception v4", "−0.010 and +0.011 (SpecTrain)", _LEFT_OUT),
    ), {"rows": rows})  # fmt: skip


def kept(lost: float, width: float) -> tuple[bool | None, str]:
    """Say whether an accuracy is kept: True, False, or None where the interval is too wide to say."""
    if lost + width < 0:
        return False, "Below synchronous training beyond the interval"
    if lost - width > -_MARGIN:
        return True, ""
    return None, f"Not decided: the interval reaches below the {100 * _MARGIN:.1f} points that staleness costs there"


def to_convergence(context: Context) -> Found:
    """Fig. 13: steps until the loss that all three reach, trained here, times a step's simulated time on four P40."""
    claims = []
    theirs = {"SNN": ("FCN/RNN", 0.149, 0.361), "VGG-11": ("CNN", 0.769, 0.491)}
    ratios: list[tuple[float, float]] = []
    for name, sides in _trained(context.quick).items():
        layers = networks()["VGG16" if name == "VGG-11" else name][1]
        seconds = {"synchronous": data_parallel("dp-overlap", layers, P40, 4, 32).seconds} | {
            side: asynchronous(schedule, layers, P40, 4, 16, 128).seconds / 16
            for side, schedule in (("stashing", "pipedream"), ("SpecTrain", "dualpipe"))
        }
        most = max(len(run.losses) for run in sides["synchronous"])
        curves = {side: smoothed([padded(run.losses, most) for run in sides[side]]) for side in seconds}
        criterion = max(curve.min() for curve in curves.values())
        steps = {side: most - len(curve) + 1 + int(np.argmax(curve <= criterion)) for side, curve in curves.items()}
        times = {side: steps[side] * seconds[side] for side in seconds}
        group, *papers = theirs[name]
        ours = times["SpecTrain"] / times["synchronous"], times["SpecTrain"] / times["stashing"]
        ratios.append(ours)
        for other, paper, ratio in zip(("data-parallel", "PipeDream"), papers, ours, strict=True):
            claims.append(_time(f"{name}: SpecTrain's time to convergence over {other}'s", f"{paper} ({group}, mean)",
                                paper, ratio, steps))  # fmt: skip
    for other, paper, values in zip(("data-parallel", "PipeDream"), (0.338, 0.421), zip(*ratios, strict=True),
                                    strict=True):  # fmt: skip
        what = f"geometric mean of {len(ratios)} networks: over {other}'s"
        claims.append(_time(what, f"{paper} (six networks)", paper, geometric_mean(values), None))
    return Found(tuple(claims))


def padded(losses: list[float], steps: int) -> list[float]:
    """Return the losses of all steps: infinite from the one on that was not finite."""
    found = [loss if np.isfinite(loss) else np.inf for loss in losses]
    return found + [np.inf] * (steps - len(found))


def smoothed(losses: Any) -> np.ndarray:
    """Return the moving average of the runs' mean losses; one that has ended is at infinity."""
    mean = np.asarray(losses, float).mean(axis=0)
    count = min(_SMOOTH, len(mean))
    return np.lib.stride_tricks.sliding_window_view(mean, count).mean(axis=1)


def _time(what: str, paper: str, most: float, ours: float, steps: Mapping[str, int] | None) -> Claim:
    ran = "" if steps is None else ", ".join(f"{side} {count} steps" for side, count in steps.items())
    why = "In the simulator DualPipe is hardly faster than PipeDream, and data-parallel workers hide their sums"
    return Claim(what, paper, f"{ours:.3f}", ours <= most, "" if ours <= most else why, ran)


def prediction(context: Context) -> Found:
    """Fig. 9: the error of predicted and of stale weights by s, of an SNN at the paper's rate and batch."""
    data = NETWORKS["SNN"].data(10 if context.quick else 1000)
    sizes, batch, steps = (NETWORKS["SNN"].quick, 8, 24) if context.quick else (_SIZES["SNN"], _BATCH, 400)
    run = spectrain.train("SNN", sizes, data, "SpecTrain", _RATES["SNN"], batch, steps, 0, measured=True)
    curves: dict[str, Any] = {}
    claims = []
    for s in (1, 2, 3):  # a backward on device s of four is s updates ahead (Eq. 6)
        chosen = [d for d in run.distances if d.action.kind == "I" and d.ahead == s]
        chosen = [d for d in chosen if (d.action.microbatch or 0) >= 2 * spectrain.STAGES]  # the pipeline is full
        predicted, stale = (np.array([getattr(d, key) for d in chosen]) for key in ("predicted", "stale"))
        curves[str(s)] = {"predicted": predicted.tolist(), "stale": stale.tolist()}
        below, ratio = float((predicted < stale).mean()), float(predicted.mean() / stale.mean())
        claims.append(Claim(f"s = {s}: mean RMSE of predicted over stale weights", "below 1" if s < 3 else "0.015",
                            f"{ratio:.3f}", ratio < (1 if s < 3 else 0.016),
                            "" if ratio < (1 if s < 3 else 0.016) else _SPIKES.format(stale.max() / stale.mean()),
                            RAN["SpecTrain"]))  # fmt: skip
        claims.append(Claim(f"s = {s}: steps at which the predicted weights are the nearer ones", "all",
                            f"{below:.1%}", below == 1, "" if below == 1 else "The direction of a step changes",
                            RAN["SpecTrain"]))  # fmt: skip
    means = [float(np.mean(curve["stale"])) for curve in curves.values()]
    claims.append(Claim("mean RMSE of stale weights, s = 1, 2, 3", "grows with s", ", ".join(f"{m:.2g}" for m in means),
                        means == sorted(means), "" if means == sorted(means) else "Each s is of other layers",
                        RAN["SpecTrain"]))  # fmt: skip
    return Found(tuple(claims), {"curves": curves})


_SPIKES = "There it comes from spikes of the stale error, above 1000 times its mean; here the largest is {:.1f} times"


def draw_prediction(data: Mapping[str, Any]) -> Any:
    """Draw both errors over the steps, a panel an s."""
    drawing, axes = pictures.figure(1, 3, width=9.0, height=3.0)
    for ax, (s, curve) in zip(axes[0], data["curves"].items(), strict=True):
        for name, colour in (("stale", "#c2410c"), ("predicted", "#1e40af")):
            ax.plot(curve[name], linewidth=0.8, color=colour, label=name)
        ax.set(xlabel="step", title=f"s = {s}", yscale="log")
    axes[0, 0].set_ylabel("RMSE")
    axes[0, 0].legend(fontsize=7)
    return drawing
