"""Bad arguments of the trainer are refused."""

from __future__ import annotations

import math

import numpy as np
import pytest

import orders
from sparsebp import nn, optim
from sparsebp.core.errors import FileFormatError, OptionError
from sparsebp.schedule import write_csv
from sparsebp.train import Trainer


def trainer(**options):
    model = orders.mlp()
    return Trainer(model, nn.CrossEntropyLoss(), optim.SGD(model.parameters()), **{"rng": 0, **options})


@pytest.mark.parametrize(
    ("name", "values"),
    [("clip_norm", ["1", True, math.nan, math.inf, 0, -1.0, [1.0], np.ones(2)]),
     ("memory_ratio", ["1", True, math.nan, 0, -1.0]),
     ("accumulate", [True, 1.5, "2", 0, None, math.nan, [2]]), ("checkpoint_every", [0.5, True, "3", 0, -1, math.nan]),
     ("fusion", ["sideways", None, 3, ["none"], True]), ("schedule", [3, None, True, ["ooo"], b"ooo"]),
     ("graph", ["False", 1, 0.0, "yes"]), ("callbacks", [3, [3], [lambda: None], "ab", None]),
     ("rng", [-1, 1.5, "a", True, math.nan, [1.5]]), ("lr_scheduler", [3, "cosine", [3]])],
)  # fmt: skip
def test_options(name, values):
    for value in values:
        orders.refused(lambda v=value: trainer(**{name: v}))


@pytest.mark.parametrize(
    ("options", "remedy"),
    [({"fusion": "backward", "clip_norm": 1.0}, "fusion='forward'"),
     ({"fusion": "forward", "schedule": "ooo"}, "fusion"),
     ({"schedule": "ooo", "accumulate": 2}, "conventional"), ({"schedule": "ooo", "clip_norm": 1.0}, "conventional")],
)  # fmt: skip
def test_options_that_exclude_each_other(options, remedy):
    with pytest.raises(OptionError) as caught:
        trainer(**options)
    assert caught.value.expected is not None and remedy in caught.value.remedy


@pytest.mark.parametrize(
    ("name", "values"),
    [("epochs", [-1, 1.5, "3", True, None, math.nan]), ("batch_size", [0, 1.5, "3", True, None, [2]]),
     ("resume", ["False", 1, None]), ("drop_last", ["False", 1, None]), ("shuffle", ["False", 0]),
     ("validation_batch_size", [0, 1.5, "3", True])],
)  # fmt: skip
def test_arguments_of_fit(name, values):
    made = trainer()
    before = made.model.state_dict()
    for value in values:
        orders.refused(lambda v=value: made.fit(orders.images(), **{"epochs": 1, "batch_size": 5, name: v}))
    for value in (0, 1.5, "3", True):
        orders.refused(lambda v=value: made.evaluate(orders.images(), batch_size=v))
        orders.refused(lambda v=value: made.predict(orders.IMAGES, batch_size=v))
    orders.assert_same(made.model.state_dict(), before)


def test_numpys_integers_are_integers():
    made = trainer(accumulate=np.int64(2), checkpoint_every=np.int32(3))
    assert made.fit(orders.images(), epochs=np.int64(1), batch_size=np.uint8(11)).steps == 2


def test_parts_of_a_trainer():
    model, loss = orders.mlp(), nn.CrossEntropyLoss()
    opt = optim.SGD(model.parameters())
    for parts in ((None, loss, opt), (model, None, opt), (model, loss, None), (model, nn.CrossEntropyLoss, opt),
                  (model, loss, optim.SGD), (nn.Linear, loss, opt), (model, loss, 0.1),
                  (model.forward, loss, opt)):  # fmt: skip
        orders.refused(lambda p=parts: Trainer(*p))


def test_a_fit_within_a_fit_is_refused():
    from sparsebp.train import Callback

    class Again(Callback):
        def on_step(self, history):
            orders.refused(lambda: made.fit(orders.images(), epochs=1, batch_size=5))

    made = trainer(callbacks=[Again()])
    assert made.fit(orders.images(), epochs=1, batch_size=11).steps == 2


@pytest.mark.parametrize(
    ("given", "said"),
    [("GPipe", "Did you mean 'gpipe'?"), ("1f1", "'1f1b'"), ("data_parallel", "'data-parallel'"),
     ("conventonal", "'conventional'"), ("xyzzy", "a file that is there")],
)  # fmt: skip
def test_a_mistyped_schedule_is_no_path(given, said):
    with pytest.raises(OptionError, match=r"Unknown schedule.*reverse-first-k.*action CSV") as caught:
        trainer(schedule=given)
    assert said in caught.value.remedy


def test_what_looks_like_a_path_is_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for missing in ("none.csv", "folder/none"):
        with pytest.raises(FileFormatError, match="No such file"):
            trainer(schedule=missing).fit(orders.images(), epochs=1, batch_size=5)
    write_csv(orders.order_for(orders.mlp()), "mine")
    assert trainer(schedule="mine").fit(orders.images(), epochs=1, batch_size=11).steps == 2
