"""Weight gradients and updates of several stages in one call, with one BLAS thread for the whole step."""

from __future__ import annotations

import numpy as np
import pytest

import orders
from sparsebp import nn, optim, prune
from sparsebp.core import threads
from sparsebp.kernels.host.dense import products
from sparsebp.runtime import streams
from sparsebp.runtime.actions import Actions, Stages
from sparsebp.runtime.executor import PlainExecutor
from sparsebp.runtime.measure import TimedExecutor
from sparsebp.schedule import Action, Schedule, StepGraph


def side_by_side(model):
    """Two streams: on the first one, two W with their U follow all I, so that they can run in one call."""
    stages = Stages(model)
    graph = StepGraph(len(stages), unweighted=stages.unweighted, updates="step", first="F")
    chosen, last = (1, 3), 5
    main = [Action(stage, "F", 0) for stage in range(6)] + [Action(stage, "I", 0) for stage in (5, 4, 3, 2, 1)]
    main += [Action(stage, kind, None if kind == "U" else 0) for stage in chosen for kind in "WU"]
    return Schedule.of(graph, [{"main": main, "sub": [Action(last, "W", 0), Action(last, "U")]}], "by hand")


def chain():
    rng = np.random.default_rng(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(72, 9, rng=rng), nn.ReLU(), nn.Linear(9, 8, bias=False, rng=rng),
                         nn.Tanh(), nn.Linear(8, 3, rng=rng))  # fmt: skip


def trained(model, order, timed=False):
    opt = optim.SGD(model.parameters(), 0.1, momentum=0.9)
    executor = (TimedExecutor if timed else PlainExecutor)(model, nn.CrossEntropyLoss(), opt, order)
    for _ in range(3):
        (step,) = executor.step([(orders.IMAGES, orders.CLASSES)])
    executor.flush()
    spans = executor.spans() if timed else []
    executor.close()
    return orders.state_of(model, opt), step.norm(executor.stages.names), spans


@pytest.mark.parametrize(("what", "together"), [
    ("as it is", True), ("pruned", False), ("too large", None), ("one's own", None), ("replaced", None),
    ("replaced in the class", None),
])  # fmt: skip
@pytest.mark.parametrize("timed", [False, True])
def test_weight_gradients_that_can_begin_run_in_one_call(monkeypatch, what, together, timed):
    """And their updates: the same numbers, bit for bit, as one after the other on one stream."""

    if what == "replaced in the class":
        inner = nn.Linear.weight_grad

        def weight_grad(self, gy, saved):
            return inner(self, gy, saved)

        monkeypatch.setattr(nn.Linear, "weight_grad", weight_grad)

    def made():
        model = chain()
        if what == "pruned":
            prune(model, 0.5)
        elif what == "one's own":
            model[3].__class__ = type("Own", (nn.Linear,), {})
        elif what == "replaced":
            model[3].weight_grad = model[3].weight_grad
        return model

    found, run = [], Actions.weight_grads

    def spy(self, step, numbers):
        found.append((tuple(numbers), run(self, step, numbers)))
        return found[-1][1]

    monkeypatch.setattr(Actions, "weight_grads", spy)
    monkeypatch.setattr(streams, "MOST_JOINED_BYTES", 0 if what == "too large" else 1 << 21)
    order = side_by_side(made())
    state, norm, spans = trained(made(), order, timed)
    assert found == ([] if together is None else [((1, 3), together and products.is_numpys())] * 3)
    wanted, wanted_norm, _ = trained(made(), orders.order_for(made()))
    orders.assert_same(state, wanted)
    assert norm == wanted_norm
    if timed:
        seen = [span.action for span in spans]
        both = [Action(stage, kind, m) for stage in (1, 3, 5) for kind, m in (("W", 0), ("U", None))]
        assert [seen.count(action) for action in both] == [3] * 6
        assert all(span.start <= span.end for span in spans)


@pytest.mark.skipif(threads.most_threads() < 2, reason="needs two threads")
@pytest.mark.parametrize("own", [False, True])
def test_a_step_asks_for_one_blas_thread_once_unless_a_part_is_the_users(monkeypatch, own):
    """A layer of one's own may compute with NumPy, and with all threads of its BLAS."""
    seen, run = [], nn.Tanh.slope

    def slope(self, saved):
        seen.append(max(count for name, count in threads.thread_counts().items() if name != "kernels"))
        return run(self, saved)

    monkeypatch.setattr(nn.Tanh, "slope", slope)
    model = chain()
    if own:
        model[2].__class__ = type("Own", (nn.ReLU,), {})
    before = max(count for name, count in threads.thread_counts().items() if name != "kernels")
    trained(model, orders.order_for(model))
    assert before > 1 and seen == [before if own else 1] * 3
    assert max(count for name, count in threads.thread_counts().items() if name != "kernels") == before
