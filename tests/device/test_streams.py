"""Plans and patterns cached on a device serve every stream at once, including later ones."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse

from backends import make_backend, needs_numba
from sparsebp.patterns import SparsityPattern
from sparsebp.products import plan_product
from sparsebp.scan import plan_scan

pytestmark = pytest.mark.gpu


@pytest.fixture
def cupy():
    return make_backend("gpu").xp


def pattern(rng, rows, columns):
    full = rng.random((rows, columns)) < 0.4
    full[:, 0] = True
    return SparsityPattern.from_scipy(scipy.sparse.csr_array(full.astype(float)))


def test_a_product_that_another_stream_has_used_first(cupy):
    needs_numba("products are planned with it, on the host")
    rng = np.random.default_rng(0)
    plan = plan_product(pattern(rng, 7, 9), pattern(rng, 9, 8))
    a, b = rng.standard_normal((plan.a.nnz, 3)), rng.standard_normal((plan.b.nnz, 3))
    on_device = cupy.asarray(a), cupy.asarray(b)
    cupy.cuda.Device().synchronize()
    found = []
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    for stream in streams:
        with stream:
            found.append(plan(*on_device))
    for stream, each in zip(reversed(streams), reversed(found), strict=True):
        stream.synchronize()
        np.testing.assert_allclose(each.get(), plan(a, b), rtol=1e-12)


@pytest.mark.parametrize("stacked", [True, False])
def test_a_scan_that_two_streams_run_at_once(stacked, cupy):
    """Each has buffers of its own: the second one's products do not come into the first one's."""
    rng, n, size, batch = np.random.default_rng(0), 8, 4, 2
    plan = plan_scan([SparsityPattern.dense(size, size)] * n, algorithm="blelloch", xp=cupy, batch=batch)
    calls = [(rng.standard_normal((size, batch)), rng.standard_normal((n, size * size, batch))) for _ in range(4)]
    sent = [(cupy.asarray(g), cupy.asarray(data)) for g, data in calls]
    cupy.cuda.Device().synchronize()
    streams, found = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)], []
    for number, (g, data) in enumerate(sent):
        with streams[number % 2]:
            found.append(plan(g, data if stacked else list(data)))
    assert len({workspace.key for workspace in plan.workspaces}) == len(plan.workspaces) == 2
    for stream in reversed(streams):
        stream.synchronize()
    for (g, data), got in zip(calls, found, strict=True):
        y = g
        for i in range(n):
            y = np.einsum("ijb,jb->ib", data[i].reshape(size, size, batch), y)
            np.testing.assert_allclose(got[i].get(), y, rtol=1e-9)
