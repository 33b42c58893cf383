"""The price list: kept in a file, refused where it does not fit, complete, and estimates that grow with the work."""

from __future__ import annotations

import json
import os
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsebp.core import machine as machine_facts
from sparsebp.core.errors import FileFormatError, OutputError
from sparsebp.core.machine import (
    CELLS,
    SHIPPED,
    STRATEGIES,
    load,
    machine,
    now_and_here,
    parse,
    price_path,
    prices,
    save,
    shipped,
)
from sparsebp.nn.cells import LONG
from sparsebp.products import product
from sparsebp.products.strategies import OF_KINDS, OF_KINDS_AND_STRUCTURE, OF_STRUCTURE
from sparsebp.scan.recurrent import GATES, SHARED_PRODUCT, choose_recurrent_backward


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """The file that the environment names; the process reads it anew, and forgets it afterwards."""
    path = tmp_path / "folder" / "prices.json"
    monkeypatch.setenv("SPARSEBP_PRICES", str(path))
    prices.cache_clear()
    yield path
    prices.cache_clear()


def own(**changes):
    return replace(shipped(), calibrated=True, measured=dict(now_and_here()), **changes)


def test_a_list_comes_back_as_it_was_saved(kept):
    mine = own(far=1.25e-10)
    save(mine, kept)
    assert prices().calibrated and prices().to_json() == mine.to_json() and prices().measured == mine.measured
    assert [entry.name for entry in kept.parent.iterdir()] == ["prices.json"]
    assert "calibrated prices" in machine(np).source and machine(np).bandwidth <= machine(np).workers / 1.25e-10
    kept.unlink()
    prices.cache_clear()
    assert prices() is shipped()


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"{", b"\xff", b'{"format": 2}', b'{"format": 1, "measured": {}, "prices": {}}', "far", "negative",
     "products", "nan", "more", "zero", "dense", "huge"],
)  # fmt: skip
def test_a_damaged_file_is_ignored_with_a_warning(kept, content):
    save(own(), kept)
    if isinstance(content, str):
        whole = json.loads(kept.read_text())
        change = {
            "far": lambda p: p.pop("far"), "negative": lambda p: p.update(call=-1.0),
            "products": lambda p: p["products"].update(runs=[1.0]), "nan": lambda p: p.update(near=float("nan")),
            "more": lambda p: p.update(unheard_of=1.0), "zero": lambda p: p.update(double=0),
            "dense": lambda p: p["products"].update(dense=[0, 0]), "huge": lambda p: p.update(call=10**400),
        }  # fmt: skip
        change[content](whole["prices"])
        content = json.dumps(whole).encode()
    kept.write_bytes(content)
    prices.cache_clear()
    with pytest.warns(RuntimeWarning, match=r"prices\.json is no list of prices.*calibrate.*shipped prices count"):
        assert prices() is shipped()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once is enough
        assert prices() is shipped()


@pytest.mark.parametrize("key", ["cpu", "threads", "vector_bytes", "package"])
def test_a_list_of_another_machine_or_version_is_ignored_silently(kept, key):
    mine = own()
    save(replace(mine, measured={**mine.measured, key: "another"}), kept)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert prices() is shipped()


def test_where_it_is_kept(monkeypatch, tmp_path):
    monkeypatch.delenv("SPARSEBP_PRICES")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert price_path() == tmp_path / "sparsebp" / "prices.json"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert price_path() == Path.home() / ".cache" / "sparsebp" / "prices.json"
    monkeypatch.setenv("SPARSEBP_PRICES", "")
    assert price_path() is None


def test_a_home_that_cannot_be_had_leaves_the_shipped_list(kept, monkeypatch):
    """A user without a home, as in a container, or with another's, which cannot be looked into."""

    def no_home():
        raise RuntimeError("Could not determine home directory.")

    def locked(path, **options):
        raise PermissionError(13, "Permission denied", str(path))

    save(own(), kept)
    monkeypatch.setattr(Path, "stat", locked)
    monkeypatch.setattr(os, "stat", locked)
    prices.cache_clear()
    assert prices() is shipped()
    monkeypatch.undo()
    monkeypatch.delenv("SPARSEBP_PRICES", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    prices.cache_clear()
    assert price_path() is None and prices() is shipped()


def test_what_is_in_the_way_of_the_file_is_said(tmp_path):
    (tmp_path / "prices.json").mkdir()
    with pytest.raises(OutputError, match=r"prices\.json"):
        save(own(), tmp_path / "prices.json")
    with pytest.raises(FileFormatError, match="no list of prices"):
        load(tmp_path / "prices.json", calibrated=True)


def test_the_list_has_a_price_for_all_that_is_estimated():
    assert (
        {strategy.name for strategy in (*OF_KINDS, *OF_KINDS_AND_STRUCTURE, *OF_STRUCTURE)} | {"matvec"}
        == set(STRATEGIES)
        == set(shipped().products)
    )
    assert set(GATES) == set(CELLS) == set(shipped().recurrent)
    assert parse(json.loads(SHIPPED.read_text())["prices"], calibrated=False, measured={}).to_json()
    assert {"cpu", "threads", "vector_bytes", "package", "date"} <= shipped().measured.keys()
    assert machine_facts.this_machine()["vector_bytes"] in (32, 64)


@given(
    cell=st.sampled_from(CELLS), T=st.integers(1, 30_000), B=st.integers(1, 64), H=st.integers(1, 128),
    more=st.integers(1, 50), itemsize=st.sampled_from([np.float32, np.float64]),
)  # fmt: skip
def test_estimates_of_a_backward_grow_with_every_size(cell, T, B, H, more, itemsize):
    def said(T, B, H, **stack):
        return choose_recurrent_backward(cell, T, B, H, itemsize, workers=1, **stack).estimates["bp"]

    one = said(T, B, H)
    assert one < said(T + more, B, H)
    assert one < said(T, B + more, H)
    width = machine_facts.this_machine()["vector_bytes"] // np.dtype(itemsize).itemsize  # not full: can take longer
    assert one < said(T, B, -(-H // width) * width + more)
    assert one < said(T, B, H, input_size=H + more) < said(T, B, H, input_size=H + more, layers=2)
    assert 2 * one == pytest.approx(said(T, B, H, directions=2))


@given(strategy=st.sampled_from(STRATEGIES), products=st.integers(1, 10**9), moved=st.integers(1, 10**9))
def test_estimates_of_a_product_grow_with_the_work(strategy, products, moved):
    one = product.seconds(strategy, products, moved)
    assert 0 < one < product.seconds(strategy, products, 2 * moved)
    assert one <= product.seconds(strategy, 2 * products, moved)
    assert product.seconds(strategy, products, moved, threads=2) < one
    assert product.seconds(strategy, products, moved, batch=2) <= product.seconds(strategy, products, moved, batch=64)


def test_what_is_said_is_the_whole_backward():
    reason = choose_recurrent_backward("gru", 100, 16, 20, workers=1).reason
    assert "for the whole backward, states and weights;" in reason
    stacked = choose_recurrent_backward("gru", 100, 16, 20, workers=1, layers=3, directions=2).reason
    assert "of 6 runs over time" in stacked


def test_threads_share_large_products_from_where_the_layers_do():
    assert SHARED_PRODUCT == LONG


def test_a_calibration_measures_every_price(monkeypatch):
    """The whole way, with times that mean nothing: what comes out can be read back."""
    from benchmarks import calibrate as module

    monkeypatch.setattr(module, "copy_bandwidth", lambda threads: 1e10 * threads)
    monkeypatch.setattr(module, "call_seconds", lambda run, *rest, **options: [run(), 1e-3][1:])
    monkeypatch.setattr(module, "_HIDDEN", (8, 20))
    monkeypatch.setattr(module, "_SHAPES", ((5, 1), (10, 1), (10, 5), (40, 5)))
    heard = []
    found = module.calibrate(heard.append)
    assert {"memory", "sparse products", "layers", "chunked scans"} <= set(heard)
    again = parse(json.loads(json.dumps(found.to_json())), calibrated=True, measured=found.measured)
    assert again.to_json() == found.to_json() and found.calibrated
    assert all(min(pair) > 0 for pair in found.products.values())
    assert {plan.strategy for plan in module._plans()} == set(STRATEGIES) - {"identity", "matvec"}
