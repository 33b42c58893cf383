"""Pipelines on processes: the numbers of one worker, bitwise equal to ranks that are threads."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

import orders
import pipelines as p
from mpi import on_ranks, shared_folder
from sparsebp import nn, optim
from sparsebp.comm.threads import run_ranks
from sparsebp.comm.transport import Transport
from sparsebp.core.absent import is_absent
from sparsebp.core.errors import NonFiniteError, OptionError
from sparsebp.train import Callback, Trainer
from sparsebp.train.checkpoint import live_state

TIGHT = {"rtol": 1e-10, "atol": 1e-12}
SIZES = [3, 2, 3, 1]


def trained(transport: Transport, name: str, schedule: str, predictor: Any = None) -> tuple[list[float], str, Any, Any]:
    """Train two steps; return losses, a digest of the state, the state and the versions read."""
    make = p.MODELS[name][0]
    model = make()
    optimizer = p.momentum(model)
    options = {"predictor": predictor and predictor(optimizer)}
    executor = p.executor(
        model, schedule, transport, len(p.filling(schedule, transport.size, SIZES)), optimizer, **options
    )
    steps = [
        executor.step(p.batches(name, sizes, seed=seed))[0] for seed, sizes in enumerate((SIZES, SIZES, SIZES[:2]))
    ]
    executor.flush()
    state = p.state_of(model, optimizer)
    return [step.loss for step in steps], p.digest(state), state, executor.reads


@on_ranks(2, 3, in_process=False)
def schedules_have_the_bits_of_ranks_that_are_threads(transport: Transport) -> None:
    """And so, if they are synchronous, the numbers of one worker (``runtime/test_pipeline.py``)."""
    kinds: list[tuple[str, str, Any]] = [
        *(("mlp", name, None) for name in p.SYNCHRONOUS if name != "dualpipe" or transport.size % 2 == 0),
        ("mlp", "pipedream", None), ("mlp", "dualpipe-2018", None),
        ("mlp", "dualpipe-2018", optim.MomentumPredictor), ("gru", "dualpipe-2018", optim.OptimizerRulePredictor),
        ("densenet", "1f1b", None), ("grouped", "zb-h1", None), ("unet", "1f1b", None), ("unet", "pipedream", None),
    ]  # fmt: skip
    found = [trained(transport, *kind) for kind in kinds]
    mine = {}
    for k in range(transport.rank, len(kinds), transport.size):  # each rank runs some on threads, for all
        every = run_ranks(transport.size, lambda own, kind=kinds[k]: trained(own, *kind))
        mine[k] = [(losses, digest, reads) for losses, digest, _, reads in every]
    wanted = {k: every for part in transport.share(mine) for k, every in part.items()}
    for k, (losses, digest, _, reads) in enumerate(found):
        assert (losses, digest) == wanted[k][0][:2], kinds[k]
        assert reads == wanted[k][transport.rank][2]


@on_ranks(2, 3, in_process=False)
def large_activations_leave_only_when_they_are_read(transport: Transport) -> None:
    """Messages beyond what MPI buffers: the order of waits must be free of deadlock."""
    model = nn.Sequential(*(nn.Linear(300, 300, dtype=np.float64, rng=k) for k in range(6)))
    rng = np.random.default_rng(0)
    batches = [(rng.standard_normal((200, 300)), rng.integers(0, 300, 200)) for _ in range(4)]
    for name in ("gpipe", "1f1b", "modulo", "dualpipe-2018"):
        executor = p.executor(model, name, transport, 4, optim.SGD(model.parameters(), lr=1e-3))
        for _ in range(3):
            executor.step(batches)


def images(samples: int = 22) -> orders.Rows:
    rng = np.random.default_rng(3)
    return orders.Rows(rng.standard_normal((samples, 7)), rng.integers(0, 3, samples))


def fit(transport: Transport | None, **options: Any) -> tuple[Any, dict[str, Any]]:
    model = p.mlp()
    optimizer = optim.Adam(model.parameters(), lr=0.01)
    epochs, resume, data = options.pop("epochs", 2), options.pop("resume", False), options.pop("data", images())
    options = ({} if transport is None else {"transport": transport, "schedule": "1f1b"}) | options
    trainer = Trainer(model, nn.CrossEntropyLoss(), optimizer, accumulate=3, rng=5, **options)
    return trainer.fit(data, epochs=epochs, batch_size=8, validation=images(9), resume=resume), p.state_of(
        model, optimizer
    )


@on_ranks(1, 2, 4)
def a_trainer_has_one_history_and_goes_on_from_its_checkpoint(transport: Transport) -> None:
    history, state = fit(transport)
    wanted, wanted_state = fit(None)
    np.testing.assert_allclose(history.loss, wanted.loss, **TIGHT)
    np.testing.assert_allclose(history.epochs[1].validation_loss, wanted.epochs[1].validation_loss, **TIGHT)
    p.assert_close(([], state), ([], wanted_state), **TIGHT)
    with shared_folder(transport) as folder:
        fit(transport, epochs=1, checkpoint_dir=folder)
        again, state_again = fit(transport, resume=True, checkpoint_dir=folder)
        assert again.loss == history.loss and again.grad_norm == history.grad_norm
        assert p.digest(state_again) == p.digest(state)
        if transport.rank == 0:  # one worker goes on from it
            alone, _ = fit(None, resume=True, checkpoint_dir=folder)
            assert alone.loss == history.loss
        transport.barrier()


def by_stage(transport: Transport | None, **options: Any) -> tuple[Any, dict[str, Any]]:
    """Train a model of which each rank makes and holds its own stages; return the history and what the rank holds."""
    with nn.deferred_init():
        model = p.mlp()
    optimizer = optim.Adam(model.parameters(), lr=0.01)
    how = {"epochs": options.pop("epochs", 2), "resume": options.pop("resume", False)}
    options = ({} if transport is None else {"transport": transport, "schedule": "1f1b"}) | options
    trainer = Trainer(model, nn.CrossEntropyLoss(), optimizer, accumulate=2, rng=5, **options)
    history = trainer.fit(images(), batch_size=8, validation=images(9), **how)
    assert trainer.evaluate(images(9)).loss == history.epochs[-1].validation_loss
    return history, {name: array for name, array in live_state(model).items() if not is_absent(array)}


@on_ranks(2, 4)
def ranks_hold_their_own_stages(transport: Transport) -> None:
    """Four also as two pipelines of two; both go on from each other's checkpoint."""
    wanted, whole = by_stage(None)
    for replicas in {1, transport.size // 2}:
        history, state = by_stage(transport, replicas=replicas)
        np.testing.assert_allclose(history.loss, wanted.loss, **TIGHT)
        orders.assert_close(state, {name: whole[name] for name in state}, **TIGHT)
        with shared_folder(transport) as folder:
            by_stage(transport, epochs=1, checkpoint_dir=folder)
            again, _ = by_stage(transport, resume=True, checkpoint_dir=folder, replicas=replicas)
            np.testing.assert_allclose(again.loss, wanted.loss, **TIGHT)
            transport.barrier()


class Fails(Callback):
    """Fails in the second step."""

    def on_step(self, history: Any) -> None:
        if history.steps == 2:
            raise RuntimeError("the disk is full")


class Leaves(Callback):
    """Calls sys.exit at its second step."""

    def on_step(self, history: Any) -> None:
        if history.steps == 2:
            sys.exit(0)


class NoData(orders.Rows):
    """Calls sys.exit on all ranks."""

    def batch(self, indices: np.ndarray) -> Any:
        sys.exit(7)


@on_ranks(2, 4, fails="the disk is full")
def a_callback_that_fails_ends_all_ranks(transport: Transport) -> None:
    fit(transport, callbacks=[Fails()])


@on_ranks(3, fails=NonFiniteError.__name__)
def a_loss_that_is_not_finite_ends_all_ranks(transport: Transport) -> None:
    model = p.mlp()
    trainer = Trainer(model, nn.CrossEntropyLoss(), optim.SGD(model.parameters(), lr=1e300), transport=transport,
                      schedule="1f1b", accumulate=2, rng=0)  # fmt: skip
    trainer.fit(images(), epochs=3, batch_size=8)


@on_ranks(2)
def what_all_ranks_refuse_leaves_the_transport_as_it_was(transport: Transport) -> None:
    """Whichever rank is wrong, and wherever it is found: the next training is as if there had been none."""
    odd = transport.rank == transport.size - 1
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("epochs is too small", {"epochs": -1}), ("epochs is too small", {"epochs": -odd}),
        ("before the first update", {"schedule": "pipedream", "clip_norm": 1.0}),
        ("note is for other schedules", {"note": print}), ("Ranks differ in clip_norm", {"clip_norm": 1.0 + odd}),
    ]  # fmt: skip
    for said, options in wrong:
        with pytest.raises(OptionError, match=said):
            fit(transport, **options)
    history, state = fit(transport)
    assert history.loss == run_ranks(transport.size, fit)[0][0].loss
    assert len(set(transport.share(p.digest(state)))) == 1
