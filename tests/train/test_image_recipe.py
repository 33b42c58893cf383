"""Recipes of convolutional networks: training, pruning, retraining, resuming, and every way of backward."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from sparsebp.core.errors import FileFormatError, OptionError
from sparsebp.train import load_checkpoint
from sparsebp.train.compare import gradient_agreement
from sparsebp.train.config import build, build_retraining, config_for, config_of
from sparsebp.train.prune import prune_checkpoint

pytest.importorskip("sklearn")

SMALL = {"samples": 40, "batch_size": 20, "epochs": 1}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("lenet5", {}),
        ("vgg11", {"width": 0.05}),
        ("resnet", {"width": 0.2}),
        ("mobilenetv2", {"width": 0.1}),
        ("densenet", {"width": 0.1}),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_every_model_trains(model, options, dtype):
    run = build(config_for("digits", model=model, dtype=dtype, **options, **SMALL | {"samples": 4, "batch_size": 2}))
    assert run.trainer.model.dtype == dtype
    history = run.trainer.fit(run.train_set, epochs=1, batch_size=2)
    assert history.steps == 2
    assert np.isfinite(history.loss).all()


def test_lenet5_learns_digits():
    run = build(config_for("digits", model="lenet5", epochs=3))
    history = run.fit()
    assert history.epochs[-1].validation_accuracy > 0.95


@pytest.mark.parametrize("backward", ["linear", "blelloch", "hybrid", "chunked", "auto"])
def test_scans_train_as_back_propagation_does(backward):
    """VGG-11, pruned: what the unpruned convolutions need for their Jacobians does not matter here."""
    options = {
        "model": "vgg11",
        "width": 0.03,
        "prune": 0.8,
        "dtype": "float64",
        **SMALL,
        "samples": 20,
        "batch_size": 10,
    }
    config = config_for("digits", backward=backward, retrain_epochs=1, **options)
    dense = build(config)
    assert dense.config.backward == "bp"
    dense.fit()
    run, report = build_retraining(config, dense)
    second, _ = build_retraining(dataclasses.replace(config, backward="bp"), dense)
    assert report.sparsity == pytest.approx(0.8, abs=1e-3)
    assert run.fit().loss == pytest.approx(second.fit().loss, rel=1e-9)
    for name, array in run.trainer.model.state_dict().items():
        if name.endswith("_mask"):
            assert (run.trainer.model.parameters()[name.removesuffix("_mask")][~array] == 0).all()
    x = run.test_set.batch(np.arange(2))[0]
    described = config.backward_of(run.trainer.model, x)
    assert backward in ("auto", described["algorithm"])
    assert ("layer by layer" in described["reason"].lower()) == (backward == "auto")


def test_gradients_of_the_scans_agree():
    config = config_for("digits", model="lenet5", backward="hybrid", dtype="float64", **SMALL)
    run = build(config)
    results = gradient_agreement(config, run.trainer.model, run.trainer.loss, run.test_set.batch(np.arange(2)))
    assert [r.algorithm for r in results] == ["chunked", "blelloch"]
    assert all(r.relative_difference < 1e-12 for r in results)


def test_statistics_are_not_moved_by_asking_for_the_plan():
    config = config_for("digits", model="mobilenetv2", width=0.1, samples=4, batch_size=2, epochs=1)
    run = build(config)
    model = run.trainer.model
    before = model.state_dict()
    described = config.backward_of(model, run.test_set.batch(np.arange(2))[0])
    assert described["algorithm"] == "bp"
    assert all((before[name] == array).all() for name, array in model.state_dict().items())


# ---- resuming ------------------------------------------------------------------------------------------------------


def test_retraining_is_not_resumed_with_another_share(tmp_path):
    config = config_for("digits", model="lenet5", prune=0.8, retrain_epochs=1, **SMALL)
    dense = build(config)
    build_retraining(config, dense, checkpoint_dir=tmp_path)[0].fit()
    other, _ = build_retraining(dataclasses.replace(config, prune=0.9), dense, checkpoint_dir=tmp_path)
    with pytest.raises(FileFormatError, match="prune differs"):
        other.fit(resume=True)


def test_a_checkpoint_is_pruned_and_trained_on(tmp_path):
    first, second = tmp_path / "dense", tmp_path / "sparse"
    second.mkdir()
    config = config_for("digits", model="lenet5", lr_schedule="constant", **SMALL)
    dense = build(config, checkpoint_dir=first)
    dense.fit()
    before = (first / "checkpoint.safetensors").read_bytes()
    report = prune_checkpoint(first, second / "checkpoint.safetensors", 0.9)
    assert (first / "checkpoint.safetensors").read_bytes() == before
    pruned = load_checkpoint(second / "checkpoint.safetensors")
    assert pruned.state["pruning"] == report.to_json()
    masks = {name: array for name, array in pruned.part("model").items() if name.endswith("_mask")}
    assert len(masks) == 5
    for name, mask in masks.items():
        weight = name.removesuffix("_mask")
        for prefix in ("model", "optimizer.exp_avg", "optimizer.exp_avg_sq"):
            assert (pruned.tensors[f"{prefix}.{weight}"][~mask] == 0).all()
            assert (pruned.tensors[f"{prefix}.{weight}"][mask] != 0).any()
    run = build(dataclasses.replace(config, epochs=3), checkpoint_dir=second)
    history = run.fit(resume=True)
    assert history.steps == 6
    assert history.loss[:2] == dense.trainer.history.loss
    for name, mask in masks.items():
        assert (run.trainer.model.state_dict()[name] == mask).all()
        assert (run.trainer.model.parameters()[name.removesuffix("_mask")][~mask] == 0).all()
    prune_checkpoint(second, tmp_path / "more.safetensors", 0.95, "class_uniform")
    more = load_checkpoint(tmp_path / "more.safetensors").part("model")
    assert all((more[name] <= mask).all() for name, mask in masks.items())


@pytest.mark.parametrize("task", ["seqmnist", "bitstream", "digits", "cifar10"])
@pytest.mark.parametrize("lr_schedule", ["constant", "onecycle"])
def test_a_configuration_comes_back_from_a_checkpoint(task, lr_schedule):
    data = {"data": "somewhere"} if task == "cifar10" else {}
    config = config_for(task, lr_schedule=lr_schedule, seed=3, **data)
    back = config_of(config.same_on_resume())
    assert dataclasses.replace(back, **data) == config
    with pytest.raises(OptionError, match="not built by a recipe"):
        config_of({})


@pytest.mark.parametrize(
    "options", [{"fusion": "backward"}, {"fusion": "forward", "clip_norm": 1.0}, {"schedule": "ooo"}]
)
def test_orders_train_alike(options):
    clip = {name: value for name, value in options.items() if name == "clip_norm"}
    first = build(config_for("digits", model="lenet5", **SMALL, **options))
    second = build(config_for("digits", model="lenet5", **SMALL, **clip))
    assert first.fit().loss == second.fit().loss
    assert first.config.same_on_resume() == second.config.same_on_resume()
