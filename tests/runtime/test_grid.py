"""Pipelines times replicas: the numbers of one worker, from any grid of ranks, and groups of ranks."""

from __future__ import annotations

import numpy as np
import pytest

import orders
import pipelines as p
from mpi import cases
from sparsebp import nn, optim
from sparsebp.comm.group import GroupTransport
from sparsebp.comm.threads import run_ranks
from sparsebp.core.absent import is_absent
from sparsebp.core.errors import OptionError, TransportError
from sparsebp.schedule.builders import build
from sparsebp.train import Callback, Trainer
from sparsebp.train.checkpoint import live_state

rng = np.random.default_rng(0)
X, TARGET = rng.standard_normal((31, 7)), rng.integers(0, 3, 31)
TARGET[rng.random(31) < 0.4] = -100
TARGET[::5] = 1


def model(shared):
    first = nn.Linear(7, 7, dtype=float, rng=0)
    last = nn.Linear(7, 7, dtype=float, rng=3)
    if shared:
        last.params["weight"] = first.params["weight"]
    return nn.Sequential(first, nn.Dropout(0.3, rng=5), nn.Linear(7, 7, dtype=float, rng=1), nn.Tanh(),
                         nn.Dropout(0.2, rng=6), nn.Linear(7, 7, dtype=float, rng=2), last,
                         nn.Linear(7, 3, dtype=float, rng=4))  # fmt: skip


class Halves(Callback):
    def set_trainer(self, trainer):
        self.trainer = trainer

    def on_epoch(self, record):
        for name in ("0.weight", "7.bias"):
            self.trainer.model.parameters()[name][...] *= 0.5


_OF_RANKS = ("schedule", "replicas", "sharded")


def run(transport, *, shared=False, deferred=True, epochs=2, resume=False, rows=slice(None), **options):
    if deferred:
        with nn.deferred_init():
            one = model(shared)
    else:
        one = model(shared)
    optimizer = optim.Adam(one.parameters(), lr=0.01)
    options = {"accumulate": 2, "schedule": "1f1b", "transport": transport, **options} if transport is not None else {
        "accumulate": 2, **{key: value for key, value in options.items() if key not in _OF_RANKS}
    }  # fmt: skip
    trainer = Trainer(one, nn.CrossEntropyLoss(weight=np.array([1.0, 2.0, 0.5])), optimizer, rng=3,
                      callbacks=[Halves()], **options)  # fmt: skip
    history = trainer.fit((X[rows], TARGET[rows]), epochs=epochs, batch_size=12, resume=resume,
                          validation=(X[:9], TARGET[:9]))  # fmt: skip
    state = live_state(one) | {f"optimizer {k}": v for k, v in live_state(optimizer).items() if hasattr(v, "ndim")}
    numbers = [(one.train_loss, one.validation_loss, one.train_accuracy) for one in history.epochs]
    return (history.loss, history.grad_norm, numbers), {k: v for k, v in state.items() if not is_absent(v)}, trainer


def assert_like(found, wanted):
    for numbers, state, _ in found:
        for one, other in zip(numbers, wanted[0], strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-9)
        orders.assert_close(state, {name: wanted[1][name] for name in state}, rtol=1e-8, atol=1e-11)
    assert set().union(*(state for _, state, _ in found)) == wanted[1].keys()


@pytest.mark.parametrize(("size", "options"), [
    (4, {"replicas": 2}), (4, {"replicas": 2, "schedule": "zb-v", "clip_norm": 0.05}), (6, {"replicas": 3}),
    (6, {"replicas": 2, "schedule": "zb-h1", "shared": True}), (2, {"replicas": 2, "schedule": "gpipe"}),
    (4, {"replicas": 2, "deferred": False, "shared": True}),
    (4, {"replicas": 2, "sharded": True, "shared": True, "clip_norm": 0.05}), (6, {"replicas": 3, "sharded": True}),
])  # fmt: skip
def test_any_grid_has_the_numbers_of_one_worker(size, options):
    """With class weights and ignored positions, dropout, weights that first and last stage share, and a callback."""
    found = run_ranks(size, lambda transport: run(transport, **options))
    assert_like(found, run(None, **options))
    n = size // options["replicas"]
    for rank, (_, state, _) in enumerate(found):  # replicas are equal
        assert p.digest(state) == p.digest(found[rank % n][1])


@pytest.mark.parametrize("second", [(None, 1), (4, 2), (3, 1), (6, 2)])
def test_a_grid_goes_on_from_another_ones_checkpoint(second, tmp_path):
    run_ranks(4, lambda transport: run(transport, replicas=2, epochs=1, checkpoint_dir=tmp_path, sharded=True))
    size, replicas = second
    again = {"checkpoint_dir": tmp_path, "resume": True, "replicas": replicas}
    found = [run(None, **again)] if size is None else run_ranks(size, lambda transport: run(transport, **again))
    assert_like(found, run(None))


def test_what_does_not_divide_is_refused():
    def refused(size, words, error=OptionError, **options):
        with pytest.raises(error, match=words):
            run_ranks(size, lambda transport: run(transport, **options))

    refused(3, "a multiple of 2 ranks", replicas=2)
    refused(4, "replicas are of pipelines", replicas=2, schedule="data-parallel")
    refused(4, "updates after every micro-batch", replicas=2, schedule="pipedream")
    refused(4, "replicates stages", replicas=2, schedule=build("dualpipe", workers=2, stages=8, microbatches=4,
                                                               unweighted=(1, 3, 4)), accumulate=4)  # fmt: skip
    refused(4, "fewer samples than there are replicas", replicas=2, rows=slice(15))
    with pytest.raises(OptionError, match="replicas are of pipelines"):
        one = model(False)
        Trainer(one, nn.CrossEntropyLoss(), optim.SGD(one.parameters(), lr=1), replicas=2)


CASES = [
    case for case in cases(2, ("transport",), in_process=True) if not case.fails and "another_size" not in case.name
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_groups_of_ranks_are_transports(case):
    run_ranks(4, lambda whole: case.run(GroupTransport(whole, [whole.rank % 2, whole.rank % 2 + 2])))


def test_a_rank_that_fails_ends_all_groups():
    def work(whole):
        group = GroupTransport(whole, [whole.rank // 2 * 2, whole.rank // 2 * 2 + 1])
        if whole.rank == 3:
            raise ValueError("out of paper")
        if whole.rank < 2:
            group.barrier()
            whole.barrier()
        group.allreduce(np.ones(3)).wait()

    with pytest.raises((ValueError, TransportError), match="out of paper"):
        run_ranks(4, work)
