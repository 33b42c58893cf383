"""A few cases of every target, and the harness on targets that crash, hang and lie."""

from __future__ import annotations

import numpy as np
import pytest

from fuzz.case import BAD, Wrong, run_case, same, target_of
from fuzz.harness import run_cases, summary
from fuzz.targets import TARGETS
from fuzz.toys import TOYS
from sparsebp.core.errors import SparseBPError

CASES = 40


@pytest.mark.parametrize("name", TARGETS)
def test_no_crash_no_raw_error_nothing_wrong(name):
    first = list(TARGETS).index(name)
    for number in range(first, CASES * len(TARGETS), len(TARGETS)):
        outcome = run_case(TARGETS, 0, number)
        assert outcome.target == name
        assert outcome.kind not in BAD, f"python tests/fuzz/run.py --seed 0 --number {number}\n{outcome.detail}"


def nameless(rng):
    raise SparseBPError("no class of its own")


def test_the_harness_attributes_what_happens_to_its_case():
    outcomes = list(run_cases("fuzz.toys:TOYS", 3, range(2 * len(TOYS)), workers=2, limit=2.0))
    assert {outcome.number for outcome in outcomes} == set(range(2 * len(TOYS)))
    assert len(outcomes) == 2 * len(TOYS)
    for outcome in outcomes:
        assert outcome.kind == outcome.target == target_of(TOYS, outcome.number)
    assert summary(outcomes) == {(name, name): 2 for name in TOYS}
    details = {outcome.kind: outcome.detail for outcome in outcomes}
    assert "KeyError: 'raw'" in details["raw"] and "2 of 2 differ" in details["wrong"]
    assert "-6" in details["crash"] and "no end after 2 s" in details["hang"]


def test_a_case_is_a_function_of_seed_and_number():
    drawn: list[float] = []
    table = {"draws": lambda rng: drawn.append(rng.random())}
    for seed, number in ((0, 1), (0, 2), (1, 1), (0, 1)):
        run_case(table, seed, number)
    assert drawn[0] == drawn[3] and len(set(drawn)) == 3


def test_an_error_needs_a_class():
    assert run_case({"x": nameless}, 0, 0).kind == "wrong"


def test_what_counts_as_the_same():
    for found, wanted in (
        (np.zeros(2), np.zeros(3)),
        (np.zeros(2, "f4"), np.zeros(2)),
        ([0.0], np.zeros(1)),
        (np.array([np.nan]), np.zeros(1)),
    ):
        with pytest.raises(Wrong):
            same("x", found, wanted)
        with pytest.raises(Wrong):
            same("x", found, wanted, exact=True)
    same("x", np.array([np.nan, 1]), np.array([np.nan, 1 + 1e-15]))
    with pytest.raises(Wrong):
        same("x", np.array([1.0]), np.array([1 + 1e-15]), exact=True)
