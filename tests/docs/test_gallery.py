"""The gallery's examples run as they stand, draw one picture, and their results are right."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from docs_scripts import DOCS, script

pytest.importorskip("matplotlib")

EXAMPLES = {path.stem: path for path in sorted((DOCS / "gallery").glob("*.py"))}


def accelerate_forecaster(names: Any) -> None:
    assert [outcome.replaced for outcome in names.explained] == [True]
    errors = [(values - names.truth).square().mean() for values in (names.forecast, names.last_value)]
    assert errors[0] < 0.7 * errors[1]


def conv_jacobian(names: Any) -> None:
    first, second, third = names.parts
    assert names.whole.pattern == ((first @ second) @ third).pattern
    y, back = names.model.vjp(names.x)
    gradient = np.random.default_rng(1).standard_normal(y.shape)
    np.testing.assert_allclose(names.whole.vjp(gradient), back(gradient).input, rtol=1e-12, atol=1e-12)


def lyapunov_spectrum(names: Any) -> None:
    assert names.spectra[0.7].largest < 0 < names.spectra[3.0].largest
    assert all(spectrum.mean.shape == (names.UNITS,) for spectrum in names.spectra.values())


def multigrid(names: Any) -> None:
    assert abs(names.coarse - names.P.T @ names.A @ names.P).max() < 1e-12
    assert names.norms[-1] < 0.01 * names.norms[0]


def newton_equilibrium(names: Any) -> None:
    newton, iteration = names.norms.values()
    assert newton[4] < 1e-12 < iteration[-1]
    assert newton[2] < newton[1] ** 2  # quadratic convergence


def optimizer_fusion(names: Any) -> None:
    for fused in ("forward", "backward"):
        for name, weights in names.trained["none"].items():
            np.testing.assert_array_equal(names.trained[fused][name], weights)
    assert [simulation.makespan for simulation in names.simulations] == [12, 12, 9]


def own_layer(names: Any) -> None:
    x, step = names.x, 1e-6
    v = np.random.default_rng(1).standard_normal(x.shape)
    for steps, chain in names.chains.items():
        difference = (chain(x + step * v) - chain(x - step * v)) / (2 * step)
        np.testing.assert_allclose(names.jacobians[steps].jvp(v), difference, rtol=1e-7, atol=1e-7)
        assert names.jacobians[steps].pattern.nnz == names.N * (3 * steps + 1)


def own_schedule(names: Any) -> None:
    assert [simulation.makespan for simulation in names.simulations] == [15, 11]
    assert names.own.allocation == (0, 1, 2)


def pruned_vgg(names: Any) -> None:
    np.testing.assert_allclose(names.by_scan, names.by_bp, rtol=1e-3)
    assert names.by_scan[-1] < 0.9 * names.by_scan[0]
    layer = names.model[0]
    assert not layer.params["weight"][~layer.buffers["weight_mask"]].any()


def robust_fit(names: Any) -> None:
    assert names.found.success
    assert np.sqrt(np.mean((names.found.x - names.true) ** 2)) < 0.05


def stream_inference(names: Any) -> None:
    whole = names.head(names.gru(names.signal[:, None]))[:, 0]
    np.testing.assert_allclose(names.predictions, whole, rtol=1e-4, atol=1e-5)
    assert names.errors.argmax() == names.BREAK - 1  # its first entry is the error at step 1


def two_ranks(names: Any) -> None:
    assert names.first_rank == names.second_rank
    np.testing.assert_allclose(names.first_rank, names.alone, rtol=1e-4)


def weight_prediction(names: Any) -> None:
    assert np.mean(names.error) < 0.7 * np.mean(names.stale)


CHECKS = (
    accelerate_forecaster, conv_jacobian, lyapunov_spectrum, multigrid, newton_equilibrium, optimizer_fusion, own_layer,
    own_schedule, pruned_vgg, robust_fit, stream_inference, two_ranks, weight_prediction,
)  # fmt: skip


def test_every_example_has_a_check_a_picture_and_a_link() -> None:
    index = (DOCS / "gallery" / "index.md").read_text(encoding="utf-8")
    assert [check.__name__ for check in CHECKS] == list(EXAMPLES)
    assert all(path.with_suffix(".png").exists() and f"({path.name})" in index for path in EXAMPLES.values())


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_an_example_runs_and_is_right(check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = EXAMPLES[check.__name__]
    if "import torch" in path.read_text(encoding="utf-8"):
        pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    names, figure = script("make_gallery").run(path)
    assert all(ax.has_data() for ax in figure.axes)
    check(SimpleNamespace(**names))


def test_an_example_becomes_a_page() -> None:
    pytest.importorskip("mkdocs")
    source = '"""Title\n\nTwo\nlines.\n"""\n\nimport this\n'
    text = script("source_pages").example_as_markdown(source, "name")
    assert text.startswith("# Title\n\nTwo\nlines.\n\n![") and "](name.png)" in text
    assert "```python\nimport this\n```" in text and "](name/name.py)" in text
