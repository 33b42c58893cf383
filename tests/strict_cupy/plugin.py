"""A pytest plugin: gpu tests run on the stand-in. ``pytest -p strict_cupy.plugin -m gpu``."""

from __future__ import annotations

import pytest

from strict_cupy import install
from strict_cupy.device import DEVICE

install()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Forget what a test has left undone."""
    DEVICE.forget()
