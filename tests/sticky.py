"""A sticky CUDA error, such as an illegal address, ends its process and not all later tests.

After each gpu test the device is waited for. If that fails, and again, the context is broken for good: the test that
did it has an error, and an xdist worker ends once its report is on its way; xdist puts another one in its place.
Without xdist the session stops there. On a GPU: ``pytest -m gpu -n 6 --dist worksteal``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

EXIT_STATUS = 70
"""Of a worker that ends itself: EX_SOFTWARE."""
_broken: list[str] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Look at the device after a gpu test."""
    try:
        return (yield)
    finally:
        status = None if item.get_closest_marker("gpu") is None else _status()
        if status is not None:
            _broken.append(status)
            item.session.shouldfail = f"the CUDA context is broken since {item.nodeid}: {status}"
            raise RuntimeError(f"{item.nodeid} has broken the CUDA context: {status}")


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """End a worker whose device is broken, behind the hook that sends the report of the test that did it."""
    if _broken and report.when == "teardown" and "PYTEST_XDIST_WORKER" in os.environ:
        os._exit(EXIT_STATUS)


def _status() -> str | None:
    """Return what CUDA says, twice, when it is waited for; None if all is well or CuPy has not been used."""
    cupy = sys.modules.get("cupy")
    if cupy is None:
        return None
    said = []
    for _ in range(2):
        try:
            cupy.cuda.Device().synchronize()
        except cupy.cuda.runtime.CUDARuntimeError as error:
            said.append(str(error))
    return said[1] if len(said) == 2 else None
