"""Ranks compare their options; changes by a callback on rank 0 reach all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import pipelines as p
from sparsebp import nn, optim
from sparsebp.comm.threads import run_ranks
from sparsebp.comm.transport import Transport
from sparsebp.core.errors import OptionError, TransportError
from sparsebp.data import ArrayDataset
from sparsebp.runtime.agreement import exchange
from sparsebp.train import Callback, Trainer
from train.test_transport import TIGHT, images


def train(transport: Transport | None, *, odd: dict[str, Any] | None = None, **options: Any) -> Any:
    """Train; on rank 1 with other options."""
    given: dict[str, Any] = {"seed": 0, "lr": 0.1, "schedule": "1f1b", "activation": nn.Tanh, "data": images(),
                             "lr_of": None, "accumulate": 2, "epochs": 1, "resume": False, "rng": 5}  # fmt: skip
    given |= options | ((odd or {}) if transport is not None and transport.rank == 1 else {})
    layers = [nn.Flatten(), nn.Linear(7, 6, dtype=np.float64, rng=given.pop("seed")), given.pop("activation")()]
    model = nn.Sequential(*layers, *given.pop("more", lambda: ())(), nn.Linear(6, 3, dtype=np.float64, rng=1))
    optimizer = optim.SGD(model.parameters(), lr=given.pop("lr"), momentum=0.9)
    loss = given.pop("loss", None) or nn.CrossEntropyLoss()
    scheduler, data, size = given.pop("lr_of"), given.pop("data"), given.pop("size", 8)
    fit = {name: given.pop(name) for name in ("epochs", "resume")}
    if transport is None:
        given.pop("schedule")
    trainer = Trainer(
        model, loss, optimizer, transport=transport,
        lr_scheduler=None if scheduler is None else scheduler(optimizer), **given,
    )  # fmt: skip
    history = trainer.fit(data, batch_size=size, **fit)
    return history, p.state_of(model, optimizer)


@pytest.mark.parametrize("schedule", ["1f1b", "data-parallel"])
@pytest.mark.parametrize(("odd", "said"), [
    ({"lr": 0.5}, "the optimizer's options"), ({"activation": nn.Sigmoid}, "the layer 2"),
    ({"lr_of": lambda o: optim.StepLR(o, 1)}, "the learning-rate schedule|the optimizer's options"),
    ({"loss": nn.CrossEntropyLoss(weight=np.array([1.0, 2.0, 3.0]))}, "the loss's weight"),
    ({"schedule": "gpipe"}, "the schedule"), ({"rng": None}, "rng"), ({"rng": 6}, "rng"), ({"seed": 9}, "1.weight"),
    ({"epochs": 2}, "epochs"), ({"data": images(samples=22)}, "samples"), ({"checkpoint_dir": "x"}, "checkpoint_dir"),
    ({"data": ArrayDataset(np.ones((23, 7)), np.zeros(23, np.int64), dtype=np.float64, batch_first=True)}, "inputs"),
])  # fmt: skip
def test_ranks_that_differ_are_told_so(schedule: str, odd: dict[str, Any], said: str) -> None:
    same = ArrayDataset(np.zeros((23, 7)), np.zeros(23, np.int64), dtype=np.float64, batch_first=True)
    with pytest.raises(OptionError, match=f"Ranks differ in .*({said})"):
        run_ranks(2, lambda transport: train(transport, schedule=schedule, odd=odd, data=same))


SCHEDULES_OF_RATES = [
    lambda o, odd: optim.StepLR(o, 1 + odd), lambda o, odd: optim.StepLR(o, 1, 0.1 + 0.1 * odd),
    lambda o, odd: optim.MultiStepLR(o, [1, 2 + odd]), lambda o, odd: optim.ReduceLROnPlateau(o, patience=1 + odd),
    lambda o, odd: optim.ChainedScheduler([optim.StepLR(o, 3), optim.ExponentialLR(o, 0.9 + 0.01 * odd)]),
    lambda o, odd: optim.SequentialLR(o, [optim.StepLR(o, 3), optim.StepLR(o, 4)], [2 + odd]),
    lambda o, odd: optim.CosineAnnealingLR(o, 5 + odd),
    lambda o, odd: optim.CyclicLR(o, 0.1, 0.2 + 0.1 * odd, 3, cycle_momentum=False),
]  # fmt: skip


@pytest.mark.parametrize("make", SCHEDULES_OF_RATES)
def test_schedules_of_other_rates_are_told_apart(make: Any) -> None:
    with pytest.raises(OptionError, match=r"Ranks differ in the (learning-rate schedule|optimizer's options)"):
        run_ranks(2, lambda transport: train(transport, lr_of=lambda o: make(o, transport.rank)))
    run_ranks(2, lambda transport: train(transport, lr_of=lambda o: make(o, 0)))


@pytest.mark.parametrize("late", [False, True])
def test_groups_of_other_parameters_are_told_apart(late: bool) -> None:
    """Options are compared group by group. A callback, which runs on rank 0 alone, adds none."""

    class Grows(Callback):
        def __init__(self, optimizer: Any, params: dict[str, Any]) -> None:
            self.optimizer, self.params = optimizer, params

        def on_epoch(self, record: Any) -> None:
            self.optimizer.add_param_group({"params": self.params})

    def run(transport: Transport) -> None:
        model = p.mlp()
        params = model.parameters()
        first, *others = list(params) if late or transport.rank == 0 else list(params)[::-1]
        groups = [{"params": {first: params[first]}}] + [{"params": {name: params[name] for name in others}}] * (
            not late
        )
        optimizer = optim.SGD(groups, lr=0.1)
        callbacks = [Grows(optimizer, {name: params[name] for name in others})] if late else []
        Trainer(model, nn.CrossEntropyLoss(), optimizer, transport=transport, schedule="data-parallel", rng=0,
                callbacks=callbacks).fit(images(), epochs=2, batch_size=8)  # fmt: skip

    with pytest.raises(
        (OptionError, TransportError), match=r"parameters of the optimizer's groups|one of several ranks"
    ):
        run_ranks(2, run)


class Own(Callback):
    """Changes the rate on rank 0 alone, and says that it looks at nothing."""

    reads_model = False

    def __init__(self, optimizer: Any = None) -> None:
        self.optimizer = optimizer

    def on_step(self, history: Any) -> None:
        self.optimizer.param_groups[0]["lr"] = 0.01


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream", "data-parallel", "reverse-first-k"])
@pytest.mark.parametrize("way", ["function", "callback"])
def test_rates_that_part_ways_are_noticed(schedule: str, way: str) -> None:
    """What functions do nobody can compare before they do it."""

    def run(transport: Transport) -> None:
        model = p.mlp()
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        at = optim.LambdaLR(optimizer, lambda step: 1.0 if step < 1 else 1.0 + transport.rank)
        options: dict[str, Any] = {"lr_scheduler": at} if way == "function" else {"callbacks": [Own(optimizer)]}
        Trainer(model, nn.CrossEntropyLoss(), optimizer, transport=transport, schedule=schedule, **options).fit(
            images(), epochs=2, batch_size=8
        )

    with pytest.raises(TransportError, match="has other options than rank 0's"):
        run_ranks(2, run)


def test_a_pipeline_of_other_samples_stops_before_it_learns() -> None:
    with pytest.raises(TransportError, match="Rank 1 has other samples than rank 0"):
        run_ranks(2, lambda transport: train(transport, odd={"data": images(seed=3)}))


class Changes(Callback):
    """Lowers the rate and clips weights, as a user's callback may."""

    def __init__(self, model_of: Any) -> None:
        self.model_of = model_of

    def on_epoch(self, record: Any) -> None:
        model, optimizer = self.model_of()
        optimizer.param_groups[0]["lr"] *= 0.5
        for array in model.parameters().values():
            np.clip(array, -0.1, 0.1, out=array)


@pytest.mark.parametrize("schedule", ["1f1b", "data-parallel"])
def test_what_a_callback_changes_reaches_all_ranks(schedule: str) -> None:
    def run(transport: Transport | None) -> Any:
        model = p.mlp()
        optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        options: dict[str, Any] = {} if transport is None else {"transport": transport, "schedule": schedule}
        trainer = Trainer(model, nn.CrossEntropyLoss(), optimizer, rng=5, accumulate=2,
                          callbacks=[Changes(lambda: (model, optimizer))], **options)  # fmt: skip
        return trainer.fit(images(), epochs=3, batch_size=8), p.state_of(model, optimizer)

    found, wanted = run_ranks(2, run), run(None)
    assert p.digest(found[0][1]) == p.digest(found[1][1])
    assert found[1][0].lr == found[0][0].lr == wanted[0].lr
    p.assert_close(([], found[1][1]), ([], wanted[1]), **TIGHT)


class Stacked:
    """A data set of a user's own, which cannot give no sample."""

    def __init__(self) -> None:
        self.rows = images()

    def __len__(self) -> int:
        return 9

    def batch(self, indices: np.ndarray) -> tuple[Any, Any]:
        return np.stack([self.rows.batch(np.array([i]))[0][0] for i in indices]), self.rows.batch(indices)[1]


def test_ranks_without_samples_ask_for_none() -> None:
    found = run_ranks(3, lambda transport: train(transport, schedule="data-parallel", data=Stacked()))
    wanted = train(None, data=Stacked())
    p.assert_close(([], found[2][1]), ([], wanted[1]), **TIGHT)


def test_replicas_with_dropout_go_on_as_if_they_had_not_stopped(tmp_path: Any) -> None:
    """The last batch of an epoch has one sample: the second rank has none, and does not draw."""

    def run(transport: Transport, **options: Any) -> Any:
        return train(transport, schedule="data-parallel", data=images(samples=22), size=7, accumulate=1,
                     more=lambda: [nn.Dropout(0.5, rng=3)], **options)  # fmt: skip

    whole = run_ranks(2, lambda transport: run(transport, epochs=3, checkpoint_dir=tmp_path / "a"))
    run_ranks(2, lambda transport: run(transport, epochs=1, checkpoint_dir=tmp_path / "b"))
    again = run_ranks(2, lambda transport: run(transport, epochs=3, checkpoint_dir=tmp_path / "b", resume=True))
    assert p.digest(again[0][1]) == p.digest(whole[0][1]) == p.digest(again[1][1])


class Reads(Callback):
    """Looks at the optimizer's state at every step."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.seen = optimizer, 0

    def on_step(self, history: Any) -> None:
        assert self.optimizer.state_dict()["momentum_buffer.1.weight"].any()
        self.seen += 1


def test_a_callback_sees_the_whole_state_of_sharded_optimizers() -> None:
    def run(transport: Transport) -> int:
        model = p.mlp()
        optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        reads = Reads(optimizer)
        Trainer(model, nn.CrossEntropyLoss(), optimizer, transport=transport, schedule="data-parallel", sharded=True,
                callbacks=[reads]).fit(images(), epochs=1, batch_size=8)  # fmt: skip
        return reads.seen

    assert run_ranks(2, run) == [3, 0]


@pytest.mark.parametrize(("named", "change"), [
    ("the loss", lambda trainer: setattr(trainer.loss, "label_smoothing", 0.5)),
    ("the loss", lambda trainer: setattr(trainer.loss, "weight", np.array([1.0, 5.0, 1.0]))),
    ("the layer 0", lambda trainer: setattr(trainer.model[0], "p", 0.9)),
    ("the mode of 0", lambda trainer: trainer.model[0].eval()),
    ("clip_norm", lambda trainer: setattr(trainer, "clip_norm", 0.1)),
])  # fmt: skip
def test_what_a_callback_changes_on_one_rank_alone_is_refused(named: str, change: Any) -> None:
    class Change(Callback):
        def set_trainer(self, trainer: Trainer) -> None:
            self.trainer = trainer

        def on_epoch(self, record: Any) -> None:
            change(self.trainer)

    def run(transport: Transport) -> None:
        model = nn.Sequential(nn.Dropout(0.5, rng=0), nn.Flatten(), nn.Linear(36, 3, rng=1, dtype=np.float64))
        made = Trainer(model, nn.CrossEntropyLoss(), optim.SGD(model.parameters(), lr=0.1), transport=transport,
                       schedule="data-parallel", callbacks=[Change()])  # fmt: skip
        made.fit((np.ones((8, 36)), np.arange(8) % 3), epochs=2, batch_size=4)

    with pytest.raises(OptionError, match=rf"on one of several ranks.* Got of {named}\."):
        run_ranks(2, run)


@pytest.mark.parametrize("changes", [False, True])
def test_only_what_a_callback_has_changed_is_sent(monkeypatch: pytest.MonkeyPatch, changes: bool) -> None:
    names: set[str] = set()

    def noted(transport: Transport, arrays: dict[str, Any]) -> None:
        names.update(arrays)
        exchange(transport, arrays)

    class Looks(Callback):
        def set_trainer(self, trainer: Trainer) -> None:
            self.model = trainer.model

        def on_step(self, history: Any) -> None:
            if changes:
                self.model.parameters()["1.weight"][...] += 1

    monkeypatch.setattr("sparsebp.train.ranks.exchange", noted)
    for schedule in ("1f1b", "data-parallel"):
        run_ranks(2, lambda transport, schedule=schedule: train(  # type: ignore[misc]
            transport, schedule=schedule, callbacks=[Looks()]
        ))  # fmt: skip
        assert names == ({"1.weight"} if changes else set())


def test_options_that_nothing_would_heed_are_refused() -> None:
    for options, said in (
        ({"sharded": True}, "sharded is for other"), ({"note": print}, "note is for other"),
        ({"schedule": "data-parallel", "note": print}, "note is for other"),
    ):  # fmt: skip
        with pytest.raises(OptionError, match=said):
            run_ranks(2, lambda transport, options=options: train(transport, **options))  # type: ignore[misc]
    model, other = p.mlp(), p.mlp()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(OptionError, match="Not a transport"):
        Trainer(model, nn.CrossEntropyLoss(), optimizer, transport="mpi")
    predictor = optim.make_predictor("momentum", optim.SGD(other.parameters(), lr=0.1))

    def predicted(transport: Transport) -> None:
        Trainer(model, nn.CrossEntropyLoss(), optimizer, transport=transport, schedule="dualpipe-2018",
                predictor=predictor)  # fmt: skip

    def replaced(transport: Transport) -> None:
        made = Trainer(model, nn.CrossEntropyLoss(), optimizer, transport=transport, schedule="dualpipe-2018",
                       predictor=optim.make_predictor("momentum", optimizer), rng=0)  # fmt: skip
        made.optimizer = optim.SGD(model.parameters(), lr=0.1)
        made.fit(images(), epochs=1, batch_size=8)

    for run in (predicted, replaced):
        with pytest.raises(OptionError, match="predictor is of another optimizer"):
            run_ranks(2, run)


def test_a_layer_with_running_statistics_is_on_one_rank() -> None:
    def run(transport: Transport) -> None:
        norm = nn.BatchNorm2d(2, dtype=np.float64)
        convolutions = [nn.Conv2d(channels, 2, 3, padding=1, dtype=np.float64, rng=channels) for channels in (1, 2)]
        model = nn.Sequential(convolutions[0], norm, convolutions[1], norm, nn.Flatten(), nn.Linear(18, 3, rng=1))
        trained = {name: array for name, array in model.parameters().items() if not name.startswith(("1.", "3."))}
        optimizer = optim.SGD(trained, lr=0.1)
        Trainer(model, nn.CrossEntropyLoss(), optimizer, transport=transport, schedule="1f1b").fit(
            (np.zeros((4, 1, 3, 3)), np.zeros(4, np.int64)), epochs=1, batch_size=4
        )

    with pytest.raises(OptionError, match="running statistics"):
        run_ranks(2, run)


@pytest.mark.parametrize("schedule", ["1f1b", "data-parallel"])
def test_lengths_reach_every_stage_on_every_rank(schedule: str) -> None:
    rng = np.random.default_rng(0)
    x, classes, lengths = rng.standard_normal((13, 5, 3)), rng.integers(0, 3, 13), rng.integers(1, 6, 13)
    x[np.arange(5) >= lengths[:, None]] = 1e3  # padding that nobody may see

    def run(transport: Transport | None) -> Any:
        model = p.transformer()
        options: dict[str, Any] = {} if transport is None else {"transport": transport, "schedule": schedule}
        trainer = Trainer(model, nn.CrossEntropyLoss(), p.momentum(model), accumulate=2, rng=0, **options)
        held_out = (x[:7], classes[:7], lengths[:7])
        history = trainer.fit((x, classes), lengths=lengths, epochs=1, batch_size=6, validation=held_out)
        return history, p.state_of(model, trainer.optimizer)

    found, (wanted, state) = run_ranks(3, run), run(None)
    np.testing.assert_allclose(found[0][0].loss, wanted.loss, **TIGHT)
    np.testing.assert_allclose(found[0][0].epochs[0].validation_loss, wanted.epochs[0].validation_loss, **TIGHT)
    p.assert_close(([], found[2][1]), ([], state), **TIGHT)
