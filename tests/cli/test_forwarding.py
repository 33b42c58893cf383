"""Every option of every command reaches the function that runs, with its value."""

import json
import sys
from pathlib import Path

import pytest

from commands import Calls, run
from sparsebp.cli.app import app
from sparsebp.train.config import config_for


def invoke(*arguments, **options):
    result = run(app, *arguments, **options)
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture
def ran(monkeypatch):
    from sparsebp.cli import demo, train

    calls, threads = Calls(), Calls()
    for module in (train, demo):
        monkeypatch.setattr(module, "run_session", calls)
        monkeypatch.setattr(module, "use_threads", threads)
    calls.threads = threads
    return calls


IMAGES = {
    "model": "vgg11", "width": 0.5, "samples": 11, "batch_size": 12, "epochs": 13, "lr": 0.14, "optimizer": "rmsprop",
    "lr_schedule": "cosine", "backward": "hybrid", "accumulate": 3, "prune": 0.15, "prune_method": "class_blind",
    "retrain_epochs": 16, "retrain_lr": 0.17, "device": "cuda", "dtype": "float64", "seed": 18, "fusion": "forward",
    "clip_norm": 0.19,
}  # fmt: skip
SEQUENCES = {
    "model": "gru", "hidden": 5, "layers": 6, "seq_len": 7, "samples": 11, "batch_size": 12, "epochs": 13, "lr": 0.14,
    "optimizer": "sgd", "lr_schedule": "onecycle", "clip_norm": 0.2, "backward": "blelloch", "dtype": "float64",
    "schedule": "some.csv", "seed": 8,
}  # fmt: skip


def as_options(values):
    named = {"clip_norm": "clip"}
    return [text for name, value in values.items()
            for text in (f"--{named.get(name, name).replace('_', '-')}", str(value))]  # fmt: skip


@pytest.mark.parametrize(("task", "values"), [("digits", IMAGES), ("bitstream", SEQUENCES)])
def test_train(ran, task, values):
    invoke("train", task, *as_options(values), "--out", "here", "--checkpoint-every", 21, "--threads", 1, "--compare",
           "--overwrite")  # fmt: skip
    (((config, folder), options),) = ran
    assert config == config_for(task, **values)
    assert all(getattr(config, name) == value for name, value in values.items())
    assert folder == Path("here")
    assert options == {"weights": None, "resume": False, "overwrite": True, "compare": True, "every": 21,
                       "as_json": False, "transport": None}  # fmt: skip
    assert ran.threads == [((1,), {})]


def test_train_by_default_and_with_flags(ran):
    invoke("train", "mnist", "--graph", "--resume", "--json")
    invoke("train", "cifar10", "--data", "images", "--weights", "w", "--no-graph")
    ((first, folder), options), ((second, other), more) = ran
    assert (first, folder) == (config_for("mnist", graph=True), Path("runs/mnist-lenet5"))
    assert options == {"weights": None, "resume": True, "overwrite": False, "compare": False, "every": None,
                       "as_json": True, "transport": None}  # fmt: skip
    assert (second, other) == (config_for("cifar10", data="images", graph=False), Path("runs/cifar10-vgg11"))
    assert more["weights"] == Path("w") and not more["resume"] and not more["as_json"]


def test_options_given_win_over_those_of_a_file(ran, tmp_path):
    path = tmp_path / "c.json"
    path.write_text(json.dumps({"task": "digits", "model": "densenet", "lr": 0.5, "graph": True, "threads": 1}))
    invoke("train", "--config", path, "--lr", 0.25, "--no-graph")
    (((config, _), _),) = ran
    assert config == config_for("digits", model="densenet", lr=0.25, graph=False)
    assert ran.threads == [((1,), {})]


def test_demo(ran):
    invoke("demo", "--out", "there", "--epochs", 3, "--seed", 4, "--threads", 1, "--resume", "--json")
    (((config, folder), options),) = ran
    assert (config, folder) == (config_for("seqmnist", epochs=3, seed=4), Path("there"))
    assert options == {"resume": True, "overwrite": False, "agreement": True, "as_json": True, "ending": None}
    assert ran.threads == [((1,), {})]


class Pruned:
    def to_json(self):
        return {"kept": 1}


@pytest.mark.parametrize("out", [[], ["--out", "there"]])
def test_prune(monkeypatch, tmp_path, out):
    calls = Calls(Pruned())
    monkeypatch.setattr(sys.modules["sparsebp.train.prune"], "prune_checkpoint", calls)
    invoke("prune", tmp_path, "--amount", 0.25, "--method", "class_distribution", *out, "--json")
    invoke("prune", tmp_path / "a.safetensors", "--amount", 0.5, *out, "--overwrite")
    targets = [Path("there") if out else tmp_path / "pruned.safetensors"] * 2
    assert calls == [
        ((tmp_path, targets[0], 0.25, "class_distribution"), {"overwrite": False}),
        ((tmp_path / "a.safetensors", targets[1], 0.5, "class_uniform"), {"overwrite": True}),
    ]  # fmt: skip


def test_verify(monkeypatch):
    calls, threads = Calls({}), Calls()
    monkeypatch.setattr("sparsebp.train.verify.self_check", calls)
    from sparsebp.cli.app import verify

    monkeypatch.setitem(verify.__globals__, "use_threads", threads)
    invoke("verify", "--seed", 9, "--threads", 1, "--device", "cuda")
    ((arguments, options),) = calls
    assert (arguments, options.pop("device"), list(options)) == ((9,), "cuda", ["progress"])
    assert threads == [((1,), {})]


TUNED = {key: IMAGES[key] for key in ("model", "width", "samples", "batch_size", "optimizer", "dtype")}


def test_tune(monkeypatch, tmp_path):
    from sparsebp.core.timing import Timing
    from sparsebp.train import tune

    best = {"fusion": "backward", "schedule": "conventional", "backward": "bp", "threads": 1}
    calls = Calls([tune.Trial(best, Timing((1.0, 2.0)))])
    monkeypatch.setattr(tune, "tune", calls)
    out = tmp_path / "t.json"
    choices = ["--fusion", "backward", "--schedule", "conventional", "--backward", "bp", "--backward", "hybrid",
               "--threads", 1]  # fmt: skip
    invoke("tune", "digits", *as_options(TUNED), *choices, "--steps", 5, "--rounds", 6, "--out", out, "--accumulate", 2)
    (((given, tried), options),) = calls
    expected = {"task": "digits", "accumulate": 2, **TUNED}
    assert {key: value for key, value in given.items() if value is not None} == expected
    assert tried == [best, best | {"backward": "hybrid"}]
    assert {name: value for name, value in options.items() if name != "progress"} == {"steps": 5, "rounds": 6}
    assert json.loads(out.read_text()) == {"task": "digits", "accumulate": 2, **TUNED, **best}


BUILT = {"stages": 5, "workers": 6, "microbatches": 7, "chunks": 2, "group": 3, "k": 4}
COSTS = ["--cost", "F=2", "--cost", "1W=3", "--latency", 0.5, "--bandwidth", 8, "--slowdown", 1.5]


def as_costs(costs):
    from sparsebp.schedule import Action

    times = tuple(costs.durations(Action(stage, kind, 0)) for stage, kind in ((0, "F"), (0, "W"), (1, "W")))
    return times, costs.link.latency, costs.link.bandwidth, costs.slowdown


def test_schedule_build(monkeypatch):
    from sparsebp.cli import schedule
    from sparsebp.schedule.builders import conventional

    calls = Calls(conventional(stages=2))
    monkeypatch.setattr(schedule, "build_schedule", calls)
    invoke(
        "schedule", "build", "gpipe", *as_options(BUILT), "--streams", 2, "--regions", 8, "--memory-ratio", 1.25,
        "--memory-limit", 9, "--priority", "first-ready", "--unweighted", "1,3", "--recomputed", "0", "--fusion",
        "backward", "--no-input-gradient", *COSTS,
    )  # fmt: skip
    (((name,), options),) = calls
    assert name == "gpipe" and as_costs(options.pop("costs")) == ((2, 1, 3), 0.5, 8, 1.5)
    assert options == BUILT | {
        "streams": 2, "regions": 8, "memory_ratio": 1.25, "memory_limit": 9, "priority": "first-ready",
        "unweighted": (1, 3), "recomputed": (0,), "fusion": "backward", "input_gradient": False,
    }  # fmt: skip
    invoke("schedule", "compare", "gpipe", *as_options(BUILT), "--unweighted", "2", "--fusion", "forward", *COSTS)
    (name,), options = calls[1]
    assert name == "gpipe" and as_costs(options.pop("costs")) == ((2, 1, 3), 0.5, 8, 1.5)
    expected = {"unweighted": (2,), "fusion": "forward", "input_gradient": True, "strict": False}
    assert options == BUILT | expected


def test_schedule_files(monkeypatch, tmp_path):
    from sparsebp.cli import schedule
    from sparsebp.schedule import simulate

    path, runs, charts = tmp_path / "s.csv", [], Calls("chart")

    def noted(plan, costs, *, steps):
        runs.append((plan.graph.first, plan.graph.weights, as_costs(costs), steps))
        return simulate(plan, costs, steps=steps)

    path.write_text("0F0,1F0,1B0,1U0,0B0,0U0\n")
    monkeypatch.setattr(schedule, "simulate", noted)
    monkeypatch.setattr(schedule, "text_chart", charts)
    for command, more in (("simulate", []), ("plot", ["--width", 33, "--no-memory"])):
        invoke("schedule", command, path, *more, "--weights", "latest", "--steps", 3, *COSTS)
    assert runs == [("F", "latest", ((2, 1, 3), 0.5, 8, 1.5), 3)] * 2
    assert [(arguments[1], options) for arguments, options in charts] == [(33, {"memory": False})]
    traces = Calls()
    monkeypatch.setattr(schedule, "write_trace", traces)
    invoke("schedule", "plot", path, "--out", tmp_path / "t.json", "--unit", 5)
    assert [(arguments[1:], options) for arguments, options in traces] == [((tmp_path / "t.json",), {"unit": 5})]
