import importlib.util
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny():
    """The module tiny.py of this folder: a model, a loss and an optimizer in plain NumPy."""
    spec = importlib.util.spec_from_file_location("sparsebp_tests_tiny", Path(__file__).with_name("tiny.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
