"""Code that looks at the model during training sees the state that the history describes."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest

import orders
from sparsebp import nn, optim
from sparsebp.data import ArrayDataset
from sparsebp.train import Callback, ProgressBar, Trainer


def fit(fusion, data, scheduler=None, callbacks=()):
    model = data.model
    opt = optim.SGD(model.parameters(), 0.1)
    made = Trainer(model, nn.CrossEntropyLoss(), opt, fusion=fusion, rng=3, callbacks=callbacks,
                   lr_scheduler=None if scheduler is None else scheduler(opt, model))  # fmt: skip
    for callback in callbacks:
        callback.trainer = made
    return made.fit(data, epochs=2, batch_size=5)


class Looks:
    """A data set whose samples depend on the model as it is by now."""

    def __init__(self, model):
        super().__init__(orders.IMAGES, orders.CLASSES, **self.options)
        self.model = model

    def batch(self, indices):
        x, target = super().batch(indices)
        return x * np.float32(1 + abs(self.model.parameters()["1.weight"]).sum()), target


class Hard(Looks, orders.Rows):
    options: ClassVar = {}


class Scaled(Looks, ArrayDataset):
    """A subclass of one that does not look."""

    options: ClassVar = {"batch_first": True}


def plain(model):
    data = orders.images()
    data.model = model
    return data


class Follows:
    """A rate that follows the weights."""

    def __init__(self, optimizer, model):
        self.model = model
        super().__init__(optimizer, *self.options)

    def lr_at(self, step, base):
        return base / float(1 + abs(self.model.parameters()["5.weight"]).sum())


class Follow(Follows, optim.LRScheduler):
    options = ()


class FollowStep(Follows, optim.StepLR):
    """A subclass of one that does not look."""

    options = (2,)

    def lr_after(self, step, base, lr):
        return self.lr_at(step, base)


@pytest.mark.parametrize("fusion", ["forward", "backward"])
@pytest.mark.parametrize(
    ("data", "scheduler"),
    [(Hard, None), (Scaled, None), (plain, Follow), (plain, FollowStep), (Hard, Follow),
     (plain, lambda opt, model: [FollowStep(opt, model), optim.ExponentialLR(opt, 0.9)]),
     (plain, lambda opt, model: optim.SequentialLR(opt, [FollowStep(opt, model), optim.ExponentialLR(opt, 0.9)], [4]))],
)  # fmt: skip
def test_a_data_set_or_a_schedule_that_looks_sees_no_late_weights(fusion, data, scheduler):
    one, two = (fit(f, data(orders.mlp()), scheduler) for f in ("none", fusion))
    assert (one.loss, one.lr) == (two.loss, two.lr)


class Waiting(Callback):
    """Counts the steps after which updates wait."""

    reads_model = False
    waiting = 0

    def on_step(self, history):
        self.waiting += self.trainer._runner.executor.pending


@pytest.mark.parametrize(
    ("data", "scheduler", "steps"),
    [(plain, None, 10), (plain, lambda opt, _: optim.CosineAnnealingLR(opt, 10), 10),
     (plain, lambda opt, _: [optim.StepLR(opt, 2), optim.LinearLR(opt)], 10), (plain, Follow, 0)],
)  # fmt: skip
def test_updates_wait_where_nobody_looks(data, scheduler, steps):
    waiting = Waiting()
    fit("forward", data(orders.mlp()), scheduler, [waiting])
    assert waiting.waiting == steps


def test_our_own_data_sets_do_not_look():
    from sparsebp.data import BitstreamDataset, ImageDataset
    from sparsebp.optim.lr_schedules import reads_model

    assert not any(reads_model(thing) for thing in (
        ArrayDataset(orders.SEQUENCES, orders.CLASSES), BitstreamDataset(5, 3),
        ImageDataset(np.zeros((2, 1, 3, 3), np.uint8), np.zeros(2, int)),
    ))  # fmt: skip
    assert reads_model(Hard(None)) and reads_model(object())


def test_a_bar_with_more_than_a_bar_looks():
    class Bar(ProgressBar):
        def on_step(self, history):
            super().on_step(history)

    assert Bar().sees_model("step") and not ProgressBar().sees_model("step")
