"""Efficient and Robust Parallel DNN Training through Model Parallelism on Multi-GPU Platform: DualPipe and SpecTrain
(Chen, Yang and Cheng, 2018)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from statistics import fmean, geometric_mean
from typing import Any

import numpy as np

from benchmarks import harness, schedules
from benchmarks.harness import Result
from benchmarks.scaling import P40, asynchronous, cut, data_parallel, scaling_papers_networks
from benchmarks.workloads import NETWORKS, mlp, stacked
from papers.figure import (
    Claim,
    Context,
    Figure,
    Found,
    claim,
    draw_ranges,
    drawn_timelines,
    elsewhere,
    judged,
    near,
    speed_ups,
)
from sparsebp import models, nn
from sparsebp.core import threads, timing
from sparsebp.schedule import Action, Costs, Network, simulate
from sparsebp.schedule.builders import dualpipe2018, pipedream

# Trained for the figures: weights predicted, accuracy, steps to convergence.

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
"""Mean loss by stale weights in the paper: a wider interval decides nothing."""
_THEIRS = {  # vanilla, stashing, SpecTrain: accuracy minus data-parallel training's, Table 1
    "SNN": ("SNN", -0.0003, -0.004, 0.022), "VGG-11": ("VGG16", -0.0024, 0.0016, 0.0056),
}  # fmt: skip
_SMOOTH = 20
"""Steps of the moving average, as in Fig. 12."""
_LEFT_OUT = "Left out to keep the run at ten minutes on two cores"


@cache
def _trained(quick: bool) -> dict[str, dict[str, list[schedules.Trained]]]:
    """Train every network in every way: Table 1 and Fig. 13 both show it."""
    found: dict[str, dict[str, list[schedules.Trained]]] = {}
    for name, rate in _RATES.items():
        if quick and name != "SNN":
            continue
        sizes, batch = (NETWORKS[name].quick, 8) if quick else (_SIZES[name], _BATCH)
        steps, seeds = (24, range(2)) if quick else (_STEPS[name], _SEEDS)
        data = NETWORKS[name].data(10 if quick else 1000)
        found[name] = {
            side: [schedules.train(name, sizes, data, side, rate, batch, steps, seed, measured=False) for seed in seeds]
            for side in SIDES
        }
    return found


def trained_accuracy(context: Context) -> Found:
    """Table 1, at the paper's rates and batch, on networks and data of a size for a CPU."""
    claims, rows = [], []
    for name, sides in _trained(context.quick).items():
        base = np.array([run.accuracy for run in sides["synchronous"]])
        paper, *theirs = _THEIRS[name]
        for side, stated in zip(SIDES[1:], theirs, strict=True):
            lost, width = schedules.interval(np.array([run.accuracy for run in sides[side]]) - base)
            steps = max(len(run.losses) for run in sides["synchronous"])
            rows.append({"network": name, "side": side, "difference": lost, "interval": width})
            what = f"{name}, rate {_RATES[name]:g}, {steps} steps of digits, {side}: accuracy minus synchronous"
            met, why = (
                kept(lost, width) if side == "SpecTrain" else (None, "Shown for comparison; the paper claims no drop")
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
        return False, "Below synchronous training by more than the interval"
    if lost - width > -_MARGIN:
        return True, ""
    return None, f"Not decided: the interval reaches below the {100 * _MARGIN:.1f} points that staleness costs there"


def to_convergence(context: Context) -> Found:
    """Fig. 13: steps until the loss that all three reach, trained here, times a step's simulated time on four P40."""
    claims = []
    theirs = {"SNN": ("FCN/RNN", 0.149, 0.361), "VGG-11": ("CNN", 0.769, 0.491)}
    ratios: list[tuple[float, float]] = []
    for name, sides in _trained(context.quick).items():
        layers = scaling_papers_networks()["VGG16" if name == "VGG-11" else name][1]
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
    return judged(what, paper, f"{ours:.3f}", ours <= most, why, ran)


def snn_prediction(context: Context) -> Found:
    """Fig. 9: the error of predicted and of stale weights by s, of an SNN at the paper's rate and batch."""
    data = NETWORKS["SNN"].data(10 if context.quick else 1000)
    sizes, batch, steps = (NETWORKS["SNN"].quick, 8, 24) if context.quick else (_SIZES["SNN"], _BATCH, 400)
    run = schedules.train("SNN", sizes, data, "SpecTrain", _RATES["SNN"], batch, steps, 0, measured=True)
    curves: dict[str, Any] = {}
    claims = []
    for s in (1, 2, 3):  # a backward on device s of four is s updates ahead (Eq. 6)
        chosen = [d for d in run.distances if d.action.kind == "I" and d.ahead == s]
        chosen = [d for d in chosen if (d.action.microbatch or 0) >= 2 * schedules.STAGES]  # the pipeline is full
        predicted, stale = (np.array([getattr(d, key) for d in chosen]) for key in ("predicted", "stale"))
        curves[str(s)] = {"predicted": predicted.tolist(), "stale": stale.tolist()}
        below, ratio = float((predicted < stale).mean()), float(predicted.mean() / stale.mean())
        claims.append(judged(f"s = {s}: mean RMSE of predicted over stale weights", "below 1" if s < 3 else "0.015",
                             f"{ratio:.3f}", ratio < (1 if s < 3 else 0.016),
                             _SPIKES.format(stale.max() / stale.mean()), RAN["SpecTrain"]))  # fmt: skip
        claims.append(judged(f"s = {s}: steps at which the predicted weights are the nearer ones", "all",
                             f"{below:.1%}", below == 1, "The direction of a step changes",
                             RAN["SpecTrain"]))  # fmt: skip
    means = [float(np.mean(curve["stale"])) for curve in curves.values()]
    claims.append(judged("mean RMSE of stale weights, s = 1, 2, 3", "grows with s",
                         ", ".join(f"{m:.2g}" for m in means), means == sorted(means), "Each s is of other layers",
                         RAN["SpecTrain"]))  # fmt: skip
    return Found(tuple(claims), {"curves": curves})


_SPIKES = (
    "The paper's value comes from spikes of the stale error, above 1000 times its mean; here they reach {:.1f} times"
)


def draw_snn_prediction(data: Mapping[str, Any]) -> Any:
    drawing, axes = harness.figure(1, 3, width=9.0, height=3.0)
    for ax, (s, curve) in zip(axes[0], data["curves"].items(), strict=True):
        for name, colour in (("stale", harness.KINDS[2]), ("predicted", harness.OURS)):
            ax.plot(curve[name], linewidth=0.8, color=colour, label=name)
        ax.set(xlabel="step", title=f"{s} updates ahead", yscale="log")
    axes[0, 0].set_ylabel("RMSE of the weights")
    return drawing


def _units(workers: int) -> Costs:
    """Return equal units; the last worker runs forward and backward of a batch in one."""
    return Costs(lambda action: 0 if action.kind == "U" else 0.5 if action.stage == workers - 1 else 1)


def versions(context: Context) -> Found:
    """Eq. 5 and 6: version differences, read off the simulated schedule."""
    claims = []
    for workers in range(2, 9):
        found = simulate(dualpipe2018(workers=workers, stages=workers, microbatches=5 * workers), _units(workers))
        batch, devices = 2 * workers + 1, range(workers)
        claims += [
            claim(f"forward, N = {workers}: 2N − k − 2", [2 * workers - k - 2 for k in devices],
                  [found.version_difference(Action(k, "F", batch)) for k in devices]),
            claim(f"backward, N = {workers}: k", list(devices),
                  [found.version_difference(Action(k, "B", batch)) for k in devices]),
        ]  # fmt: skip
    return Found(tuple(claims))


def fifth_batch(context: Context) -> Found:
    """Fig. 8: the round trip of a batch on three devices."""
    found = simulate(dualpipe2018(workers=3, stages=3, microbatches=20), _units(3))
    trip = [Action(0, "F", 9), Action(1, "F", 9), Action(2, "F", 9), Action(1, "B", 9), Action(0, "B", 9)]
    return Found((
        claim("units from the first forward to the last backward", [0, 1, 2, 3, 4],
              [round(found.start(action) - found.start(trip[0])) for action in trip]),
        claim("version differences on the way", [4, 3, 2, 1, 0], [found.version_difference(action) for action in trip]),
    ))  # fmt: skip


def timelines(context: Context) -> Found:
    """Fig. 6: PipeDream and DualPipe on four devices."""
    found = simulate(dualpipe2018(workers=4, stages=4, microbatches=20), _units(4))
    starts = [round(found.start(Action(k, "F", 10))) for k in range(4)]
    back = found.start(Action(0, "B", 10))
    return Found((
        claim("DualPipe: forward of batch m on device k begins in unit m + k", [10, 11, 12, 13], starts),
        claim("its backward on the first device in unit m + 2N − 2", 16, round(back)),
    ))  # fmt: skip


def draw_both(data: Mapping[str, Any]) -> Any:
    built = [build(workers=4, stages=4, microbatches=12) for build in (pipedream, dualpipe2018)]
    return drawn_timelines(built, _units(4))


def prediction(result: Result) -> Found:
    """Fig. 9's footnote: the errors of predicted and of stale weights, of other networks too."""
    rows = [row for row in result["rows"]
            if row["side"] == "SpecTrain" and "predicted_forward" in row]  # fmt: skip
    claims = tuple(
        judged(f"{row['network']}, rate {row['rate']:g}: RMSE of predicted over stale weights, forward", "below 1",
               f"{row['predicted_forward'] / row['stale_forward']:.2f}",
               row["predicted_forward"] < row["stale_forward"], "The direction of the steps changes too often",
               RAN["SpecTrain"])
        for row in rows
    )  # fmt: skip
    return Found(claims, {"rows": [
        {"name": f"{row['network']}, {row['level']}", "predicted": row["predicted_forward"],
         "stale": row["stale_forward"]} for row in rows
    ]})  # fmt: skip


def accuracy(result: Result) -> Found:
    """Table 1 after few steps, where staleness hurts: accuracy minus synchronous training's."""
    claims = []
    for row in result["rows"]:
        if row["side"] not in RAN:
            continue
        lost, width = row["difference"]["mean"], row["difference"]["interval"]
        met, why = kept(lost, width)
        if row["side"] != "SpecTrain":
            met, why = None, "Shown for comparison; the paper claims nothing about it"
        paper = "as synchronous" if row["side"] == "SpecTrain" else "below synchronous"
        what = f"{row['network']}, rate {row['rate']:g}, {row['side']}: accuracy minus synchronous"
        claims.append(Claim(what, paper, f"{lost:+.3f} ± {width:.3f}", met, why, RAN[row["side"]]))
    return Found(tuple(claims))


def learning_curves(result: Result) -> Found:
    """Fig. 5 and 12: learning curves of the Transformer."""
    rows = [row for row in result["rows"]
            if row["network"] == "Transformer" and row.get("loss") is not None]  # fmt: skip
    kept = {f"{row['side']}, {row['level']}": np.asarray(row["loss"], float).tolist() for row in rows}
    last = {name: float(np.mean(loss[-10:])) for name, loss in kept.items() if np.ndim(loss) == 1 and loss}
    claims = []
    for level in dict.fromkeys(row["level"] for row in rows):
        alone, vanilla, predicted = (last.get(f"{side}, {level}") for side in ("synchronous", "vanilla", "SpecTrain"))
        if alone is None or vanilla is None or predicted is None:
            continue
        for other, loss, paper, met, why in (
            ("stale weights", vanilla, "SpecTrain's is lower", predicted < vanilla, "The prediction overshoots"),
            ("synchronous training", alone, "similar (here: within 5 %)", abs(predicted - alone) <= 0.05 * alone,
             "Stale weights are far off at this rate, which is not the paper's"),
        ):  # fmt: skip
            what = f"Transformer, {level} rate: last losses of SpecTrain and of {other}"
            ours = f"{predicted:.3f} and {loss:.3f}"
            claims.append(judged(what, paper, ours, met, why, RAN["SpecTrain"]))
    return Found(tuple(claims), {"steps": max((row["steps"] for row in rows), default=0), "curves": kept})


def draw_curves(data: Mapping[str, Any]) -> Any:
    """Draw the mean losses of parts of the training, all as long, at the moderate rate."""
    drawing, axes = harness.figure(height=4.4)
    for name, loss in data["curves"].items():
        side, level = name.split(", ")
        if level == "moderate" and np.ndim(loss) == 1:
            at = (np.arange(len(loss)) + 0.5) * data["steps"] / len(loss)
            axes[0, 0].plot(at, loss, color=schedules.SIDES[side].colour, linewidth=1.3, label=side)
    axes[0, 0].set(xlabel="training step, batches", ylabel="training loss, nats")
    return drawing


def throughput(result: Result) -> Found:
    """Fig. 10: over data-parallel and over PipeDream, simulated; means are geometric."""
    return speed_ups(result, lambda row: row["source"].startswith("Chen"))


_WORKERS, _SAMPLES = 4, 128


def transfers(context: Context) -> Found:
    """Fig. 3: bytes that four GPUs hand each other for a batch, from the shapes of the networks."""
    ratios, claims = {}, []
    for name, (_, layers) in scaling_papers_networks().items():
        inside = cut(layers, _WORKERS)[:-1]
        gradients = 2 * (_WORKERS - 1) * sum(layer.weights for layer in layers)  # to a server and back
        activations = 2 * _SAMPLES * sum(part.output for part in inside)  # and their gradients
        ratios[name] = gradients / activations
        claims.append(Claim(f"{name}: data-parallel over model-parallel", "more", f"{ratios[name]:.3g}×",
                            gradients > activations))  # fmt: skip
    most = max(ratios.values())
    return Found((
        *claims,
        near("the largest (within 10 %)", 528, most, ""),
        near("mean, geometric (within 10 %)", 13.4, geometric_mean(ratios.values()),
             "Five networks, without Inception v4; the paper does not say how it counts"),
    ), {"rows": [{"name": name, "ratio": ratio} for name, ratio in ratios.items()]})  # fmt: skip


def breakdown(context: Context) -> Found:
    """Fig. 4 and 11: shares of a step in transfers and in waiting for slower workers, simulated for four P40."""
    shares: dict[str, list[float]] = {name: [] for name in ("data-parallel", "PipeDream", "DualPipe", "uneven", "even")}
    alone = replace(P40, network=Network())
    recurrent = []
    for group, layers in scaling_papers_networks().values():
        free = data_parallel("dp-overlap", layers, alone, _WORKERS, 32).seconds
        shares["data-parallel"].append(1 - free / data_parallel("dp-overlap", layers, P40, _WORKERS, 32).seconds)
        if group != "CNN":
            recurrent.append(shares["data-parallel"][-1])
        for name in ("PipeDream", "DualPipe"):
            found, free = (asynchronous(name.lower(), layers, machine, _WORKERS, 16, _SAMPLES).seconds
                           for machine in (P40, alone))  # fmt: skip
            shares[name].append(1 - free / found)
        parts = cut(layers, _WORKERS)
        forward, backward = [p.forward for p in parts], [p.input_grad + p.weight_grad for p in parts]
        both = list(map(sum, zip(forward, backward, strict=True)))
        units = [max(pair[(worker + parity) % 2] for worker, pair in enumerate(zip(forward, backward, strict=True)))
                 for parity in (0, 1)]  # fmt: skip
        shares["uneven"].append(1 - fmean(both) / sum(units))
        shares["even"].append(1 - fmean(both) / max(both))

    def mean(what: str, paper: float, values: Sequence[float]) -> Claim:
        return near(what, paper, 100 * fmean(values), _SIMULATED)

    return Found((
        mean("transfers, data-parallel, mean, % of a step", 26.7, shares["data-parallel"]),
        mean("transfers, data-parallel, FCN/RNN, %", 49.8, recurrent),
        near("transfers, data-parallel, the largest, %", 76.6, 100 * max(shares["data-parallel"]), _SIMULATED),
        mean("transfers, PipeDream, mean, %", 1.9, shares["PipeDream"]),
        mean("transfers, DualPipe, mean, %", 2.2, shares["DualPipe"]),
        mean("idle by imbalance, PipeDream, all waiting after every unit, mean, %", 38.6, shares["uneven"]),
        mean("idle by imbalance, DualPipe, the same, mean, %", 11.5, shares["even"]),
        elsewhere("computing, data-parallel over pipelines, mean", "1.611×",
                  "Smaller batches use a GPU less well; the simulator counts FLOPs"),
    ))  # fmt: skip


_SIMULATED = "Simulated from data sheets; five networks, without Inception v4, cut into stages of equal FLOPs"


def backward_time(context: Context) -> Found:
    """Fig. 7: time of a backward over a forward, of networks like the paper's six, on this machine."""
    rounds = {"rounds": 2, "least_rounds": 2, "warmup": 1} if context.quick else {"rounds": 9, "budget": 6.0}
    claims, rows = [], []
    count = threads.most_threads()
    with harness.using_threads(count):
        for name, (make, shape, samples) in _networks(context.quick).items():
            model, loss, rng = make(), nn.CrossEntropyLoss(), np.random.default_rng(0)
            x, target = rng.standard_normal(shape, np.float32), rng.integers(10, size=samples)

            def back(kept: Any, model: Any = model, loss: Any = loss) -> None:
                model.weight_grad(loss.input_grad(kept[0]), kept[1])

            def forth(model: Any = model, loss: Any = loss, x: Any = x, target: Any = target) -> Any:
                logits, saved = model.forward(x)
                return loss.forward(logits, target)[1], saved

            timings = timing.measure({"forward": forth, "backward": timing.Call(back, forth)}, **rounds)
            ratio = timings["backward"].median / timings["forward"].median
            rows.append({"name": name, "ratio": ratio})
            claims.append(judged(f"{name}: backward over forward", "above 1, up to 3.3×", f"{ratio:.2f}×",
                                 1 < ratio <= 3.3, "Other kernels, on a CPU",
                                 f"bp, one stream, {count} threads"))  # fmt: skip
    return Found(tuple(claims), {"rows": rows})


def _networks(quick: bool) -> dict[str, tuple[Callable[[], Any], tuple[int, ...], int]]:
    """Return each network's constructor, the shape of a batch, and its samples."""
    if quick:
        return {"SNN, 4 × 16": (lambda: mlp(16, 4, 10), (8, 16), 8)}
    return {
        "SNN, 32 × 2048": (lambda: mlp(2048, 32, 10), (_SAMPLES, 2048), _SAMPLES),
        "VGG-11": (lambda: models.vgg11(rng=0), (32, 3, 32, 32), 32),
        "DenseNet, L = 40, k = 12": (lambda: models.densenet(rng=0), (8, 3, 32, 32), 8),
        "MobileNetV2-style": (lambda: models.mobilenetv2(rng=0), (8, 3, 32, 32), 8),
        "Transformer, 6 × 512, 20 steps":
            (lambda: models.transformer_classifier(512, steps=20, width=512, heads=8, layers=6, rng=0),
             (32, 20, 512), 32),
        "LSTM, 8 × 512, T = 20": (lambda: stacked("LSTM", 8, 512, 10), (20, 32, 512), 32),
    }  # fmt: skip


_PREDICTION = harness.bars("{name} rate", {"predicted": "predicted weights", "stale": "stale weights"},
                           "RMSE from the weights that are used later, × 10⁻³", unit=1e3)  # fmt: skip
_TRANSFERS = harness.bars("{name}", {"ratio": ""}, "bytes per batch, data-parallel over model-parallel", log=True)
_RATIOS = harness.bars("{name}", {"ratio": ""}, "time of a backward over a forward's (dashed: the paper's largest)",
                       line=3.3)  # fmt: skip

FIGURES = (
    Figure("spectrain-fig3", "Fig. 1–3", "exact",
           "bytes between four GPUs a batch: data-parallel 13.4 times model-parallel on average, 528 at most",
           run=transfers, draw=_TRANSFERS),
    Figure("spectrain-fig4", "Fig. 4 and 11", "simulated",
           "shares of a step: transfers 26.7, 1.9 and 2.2 %, idle by imbalance 38.6 and 11.5 %", run=breakdown,
           seconds=2, gpu=True),
    Figure("spectrain-fig6", "Fig. 6", "exact", "timelines of PipeDream and DualPipe", run=timelines, draw=draw_both),
    Figure("spectrain-fig7", "Fig. 7", "measured", "a backward takes up to 3.3 times a forward", run=backward_time,
           draw=_RATIOS, seconds=60, gpu=True),
    Figure("spectrain-fig8", "Fig. 8", "exact", "the round trip of the 5th batch and its weight versions",
           run=fifth_batch),
    Figure("spectrain-eq5", "Eq. 5 and 6", "exact", "version differences 2N − k − 2 and k", run=versions),
    Figure("spectrain-fig9", "Fig. 9, Eq. 1 and 4", "executed",
           "an SNN: RMSE of predicted and of stale weights by version difference", run=snn_prediction,
           draw=draw_snn_prediction, seconds=20, needs=("data",)),
    Figure("spectrain-fig9-nets", "Fig. 9, footnote 3", "executed", "other models show similar results",
           rests_on="spectrain", shows=prediction, draw=_PREDICTION, seconds=1500, needs=("data",)),
    Figure("spectrain-table1", "Table 1", "executed",
           "SpecTrain keeps the accuracy that staleness costs; here with the paper's rates and batch, smaller "
           "networks, digits, and 250 to 400 steps in place of 5000", run=trained_accuracy, seconds=420,
           needs=("data",)),
    Figure("spectrain-hard", "Table 1", "executed",
           "the same within 60 to 250 steps of batch 32, where staleness hurts", rests_on="spectrain", shows=accuracy,
           seconds=1500, needs=("data",)),
    Figure("spectrain-fig13", "Fig. 13", "simulated",
           "time to convergence: 33.8 % of data-parallel, 42.1 % of PipeDream; steps trained here, their time "
           "simulated", run=to_convergence, seconds=420, needs=("data",), gpu=True),
    Figure("spectrain-fig12", "Fig. 5 and 12", "executed", "learning curves of the Transformer", rests_on="spectrain",
           shows=learning_curves, draw=draw_curves, seconds=1500, needs=("data",)),
    Figure("spectrain-fig10", "Fig. 10", "simulated",
           "throughput: 2.64× data-parallel, 1.68× PipeDream, geometric means", rests_on="scaling-papers",
           shows=throughput, draw=draw_ranges, seconds=30, gpu=True),
)  # fmt: skip
