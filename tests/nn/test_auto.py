"""``backward="auto"``: layer by layer or a scan, decided by shapes, pruned weights, workers and memory limit."""

from __future__ import annotations

from math import prod
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convolutions import configurations
from networks import networks
from sparsebp import nn, plan_scan
from sparsebp.core.errors import MemoryLimitError
from sparsebp.core.machine import machine
from sparsebp.models import vgg11
from sparsebp.nn import sequential
from sparsebp.nn.recurrent.runs import BackwardOptions
from sparsebp.nn.sequential import KEPT, choose_chain_backward
from sparsebp.nn.work import Work
from sparsebp.patterns import SparsityPattern
from sparsebp.scan.rules import MARGIN, layers_time
from strategies import seeds

CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}


def refuse(*_):
    raise AssertionError("was asked for")


def dense(n, size, batch=None):
    """Stand-ins for n dense Jacobians."""
    values = np.ones(size * size if batch is None else (size * size, batch), dtype=np.float32)
    return [SimpleNamespace(pattern=SparsityPattern.dense(size, size), data=values, batch=batch) for _ in range(n)]


def choice(works, jacobians, *, batch=2, plan=None, **options):
    return choose_chain_backward(
        works, batch, np.dtype(np.float32), np, BackwardOptions("auto", **options),
        jacobians if callable(jacobians) else lambda: jacobians,
        plan or refuse,
    )  # fmt: skip


# ---- what a layer says of itself -----------------------------------------------------------------------------------


@given(
    c=configurations(symmetric=True),
    transposed=st.booleans(),
    pruned=st.booleans(),
    seed=seeds,
    batch=st.integers(1, 3),
)
def test_work_of_convolutions(c, transposed, pruned, seed, batch):
    """The entries are those of the pattern, and the FLOPs those of a dense product for every window."""
    rng = np.random.default_rng(seed)
    layers = TRANSPOSED if transposed else CONVOLUTIONS
    padding = tuple(before for before, _ in c.padding)
    size = c.size
    layer = layers[len(size)](
        c.in_channels, c.out_channels, c.kernel, c.stride, padding, dilation=c.dilation, groups=c.groups, rng=rng
    )  # fmt: skip
    if transposed:
        size = layer.windows.output_size(size)
        if min(layer.windows.padded_size(c.size)) < 1 or min((n - 1) * s + r - 2 * p for n, s, r, p in zip(
            size, c.stride, layer.windows.reach, padding, strict=True)) < 1:  # fmt: skip
            return
    if pruned:
        layer.keep_weights(rng.random(layer.params["weight"].shape) < 0.5)
    x = rng.standard_normal((batch, c.in_channels, *size)).astype(np.float32)
    y, saved = layer.forward(x)
    work = layer.input_grad_work(x.shape, saved)
    assert work.entries == layer.jacobian_t(saved).pattern.nnz
    windows = prod(size) if transposed else prod(y.shape[2:])
    assert work.flops == 2 * batch * windows * layer.params["weight"].size
    assert work.values > x.size and work.calls == 1


@given(
    features=st.tuples(st.integers(1, 5), st.integers(1, 5)), rows=st.lists(st.integers(1, 3), min_size=1, max_size=3)
)
def test_work_of_linear(features, rows):
    layer = nn.Linear(*features, rng=0)
    x = np.ones((*rows, features[0]), np.float32)
    _, saved = layer.forward(x)
    work = layer.input_grad_work(x.shape, saved)
    assert work.entries == layer.jacobian_t(saved).pattern.nnz
    assert work.flops == 2 * prod(rows) * prod(features)
    layer.keep_weights(np.zeros((features[1], features[0]), bool))
    pruned = layer.input_grad_work(x.shape, saved)
    assert pruned == work._replace(entries=0)  # a matrix product computes with the zeros


def test_work_of_attention():
    """Two projections, of which one is of three matrices; four products over the pairs of steps; the softmax."""
    x = np.ones((5, 3, 8), np.float32)
    layer = nn.MultiheadAttention(8, 2, rng=0)
    rows, pairs = 5 * 3, 2 * 3 * 5 * 5
    assert layer.input_grad_work(x.shape, layer.forward(x)[1]) == Work(
        flops=2 * rows * 8 * (8 + 3 * 8) + 4 * 2 * pairs * 4 + 4 * pairs,
        values=(8 + 3 * 8) * 8 + 20 * rows * 8 + 8 * pairs, calls=14,
    )  # fmt: skip


@given(network=networks(training=True))
def test_every_layer_knows_its_work(network):
    pair, x = network
    _, saved = pair.layer.forward(x)
    work = pair.layer.input_grad_work(x.shape, saved)
    assert all(value >= 0 for value in work) and work.values >= x.size
    parts = [link.layer.input_grad_work(link.shape, link.saved) for link in pair.layer._links(saved)[1]]
    assert work == tuple(map(sum, zip(*parts, strict=True)))


# ---- the decision --------------------------------------------------------------------------------------------------


def scan(algorithm="blelloch", **compared):
    """A stand-in for planning."""
    return lambda _: SimpleNamespace(algorithm=algorithm, compared=compared)


@given(
    flops=st.integers(0, 10**12), values=st.integers(1, 10**4), entries=st.integers(0, 10**10),
    batch=st.integers(1, 64), w=st.integers(1, 64), wait=st.floats(1, 1e12),
)  # fmt: skip
def test_it_depends_on_its_arguments_alone_and_follows_the_counts(flops, values, entries, batch, w, wait):
    works, chain_ = [Work(flops, values, 1, entries)] * 3, dense(3, 4)
    first, again = (choice(works, chain_, batch=batch, workers=w, plan=scan(blelloch=wait)) for _ in range(2))
    assert first == again and first.reason.startswith("By scan" if first.scans else "Layer by layer")
    layerwise = layers_time([(flops, values, 1)] * 3, machine(np, w))
    pays = w > values * (flops > 0) and 6 * entries * batch / w <= MARGIN * layerwise and wait <= MARGIN * layerwise
    assert first.scans == pays


def test_a_host_goes_layer_by_layer_without_counting():
    found = choice([Work(10**12, 1, 1)] * 3, refuse, plan=refuse)
    assert not found.scans and found.reason.startswith("Layer by layer: on a host")


def test_jacobians_are_not_asked_for_where_no_scan_can_be_as_fast():
    found = choice([Work(10, 10, 1, 10**9)], refuse, plan=refuse, workers=20)
    assert not found.scans and "entries of Jacobians" in found.reason and "1000000000 entries" in found.reason
    found = choice([Work(10**12, 10, 1)], refuse, plan=refuse, workers=10)
    assert not found.scans and "share the values of each layer, 10 at least" in found.reason


def test_a_linear_scan_is_never_taken():
    works = [Work(10**12, 1, 1)] * 3
    assert choice(works, dense(3, 4), plan=scan(blelloch=1e5), workers=2).scans
    assert not choice(works, dense(3, 4), plan=scan("linear", linear=1e5), workers=2).scans


def test_memory_limit():
    works = [Work(10**12, 1, 1, 16)] * 3
    assert choice(works, dense(3, 4), plan=scan(blelloch=1e5), memory_limit=10**6, workers=2).scans

    def full(_):
        raise MemoryLimitError("The scan needs more memory than memory_limit")

    for limit, jacobians, plan in (
        (0, refuse, refuse), (191, refuse, refuse), (200, dense(3, 4, 2), refuse), (193, dense(3, 4), full),
    ):  # fmt: skip
        found = choice(works, jacobians, plan=plan, memory_limit=limit, workers=2)
        assert not found.scans and f"memory_limit, {limit} bytes" in found.reason


def test_many_workers_scan_a_long_chain():
    def planned(jacobians):
        return plan_scan([j.pattern for j in jacobians], workers=4096, batch=2)

    many = choice([Work(2 * 16 * 2, 48, 1, 16)] * 512, dense(512, 4, 2), workers=4096, plan=planned)
    assert many.scans and planned(dense(512, 4, 2)).algorithm != "linear"


def test_nothing_to_scan():
    assert "nothing to scan" in choice([Work(0, 0, 1)], [], workers=2).reason


# ---- in a chain ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [None, 2])
def test_a_vgg_runs_layer_by_layer_without_a_jacobian(monkeypatch, workers):
    model = vgg11(width=0.25, rng=0)
    model.set_backward("auto", workers=workers)
    x = np.random.default_rng(0).standard_normal((2, 3, 32, 32)).astype(np.float32)
    with monkeypatch.context() as patch:
        patch.setattr(nn.Conv2d, "jacobian_t", refuse)
        y, saved = model.forward(x)
        model.weight_grad(np.ones_like(y), saved)
        (plan,) = model.scan_plans(saved)
    assert plan.algorithm == "bp" and "layer by layer" in plan.reason.lower() and plan.reason in plan.describe()


def small(**options):
    rng = np.random.default_rng(0)
    return nn.Sequential(nn.Linear(3, 4, rng=rng), nn.Tanh(), nn.Linear(4, 2, rng=rng), **options)


@given(net=networks(training=True), seed=seeds, workers=st.sampled_from([None, 1, 10_000]))
@settings(max_examples=25)
def test_gradients_are_those_of_what_was_taken(net, seed, workers):
    """Layer by layer bit for bit, and those of a scan in any case."""
    pair, x = net
    model, rng = pair.layer, np.random.default_rng(seed)
    y, saved = model.forward(x)
    gy = rng.standard_normal(y.shape)
    model.set_backward("auto", workers=workers)
    got = model.input_grad(gy, saved)
    _, links = model._links(saved)
    behind = model._behind_first(links, sequential._has_parameters)  # the chain runs in two parts
    plans = [plan for part in (links[:behind], links[behind:]) for plan in model._backward.plans(part, saved.like)]
    if all(plan.algorithm == "bp" for plan in plans):
        model.set_backward("bp")
        assert np.array_equal(got, model.input_grad(gy.copy(), saved), equal_nan=True)
    model.set_backward("linear")
    np.testing.assert_allclose(got, model.input_grad(gy.copy(), saved), rtol=1e-9, atol=1e-9)


def test_choices_are_kept_and_follow_the_masks(monkeypatch):
    asked = []
    original = choose_chain_backward
    monkeypatch.setattr(sequential, "choose_chain_backward", lambda *a: asked.append(a[1]) or original(*a))
    model = small(backward="auto")

    def step(batch):
        y, saved = model.forward(np.ones((batch, 3), np.float32))
        model.input_grad(np.ones_like(y), saved)
        return saved

    for batch in (2, 2, 3, 2):
        step(batch)
    assert asked == [2, 3]
    model[2].keep_weights(np.eye(2, 4, dtype=bool))
    step(2)
    step(2)
    model[2].keep_weights(np.eye(2, 4, 1, dtype=bool))  # as many weights, other ones
    step(2)
    assert asked == [2, 3, 2, 2]
    model.set_backward("auto", workers=5)
    assert model.scan_plans(step(2)) and asked == [2, 3, 2, 2, 2]
    for batch in range(3, 2 * KEPT):
        step(batch)
    assert len(model._backward._chosen) == KEPT


def test_a_reason_belongs_to_its_chain():
    """Plans are shared by chains with equal patterns; what "auto" says of one is not said of another."""
    auto, linear = small(backward="auto", workers=7), small(backward="linear", workers=7)
    _, saved = linear.forward(np.ones((2, 3), np.float32))
    before = linear.scan_plans(saved)[0].reason
    auto.scan_plans(auto.forward(np.ones((2, 3), np.float32))[1])
    assert linear.scan_plans(saved)[0].reason == before
