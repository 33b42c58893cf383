"""Kernels over lists of arrays, optimizer updates and clipping, on every backend."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsebp import kernels
from sparsebp.core import backend as seam
from sparsebp.core.errors import DTypeError, LayoutError, OptionError, ShapeError
from sparsebp.kernels.checks import OPTIONAL_BUFFERS, UPDATE_BUFFERS, UPDATE_OPTIONS
from sparsebp.kernels.operands import momenta
from strategies import normal, reals, seeds, tolerance
from torch_cases import scalars_in_float64
from update_options import DEFAULTS, options_of

SHAPES = [(3, 5), (), (0, 2), (1,), (67,), (2, 3, 11)]
TORCH = {
    "sgd": "SGD", "adam": "Adam", "nadam": "NAdam", "radam": "RAdam", "adamax": "Adamax", "adagrad": "Adagrad",
    "adadelta": "Adadelta", "rmsprop": "RMSprop",
}  # fmt: skip


def buffers_of(rule, make, optional):
    return [
        [None if not optional and name in OPTIONAL_BUFFERS else make(s) for s in SHAPES]
        for name in UPDATE_BUFFERS[rule]
    ]


def columns_of(rule, rng, shapes, dtype):
    """Parameters, gradients and all buffers of these shapes, a list each."""
    columns = [[np.asarray(abs(normal(rng, shape, dtype)), dtype) for shape in shapes]
               for _ in range(2 + len(UPDATE_BUFFERS[rule]))]  # fmt: skip
    if rule == "rmsprop":  # a mean of gradients that is not above the root of their mean square
        columns[4] = [np.zeros_like(array) for array in columns[4]]
    return columns


def numbers_of(rule, rng, count):
    """Options that differ from parameter to parameter, and steps."""
    options = options_of(rule, count) * rng.uniform(0.5, 1, (count, 1))
    options[:, [name in ("nesterov", "maximize", "decoupled") for name in UPDATE_OPTIONS[rule]]] = 0
    return options, rng.integers(1, 9, count)


def torch_options(rule, optional):
    """The options under torch.optim's names."""
    options = {name: DEFAULTS[name] for name in UPDATE_OPTIONS[rule] if name not in ("beta1", "beta2", "decoupled")}
    options |= {name: bool(options.pop(name)) for name in ("maximize", "nesterov") if name in options}
    if "beta1" in UPDATE_OPTIONS[rule]:
        options["betas"] = DEFAULTS["beta1"], DEFAULTS["beta2"]
    if rule == "adam":
        options["amsgrad"] = optional
    if rule in ("nadam", "radam"):  # which have no optional buffers
        options["decoupled_weight_decay"] = optional
    if rule == "rmsprop":
        options["centered"] = optional
    if "momentum" in options and not optional:
        options["momentum"] = 0.0
    return options


@given(rule=st.sampled_from(list(UPDATE_OPTIONS)), optional=st.booleans(), dtype=reals, seed=seeds)
def test_updates_are_torchs(backend, rule, optional, dtype, seed):
    rng = np.random.default_rng(seed)
    start = [np.asarray(normal(rng, shape, dtype)) for shape in SHAPES]
    twins = [torch.tensor(array.astype(np.float64), requires_grad=True) for array in start]
    optimizer = getattr(torch.optim, TORCH[rule])(twins, **torch_options(rule, optional))
    params = [backend.array(array) for array in start]
    buffers = buffers_of(rule, lambda shape: backend.zeros(shape, dtype), optional)
    changed = {"momentum": DEFAULTS["momentum"] * optional, "decoupled": float(optional and rule != "adam")}
    options = options_of(rule, len(SHAPES), **changed)
    for step in range(1, 9):  # the sixth of RAdam is the first that is rectified, with these betas
        grads = [np.asarray(normal(rng, shape, dtype)) for shape in SHAPES]
        for twin, grad in zip(twins, grads, strict=True):
            twin.grad = torch.tensor(grad.astype(np.float64))
        with scalars_in_float64():
            optimizer.step()
        steps = np.full(len(SHAPES), step)
        backend.kernels.optimizer_update(rule, params, [backend.array(g) for g in grads], buffers, options, steps)
    for param, twin in zip(params, twins, strict=True):
        np.testing.assert_allclose(backend.numpy(param), twin.detach(), **tolerance(dtype, 10))


@given(rule=st.sampled_from(list(UPDATE_OPTIONS)), seed=seeds, dtype=reals)
def test_a_parameter_alone_is_updated_bit_for_bit_as_with_others(backend, rule, seed, dtype):
    rng = np.random.default_rng(seed)
    results = []
    params, grads, *buffers = columns_of(rule, rng, SHAPES, dtype)
    options, steps = options_of(rule, len(SHAPES)), np.array([3, 1, 1, 7, 2, 2])
    for pieces in ([range(len(SHAPES))], [[i] for i in range(len(SHAPES))]):
        p, g, *b = [[backend.array(array) for array in column] for column in (params, grads, *buffers)]
        for piece in pieces:
            some = [[column[i] for i in piece] for column in (p, g, *b)]
            backend.kernels.optimizer_update(rule, some[0], some[1], some[2:], options[piece], steps[piece])
        results.append([backend.numpy(array) for column in (p, *b) for array in column])
    for together, alone in zip(*results, strict=True):
        np.testing.assert_array_equal(together, alone)


@pytest.mark.parametrize("rule", UPDATE_OPTIONS)
def test_more_arrays_than_a_launch_takes(backend, rule):
    """They are updated bit for bit as one by one; some have more than a block works on."""
    rng, count = np.random.default_rng(0), 45
    sizes = [4097 if i in (0, 41, 44) else i % 3 for i in range(count)]
    columns, (options, steps) = columns_of(rule, rng, sizes, np.float32), numbers_of(rule, rng, count)
    together, apart = ([[backend.array(array) for array in column] for column in columns] for _ in range(2))
    backend.kernels.optimizer_update(rule, together[0], together[1], together[2:], options, steps)
    for i in range(count):
        one, own = [[column[i]] for column in apart], slice(i, i + 1)
        backend.kernels.optimizer_update(rule, one[0], one[1], one[2:], options[own], steps[own])
    for one, other in zip(together, apart, strict=True):
        for i in range(count):
            np.testing.assert_array_equal(backend.numpy(one[i]), backend.numpy(other[i]), err_msg=f"array {i}")


@pytest.mark.parametrize("rule", UPDATE_OPTIONS)
def test_options_and_steps_may_be_on_the_device(backend, rule, monkeypatch):
    """As in a captured step: they are read when the kernel runs."""
    rng, count = np.random.default_rng(0), 45
    columns, (options, steps) = columns_of(rule, rng, [3] * count, np.float64), numbers_of(rule, rng, count)
    results = []
    for there in (False, True):
        p, g, *b = [[backend.array(array) for array in column] for column in columns]
        numbers = [backend.array(options), backend.array(steps)] if there else [options, steps]
        with monkeypatch.context() as patch:
            if there and backend.emulated:  # NumPy's arrays stand for those on a device
                patch.setattr(seam, "device_of", lambda array: "cuda")
            backend.kernels.optimizer_update(rule, p, g, b, *numbers)
        results.append([backend.numpy(array) for array in p])
    np.testing.assert_array_equal(*results)


def test_clipping_more_arrays_than_a_launch_takes(backend):
    rng, count = np.random.default_rng(0), 130
    values = [normal(rng, (4100 if i in (3, 129) else i % 4,), np.float32, 3.0) for i in range(count)]
    arrays, out = [backend.array(v) for v in values], backend.empty(count, np.float64)
    backend.kernels.square_sums(arrays, out)
    for i, array in enumerate(arrays):
        alone = backend.empty(1, np.float64)
        backend.kernels.square_sums([array], alone)
        assert backend.numpy(out)[i] == backend.numpy(alone)[0]
    np.testing.assert_allclose(backend.numpy(out), [np.square(v, dtype=np.float64).sum() for v in values], rtol=1e-12)
    backend.kernels.clamp_arrays(arrays, 1.5)
    backend.kernels.scale_arrays(arrays, 0.5)
    want = [np.float32(0.5) * value.clip(-1.5, 1.5) for value in values]
    for value, array in zip(want, arrays, strict=True):
        np.testing.assert_array_equal(backend.numpy(array), value)
    together = backend.empty(sum(value.size for value in want), np.float32)
    backend.kernels.join_arrays(arrays, together)
    np.testing.assert_array_equal(backend.numpy(together), np.concatenate(want))


@pytest.mark.parametrize("norm", [2.0, 0.4, np.inf, np.nan])
def test_clipping_to_a_norm_that_is_known_when_the_kernel_runs(backend, norm):
    values = [normal(np.random.default_rng(0), (4100 if i == 129 else i % 4,), np.float32) for i in range(130)]
    arrays, squares = [backend.array(value) for value in values], np.full(70, norm * norm / 70)
    backend.kernels.clip_arrays(arrays, backend.array(squares), 0.5)
    factor = np.float32(0.5 / (norm + 1e-6)) if norm == 2 else np.float32(1)
    for value, array in zip(values, arrays, strict=True):
        np.testing.assert_allclose(backend.numpy(array), factor * value, rtol=1e-6)


@given(
    rule=st.sampled_from(list(UPDATE_OPTIONS)), size=st.integers(1, 70), begin=st.integers(0, 20), dtype=reals,
    seed=seeds,
)  # fmt: skip
def test_an_array_may_begin_anywhere(backend, rule, size, begin, dtype, seed):
    """The update is the same bit for bit, and what lies beside it is left alone."""
    rng, own = np.random.default_rng(seed), slice(begin, begin + size)
    before = [abs(normal(rng, (begin + size + 64,), dtype)) for _ in range(2 + len(UPDATE_BUFFERS[rule]))]
    wide = [backend.array(array) for array in before]
    p, g, *b = [[array[own]] for array in wide]
    at_the_begin = [[backend.array(array[own])] for array in before]
    for first, second, *others in ((p, g, *b), at_the_begin):
        backend.kernels.optimizer_update(rule, first, second, others, options_of(rule, 1), np.array([2]))
    for array, old, [same] in zip(wide, before, at_the_begin, strict=True):
        np.testing.assert_array_equal(np.delete(backend.numpy(array), own), np.delete(old, own))
        np.testing.assert_array_equal(backend.numpy(array)[own], backend.numpy(same))


def test_a_gradient_that_is_not_finite_reaches_its_own_number_only(backend):
    for rule in UPDATE_OPTIONS:
        param = backend.array(np.ones(3), np.float32)
        buffers = [[backend.zeros(3, np.float32)] for _ in UPDATE_BUFFERS[rule]]
        grad = backend.array([1, np.nan, 2], np.float32)
        backend.kernels.optimizer_update(rule, [param], [grad], buffers, options_of(rule, 1), np.array([1]))
        np.testing.assert_array_equal(np.isfinite(backend.numpy(param)), [True, False, True])


@given(dtype=reals, seed=seeds)
def test_clipping(backend, dtype, seed):
    rng = np.random.default_rng(seed)
    long = 4100 if backend.emulated else 20_011
    values = [np.asarray(normal(rng, shape, dtype, 3.0)) for shape in [*SHAPES, (long,), (2, long)]]
    arrays, out = [backend.array(v) for v in values], backend.empty(len(values), np.float64)
    backend.kernels.square_sums(arrays, out)
    want = [np.square(v, dtype=np.float64).sum() for v in values]
    np.testing.assert_allclose(backend.numpy(out), want, rtol=1e-12)
    backend.kernels.clamp_arrays(arrays, 1.5)
    backend.kernels.scale_arrays(arrays, 0.7)
    for value, array in zip(values, arrays, strict=True):
        np.testing.assert_allclose(backend.numpy(array), dtype.type(0.7) * value.clip(-1.5, 1.5), **tolerance(dtype))


def test_clamping_keeps_nan_and_no_arrays_are_legal(backend):
    array = backend.array([np.nan, np.inf, -np.inf, 0.5], np.float32)
    backend.kernels.clamp_arrays([array], 1.0)
    np.testing.assert_array_equal(backend.numpy(array), [np.nan, 1, -1, 0.5])
    backend.kernels.clamp_arrays([], 1.0)
    backend.kernels.scale_arrays([], 1.0)
    backend.kernels.square_sums([], backend.empty(0, np.float64))
    backend.kernels.clip_arrays([], backend.zeros(1, np.float64), 1.0)
    backend.kernels.join_arrays([], backend.empty(0, np.float64))
    none = np.zeros((0, 6)), np.zeros(0, np.int64)
    backend.kernels.optimizer_update("sgd", [], [], [[]], *none)


# ---- bad input -----------------------------------------------------------------------------------------------------


def sgd(backend, **changed):
    """Call the update of two parameters with some arguments changed; nothing may be written."""
    ones = [backend.array(np.ones((2, 3)), np.float32) for _ in range(6)]
    arguments = {
        "rule": "sgd", "params": ones[:2], "grads": ones[2:4], "buffers": [ones[4:]], "options": options_of("sgd", 2),
        "steps": np.ones(2, np.int64),
    } | changed  # fmt: skip
    try:
        backend.kernels.optimizer_update(*arguments.values())
    finally:
        assert all((backend.numpy(array) == 1).all() for array in ones[:2])


def test_wrong_arguments_are_refused(backend):
    good = backend.array(np.ones((2, 3)), np.float32)
    for error, changed, word in (
        (OptionError, {"rule": "lion"}, "rule"),
        (ShapeError, {"grads": [good]}, "grads"),
        (
            LayoutError,
            {"grads": [good, np.float32(1)], "params": [good, backend.array(1.0, np.float32)]},
            "not an array",
        ),
        (ShapeError, {"buffers": []}, "buffers"),
        (ShapeError, {"buffers": [[None]]}, "momentum_buffer"),
    ):
        with pytest.raises(error, match=word):
            sgd(backend, **changed)
    with pytest.raises(DTypeError, match="exp_avg_sq"):
        backend.kernels.optimizer_update(
            "adam", [good], [good], [[good], [None], [None]], options_of("adam", 1), np.array([1])
        )


def test_subclasses_of_arrays_are_taken_on_the_host():
    class Own(np.ndarray):
        pass

    param = np.ones((2, 2)).view(Own)
    kernels.get(np).scale_arrays([np.ones(3), param], 2.0)
    assert (param == 2).all()
    first = np.ones(3).view(Own)
    kernels.get(np).scale_arrays([first, param], 2.0)
    assert (first == 2).all() and (param == 4).all()


# ---- threads -------------------------------------------------------------------------------------------------------


def large(seed=0):
    rng = np.random.default_rng(seed)
    sizes = [900_003, 17, 250_000, 0, 100]
    return [[abs(normal(rng, (size,), np.float32)) for size in sizes] for _ in range(4)]


def adam(columns, rows=slice(None)):
    params, grads, mean, square = (column[rows] for column in columns)
    count = len(params)
    buffers = [mean, square, [None] * count]
    kernels.get(np).optimizer_update(
        "adam", params, grads, buffers, options_of("adam", count), np.ones(count, np.int64)
    )


def test_python_threads_update_at_the_same_time():
    together, apart = large(), large()
    adam(together)

    def work(rows):
        adam(apart, rows)

    workers = [threading.Thread(target=work, args=(rows,)) for rows in (slice(0, 1), slice(1, 3), slice(3, 5))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for one, other in zip(together[0], apart[0], strict=True):
        np.testing.assert_array_equal(one, other)


def test_tables_hold_the_addresses_of_the_arrays():
    """What is read from the structures of lists and arrays is what CPython and NumPy say."""
    from sparsebp.kernels.host.optim import _read, _wanted, lists_of

    arrays = [np.ones(shape) for shape in SHAPES]
    others = [None if i == 2 else np.ones(array.shape) for i, array in enumerate(arrays)]
    for columns in ((arrays, others), (tuple(arrays), tuple(others))):
        lists, trusted = lists_of(columns, pytest.fail)
        n, wanted = len(arrays), _wanted("d", "wo")
        addresses, begins, rows = np.empty((n, 2), np.int64), np.empty(n + 1, np.int64), np.empty(n, np.int64)
        assert _read(id(lists), wanted, trusted, addresses, begins, rows)
        want = [[0 if a is None else a.ctypes.data for a in row] for row in zip(arrays, others, strict=True)]
        np.testing.assert_array_equal(addresses, want)
        np.testing.assert_array_equal(begins, np.cumsum([0] + [a.size for a in arrays]))
        np.testing.assert_array_equal(rows, [len(a) if a.ndim else 1 for a in arrays])


@pytest.mark.parametrize("momentum_decay", [0.0, 1e-310, 1e-9, 4e-3, 0.3, 500.0])
@pytest.mark.parametrize("beta1", [0.0, 0.9, 0.999])
def test_the_product_of_nadams_momenta_is_that_of_each(beta1, momentum_decay):
    product = 1.0
    for step in range(1, 3001):
        product *= beta1 * (1 - 0.5 * 0.96 ** (step * momentum_decay))
        if step in (1, 2, 7, 100, 3000):
            now, then, found = momenta(beta1, momentum_decay, step)
            assert now == pytest.approx(beta1 * (1 - 0.5 * 0.96 ** (step * momentum_decay)), rel=1e-13)
            assert then == pytest.approx(beta1 * (1 - 0.5 * 0.96 ** ((step + 1) * momentum_decay)), rel=1e-13)
            assert found == pytest.approx(product, rel=1e-11, abs=1e-300)
