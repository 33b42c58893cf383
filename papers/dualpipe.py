"""Efficient and Robust Parallel DNN Training through Model Parallelism on Multi-GPU Platform: DualPipe and SpecTrain
(Chen, Yang and Cheng, 2018)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from statistics import fmean, geometric_mean
from typing import Any

import numpy as np

from benchmarks import harness, schedules, workloads
from benchmarks.harness import Result
from benchmarks.scaling import P40, asynchronous, cut, data_parallel, scaling_papers_networks
from benchmarks.workloads import NETWORKS, mlp, stacked
from papers.claims import Context, Found, Ours, Run, drawn_timelines, of_runs
from sparsebp import models, nn, optim
from sparsebp.comm.threads import run_ranks
from sparsebp.comm.transport import Transport
from sparsebp.core import threads, timing
from sparsebp.runtime.pipeline import PipelineExecutor
from sparsebp.schedule import Action, Costs, Network, simulate
from sparsebp.schedule.builders import dualpipe2018, pipedream

# ---- trained: Table 1, Fig. 9, 12 and 13 -----------------------------------------------------------------------------

SIDES = ("synchronous", "vanilla", "stashing", "SpecTrain")
RAN = {
    "vanilla": "DualPipe (2018), newest weights", "stashing": "PipeDream, stashed weights",
    "SpecTrain": "DualPipe (2018), weights predicted from the momentum",
}  # fmt: skip
_BATCH, _RATE, _SIZES = 128, 1e-3, {"layers": 8, "width": 128}
"""Batch and rate are the paper's for its SNN; the network is smaller."""


def trained(context: Context) -> dict[str, Any]:
    """Table 1 and Fig. 13: train an SNN on digits in every way; losses and accuracy at the end of every part."""
    if "SNN" in context.results:
        return context.results["SNN"]
    data = NETWORKS["SNN"].data(10 if context.quick else 1000)
    parts, steps, seeds = (2, 6, 2) if context.quick else (12, 100, 3)
    batch, sizes = (8, NETWORKS["SNN"].quick) if context.quick else (_BATCH, _SIZES)

    def run(side: str, seed: int) -> list[list[float]]:
        return course(
            schedules.SIDES[side], lambda: NETWORKS["SNN"].build(np.random.default_rng(seed), **sizes),
            lambda params: optim.SGD(params, lr=_RATE, momentum=schedules.MOMENTUM), data, batch, parts, steps, seed,
                _score,
        )  # fmt: skip

    found = {"steps": steps, "runs": {side: [run(side, seed) for seed in range(seeds)] for side in SIDES}}
    context.results["SNN"] = found
    return found


def _score(logits: np.ndarray, target: np.ndarray) -> list[float]:
    value = float(nn.CrossEntropyLoss().forward(logits, target)[0])
    return [value, float((logits.argmax(axis=1) == target).mean())]


def course(
    side: schedules.Side, build: Callable[[], Any], make_optimizer: Callable[[Any], Any], data: Any, batch: int,
        parts: int,
    steps: int, seed: int, score: Callable[[np.ndarray, np.ndarray], list[float]],
) -> list[list[float]]:  # fmt: skip
    """Train; return the mean training loss and the test set's score after each part, where a pipeline is drained."""
    train_set, test_set = data
    given = [train_set.batch(chosen) for chosen in workloads.batches(len(train_set), batch, seed, parts * steps)]
    watch = schedules.Losses()

    def work(transport: Transport | None) -> list[list[float]]:
        model, found = build(), []
        optimizer = make_optimizer(model.parameters())
        executor = None
        if transport is not None:
            predictor = None if side.predictor is None else optim.make_predictor(side.predictor, optimizer)
            executor = PipelineExecutor(
                model, nn.CrossEntropyLoss(), optimizer, schedules.schedule_of(side.schedule or "", steps), transport,
                observer=watch, predictor=predictor,
            )  # fmt: skip
        for begin in range(0, len(given), steps):
            part = given[begin : begin + steps]
            if executor is None:
                watch.found += [workloads.step(model, optimizer, x, target) for x, target in part]
            else:
                executor.step(part)
                executor.flush()
            if transport is None or transport.rank == 0:
                x, target = test_set.batch(np.arange(len(test_set)))
                found.append([float(np.mean(watch.found[-steps:])), *score(model(x), np.asarray(target))])
        return found

    return work(None) if side.schedule is None else run_ranks(schedules.STAGES, work)[0]


def accuracies(data: Mapping[str, Any]) -> Found:
    """Table 1: the best losses and accuracies of an SNN, and their differences from synchronous training."""
    best = {
        side: np.array(
            [
                [min(part[0] for part in run), min(part[1] for part in run), 100 * max(part[2] for part in run)]
                for run in runs
            ]
        )
        for side, runs in data["runs"].items()
    }  # (seeds, 3)
    vanilla, found = of_runs(*schedules.interval((best["vanilla"] - best["synchronous"])[:, 2])), {}
    steps = data["steps"] * len(data["runs"]["vanilla"][0])
    for side in SIDES[1:]:
        names = ("train loss", "val loss", "accuracy")
        for number, name in enumerate(names):
            mean, width = schedules.interval((best[side] - best["synchronous"])[:, number])
            values = f"{best[side][:, number].mean():.4g}, synchronous {best['synchronous'][:, number].mean():.4g}"
            found[f"{side} {name}"] = of_runs(
                mean, width, " points" if name == "accuracy" else "", other=values, ran=RAN[side]
            )
    kept = found["SpecTrain accuracy"]
    if vanilla.low is not None and vanilla.low > -2.1:  # the test must tell the sides apart
        found["SpecTrain accuracy"] = replace(kept, noise=f"Stale weights pass as well: {vanilla.said} points")
    return Found(
        {name: replace(ours, why=f"A smaller SNN, digits, {steps} of 5000 steps") for name, ours in found.items()}
    )


def early(result: Result) -> Found:
    """Table 1 within few steps of batch 32, where staleness hurts: the mean over networks and rates."""
    found = {}
    for side in SIDES[1:]:
        rows = [row for row in result["rows"] if row["side"] == side]
        lost = np.array([100 * row["difference"]["mean"] for row in rows])
        found[side] = of_runs(*schedules.interval(lost), " points", ran=RAN[side], other="; ".join(
            f"{row['network']} {row['rate']:g}: {value:.0f}" for row, value in zip(rows, lost,
                strict=True)))  # fmt: skip
    return Found(found)


def to_convergence(data: Mapping[str, Any]) -> Found:
    """Fig. 13: steps to the accuracy that all three reach, trained here, times a step's simulated time on four P40."""
    layers = scaling_papers_networks()["SNN"][1]
    seconds = {"synchronous": data_parallel("dp-overlap", layers, P40, 4, 32).seconds} | {
        side: asynchronous(schedule, layers, P40, 4, 16, 128).seconds / 16
        for side, schedule in (("stashing", "pipedream"), ("SpecTrain", "dualpipe"))
    }
    curves = {side: np.mean([[part[2] for part in run] for run in data["runs"][side]], axis=0) for side in seconds}
    criterion = min(curve.max() for curve in curves.values())
    steps = {side: data["steps"] * (1 + int(np.argmax(curve >= criterion))) for side, curve in curves.items()}
    said = f"to {criterion:.1%}: " + ", ".join(f"{side} {count} steps" for side, count in steps.items())
    times = {side: steps[side] * seconds[side] for side in seconds}
    ratios = {other: 100 * times["SpecTrain"] / times[other] for other in ("synchronous", "stashing")}
    return Found(
        {
            "FCN/RNN": Ours(
                other=(f"SNN alone, simulated: {ratios['synchronous']:.3g} % and {ratios['stashing']:.3g} %, {said}")
            )
        }
    )


def prediction_errors(context: Context) -> dict[str, Any]:
    """Fig. 9: the error of predicted and of stale weights by s, of an SNN at the paper's rate and batch."""
    data = NETWORKS["SNN"].data(10 if context.quick else 1000)
    sizes, batch, steps = (NETWORKS["SNN"].quick, 8, 24) if context.quick else (_SIZES, _BATCH, 400)
    run = schedules.train("SNN", sizes, data, "SpecTrain", _RATE, batch, steps, 0, measured=True)
    curves = {}
    for s in (1, 2, 3):  # a backward on device s of four is s updates ahead (Eq. 6); once the pipeline is full
        chosen = [d for d in run.distances if d.action.kind == "I" and d.ahead == s
                  and (d.action.microbatch or 0) >= 2 * schedules.STAGES]  # fmt: skip
        curves[str(s)] = {key: [float(getattr(d, key)) for d in chosen] for key in ("predicted", "stale")}
    return {"curves": curves}


def errors(data: Mapping[str, Any]) -> Found:
    curves = {s: {key: np.array(values) for key, values in curve.items()} for s, curve in data["curves"].items()}
    stale = [float(curve["stale"].mean()) for curve in curves.values()]
    ratios = [float(curve["predicted"].mean() / curve["stale"].mean()) for curve in curves.values()]
    below = [float((curve["predicted"] < curve["stale"]).mean()) for curve in curves.values()]
    spike = max(float(curve["stale"].max() / curve["stale"].mean()) for curve in curves.values())
    return Found({
        "lower": Ours(max(ratios), text="predicted over stale, s = 1, 2, 3: " + ", ".join(f"{r:.3f}" for r in ratios)),
        "always": Ours(100 * min(below), text="steps, s = 1, 2, 3: " + ", ".join(f"{b:.1%}" for b in below)),
        "spikes": Ours(spike, unit="×"), "s = 3": Ours(100 * ratios[-1], unit=" %"),
        "grows": Ours(stale == sorted(stale), text=", ".join(f"{one:.2g}" for one in stale)),
    })  # fmt: skip


def other_models(result: Result) -> Found:
    """Fig. 9's footnote: predicted over stale weights in the forward, of other networks too."""
    rows = [{"name": f"{row['network']}, {row['level']}", "predicted": row["predicted_forward"],
             "stale": row["stale_forward"]}
            for row in result["rows"] if row["side"] == "SpecTrain" and "predicted_forward" in row]  # fmt: skip
    ratios = [row["predicted"] / row["stale"] for row in rows]
    return Found({"similar": Ours(max(ratios), text=f"{min(ratios):.2f} to {max(ratios):.2f}, {len(rows)} settings")},
                 {"rows": rows})  # fmt: skip


def learning_curves(result: Result) -> Found:
    """Fig. 12: the Transformer's training losses, the mean of the last ten points, at two rates."""
    rows = [row for row in result["rows"] if row["network"] == "Transformer" and row.get("loss") is not None]
    curves = {f"{row['side']}, {row['level']}": np.asarray(row["loss"], float) for row in rows}

    def compared(measure: Callable[[np.ndarray], float], one: str, other: str) -> tuple[list[float], str]:
        """Return the ratios of two sides by rate, and both sides in words."""
        pairs = [(measure(curves[f"{one}, {rate}"]), measure(curves[f"{other}, {rate}"])) for rate in schedules.LEVELS]
        return [a / b for a, b in pairs], " and ".join(f"{a:.2f} over {b:.2f}" for a, b in pairs)

    found = {}
    for other in ("synchronous", "vanilla", "stashing"):
        ratios, said = compared(lambda loss: float(loss[-10:].mean()), "SpecTrain", other)
        found[other] = Ours(max(ratios), text=said)
    rough, said = compared(lambda loss: float(np.abs(np.diff(loss[len(loss) // 2 :])).mean()), "vanilla", "stashing")
    found["stability"] = Ours(min(rough) > 1, text=said, ran="DualPipe (2018) and PipeDream")
    shown = {name: loss.tolist() for name, loss in curves.items()}
    return Found(found, {"steps": max(row["steps"] for row in rows), "curves": shown})


# ---- schedules, exact ------------------------------------------------------------------------------------------------


def _units(workers: int) -> Costs:
    """Return equal units; the last worker runs forward and backward of a batch in one."""
    return Costs(lambda action: 0 if action.kind == "U" else 0.5 if action.stage == workers - 1 else 1)


def versions(data: Any) -> Found:
    """Eq. 5 and 6: version differences of 2 to 8 devices, read off the simulated schedule."""
    found: dict[str, list[bool]] = {"forward": [], "backward": []}
    for n in range(2, 9):
        run = simulate(dualpipe2018(workers=n, stages=n, microbatches=5 * n), _units(n))
        for k in range(n):
            batch = 2 * n + 1
            found["forward"].append(run.version_difference(Action(k, "F", batch)) == 2 * n - k - 2)
            found["backward"].append(run.version_difference(Action(k, "B", batch)) == k)
    return Found({key: Ours(all(right), text=f"{sum(right)} of {len(right)} devices") for key, right in found.items()})


def fifth_batch(data: Any) -> Found:
    """Fig. 8: the round trip of a batch on three devices."""
    found = simulate(dualpipe2018(workers=3, stages=3, microbatches=20), _units(3))
    trip = [Action(0, "F", 9), Action(1, "F", 9), Action(2, "F", 9), Action(1, "B", 9), Action(0, "B", 9)]
    stashed = simulate(pipedream(workers=3, stages=3, microbatches=20), _units(3))
    read = {stashed.version_difference(Action(0, kind, 9)) for kind in ("F", "B")}
    return Found({
        "units": Ours([round(found.start(action) - found.start(trip[0])) for action in trip]),
        "versions": Ours([found.version_difference(action) for action in trip]),
        "PipeDream": Ours(len(read) == 1, ran="PipeDream",
            text=f"forward and backward read weights {max(read)} updates old"),
    })  # fmt: skip


def timelines(data: Any) -> Found:
    """Fig. 6: DualPipe on four devices."""
    found = simulate(dualpipe2018(workers=4, stages=4, microbatches=20), _units(4))
    return Found({"forward": Ours([round(found.start(Action(k, "F", 10))) - 10 for k in range(4)]),
                  "backward": Ours(round(found.start(Action(0, "B", 10))) - 10)})  # fmt: skip


def program_flow(data: Any) -> Found:
    """Alg. 1, transcribed for a chain of Linear layers of one unit each, and our pipeline: the same weights."""
    n, width, steps, rate, decay = 4, 6, 24, 0.05, 0.9
    rng = np.random.default_rng(0)
    given = [(rng.standard_normal((8, width)), rng.integers(0, width, 8)) for _ in range(steps)]

    def build() -> nn.Sequential:
        return nn.Sequential(*(nn.Linear(width, width, dtype="float64", rng=i) for i in range(n)))

    def ours(transport: Transport) -> nn.Sequential:
        model = build()
        optimizer = optim.SGD(model.parameters(), lr=rate, momentum=decay)
        executor = PipelineExecutor(model, nn.CrossEntropyLoss(), optimizer, schedules.schedule_of("DualPipe (2018)",
            steps),
                                    transport, predictor=optim.make_predictor("momentum", optimizer))  # fmt: skip
        executor.step(given)
        executor.flush()
        return model

    theirs, layers = _transcribed(build(), given, rate, decay), run_ranks(n, ours)[0]
    apart = max(float(np.abs(value - theirs[name]).max()) for name, value in layers.state_dict().items())
    return Found({"weights": Ours(apart, text=f"{apart:.1g}")})


def _transcribed(model: nn.Sequential, given: list[Any], rate: float, decay: float) -> dict[str, np.ndarray]:
    """Algorithm 1 on all GPUs at once: FwdTask, BwdTask, then the updates; returns the weights at the end."""
    n, loss = len(model), nn.CrossEntropyLoss()
    weights = [{name: value.copy() for name, value in model[k].params.items()} for k in range(n)]
    smoothed = [{name: np.zeros_like(value) for name, value in layer.items()} for layer in weights]
    forward: dict[int, Any] = {}
    backward: dict[int, Any] = {}
    kept: dict[tuple[int, int], Any] = {}

    def predicted(k: int, s: int) -> Any:
        step = s * rate / (1 - decay)  # our SGD's momentum is v / (1 - decay)
        model[k].load_state_dict({name: value - step * smoothed[k][name] for name, value in weights[k].items()})
        return model[k]

    for t in range(len(given) + 2 * n):
        sent: list[tuple[dict[int, Any], int, Any]] = []
        buffers: dict[int, Any] = {}
        for k in range(n):  # the last device runs both tasks of a batch in a unit
            item = (t, given[t][0]) if k == 0 and t < len(given) else forward.pop(k, None)
            if item is not None:
                m, x = item
                y, kept[k, m] = predicted(k, min(2 * n - k - 2, len(given) - m + 2 * (n - 1 - k))).forward(x)
                if k < n - 1:
                    sent.append((forward, k + 1, (m, y)))
                else:
                    backward[k] = (m, loss.input_grad(loss.forward(y, given[m][1])[1]))
            if k in backward:
                m, gy = backward.pop(k)
                layer, saved = (
                    predicted(k, min(k, len(given) - m)),
                    kept.pop((k, m)),
                )  # fewer updates follow the last ones
                buffers[k] = layer.weight_grad(gy, saved)
                if k:
                    sent.append((backward, k - 1, (m, layer.input_grad(gy, saved))))
        for buffer, k, item in sent:
            buffer[k] = item
        for k, grads in buffers.items():
            for name, g in grads.items():
                smoothed[k][name] = decay * smoothed[k][name] + (1 - decay) * g
                weights[k][name] = weights[k][name] - rate / (1 - decay) * smoothed[k][name]
    return {f"{k}.{name}": value for k, layer in enumerate(weights) for name, value in layer.items()}


# ---- simulated for four P40 ------------------------------------------------------------------------------------------

_WORKERS, _SAMPLES = 4, 128


def transfers(data: Any) -> Found:
    """Fig. 3: bytes that four GPUs hand each other for a batch, from the shapes of the networks."""
    ratios = {}
    for name, (_, layers) in scaling_papers_networks().items():
        inside = cut(layers, _WORKERS)[:-1]
        gradients = 2 * (_WORKERS - 1) * sum(layer.weights for layer in layers)  # to a server and back
        ratios[name] = gradients / (2 * _SAMPLES * sum(part.output for part in inside))  # and their gradients
    said = ", ".join(f"{name} {value:.3g}" for name, value in ratios.items())
    return Found({
        "mean": Ours(geometric_mean(ratios.values()), unit="×", other=f"arithmetic {fmean(ratios.values()):.3g}×"),
        "largest": Ours(max(ratios.values()), unit="×"), "more": Ours(min(ratios.values()) > 1, text=said),
    }, {"rows": [{"name": name, "ratio": value} for name, value in ratios.items()]})  # fmt: skip


def breakdown(data: Any) -> Found:
    """Fig. 4 and 11: shares of a step in transfers and in waiting for slower workers."""
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
    ran = {"uneven": "PipeDream, all waiting after every unit", "even": "DualPipe (2018), the same"}
    means = {name: Ours(100 * fmean(values), unit=" %", ran=ran.get(name, name)) for name, values in shares.items()}
    return Found(means | {"recurrent": Ours(100 * fmean(recurrent), unit=" %", ran="data-parallel"),
                          "largest": Ours(100 * max(shares["data-parallel"]), unit=" %",
                              ran="data-parallel")})  # fmt: skip


def throughput(result: Result) -> Found:
    """Fig. 10: over data-parallel and over PipeDream; means are geometric. And data-parallel on one, two, four GPUs."""
    rows = [row for row in result["rows"] if row["source"].startswith("Chen")]
    ours = {(row["compared"], row["setting"]): row["ours"] for row in rows}
    found = {}
    for peer in ("data-parallel", "PipeDream"):
        for setting in ("all, mean", "the largest", "CNN, mean", "FCN/RNN, mean"):
            barrier = ours.get((f"DualPipe over {peer}, with a barrier", setting))
            found[f"{peer} {setting}"] = Ours(ours.get((f"DualPipe over {peer}", setting)), unit="×",
                                              other=f"with a barrier {barrier:.2f}×" if barrier else "")  # fmt: skip
    speed: dict[str, list[list[float]]] = {"CNN": [], "FCN/RNN": []}
    dual = []
    for group, layers in scaling_papers_networks().values():
        one = 1 / P40.alone(layers, 1)
        counts = (2, 4)
        speed[group].append([data_parallel("dp-overlap", layers, P40, n, 128 / n).throughput / one for n in counts])
        dual.append([asynchronous("dualpipe", layers, P40, n, 16, 128).throughput / one for n in counts])
    falls = [two > four for two, four in speed["FCN/RNN"]]
    said = {group: "; ".join(f"{two:.2f}, {four:.2f}" for two, four in values) for group, values in speed.items()}
    sums = "data-parallel, sums during the backward"
    found |= {
        "falls": Ours(all(falls), ran=sums, text=f"{sum(falls)} of {len(falls)}: {said['FCN/RNN']}"),
        "rises": Ours(all(two < four for two, four in speed["CNN"]), ran=sums, text=said["CNN"]),
        "38.5": Ours(100 * geometric_mean(four for _, four in speed["FCN/RNN"]), unit=" %", ran=sums),
        "scales": Ours(all(two < four for two, four in dual), text="; ".join(f"{a:.2f}, {b:.2f}" for a, b in dual)),
    }
    return Found(found, {"rows": rows})


# ---- Fig. 7: measured ------------------------------------------------------------------------------------------------


def backward_time(context: Context) -> dict[str, Any]:
    """Time a backward over a forward, of networks like the paper's six, on this machine."""
    rounds = {"rounds": 2, "least_rounds": 2, "warmup": 1} if context.quick else {"rounds": 9, "budget": 6.0}
    rows = []
    with harness.using_threads(threads.most_threads()):
        for name, (make, shape, samples) in _networks(context.quick).items():
            model, loss, rng = make(), nn.CrossEntropyLoss(), np.random.default_rng(0)
            x, target = rng.standard_normal(shape, np.float32), rng.integers(10, size=samples)

            def back(kept: Any, model: Any = model, loss: Any = loss) -> None:
                model.weight_grad(loss.input_grad(kept[0]), kept[1])

            def forth(model: Any = model, loss: Any = loss, x: Any = x, target: Any = target) -> Any:
                logits, saved = model.forward(x)
                return loss.forward(logits, target)[1], saved

            found = timing.measure({"forward": forth, "backward": timing.Call(back, forth)}, **rounds)
            rows.append({"name": name, "ratio": found["backward"].median / found["forward"].median})
    return {"rows": rows}


def backward_ratios(data: Mapping[str, Any]) -> Found:
    ratios = {row["name"]: row["ratio"] for row in data["rows"]}
    said = ", ".join(f"{name.split(',')[0]} {value:.2f}" for name, value in ratios.items())
    return Found({"largest": Ours(max(ratios.values()), unit="×", other=said),
                  "longer": Ours(min(ratios.values()), unit="×", other=said)})  # fmt: skip


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


# ---- pictures --------------------------------------------------------------------------------------------------------


def draw_errors(data: Mapping[str, Any]) -> Any:
    drawing, axes = harness.figure(1, 3, width=9.0, height=3.0)
    for ax, (s, curve) in zip(axes[0], data["curves"].items(), strict=True):
        for name, colour in (("stale", harness.KINDS[2]), ("predicted", harness.OURS)):
            ax.plot(curve[name], linewidth=0.8, color=colour, label=name)
        ax.set(xlabel="step", title=f"{s} updates ahead", yscale="log")
    axes[0, 0].set_ylabel("RMSE of the weights")
    return drawing


def draw_both(data: Mapping[str, Any]) -> Any:
    built = [build(workers=4, stages=4, microbatches=12) for build in (pipedream, dualpipe2018)]
    return drawn_timelines(built, _units(4))


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


_PREDICTION = harness.bars("{name} rate", {"predicted": "predicted weights", "stale": "stale weights"},
                           "RMSE from the weights that are used later, × 10⁻³", unit=1e3)  # fmt: skip
_TRANSFERS = harness.bars("{name}", {"ratio": ""}, "bytes per batch, data-parallel over model-parallel", log=True)
_RATIOS = harness.bars("{name}", {"ratio": ""}, "time of a backward over a forward's (dashed: the paper's largest)",
                       line=3.3)  # fmt: skip
DRAW_RANGES = harness.bars("{compared}: {setting}, {workers} workers", {"ours": "simulated", "high": "the paper's"},
                           "speed-up over the baseline", (harness.OURS, harness.PAPER), line=1.0)  # fmt: skip
"""Draws simulated speed-ups and the papers'."""

RUNS = {
    "spectrain-fig3": Run(transfers, draw=_TRANSFERS),
    "spectrain-fig4": Run(breakdown, seconds=2),
    "spectrain-fig6": Run(timelines, draw=draw_both),
    "spectrain-fig7": Run(backward_ratios, backward_time, draw=_RATIOS, seconds=60),
    "spectrain-fig8": Run(fifth_batch),
    "spectrain-eq5": Run(versions),
    "spectrain-alg1": Run(program_flow),
    "spectrain-fig9": Run(errors, prediction_errors, draw=draw_errors, seconds=20, needs=("data",)),
    "spectrain-fig9-nets": Run(other_models, rests_on="spectrain", draw=_PREDICTION, seconds=1500, needs=("data",)),
    "spectrain-table1": Run(accuracies, trained, seconds=240, needs=("data",)),
    "spectrain-hard": Run(early, rests_on="spectrain", seconds=1500, needs=("data",)),
    "spectrain-fig13": Run(to_convergence, trained, seconds=240, needs=("data",)),
    "spectrain-fig12": Run(learning_curves, rests_on="spectrain", draw=draw_curves, seconds=1500, needs=("data",)),
    "spectrain-fig10": Run(throughput, rests_on="scaling-papers", draw=DRAW_RANGES, seconds=30),
}
"""By the figure's name."""
