"""One object called again and again, against a fresh one a call: nothing may depend on what was called before.

Hypothesis chooses the calls and their order: sizes, dtypes, sharing, training and evaluation, pruning, buffers that are
used again with other values, and calls that fail in between.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from scan.chains import Chain, algorithms, make_chain, make_stack
from scan.chains import dense as dense_block
from sparsebp import SparsityPattern, nn, plan_product, plan_scan
from sparsebp.core.errors import MemoryLimitError, OptionError, ShapeError, SparseBPError
from sparsebp.products import product
from strategies import REALS, csr_patterns, normal, reals, seeds, sizes, tolerance

Array = np.ndarray
batches = st.sampled_from([None, 1, 2, 3, 8, 17, 33])


def run_machine(make: Callable[[], RuleBasedStateMachine], examples: int, steps: int = 15) -> None:
    run_state_machine_as_test(make, settings=settings(max_examples=examples, stateful_step_count=steps))


class Buffers:
    """Arrays handed out again for the same use, shape and dtype, filled anew: identity says nothing of the values."""

    def __init__(self) -> None:
        self.kept: dict[Any, Array] = {}

    def filled(self, use: str, values: Array, fresh: bool = False) -> Array:
        if fresh:
            return values.copy()
        buffer = self.kept.setdefault((use, values.shape, values.dtype), np.empty_like(values))
        buffer[...] = values
        return buffer


# ---- a product's plan ------------------------------------------------------------------------------------------------


class ProductMachine(RuleBasedStateMachine):
    """A `ProductPlan`: two dtypes, any batch and sharing, results into arrays used before, refusals in between."""

    @initialize(left=csr_patterns(columns=st.just(7)), right=csr_patterns(rows=st.just(7)), special=st.integers(0, 5))
    def start(self, left, right, special):
        a, b = SparsityPattern(*left), SparsityPattern(*right)
        self.a = {0: SparsityPattern.identity(7), 1: SparsityPattern.diagonal(7)}.get(special, a)
        self.b = {2: SparsityPattern.identity(7), 3: SparsityPattern.diagonal(7)}.get(special, b)
        if special == 4:
            self.a, self.b = SparsityPattern.dense(5, 7), SparsityPattern.dense(7, 3)
        self.plan, self.buffers = plan_product(self.a, self.b), Buffers()
        self.last: tuple[Array, Array] | None = None

    def values(self, pattern, shape, dtype, seed):
        if pattern.kind == "identity":
            return np.ones(shape, dtype)
        return normal(np.random.default_rng(seed), shape, dtype)

    @rule(batch=batches, a_shared=st.booleans(), b_shared=st.booleans(), dtype=reals, seed=seeds,
          out=st.sampled_from(["new", "used", "nan"]))  # fmt: skip
    def call(self, batch, a_shared, b_shared, dtype, seed, out):
        shapes = [
            (p.nnz,) if batch is None or shared else (p.nnz, batch)
            for p, shared in ((self.a, a_shared), (self.b, b_shared))
        ]
        a, b = self.values(self.a, shapes[0], dtype, seed), self.values(self.b, shapes[1], dtype, seed + 1)
        shape = (self.plan.pattern.nnz, *{s[1] for s in shapes if len(s) == 2})
        into = None if out == "new" else self.buffers.filled("out", np.full(shape, np.nan, dtype), fresh=out == "nan")
        got = self.plan(self.buffers.filled("a", a), self.buffers.filled("b", b), out=into)
        assert got.dtype == dtype and got.shape == shape and (into is None or got is into)
        fresh = product._make_plan(self.a, self.b, None)(a, b)
        np.testing.assert_array_equal(got, fresh)
        samples = shape[1] if len(shape) == 2 else 1
        for sample in range(samples):
            expected = dense_block(self.a, a, sample) @ dense_block(self.b, b, sample)
            np.testing.assert_allclose(dense_block(self.plan.pattern, got, sample), expected, **tolerance(dtype))
        if self.last is not None and self.last[0] is not got:
            np.testing.assert_array_equal(*self.last)  # a result is not written to by later calls
        self.last = (got, got.copy()) if out != "used" else None

    @rule(dtype=reals, seed=seeds)
    def refused(self, dtype, seed):
        other = REALS[dtype == REALS[0]]
        a, b = self.values(self.a, (self.a.nnz,), dtype, seed), self.values(self.b, (self.b.nnz,), dtype, seed)
        with pytest.raises(SparseBPError):
            self.plan(a, b.astype(other))
        with pytest.raises(SparseBPError):
            self.plan(np.ones(self.a.nnz + 1, dtype), b)
        with pytest.raises(SparseBPError):
            self.plan(a, b, out=np.empty(self.plan.pattern.nnz, other))

    @rule()
    def planned_again(self):
        """At the exact limit the plan serves; a byte less gives another one, or a refusal."""
        assert plan_product(self.a, self.b) is self.plan
        needed = self.plan.index_bytes
        assert plan_product(self.a, self.b, memory_limit=needed) is self.plan
        if self.plan.pattern not in (self.a, self.b):
            assert product._make_plan(self.a, self.b, needed).strategy == self.plan.strategy
        if needed:
            with contextlib.suppress(MemoryLimitError):
                assert plan_product(self.a, self.b, memory_limit=needed - 1).index_bytes < needed


def test_a_product_plan_forgets_its_calls():
    run_machine(ProductMachine, 60)


# ---- a scan's plan ---------------------------------------------------------------------------------------------------


class ScanMachine(RuleBasedStateMachine):
    """A `ScanPlan`: listed and stacked values, with and without a batch, and workspaces that are used again."""

    @initialize(
        stack=st.booleans(),
        sparse=st.booleans(),
        n=st.sampled_from([1, 2, 5, 9, 16, 17]),
        options=algorithms(),
        seed=seeds,
    )
    def start(self, stack, sparse, n, options, seed):
        rng = np.random.default_rng(seed)
        self.stack, self.options = stack, options
        self.patterns = (make_stack(rng, n, 3, 1, False) if stack else make_chain(rng, n, 1)).patterns
        if stack and sparse:
            self.patterns = [SparsityPattern([0, 2, 2, 4], [0, 2, 0, 1], (3, 3))] * n
        self.plan = self.fresh()
        self.kept: list[tuple[list[Array], list[Array]]] = []

    def fresh(self):
        return plan_scan(self.patterns, **self.options)

    def chain(self, batch, dtype, seed):
        """Values on the patterns; every one shared or not, with or without an injection."""
        rng = np.random.default_rng(seed)
        data = []
        for p in self.patterns:
            shared = rng.random() < 0.4
            values = normal(rng, (p.nnz,) if shared else (p.nnz, batch), dtype, 0.5)
            data.append(np.ones_like(values) if p.kind == "identity" else values)
        injections = [normal(rng, (p.shape[0], batch), dtype) if rng.random() < 0.5 else None for p in self.patterns]
        g = normal(rng, (self.patterns[0].shape[1], batch), dtype)
        return Chain(self.patterns, data, g, injections if rng.random() < 0.6 else None)

    def check(self, call, expected, dtype, fresh):
        got = call(self.plan)
        factor = 1e2 if dtype == np.float32 else 1e4
        for have, again, want in zip(got, call(fresh), expected, strict=True):
            assert have.dtype == dtype
            np.testing.assert_array_equal(have, again)
            scale = max(1.0, float(np.abs(want).max(initial=0)))
            np.testing.assert_allclose(have / scale, want / scale, **tolerance(dtype, factor))
        for ours, copies in self.kept:
            for have, copy in zip(ours, copies, strict=True):
                np.testing.assert_array_equal(have, copy)
        self.kept = [*self.kept[-1:], (list(got), [y.copy() for y in got])]

    @rule(batch=batches, dtype=reals, seed=seeds)
    def listed(self, batch, dtype, seed):
        chain = self.chain(batch or 1, dtype, seed)
        expected, data, g, injections = chain.expected(), chain.data, chain.g, chain.injections
        if batch is None:
            data, g = [d.reshape(-1) for d in data], g[:, 0]
            injections = None if injections is None else [None if v is None else v[:, 0].copy() for v in injections]
            expected = [y[:, 0] for y in expected]
        self.check(lambda plan: plan(g, data, injections), expected, dtype, self.fresh())

    @precondition(lambda self: self.stack)
    @rule(batch=batches, dtype=reals, shared=st.booleans(), seed=seeds)
    def stacked(self, batch, dtype, shared, seed):
        rng, nnz = np.random.default_rng(seed), self.patterns[0].nnz
        size, n = batch or 1, len(self.patterns)
        data = normal(rng, (n, nnz) if shared else (n, nnz, size), dtype, 0.5)
        g, injections = normal(rng, (3, size), dtype), normal(rng, (n, 3, size), dtype)
        expected = Chain(self.patterns, list(data), g, list(injections)).expected()
        if batch is None:
            data, g, injections = (data if shared else data[:, :, 0].copy()), g[:, 0].copy(), injections[:, :, 0].copy()
            expected = [y[:, 0] for y in expected]
        self.check(lambda plan: plan(g, data, injections), expected, dtype, self.fresh())

    @rule(dtype=reals, seed=seeds)
    def refused(self, dtype, seed):
        chain = self.chain(3, dtype, seed)
        with pytest.raises(SparseBPError):
            self.plan(chain.g, chain.data[:-1])
        with pytest.raises(SparseBPError):
            self.plan(chain.g.astype(np.int64), chain.data)
        with pytest.raises(ShapeError):
            self.plan(chain.g[:, :2].copy(), [np.ones((p.nnz, 3), dtype) for p in self.patterns])

    @rule(dtype=reals, seed=seeds)
    def profiled(self, dtype, seed):
        chain = self.chain(2, dtype, seed)
        assert len(self.plan.profile(chain.g, chain.data, chain.injections, repeats=1)) == len(self.plan.steps)


def test_a_scan_plan_forgets_its_calls():
    run_machine(ScanMachine, 40)


# ---- layers ----------------------------------------------------------------------------------------------------------


def image(batch, size):
    return (batch, 2, 2 + size, 5)


def rows(batch, size):
    return (batch, 4)


def sequence(batch, size):
    return (2 * size, batch, 3)


def model(**options):
    def make(d):
        body = nn.Sequential(nn.Linear(4, 4, dtype=d, rng=1), nn.Tanh(), nn.Linear(4, 4, dtype=d, rng=2))
        return nn.Sequential(
            nn.Linear(4, 5, dtype=d, rng=0), nn.Dropout(0.3, rng=1), nn.Tanh(), nn.Linear(5, 4, dtype=d, rng=3),
            nn.Residual(body), nn.Sigmoid(), nn.Linear(4, 3, bias=False, dtype=d, rng=4), **options,
        )  # fmt: skip

    return make


def convolutional(d):
    return nn.Sequential(
        nn.Conv2d(2, 3, 2, padding=1, dtype=d, rng=0), nn.BatchNorm2d(3, dtype=d), nn.ReLU(),
        nn.Concat(nn.Conv2d(3, 2, 1, dtype=d, rng=1), nn.Identity()), nn.AdaptiveAvgPool2d((2, 1)), nn.Flatten(),
        nn.Linear(10, 3, dtype=d, rng=2),
    )  # fmt: skip


def classifier(d):
    return nn.SequenceClassifier(nn.GRU(3, 4, dtype=d, rng=0), nn.Linear(4, 3, dtype=d, rng=1))


KINDS: dict[str, tuple[Callable[[Any], nn.Layer], Callable[[int, int], tuple[int, ...]]]] = {
    "linear": (lambda d: nn.Linear(4, 3, dtype=d, rng=0), rows),
    "conv": (lambda d: nn.Conv2d(2, 3, (2, 3), stride=(2, 1), padding=1, dtype=d, rng=0), image),
    "depthwise": (lambda d: nn.Conv2d(2, 4, 3, padding=1, groups=2, dtype=d, rng=0), image),
    "conv_transpose": (lambda d: nn.ConvTranspose2d(2, 3, 2, stride=2, dtype=d, rng=0), image),
    "max_pool": (lambda d: nn.MaxPool2d(2, padding=1, ceil_mode=True), image),
    "avg_pool": (lambda d: nn.AvgPool2d(2, padding=1, ceil_mode=True, count_include_pad=False), image),
    "adaptive_avg_pool": (lambda d: nn.AdaptiveAvgPool2d((3, 2)), image),
    "adaptive_max_pool": (lambda d: nn.AdaptiveMaxPool2d((3, 2)), image),
    "upsample": (lambda d: nn.Upsample(scale_factor=2, mode="bilinear"), image),
    "instance_norm": (lambda d: nn.InstanceNorm2d(2, affine=True, track_running_stats=True, dtype=d), image),
    "batch_norm": (lambda d: nn.BatchNorm2d(2, dtype=d), image),
    "batch_norm_average": (lambda d: nn.BatchNorm2d(2, momentum=None, affine=False, dtype=d), image),
    "layer_norm": (lambda d: nn.LayerNorm(4, dtype=d), rows),
    "group_norm": (lambda d: nn.GroupNorm(1, 2, dtype=d), image),
    "prelu": (lambda d: nn.PReLU(2, dtype=d), image),
    "zero_pad": (lambda d: nn.ZeroPad2d(1), image),
    "dropout_2d": (lambda d: nn.Dropout2d(0.4, rng=5), image),
    "softmax": (lambda d: nn.Softmax(), rows),
    "relu": (lambda d: nn.ReLU(), image),
    "gelu": (lambda d: nn.GELU(), rows),
    "dropout": (lambda d: nn.Dropout(0.4, rng=5), rows),
    "flatten": (lambda d: nn.Flatten(), image),
    "residual": (lambda d: nn.Residual(nn.Conv2d(2, 2, 3, padding=1, dtype=d, rng=0)), image),
    "sum": (lambda d: nn.Sum(nn.Linear(4, 4, dtype=d, rng=0), nn.Identity(), nn.Tanh()), rows),
    "concat": (lambda d: nn.Concat(nn.Linear(4, 2, dtype=d, rng=0), nn.Tanh()), rows),
    "sequential": (model(), rows),
    "sequential_blelloch": (model(backward="blelloch"), rows),
    "convolutional": (convolutional, image),
    "gru": (lambda d: nn.GRU(3, 4, 2, bidirectional=True, dropout=0.3, dtype=d, rng=0), sequence),
    "gru_chunked": (lambda d: nn.GRU(3, 4, backward="chunked", chunks=3, dtype=d, rng=0), sequence),
    "rnn": (lambda d: nn.RNN(3, 2, nonlinearity="relu", batch_first=True, dtype=d, rng=0), sequence),
    "gru_cell": (lambda d: nn.GRUCell(4, 3, dtype=d, rng=0), rows),
    "lstm": (lambda d: nn.LSTM(3, 4, 2, bidirectional=True, proj_size=2, dtype=d, rng=0), sequence),
    "lstm_cell": (lambda d: nn.LSTMCell(4, 3, dtype=d, rng=0), rows),
    "min_lstm": (lambda d: nn.MinLSTM(3, 4, 2, dropout=0.3, dtype=d, rng=0), sequence),
    "lru": (lambda d: nn.LRU(3, 4, dtype=d, rng=0), sequence),
    "selective_scan": (lambda d: nn.SelectiveScan(3, 4, dtype=d, rng=0), sequence),
    "rnn_cell": (lambda d: nn.RNNCell(4, 3, dtype=d, rng=0), rows),
    "classifier": (classifier, sequence),
}


@dataclass
class Run:
    """A forward of the layer under test, and what a fresh layer needs to repeat it."""

    x: Array
    y: Array
    saved: Any
    state: dict[str, Array]
    generators: dict[str, Any]
    training: bool


class LayerMachine(RuleBasedStateMachine):
    """A layer: forwards of several sizes pending at once, their gradients in any order, through buffers used again."""

    kind: str

    @initialize(dtype=reals)
    def start(self, dtype):
        self.make, self.shape = KINDS[self.kind]
        self.dtype, self.layer, self.buffers = dtype, self.make(dtype), Buffers()
        self.runs: list[Run] = []

    def has_weights(self) -> bool:
        return any("weight" in layer.params and "bias" in layer.params for _, layer in self.layer.modules())

    def states(self) -> dict[str, Any]:
        return {name: generator.bit_generator.state for name, generator in self.layer.generators().items()}

    def repeated(self, run: Run) -> tuple[nn.Layer, Array, Any]:
        """Return a fresh layer that has done this forward and nothing else."""
        layer = self.make(run.x.dtype)
        layer.load_state_dict(run.state)
        for name, generator in layer.generators().items():
            generator.bit_generator.state = run.generators[name]
        return layer, *layer.train(run.training).forward(run.x.copy())

    def close(self, got, expected):
        assert got.dtype == expected.dtype
        np.testing.assert_allclose(got, expected, **tolerance(self.dtype))

    @rule(batch=sizes(1, 9), size=st.integers(1, 4), seed=seeds)
    def forward(self, batch, size, seed):
        x = normal(np.random.default_rng(seed), self.shape(batch, size), self.dtype)
        state, generators = self.layer.state_dict(), self.states()
        y, saved = self.layer.forward(x)
        run = Run(x, y.copy(), saved, state, generators, self.layer.training)
        twin, expected, _ = self.repeated(run)
        self.close(y, expected)
        for name, buffer in twin.state_dict().items():
            np.testing.assert_array_equal(self.layer.state_dict()[name], buffer, err_msg=name)
        self.runs = [*self.runs[-2:], run]

    @precondition(lambda self: self.runs)
    @rule(data=st.data(), seed=seeds, fresh=st.booleans(), weights=st.booleans())
    def gradient(self, data, seed, fresh, weights):
        run = data.draw(st.sampled_from(self.runs))
        gy = normal(np.random.default_rng(seed), run.y.shape, self.dtype)
        buffer = self.buffers.filled("gy", gy, fresh)
        twin, _, saved = self.repeated(run)
        if weights:
            got, expected = self.layer.weight_grad(buffer, run.saved), twin.weight_grad(gy, saved)
            assert got.keys() == expected.keys() == self.layer.parameters().keys()
            for name, array in expected.items():
                self.close(got[name], array)
        else:
            self.close(self.layer.input_grad(buffer, run.saved), twin.input_grad(gy, saved))
        np.testing.assert_array_equal(buffer, gy)  # the caller's array is the caller's

    @precondition(lambda self: self.runs)
    @rule(data=st.data(), seed=seeds)
    def overwritten(self, data, seed):
        """One forward's gradients twice, from one array with other values in it."""
        run = data.draw(st.sampled_from(self.runs))
        buffer = np.ones_like(run.y)
        self.layer.input_grad(buffer, run.saved)
        self.layer.weight_grad(buffer, run.saved)
        buffer[...] = gy = normal(np.random.default_rng(seed), run.y.shape, self.dtype)
        twin, _, saved = self.repeated(run)
        got, expected = self.layer.weight_grad(buffer, run.saved), twin.weight_grad(gy, saved)
        for name, array in expected.items():
            self.close(got[name], array)
        self.close(self.layer.input_grad(buffer, run.saved), twin.input_grad(gy, saved))

    @precondition(lambda self: self.runs)
    @rule(data=st.data())
    def jacobian(self, data):
        run = data.draw(st.sampled_from(self.runs))
        twin, _, saved = self.repeated(run)
        if self.layer.couples_samples(run.saved):
            with pytest.raises(OptionError):
                self.layer.jacobian_t(run.saved)
            return
        if "jacobian_t" not in self.layer.valid_shortcuts:  # of one backward pass an output
            return
        got, expected = self.layer.jacobian_t(run.saved), twin.jacobian_t(saved)
        self.close(got.to_dense(0), expected.to_dense(0))
        gy = normal(np.random.default_rng(0), run.y.shape, self.dtype)
        factor = 1e2 if self.dtype == np.float32 else 1e3
        gx = self.layer.input_grad(gy, run.saved)
        if isinstance(self.layer, (nn.GRU, nn.LSTM, nn.MinLSTM, nn.LRU, nn.SelectiveScan)):  # time-major
            gy, gx = gy.swapaxes(0, 1), gx.swapaxes(0, 1)
        flat = np.ascontiguousarray(gy.reshape(len(gy), -1).T)
        np.testing.assert_allclose((got @ flat).T, gx.reshape(len(gx), -1), **tolerance(self.dtype, factor))

    @precondition(lambda self: self.runs)
    @rule(data=st.data())
    def refused(self, data):
        run = data.draw(st.sampled_from(self.runs))
        wrong = np.ones((*run.y.shape, 1), self.dtype)
        with pytest.raises(SparseBPError):
            self.layer.input_grad(wrong, run.saved)
        if self.layer.params:
            with pytest.raises(SparseBPError):
                self.layer.weight_grad(wrong, run.saved)
        before = self.layer.state_dict()
        with pytest.raises(SparseBPError):
            self.layer.forward(run.x.astype(np.int64))
        for name, array in self.layer.state_dict().items():
            np.testing.assert_array_equal(array, before[name])

    @rule(training=st.booleans())
    def mode(self, training):
        self.layer.train(training)

    @rule(seed=seeds)
    def update(self, seed):
        """As an optimizer does: parameters change in place, so what was pending is void."""
        rng = np.random.default_rng(seed)
        for array in self.layer.parameters().values():
            array[...] += normal(rng, array.shape, array.dtype, 0.1)
        self.runs = []

    @rule(amount=st.sampled_from([0.0, 0.2, 0.5, 0.7]), method=st.sampled_from(["class_blind", "class_uniform"]))
    def prune(self, amount, method):
        before = {name: mask for name, mask in self.layer.state_dict().items() if name.endswith("weight_mask")}
        try:
            report = nn.prune(self.layer, amount, method)
        except OptionError:  # there is nothing to prune, or nothing would be left
            return
        state = self.layer.state_dict()
        for name, mask in before.items():
            assert not (state[name] & ~mask).any()  # what was pruned stays pruned
        for name, kept in report.kept.items():
            path = f"{name}." if name else ""
            mask = state[f"{path}weight_mask"]
            assert kept == mask.sum() and (state[f"{path}weight"][~mask] == 0).all()
        if method == "class_blind":
            gone = sum(report.total.values()) - sum(report.kept.values())
            earlier = sum(int((~mask).sum()) for mask in before.values())
            assert gone == max(earlier, round(amount * sum(report.total.values())))
        self.runs = []

    @rule(dtype=reals)
    def convert(self, dtype):
        self.layer.to(dtype=dtype)
        self.dtype, self.runs = dtype, []


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_forgets_its_calls(kind):
    run_machine(type(kind, (LayerMachine,), {"kind": kind}), 10, 20)
