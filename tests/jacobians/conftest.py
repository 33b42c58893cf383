"""Loops of the compiled tape run by Python: the same text, without seconds of compilation for each function."""

from types import ModuleType

import numpy as np
import pytest

from sparsebp.jacobians.tape import loops


@pytest.fixture
def loops_in_python(monkeypatch):
    def run(text):
        module = ModuleType("loop")
        function = loops.as_python(text, module)
        module.in_parts = lambda body, team, parts, args: [body(part, *args) for part in range(parts)]
        return np.errstate(all="ignore")(function)

    monkeypatch.setattr(loops, "_compiled", {})
    monkeypatch.setattr(loops, "translated", run)
    monkeypatch.setattr(loops, "GRAIN", loops.GRAIN)  # which tests may set
