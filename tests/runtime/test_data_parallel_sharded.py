"""Sharded optimizer states: the numbers of whole ones, a share of the bytes, gathered for files."""

from __future__ import annotations

import numpy as np
import pytest

import replicas as rep
from sparsebp.comm.threads import run_ranks
from sparsebp.core.errors import OptionError
from sparsebp.runtime.actions import Stages
from sparsebp.train import Trainer

NAMES = list(rep.schedules(Stages(rep.mlp())))


@pytest.mark.parametrize(
    ("name", "optimizer"), [(name, "adam") for name in NAMES] + [("forward", name) for name in rep.OPTIMIZERS]
)
def test_equal_to_whole_states(name, optimizer):
    options = {"epochs": 1, "inputs": rep.INPUTS[:14]}
    want = rep.replicas(3, rep.mlp, rep.OPTIMIZERS[optimizer], name, **options)
    got = rep.replicas(3, rep.mlp, rep.OPTIMIZERS[optimizer], name, sharded=True, **options)
    for one, other in zip(got, want, strict=True):
        assert rep.digest(one[0]) == rep.digest(other[0])  # sums in the order of the ranks, updates by elements
        assert one[1] == other[1]
        np.testing.assert_allclose(one[2], other[2], rtol=1e-12)


def groups(params):
    names = list(params)
    return [
        {"params": {name: params[name] for name in names[:3]}, "lr": 0.03},
        {"params": {name: params[name] for name in names[3:]}, "momentum": 0.9},
    ]  # fmt: skip


def test_groups_and_options_set_on_the_way():
    def work(transport, sharded):
        model = rep.mlp()
        optimizer = rep.optim.SGD(groups(model.parameters()), 0.1)
        executor = rep.executor(transport, model, "first-ready", optimizer, sharded=sharded)
        for rate in (0.2, 0.1, 0.3):
            optimizer.param_groups[1]["lr"] = rate
            executor.step([(rep.INPUTS[:5], rep.CLASSES[:5])])
        executor.gather_state(everywhere=True)
        return rep.digest(rep.state_of(model, optimizer))

    assert len({*run_ranks(3, lambda t: work(t, True)), *run_ranks(3, lambda t: work(t, False))}) == 1


def test_a_group_that_is_added_between_two_fits():
    def work(transport, sharded):
        model = rep.mlp()
        first, second = groups(model.parameters())
        optimizer = rep.optim.SGD([first], 0.1, momentum=0.9)
        trainer = Trainer(model, rep.nn.CrossEntropyLoss(), optimizer, transport=transport, schedule="data-parallel",
                          sharded=sharded, rng=0)  # fmt: skip
        for _ in range(2):
            trainer.fit((rep.INPUTS[:14], rep.CLASSES[:14]), epochs=1, batch_size=5)
            if len(optimizer.param_groups) == 1:
                optimizer.add_param_group(second)
        assert set(optimizer.steps.values()) == {3, 6} and set(optimizer.last_update.values()) == {6}
        return rep.digest(rep.state_of(model, optimizer))

    assert len({*run_ranks(3, lambda t: work(t, True)), *run_ranks(3, lambda t: work(t, False))}) == 1


def test_bytes_and_whole_states():
    def work(transport):
        model = rep.mlp()
        optimizer = rep.OPTIMIZERS["adam"](model.parameters())
        whole = sum(array.nbytes for arrays in optimizer.buffers.values() for array in arrays.values())
        executor = rep.executor(transport, model, "forward", optimizer, sharded=True)
        batch = [(rep.INPUTS[:5], rep.CLASSES[:5])]
        executor.step(batch)
        executor.flush()
        for refused in (optimizer.state_dict, lambda: optimizer.step(model.parameters())):
            with pytest.raises(OptionError, match="in pieces on several ranks"):
                refused()
        executor.gather_state()
        if transport.rank == 0:
            first = optimizer.state_dict()
        else:
            with pytest.raises(OptionError, match="in pieces on several ranks"):
                optimizer.state_dict()
        executor.step(batch)
        executor.flush()
        with pytest.raises(OptionError, match="in pieces on several ranks"):
            optimizer.state_dict()
        executor.close()
        again = rep.executor(transport, model, "forward", optimizer, sharded=True)  # takes the pieces over
        again.gather_state(everywhere=True)
        second = optimizer.state_dict()
        if transport.rank == 0:
            assert (first["step.0.weight"], second["step.0.weight"]) == (1, 2)
            assert (first["exp_avg.0.weight"] != second["exp_avg.0.weight"]).any()
        return executor.state_bytes, whole

    size = 4
    found = run_ranks(size, work)
    whole, padding = found[0][1], 8 * 2 * size
    assert sum(held for held, _ in found) == whole
    assert all(held <= whole / size + padding for held, _ in found)


def test_what_cannot_be_parted_is_refused():
    class Own:
        def __init__(self, params):
            self.params = params

    def work(transport):
        model = rep.mlp()
        with pytest.raises(OptionError, match="cannot be parted"):
            rep.executor(transport, model, "first-ready", Own(model.parameters()), sharded=True)
        optimizer = rep.OPTIMIZERS["adam"](model.parameters())
        rep.executor(transport, model, "first-ready", optimizer, sharded=True)
        executor = rep.executor(transport, model, "reverse first-7", optimizer)
        with pytest.raises(OptionError, match="in pieces on several ranks"):
            executor.step([(rep.INPUTS[:5], rep.CLASSES[:5])])

    run_ranks(1, work)


@pytest.mark.parametrize("size", [2, 3])
def test_the_bits_do_not_depend_on_the_order_of_the_sums(size):
    """Which k reverse first-k goes on with is a matter of measured times; the norm that clips by must not be."""
    names = [name for name in NAMES if name != "waits"]
    options = {"epochs": 1, "inputs": rep.INPUTS[:18], "clip_norm": 0.05, "sharded": True}
    found = [rep.replicas(size, rep.mlp, rep.OPTIMIZERS["adam"], name, **options)[0] for name in names]
    for name, (state, losses, norms) in zip(names, found, strict=True):
        assert rep.digest(state) == rep.digest(found[0][0]), name
        assert (losses, norms) == found[0][1:], name
