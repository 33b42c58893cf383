"""How XLA calls kernels: handlers, callbacks in their place, plans by number, errors, threads, devices, processes."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest

import sparsebp as sb

jax = pytest.importorskip("jax")

from jax import numpy as jnp  # noqa: E402

import sparsebp.jax as sj  # noqa: E402
from sparsebp.core.threads import get_threads, set_threads  # noqa: E402
from sparsebp.jax import operations  # noqa: E402
from sparsebp.kernels.host import xla  # noqa: E402
from sparsebp.kernels.host.engine.threads import PUBLISHED  # noqa: E402

pytestmark = pytest.mark.usefixtures("jax_compiles_quickly")
rng = np.random.default_rng(0)
A, B = (rng.standard_normal((50, 4, 5), np.float32) for _ in range(2))
LENGTHS = np.array([50, 3, 0, 7])


@pytest.fixture
def by_callbacks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    jax.clear_caches()
    monkeypatch.setattr(operations, "fits", lambda: False)
    yield
    jax.clear_caches()


def square_plan(n: int) -> sb.FactorPlan:
    return sb.plan_factor(sb.SparsityPattern.dense(n, n))


def everything() -> list[jax.Array]:
    """Compiled calls of all functions, with their gradients."""
    plan = square_plan(3)
    product = sb.plan_product(plan.pattern, plan.pattern)
    values, scans = (
        np.arange(9, dtype=np.float32) + 9 * np.eye(3, dtype=np.float32).ravel(),
        (A, A**2, -(B[0].T ** 2), A[..., :4], B[..., :4]),
    )
    calls = [
        (lambda a, b: sj.linear_recurrence(a, b, lengths=LENGTHS, reset=B > 1), (A, B)),
        (lambda a, b: sj.linear_recurrence(a, b, reverse=True), (A[:1] * 1j, B * 1j)),
        (lambda *v: sj.selective_scan(*v, reset=np.arange(len(v[0])) == 1)[0], scans),
        (lambda v, w: sj.product(product, v, w), (values, values)),
        (lambda v, b: sj.solve(plan, v, b), (values, values[:3])),
    ]
    found = []
    for f, operands in calls:
        run = jax.jit(jax.value_and_grad(lambda *v, f=f: jnp.abs(f(*v)).sum(), tuple(range(len(operands)))))
        assert ("callback" in run.lower(*operands).as_text()) != operations.fits()
        found += jax.tree.leaves(run(*operands))
    return found


def test_without_handlers_callbacks_compute_the_same(request):
    """XLA calls kernels where the interface has the version that they are made for, else JAX's callbacks do."""
    assert operations.fits()
    expected = everything()
    request.getfixturevalue("by_callbacks")
    for mine, true in zip(everything(), expected, strict=True):
        np.testing.assert_allclose(mine, true, rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("by_callbacks")
def test_errors_of_callbacks():
    with pytest.raises(Exception, match="PivotError: The matrix cannot be factorised"):
        jax.block_until_ready(sj.solve(square_plan(2), np.zeros(4, np.float32), np.ones(2, np.float32)))


@pytest.mark.parametrize(
    ("text", "fit"),
    [(f"#define XLA_FFI_API_MAJOR {major}\n#define XLA_FFI_API_MINOR {minor}", fit)
     for major, minor, fit in ((0, 3, True), (0, 9, True), (0, 2, False), (1, 3, False))]
    + [("", False), (None, False)],
)  # fmt: skip
def test_the_header_says_which_version_there_is(tmp_path, monkeypatch, text, fit):
    if text is not None:
        (tmp_path / "xla/ffi/api").mkdir(parents=True)
        (tmp_path / "xla/ffi/api/c_api.h").write_text(text)
    monkeypatch.setattr(jax.ffi, "include_dir", lambda: str(tmp_path))
    assert operations.fits.__wrapped__() is fit


@pytest.mark.parametrize("wrong", [[50, 51, 0, 0], [50, -1, 0, 0]])
def test_wrong_lengths_in_compiled_code(wrong):
    run = jax.jit(lambda of: sj.linear_recurrence(A, B, lengths=of))
    grad = jax.jit(jax.grad(lambda b, of: sj.linear_recurrence(A, b, lengths=of).sum()))
    for call in (run, lambda of: grad(B, of)):
        with pytest.raises(jax.errors.JaxRuntimeError, match="OptionError: A length is out of range"):
            jax.block_until_ready(call(jnp.array(wrong)))
        jax.block_until_ready(call(jnp.array(LENGTHS)))


def test_an_error_leaves_the_next_call_alone():
    plan = square_plan(2)
    run = jax.jit(lambda v: sj.solve(plan, v, jnp.ones(2)))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"PivotError.*no value other than 0 in row 0"):
        jax.block_until_ready(run(jnp.zeros(4)))
    np.testing.assert_allclose(run(jnp.array([1.0, 0, 0, 2])), [1, 0.5])


def test_compiled_code_keeps_its_plan(monkeypatch):
    def made(n: int) -> object:
        plan = sb.plan_product(*[sb.SparsityPattern.dense(n, n)] * 2)
        return jax.jit(lambda x: sj.product(plan, x, x)).lower(jnp.ones(n * n)).compile()

    compiled = {n: made(n) for n in (2, 3, 4)}
    jax.clear_caches()
    gc.collect()
    assert all(run(jnp.ones(n * n)).tolist() == [n] * n * n for n, run in compiled.items())
    monkeypatch.setattr(operations, "STAY", 0)
    numbers = set(operations._calls)
    del compiled
    gc.collect()
    assert made(2)(jnp.ones(4)).tolist() == [2] * 4
    assert len(numbers - set(operations._calls)) >= 3  # those of the dropped ones go, and no number comes twice


def test_a_computation_that_is_dropped_while_it_runs():
    x = jnp.ones(900)
    plan = sb.plan_product(*[sb.SparsityPattern.dense(30, 30)] * 2)
    found = [jax.jit(lambda x, k=k: sj.product(plan, k * x, x))(x) for k in range(5)]
    jax.clear_caches()
    gc.collect()
    assert [y[0] for y in found] == [30 * k for k in range(5)]


def test_a_computation_of_nobody_is_refused():
    call = operations._Call(lambda given, results: None, [((1,), np.dtype(np.float32))], [((1,), np.dtype(np.float32))])
    lost = call.number
    del operations._calls[lost]
    sj.product(
        sb.plan_product(*[sb.SparsityPattern.dense(1, 1)] * 2), jnp.ones(1), jnp.ones(1)
    )  # registers the handler
    wanted = jax.ShapeDtypeStruct((1,), np.float32)
    with pytest.raises(jax.errors.JaxRuntimeError, match="whose plan is gone"):
        jax.block_until_ready(jax.ffi.ffi_call(operations._PYTHON, wanted)(jnp.ones(1), number=np.int64(lost)))


def test_buffers_that_are_given_away_and_other_layouts():
    expected = sb.linear_recurrence(A, B)
    given = jax.jit(sj.linear_recurrence, donate_argnums=(0, 1))
    np.testing.assert_array_equal(given(jnp.array(A), jnp.array(B)), expected)
    turned = jax.jit(lambda a, b: sj.linear_recurrence(a.T, b.T))
    np.testing.assert_array_equal(turned(jnp.asarray(A.T), jnp.asarray(B.T)), expected)
    twice = jax.jit(lambda a: sj.linear_recurrence(a, a))
    np.testing.assert_array_equal(twice(A), sb.linear_recurrence(A, A))


def test_control_flow():
    def repeated(a: jax.Array, b: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda h, _: (sj.linear_recurrence(a, h), None), b, None, length=3)[0].sum()

    def unrolled(a: jax.Array, b: jax.Array) -> jax.Array:
        return sj.linear_recurrence(a, sj.linear_recurrence(a, sj.linear_recurrence(a, b))).sum()

    a = jnp.tanh(A)
    expected = jax.grad(unrolled)(a, B)
    np.testing.assert_allclose(jax.jit(jax.grad(repeated))(a, B), expected, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(jax.grad(jax.checkpoint(repeated))(a, B), expected, rtol=1e-4, atol=1e-3)
    mapped = jax.jit(jax.vmap(jax.grad(repeated), (None, 0)))(a, jnp.stack([B, 2 * B]))
    np.testing.assert_allclose(mapped, jnp.stack([expected, 2 * expected]), rtol=1e-4, atol=1e-3)


def test_several_threads_and_numbers_of_threads():
    """Large calls at once share the helpers or go without them; results do not depend on it."""
    a, b = (rng.random((300, 64, 50), np.float32) for _ in range(2))
    run = jax.jit(jax.value_and_grad(lambda a, b: (sj.linear_recurrence(a, b) ** 2).sum(), (0, 1)))
    expected, wrong, before = jax.tree.leaves(run(a, b)), [], get_threads()

    def work() -> None:
        for _ in range(8):
            wrong.extend(
                1 for mine, true in zip(jax.tree.leaves(run(a, b)), expected, strict=True) if (mine != true).any()
            )

    try:
        for threads in (1, before):
            set_threads(threads)
            assert PUBLISHED[1] == threads and (PUBLISHED[0] != 0) == (threads > 1)
            callers = [threading.Thread(target=work) for _ in range(3)]
            for caller in callers:
                caller.start()
            for caller in callers:
                caller.join()
    finally:
        set_threads(before)
    assert not wrong


def run_alone(code: str, **environment: str) -> None:
    import os

    head = "import os, numpy as np, jax, jax.numpy as jnp, sparsebp as sb, sparsebp.jax as sj\n"
    result = subprocess.run([sys.executable, "-c", head + code], capture_output=True, text=True, check=False,
                            timeout=100, env={**os.environ, **environment})  # fmt: skip
    assert result.returncode == 0, result.stderr


def test_two_devices():
    run_alone(
        """
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
a, b = (jnp.asarray(np.random.default_rng(0).random((20, 4, 5), np.float32)) for _ in range(2))
expected = sb.linear_recurrence(np.asarray(a), np.asarray(b))
mesh, spec = Mesh(np.array(jax.devices()), ("x",)), P(None, "x", None)
assert len(jax.devices()) == 2
placed = [jax.device_put(v, NamedSharding(mesh, spec)) for v in (a, b)]
np.testing.assert_array_equal(jax.jit(sj.linear_recurrence)(*placed), expected)
split = jax.shard_map(sj.linear_recurrence, mesh=mesh, in_specs=spec, out_specs=spec)
np.testing.assert_array_equal(jax.jit(split)(a, b), expected)
for derivative in (lambda f: jax.jit(jax.grad(lambda a: (f(a, b) ** 2).sum()))(a),
                   lambda f: jax.jit(lambda a, b: jax.jvp(f, (a, b), (b, a))[1])(a, b)):
    np.testing.assert_allclose(derivative(split), derivative(sj.linear_recurrence), rtol=1e-5)
shared = jax.shard_map(sj.linear_recurrence, mesh=mesh, in_specs=(P(), spec), out_specs=spec)
for run in (lambda f: jax.jit(jax.grad(lambda a: (f(a, b) ** 2).sum()))(a[:, :1]),
            lambda f: jax.jit(jax.grad(lambda b: f(a[:, :1], b).sum()))(b)):
    np.testing.assert_allclose(run(shared), run(sj.linear_recurrence), rtol=1e-5)  # what devices share is summed
plan = sb.plan_product(*[sb.SparsityPattern.dense(5, 5)] * 2)
products = lambda x, y: jax.vmap(lambda y: sj.product(plan, x, y))(y)
x, y = jnp.ravel(a[:5, 0]), a[:10].reshape(8, 25)
split = jax.shard_map(products, mesh=mesh, in_specs=(P(), P("x")), out_specs=P("x"))
np.testing.assert_allclose(*(jax.jit(jax.grad(lambda x: (f(x, y) ** 2).sum()))(x) for f in (split, products)),
                           rtol=1e-5)
halves = jax.pmap(sj.linear_recurrence)(*(jnp.stack(jnp.split(v, 2, 1)) for v in (a, b)))
np.testing.assert_array_equal(np.concatenate(list(halves), 1), expected)
there = [jax.device_put(v, jax.devices()[1]) for v in (a, b)]
runs = [jax.jit(sj.linear_recurrence)(*v) for _ in range(20) for v in ((a, b), there)]
assert all((np.asarray(h) == expected).all() for h in runs)
""",
        XLA_FLAGS="--xla_force_host_platform_device_count=2",
    )


def test_exported(tmp_path):
    """And called by another process."""
    from jax import export

    def squares(a, b):
        return (sj.linear_recurrence(a, b) ** 2).sum()

    a, b = jnp.asarray(np.random.default_rng(0).random((2, 20, 4, 5), np.float32))
    checks = [export.DisabledSafetyCheck.custom_call(name) for name in sj.custom_calls()]
    function = jax.jit(jax.value_and_grad(squares))
    (tmp_path / "function").write_bytes(export.export(function, disabled_checks=checks)(a, b).serialize())
    run_alone(f"""
from jax import export
function = export.deserialize(open({str(tmp_path / "function")!r}, "rb").read())
sj.custom_calls()
value, grad = function.call(*jnp.asarray(np.random.default_rng(0).random((2, 20, 4, 5), np.float32)))
assert [float(value), float(grad.sum())] == {[float(x.sum()) for x in function(a, b)]}
""")


def test_a_process_that_ends_while_calls_wait():
    """And one that forks meanwhile, whose child uses the kernels."""
    run_alone("""
n = 64
plan = sb.plan_product(*[sb.SparsityPattern.dense(n, n)] * 2)
f = jax.jit(lambda x, y: sj.product(plan, x, y))
x = jnp.ones(n * n)
jax.block_until_ready(f(x, x))
waiting = [f(x * k, x) for k in range(20)]
if (child := os.fork()) == 0:
    os._exit(int((sb.linear_recurrence(*np.ones((2, 1000, 64, 64))) == 0).any()))
assert os.waitpid(child, 0)[1] == 0
more = [f(x * k, x) for k in range(20)]
""")


def test_the_flags_of_handlers_are_those_of_the_header():
    """Places in XLA's structs, by the header that JAX brings."""
    from pathlib import Path

    text = (Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h").read_text()
    assert f"XLA_FFI_Error_Code_INVALID_ARGUMENT = {xla.INVALID_ARGUMENT}" in text
    for name, code in (("C64", 15), ("C128", 18)):
        assert f"XLA_FFI_DataType_{name} = {code}" in text and code in xla._COMPLEX
