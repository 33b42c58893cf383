"""``sparsebp info``: which prices count, and their calibration, whole or interrupted."""

import json
from dataclasses import replace

import pytest

pytest.importorskip("typer", exc_type=ImportError)
pytest.importorskip("rich", exc_type=ImportError)

from typer.testing import CliRunner

from benchmarks.tools import calibrate
from sparsebp.cli.app import app
from sparsebp.core.machine import now_and_here, prices, shipped


@pytest.fixture
def kept(tmp_path, monkeypatch):
    path = tmp_path / "cache" / "prices.json"
    monkeypatch.setenv("SPARSEBP_PRICES", str(path))
    monkeypatch.setenv("COLUMNS", "500")
    prices.cache_clear()
    yield path
    prices.cache_clear()


def measured(told):
    told("memory")
    return replace(shipped(), calibrated=True, measured=now_and_here(), far=1e-10)


def info(*arguments):
    return CliRunner().invoke(app, ["info", *arguments], catch_exceptions=False)


def test_prices_are_shipped_until_they_are_calibrated(kept, monkeypatch):
    monkeypatch.setattr(calibrate, "calibrate", measured)
    before = info().stdout
    assert "shipped, measured 20" in before and str(kept) in before and not kept.exists()
    text = info("--calibrate").stdout
    assert "measuring: memory" in text and f"written: {kept}" in text and "calibrated 20" in text
    assert prices().far == 1e-10
    facts = json.loads(info("--json").stdout)
    assert facts["prices"]["kind"] == "calibrated" and facts["prices"]["file"] == str(kept)
    assert len(info("--calibrate", "--json").stdout.splitlines()) == 1


def test_an_interrupted_calibration_leaves_what_was_there(kept, monkeypatch):
    monkeypatch.setattr(calibrate, "calibrate", measured)
    info("--calibrate")
    before = kept.read_bytes()

    def interrupted(told):
        raise KeyboardInterrupt

    monkeypatch.setattr(calibrate, "calibrate", interrupted)
    result = info("--calibrate")
    assert (result.exit_code, result.stderr) == (130, "Interrupted.\n")
    assert kept.read_bytes() == before and [entry.name for entry in kept.parent.iterdir()] == ["prices.json"]


def test_where_nothing_can_be_kept_nothing_is_measured(kept, monkeypatch, tmp_path):
    monkeypatch.setattr(calibrate, "calibrate", lambda told: pytest.fail("measured"))
    (tmp_path / "file").write_text("")
    for path, code, message in ((tmp_path / "file" / "prices.json", 1, "cannot be written"), ("", 2, "no file for")):
        monkeypatch.setenv("SPARSEBP_PRICES", str(path))
        result = info("--calibrate")
        assert result.exit_code == code and message in result.stderr and result.stdout == ""
