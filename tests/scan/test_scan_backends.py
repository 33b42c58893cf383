"""The scan on every implementation of the kernels, the emulated device among them."""

from __future__ import annotations

import numpy as np
import pytest

from scan.chains import make_chain, make_stack
from sparsebp import kernels, plan_scan


@pytest.mark.parametrize("options", [{"algorithm": "hybrid", "up_levels": 1}, {"algorithm": "chunked", "chunks": 3}])
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
def test_scan_on_every_backend(backend, options, stacked, batch, monkeypatch):
    """Values and vectors agree with the dense sequential product, injections included."""
    rng = np.random.default_rng(17)
    chain = make_stack(rng, 7, 3, batch, False) if stacked else make_chain(rng, 7, batch, most=5)
    chain.injections = [rng.standard_normal((p.shape[0], batch)) for p in chain.patterns]
    plan = plan_scan(chain.patterns, **options)
    implementation = backend.kernels
    monkeypatch.setattr(kernels, "get", lambda xp: implementation)
    data = backend.array(chain.data) if stacked else [backend.array(d) for d in chain.data]
    y = plan(backend.array(chain.g), data, [backend.array(v) for v in chain.injections])
    for have, want in zip(y, chain.expected(), strict=True):
        np.testing.assert_allclose(backend.numpy(have), want, rtol=1e-9, atol=1e-9)
