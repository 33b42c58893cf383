"""``sparsebp info``: which prices count, and their calibration, whole or interrupted."""

import json
from dataclasses import replace

import pytest

pytest.importorskip("typer", exc_type=ImportError)
pytest.importorskip("rich", exc_type=ImportError)

from typer.testing import CliRunner

from benchmarks import calibrate
from sparsebp.cli.app import app
from sparsebp.core.errors import OptionError, OutputError
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


def test_prices_are_shipped_until_they_are_calibrated(kept, monkeypatch, capsys):
    monkeypatch.setattr(calibrate, "calibrate", measured)
    before = info().stdout
    assert "shipped, measured 20" in before and str(kept) in before and not kept.exists()
    calibrate.main()
    text = capsys.readouterr().out
    assert "measuring: memory" in text and f"written: {kept}" in text and "calibrated 20" in info().stdout
    assert prices().far == 1e-10
    facts = json.loads(info("--json").stdout)
    assert facts["prices"]["kind"] == "calibrated" and facts["prices"]["file"] == str(kept)


def test_an_interrupted_calibration_leaves_what_was_there(kept, monkeypatch):
    monkeypatch.setattr(calibrate, "calibrate", measured)
    calibrate.main()
    before = kept.read_bytes()

    def interrupted(told):
        raise KeyboardInterrupt

    monkeypatch.setattr(calibrate, "calibrate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        calibrate.main()
    assert kept.read_bytes() == before and [entry.name for entry in kept.parent.iterdir()] == ["prices.json"]


def test_where_nothing_can_be_kept_nothing_is_measured(kept, monkeypatch, tmp_path):
    monkeypatch.setattr(calibrate, "calibrate", lambda told: pytest.fail("measured"))
    (tmp_path / "file").write_text("")
    for path, error, message in (
        (tmp_path / "file" / "prices.json", OutputError, "cannot be written"), ("", OptionError, "no file for"),
    ):  # fmt: skip
        monkeypatch.setenv("SPARSEBP_PRICES", str(path))
        with pytest.raises(error, match=message):
            calibrate.main()
