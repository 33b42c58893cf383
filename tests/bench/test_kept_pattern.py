"""The benchmark of kept patterns: its bundle adjustment's Jacobian is that of its residuals."""

from __future__ import annotations

import numpy as np

import sparsebp as sb
from benchmarks.kept_pattern import bundle


def test_the_jacobian_of_bundle_adjustment_is_that_of_its_residuals() -> None:
    fit = bundle(3, 5, 2)
    direction = np.random.default_rng(0).standard_normal(len(fit.x0))
    difference = (fit.f(fit.x0 + 1e-6 * direction) - fit.f(fit.x0 - 1e-6 * direction)) / 2e-6
    np.testing.assert_allclose(fit.jac(fit.x0) @ direction, difference, rtol=1e-6, atol=1e-4)
    found = sb.least_squares(fit.f, fit.x0, fit.jac)
    assert found.success and found.cost < 1e-3 * 0.5 * np.sum(fit.f(fit.x0) ** 2)
