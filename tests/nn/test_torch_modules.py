"""PyTorch's own cases for its modules (``common_modules.module_db``), with ours in their place, counted by module."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from modules_of_torch import INFOS, counts

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "torch-parity.md"
ROW = re.compile(r"^\| `(\w+)` \| (\d+) \| (\d+) \|$", re.MULTILINE)


@pytest.fixture(autouse=True)
def quiet():
    """The mean of what is all ignored is 0 / 0 in PyTorch too."""
    with np.errstate(all="ignore"):
        yield


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", INFOS)
def test_cases(name):
    found, lines = counts(name)
    assert not lines, "\n".join(lines)
    row = (name, str(found["right"]), str(found["refuses as well"]))
    assert row in ROW.findall(PAGE.read_text()), f"{PAGE.name} lacks: | `{row[0]}` | {row[1]} | {row[2]} |"


def test_the_page_lists_no_other_modules():
    assert {module for module, _, _ in ROW.findall(PAGE.read_text())} == set(INFOS)
