"""Loops of the compiled tape run by Python: the same text, without seconds of compilation for each function."""

import pytest

from jacobians.operations import in_python
from sparsebp.jacobians.tape import loops


@pytest.fixture
def loops_in_python(monkeypatch):
    monkeypatch.setattr(loops, "_compiled", {})
    monkeypatch.setattr(loops, "translated", in_python)
    monkeypatch.setattr(loops, "GRAIN", loops.GRAIN)  # which tests may set
