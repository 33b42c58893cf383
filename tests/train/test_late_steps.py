"""Metrics that are read one step late: when they are reported, and after errors and interrupts."""

from __future__ import annotations

import numpy as np
import pytest

from sparsebp.core import backend
from sparsebp.core.errors import NonFiniteError
from sparsebp.core.graphs import Reading
from sparsebp.optim.optimizer import clip_grad_norm, clip_on_device, square_sums
from sparsebp.runtime.actions import DeferredMetrics, Observer, Step
from sparsebp.runtime.deferred import DeferredSteps


class Spy(Observer):
    interrupts = 0

    def loss(self, step, m, value):
        if self.interrupts:
            self.interrupts -= 1
            raise KeyboardInterrupt
        if not np.isfinite(value):
            raise NonFiniteError(f"The loss of step {step.tag}")

    def gradients(self, step, grads):
        raise NonFiniteError(f"The gradients {list(grads)} of step {step.tag}")


class Loss:
    def forward(self, prediction, target):
        return np.nan, None


def late(number, loss=1.0, squares=(4.0, 9.0)):
    step = Step([(np.zeros((2, 3)), np.zeros(2, int))], [None], number)
    step.later = DeferredMetrics({0: np.asarray(loss)}, {0: (np.asarray(1.0), 2)}, [(["w", "b"], np.array(squares))])
    return step


def at_once(number):
    step = Step([(np.zeros((2, 3)), np.zeros(2, int))], [None], number)
    step.values = [2.0]
    return step


def numbers(steps):
    return [step.tag for step in steps]


def test_a_step_is_told_when_the_next_one_has_been_given():
    steps = DeferredSteps(np, Loss(), Spy())
    assert steps.exchange([late(0)]) == [] and steps.waiting
    assert steps.exchange([]) == []  # nothing has been given since
    (known,) = steps.exchange([late(1)])
    assert (known.tag, known.loss, known.scores, known.squares) == (0, 1.0, [(1.0, 2.0)], {"w": 4.0, "b": 9.0})
    assert known.norm(["w", "b"]) == 13**0.5
    assert numbers(steps.exchange([late(2), late(3)])) == [1]
    assert numbers(steps.exchange([])) == [2]
    assert numbers(steps.drain()) == [3] and not steps.waiting


def test_steps_that_are_read_as_they_go_are_told_at_once_and_in_turn():
    steps = DeferredSteps(np, Loss(), Spy())
    given = [at_once(0)]
    assert steps.exchange(given) is given
    steps.exchange([late(1)])
    assert numbers(steps.exchange([at_once(2)])) == [1, 2]  # 1 was given before, so that it is told before
    assert not steps.waiting


@pytest.mark.parametrize(
    ("wrong", "said"), [({"loss": np.nan}, "loss of step 1"), ({"squares": (4.0, np.inf)}, r"\['b'\] of step 1")]
)
def test_after_an_error_what_came_before_is_told_and_what_came_after_forgotten(wrong, said):
    steps = DeferredSteps(np, Loss(), Spy())
    steps.exchange([late(0), late(1, **wrong), late(2)])
    with pytest.raises(NonFiniteError, match=said):
        steps.drain()
    assert steps.waiting and numbers(steps.drain()) == [0] and not steps.waiting
    assert steps.exchange([late(3)]) == [] and numbers(steps.drain()) == [3]


def test_an_interrupt_loses_nothing():
    observer = Spy()
    steps = DeferredSteps(np, Loss(), observer)
    steps.exchange([late(0)])
    observer.interrupts = 1
    with pytest.raises(KeyboardInterrupt):
        steps.exchange([late(1)])
    assert numbers(steps.drain()) == [0, 1]


def test_what_is_given_up_is_forgotten():
    steps = DeferredSteps(np, Loss(), Spy())
    steps.exchange([late(0)])
    steps.forget()
    assert not steps.waiting and steps.drain() == []


def test_a_reading_is_of_its_time():
    array = np.arange(3.0)
    reading = Reading(array)
    array[:] = 7
    np.testing.assert_array_equal(reading(), [0, 1, 2])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[
    pytest.mark.gpu, pytest.mark.skipif(not backend.has_gpu(), reason="needs CuPy and a GPU")
])])  # fmt: skip
@pytest.mark.parametrize("scale", [1e-3, 1.0, np.inf, np.nan])
def test_clipping_without_a_number_that_is_read(device, scale):
    rng = np.random.default_rng(0)
    host = {"a": rng.standard_normal((33, 20)).astype(np.float32), "b": rng.standard_normal(7)}
    host["b"][2] *= scale
    if scale == 1e-3:
        host = {name: grad * grad.dtype.type(1e-3) for name, grad in host.items()}
    grads = {name: backend.to_device(grad.copy(), device) for name, grad in host.items()}
    if np.isfinite(scale):
        clip_grad_norm(host, 0.5)
    clip_on_device(grads, 0.5, [sums for _, sums in square_sums(grads)])
    for name, grad in grads.items():
        assert grad.dtype == host[name].dtype
        np.testing.assert_allclose(backend.to_host(grad), host[name], rtol=1e-6)
