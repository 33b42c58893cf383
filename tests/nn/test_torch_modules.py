"""PyTorch's own cases for its modules (``common_modules.module_db``), with ours in their place, counted by module."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from modules_of_torch import counts, infos
from torch_cases import lists_are_counted, version_of_lists

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "torch-parity.md"
ROWS = re.findall(r"^\| `(\w+)` \| (\d+) \| (\d+) \|$", PAGE.read_text(), re.MULTILINE)


@pytest.fixture(autouse=True)
def quiet():
    """The mean of what is all ignored is 0 / 0 in PyTorch too."""
    with np.errstate(all="ignore"):
        yield


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_cases(row):
    found, lines = counts(row[0])
    assert not lines, "\n".join(lines)
    got = str(found["right"]), str(found["refuses as well"])
    assert not lists_are_counted(PAGE) or row[1:] == got, f"{PAGE.name} has other counts"


def test_the_page_counts_the_lists_of_the_version_that_is_developed_with():
    pinned = re.search(r'"torch==(\d+\.\d+)\.\d+"', (PAGE.parents[2] / "pyproject.toml").read_text())
    assert pinned
    assert version_of_lists(PAGE) == pinned[1]


def test_the_page_lists_all_modules():
    lacking = infos().keys() - {row[0] for row in ROWS}
    assert not lacking, "\n".join(f"| `{name}` | {counts(name)[0]} |" for name in sorted(lacking))
    assert len(ROWS) == len(infos())
