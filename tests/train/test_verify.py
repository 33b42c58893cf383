"""The gradient check finds faults and reports none where there are none."""

from __future__ import annotations

import json

import numpy as np
import pytest

import sparsebp as sb
from sparsebp import nn
from sparsebp.core.errors import DeviceError, MemoryLimitError, OptionError, ShapeError
from sparsebp.nn.recurrent.cells import RNNMath


def data(steps=9, batch=3, features=2, dtype=np.float64):
    rng = np.random.default_rng(0)
    return rng.standard_normal((steps, batch, features)).astype(dtype), rng.integers(0, 4, batch)


def classifier(rnn):
    return nn.SequenceClassifier(rnn, nn.Linear(rnn.directions * rnn.hidden_size, 4, dtype=rnn.dtype, rng=1))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("cell", [nn.RNN, nn.GRU, nn.LSTM])
def test_a_right_gradient_passes(cell, dtype):
    rnn = cell(2, 5, num_layers=2, bidirectional=True, dropout=0.5, dtype=dtype, rng=0)
    model = classifier(rnn)
    before = model.state_dict()
    report = sb.verify.check_gradient(model, nn.CrossEntropyLoss(), *data(dtype=dtype))
    assert report.ok, str(report)
    assert report.max_finite_difference > 0
    if dtype == np.float64:
        assert report.max_scan_difference < 1e-12 and report.max_finite_difference < 1e-7
    names = {c.subject for c in report.checks}
    assert {"chunked", "blelloch", "hybrid", "input", "head.weight", "rnn.weight_hh_l1_reverse"} <= names
    assert rnn.backward == "auto" and rnn.training and model.training
    for name, array in model.state_dict().items():
        np.testing.assert_array_equal(array, before[name])


def test_the_report_prints_and_serialises():
    report = sb.verify.check_gradient(classifier(nn.GRU(2, 3, dtype=np.float64, rng=0)), nn.CrossEntropyLoss(), *data())
    text = str(report)
    assert "blelloch" in text and "finite diff." in text and text.endswith(")") and "gradients agree" in text
    loaded = json.loads(json.dumps(report.to_json()))
    assert loaded["ok"] and len(loaded["checks"]) == len(report.checks) and loaded["loss"] == report.loss


def test_lengths_and_outputs_at_every_step():
    rnn = nn.RNN(2, 3, nonlinearity="relu", dtype=np.float64, rng=0)
    x, _ = data()
    target = np.random.default_rng(1).standard_normal((9, 3, 3))
    report = sb.verify.check_gradient(rnn, nn.MSELoss(), x, target, lengths=[9, 1, 4])
    assert report.ok, str(report)


class WrongBias(nn.Linear):
    def weight_grad(self, gy, saved):
        grads = super().weight_grad(gy, saved)
        return grads | {"bias": grads["bias"] * 1.001}


class WrongSlope(nn.Tanh):
    def slope(self, y):
        return 1 - y


@pytest.mark.parametrize(("linear", "tanh", "wrong", "right"), [
    (WrongBias, nn.Tanh, "0.bias", "0.weight"), (nn.Linear, WrongSlope, "input", None),
])  # fmt: skip
def test_a_wrong_gradient_is_caught(linear, tanh, wrong, right):
    model = nn.Sequential(linear(3, 2, dtype=np.float64, rng=0), tanh())
    rng = np.random.default_rng(0)
    report = sb.verify.check_gradient(model, nn.MSELoss(), rng.standard_normal((4, 3)), rng.standard_normal((4, 2)))
    assert not report.ok and report.max_scan_difference < 1e-12
    found = [c.subject for c in report.checks if c.difference > report.finite_tolerance]
    assert wrong in found and right not in found
    assert "DIFFER" in str(report)


@pytest.mark.parametrize("factor", [1, 2, np.nan])
def test_a_jacobian_of_a_users_layer_is_compared_with_its_input_gradient(factor):
    class Own(nn.Tanh):
        def jacobian_t(self, saved):
            return sb.jacobians.pointwise_jacobian_t(factor * self.slope(saved))

    model = nn.Sequential(nn.Linear(3, 2, dtype=np.float64, rng=0), Own())
    rng = np.random.default_rng(0)
    report = sb.verify.check_gradient(model, nn.MSELoss(), rng.standard_normal((4, 3)), rng.standard_normal((4, 2)))
    assert (report.checks[0].kind, report.checks[0].subject) == ("jacobian", "1")
    assert report.ok == (factor == 1) and report.max_finite_difference < report.finite_tolerance


@pytest.mark.parametrize("fault", [1e-4, np.nan])
def test_a_wrong_scan_is_caught_and_named(monkeypatch, fault):
    real = RNNMath.run_back

    def faulty(self, k, tape, w_hh, gy, grad_h_n, chunks, ga, gh0, sums=None):
        real(self, k, tape, w_hh, gy, grad_h_n, chunks, ga, gh0, sums)
        if chunks > 1:
            (ga[0] if sums is None else sums.weight_hh)[:] *= 1 + fault

    monkeypatch.setattr(RNNMath, "run_back", faulty)
    model = classifier(nn.RNN(2, 3, dtype=np.float64, rng=0))
    report = sb.verify.check_gradient(model, nn.CrossEntropyLoss(), *data())
    assert not report.ok
    bad = [c.subject for c in report.checks if not c.difference <= report.scan_tolerance and c.kind == "scan"]
    assert bad == ["chunked"]


def test_options():
    model = classifier(nn.GRU(2, 3, memory_limit=100, dtype=np.float64, rng=0))
    loss = nn.CrossEntropyLoss()
    report = sb.verify.check_gradient(model, loss, *data(), samples=0)
    assert report.ok and {c.subject for c in report.checks if c.note} == {"rnn", "linear", "blelloch", "hybrid"}
    assert "left out" in str(report)
    other = classifier(nn.GRU(2, 3, dtype=np.float64, rng=0))
    assert (
        sum(
            bool(c.note)
            for c in sb.verify.check_gradient(other, loss, *data(), memory_limit=100).checks
            if c.kind == "scan"
        )
        == 3
    )
    with pytest.raises(MemoryLimitError):
        sb.verify.check_gradient(model, loss, *data(), algorithms=["blelloch"])
    with pytest.raises(OptionError, match="Unknown backward algorithm"):
        sb.verify.check_gradient(model, loss, *data(), algorithms=["fast"])
    assert not sb.verify.check_gradient(model, loss, *data(), finite_tolerance=0.0, algorithms=["chunked"]).ok


class ForgetsItsStatistics(nn.BatchNorm1d):
    """A backward as if mean and variance were constants: right in evaluation."""

    def input_grad(self, gy, saved, *shared):
        _, _, scale, batch = saved
        return gy * (self.params["weight"] * scale) if batch else super().input_grad(gy, saved, *shared)

    def weight_grad(self, gy, saved, *shared):
        return super().weight_grad(gy, saved)


class Noise(nn.Layer):
    """``x * (1 + noise)`` while training, from `generator` or from elsewhere."""

    def __init__(self, own):
        super().__init__()
        self.generator, self.elsewhere = (np.random.default_rng(0), None) if own else (None, np.random.default_rng(1))

    def forward(self, x):
        factor = np.ones_like(x)
        if self.training:
            factor += 0.1 * (self.generator or self.elsewhere).standard_normal(x.shape)
        return x * factor, factor

    def input_grad(self, gy, saved):
        return gy * saved


def batch_of(*shape, targets=2):
    rng = np.random.default_rng(2)
    return rng.standard_normal(shape), rng.standard_normal((shape[0], targets))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_backward_that_is_only_wrong_in_training_is_caught(dtype):
    def model(norm):
        first, last = (nn.Linear(3, 4, dtype=dtype, rng=0), nn.Linear(4, 2, dtype=dtype, rng=1))
        return nn.Sequential(first, norm(4, dtype=dtype), nn.Dropout(0.3, rng=2), last)

    x, target = (array.astype(dtype) for array in batch_of(6, 3))
    for norm in (nn.BatchNorm1d, ForgetsItsStatistics):
        made = model(norm)
        before, drawn = made.state_dict(), made[2].generator.bit_generator.state
        report = sb.verify.check_gradient(made, nn.MSELoss(), x, target)
        wrong = {
            (c.mode, c.subject) for c in report.checks if not c.note and not c.difference <= report.finite_tolerance
        }
        if norm is nn.BatchNorm1d:
            assert report.ok and not report.not_checked, str(report)
        else:
            assert ("training", "0.weight") in wrong and {mode for mode, _ in wrong} == {"training"}
        assert made.training and all(layer.training for _, layer in made.modules())
        assert made[2].generator.bit_generator.state == drawn
        for name, array in made.state_dict().items():
            np.testing.assert_array_equal(array, before[name])


@pytest.mark.parametrize("where", ["chain", "part", "stage"])
def test_a_scan_of_a_chain_that_differs_is_caught(monkeypatch, where):
    rng = np.random.default_rng(0)
    real = nn.Linear.jacobian_t

    def faulty(self, saved):
        jacobian = real(self, saved)
        return sb.TransposedJacobian(jacobian.pattern, jacobian.data * (1 + 1e-4))

    inner = nn.Tanh(), nn.Linear(3, 3, dtype=np.float64, rng=1), nn.Sigmoid()
    model = nn.Sequential(nn.Linear(3, 3, dtype=np.float64, rng=0), *inner)
    if where == "stage":
        model = nn.Sequential(nn.Linear(3, 3, dtype=np.float64, rng=2), nn.Stage(*model.children.values()))
    if where == "part":
        model = nn.Residual(model)
    data = rng.standard_normal((4, 3)), rng.standard_normal((4, 3))
    assert sb.verify.check_gradient(model, nn.MSELoss(), *data, samples=0).ok
    monkeypatch.setattr(nn.Linear, "jacobian_t", faulty)
    report = sb.verify.check_gradient(model, nn.MSELoss(), *data)
    wrong = {c.subject.split()[0] for c in report.checks if not c.difference <= report._tolerance(c.kind)}
    assert {"linear", "blelloch", "hybrid", "chunked"} <= wrong and report.max_finite_difference < 1e-6


def test_what_was_not_checked_is_said():
    model = nn.Sequential(nn.Linear(3, 2, dtype=np.float64, rng=0), nn.BatchNorm1d(2, dtype=np.float64))
    report = sb.verify.check_gradient(model, nn.MSELoss(), *batch_of(1, 3))
    assert report.ok and "training: ShapeError" in report.not_checked[0] and "not checked: training" in str(report)
    plain = nn.Sequential(nn.Linear(3, 2, dtype=np.float64, rng=0), nn.Tanh())
    report = sb.verify.check_gradient(plain, nn.MSELoss(), *batch_of(4, 3))
    assert "bitwise" in report.not_checked[0] and {c.mode for c in report.checks} == {"evaluation"}
    with_words = nn.Sequential(nn.Embedding(5, 3, dtype=np.float64, rng=0), nn.MeanOverSteps(batch_first=True))
    words = np.random.default_rng(0).integers(0, 5, (4, 6))
    report = sb.verify.check_gradient(with_words, nn.MSELoss(), words, np.ones((4, 3)))
    assert report.ok and "integers" in report.not_checked[0] and report.max_finite_difference > 0
    assert json.loads(json.dumps(report.to_json()))["not_checked"] == list(report.not_checked)


@pytest.mark.parametrize("own", [False, True])
def test_draws_are_held_or_the_report_says_that_they_could_not_be(own):
    model = nn.Sequential(nn.Linear(3, 2, dtype=np.float64, rng=0), Noise(own))
    report = sb.verify.check_gradient(model, nn.MSELoss(), *batch_of(4, 3))
    assert report.ok and {c.mode for c in report.checks} == {"evaluation", *(["training"] if own else [])}
    assert own or "Two forwards in training differ" in report.not_checked[0]


def test_a_jacobian_of_the_wrong_size_is_no_agreement():
    class Wide(nn.Tanh):
        def jacobian_t(self, saved):
            return sb.jacobians.pointwise_jacobian_t(np.ones((len(saved), 1)))

    model = nn.Residual(Wide())
    report = sb.verify.check_gradient(model, nn.MSELoss(), *batch_of(4, 2))
    assert not report.ok and "body" in [c.subject for c in report.checks if np.isnan(c.difference)]


class Sine(nn.Layer):
    """``sin x``, right, and nothing else."""

    def forward(self, x):
        return np.sin(x), x

    def input_grad(self, gy, x):
        return np.cos(x) * gy


class WritesToGy(Sine):
    def input_grad(self, gy, x):
        gy *= np.cos(x)
        return gy


class WritesToX(Sine):
    def forward(self, x):
        np.clip(x, -1, 1, out=x)
        return x.copy(), x

    def input_grad(self, gy, x):
        return gy * (abs(x) < 1)


class WritesToSaved(Sine):
    def input_grad(self, gy, x):
        return np.multiply(np.cos(x, out=x), gy)


class SavesInOneBuffer(Sine):
    buffer = np.empty(0)

    def forward(self, x):
        if self.buffer.shape != x.shape:
            self.buffer = np.empty_like(x)
        self.buffer[...] = x
        return np.sin(x), self.buffer


class ReturnsOneBuffer(SavesInOneBuffer):
    def input_grad(self, gy, x):
        if self.buffer.shape != x.shape:
            self.buffer = np.empty_like(x)
        return np.multiply(np.cos(x), gy, out=self.buffer)

    def forward(self, x):
        return np.sin(x), x.copy()


class Accumulates(nn.Linear):
    total = 0.0

    def weight_grad(self, gy, saved):
        grads = super().weight_grad(gy, saved)
        self.total = self.total + grads["bias"]
        return grads | {"bias": self.total}


@pytest.mark.parametrize("make", [
    Sine, WritesToGy, WritesToX, WritesToSaved, SavesInOneBuffer, ReturnsOneBuffer,
    lambda: Accumulates(3, 3, dtype=np.float64, rng=2),
])  # fmt: skip
@pytest.mark.parametrize("inside", [False, True])
def test_a_layer_that_breaks_the_rules_is_caught_and_named(make, inside):
    """Alone in a chain many such layers have the right gradients: with micro-batches, or branches, they do not."""
    layer = make()
    model = nn.Sequential(nn.Linear(3, 3, dtype=np.float64, rng=0), layer, nn.Sigmoid()) if inside else layer
    x, target = batch_of(4, 3, targets=3)
    before = x.copy()
    report = sb.verify.check_gradient(model, nn.MSELoss(), x, target)
    np.testing.assert_array_equal(x, before)
    repeated = next(check for check in report.checks if check.kind == "repeat")
    if make is Sine:
        assert report.ok and repeated.difference == 0, str(report)
    else:
        assert not report.ok and not repeated.difference < 1e-3
        assert repeated.where.startswith("1: " if inside else f"{type(layer).__name__}: ")


@pytest.mark.parametrize("inside", [False, True])
def test_an_input_gradient_of_the_wrong_shape_is_named(inside):
    class Sum(Sine):
        def forward(self, x):
            return x.sum(axis=1, keepdims=True), x

        def input_grad(self, gy, x):
            return gy

    model = nn.Sequential(nn.Linear(3, 3, dtype=np.float64, rng=0), Sum()) if inside else Sum()
    with pytest.raises(ShapeError, match=f"input gradient of {1 if inside else 'Sum'} has the wrong shape"):
        sb.verify.check_gradient(model, nn.MSELoss(), *batch_of(4, 3, targets=1))


def test_layers_that_are_no_parts_are_said_to_be_unchecked():
    class Listed(nn.Sequential):
        def __init__(self, *layers):
            super().__init__(*layers)
            self.again, self.others = list(layers), {"a": nn.Tanh()}

    model = nn.Sequential(Listed(nn.Linear(3, 2, dtype=np.float64, rng=0)))
    report = sb.verify.check_gradient(model, nn.MSELoss(), *batch_of(4, 3))
    assert [said for said in report.not_checked if "no children" in said] == [
        "layers in 0.others: no children, not trained and not saved"
    ]


def test_self_check_covers_both_cells_and_dtypes():
    told = []
    reports = sb.verify.self_check(progress=lambda *part: told.append(part))
    assert told == [(name, number, len(reports)) for number, name in enumerate(reports)]
    assert all(report.ok for report in reports.values()), "\n".join(str(r) for r in reports.values() if not r.ok)
    parts = "RNN tanh", "RNN relu", "GRU", "LSTM, proj_size", "MinGRU", "bidirectional", "lengths", "float32", "float64"
    for part in (*parts, "Sequential", "BatchNorm2d", "TransformerEncoderLayer"):
        assert any(part in name for name in reports), part


@pytest.mark.gpu
@pytest.mark.real_gpu("twenty seconds here, and device/test_layers_on_device.py runs the same layers")
@pytest.mark.skipif(not sb.backend.has_gpu(), reason="needs CuPy and a GPU")
def test_self_check_on_a_gpu():
    reports = sb.verify.self_check(device="cuda")
    assert all(report.ok for report in reports.values()), "\n".join(str(r) for r in reports.values() if not r.ok)


def test_self_check_on_an_unknown_device():
    with pytest.raises(DeviceError, match="Unknown device"):
        sb.verify.self_check(device="tpu")
