"""Shared fixtures: the backends that kernel tests run on, and the number of hypothesis examples on each."""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

import strict_cupy
from backends import BACKENDS, Backend, make_backend
from sparsebp.core import threads, timing
from sticky import pytest_runtest_logreport, pytest_runtest_teardown  # noqa: F401  (hooks)

# Of the test's max_examples; everything else runs them all.
SHARE_OF_EXAMPLES = {"emulated": 0.2, "gpu": 0.15 if strict_cupy.installed() else 0.5}

settings.register_profile(
    "default",
    deadline=None,  # tests never measure time
    max_examples=30,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.differing_executors],
)
settings.register_profile(
    "ci", parent=settings.get_profile("default"), max_examples=20, derandomize=True, database=None
)
settings.register_profile("thorough", parent=settings.get_profile("default"), max_examples=300)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "default"))
# Some hundred processes are started, whose imports take three times as long where compiled modules are not kept.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
gc.disable()  # until all is collected: millions of objects, none of them garbage
_TAKES_BACKEND = re.compile(r"def \w+\([^)]*\bbackend\b")  # a test or a fixture, which then runs on the GPU's too


@pytest.fixture(scope="session", params=[pytest.param(name, marks=marks) for name, marks in BACKENDS.items()])
def backend(request: pytest.FixtureRequest) -> Backend:
    """Each backend in turn; one session-wide instance, so that kernels are compiled once."""
    return make_backend(request.param)


# What a shell starts by "&" ignores Ctrl-C, and so would all processes that the tests start and interrupt.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def short_rests() -> None:
    """Nobody looks at seconds here, so clocks need not wait until all threads are idle."""
    timing.HostClock.rest, timing._MOST_REST, timing._WINDOW = 0.0, 1e-3, 1e-4


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    """No test leaves the number of threads to the next one; ``--threads`` of a command sets it for the process."""
    before = threads.get_threads()
    yield
    if threads.get_threads() != before:
        threads.set_threads(before)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Small products gain nothing from threads, and lose much where tests run side by side."""
    before = threads.get_threads()
    threads.set_threads(1)
    yield
    threads.set_threads(before)


@pytest.fixture(scope="module")
def jax_compiles_quickly() -> Iterator[None]:
    """Compiling takes most of the time of small functions of JAX, in this process and in those that it starts."""
    from jax import config

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
        config.update("jax_disable_most_optimizations", True)
        yield
        config.update("jax_disable_most_optimizations", False)


@pytest.fixture(autouse=True)
def torch_draws_alike() -> None:
    """What a test draws from PyTorch's generator does not depend on the tests that ran before it in the process."""
    if "torch" in sys.modules:  # `torch.manual_seed` keeps a trace of its callers for each GPU that may come
        sys.modules["torch"].default_generator.manual_seed(0)


def pytest_collection_finish() -> None:
    """Let no later search for garbage look at modules and tests, which stay to the end."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Draw fewer hypothesis examples where one example is slow (emulation), through the test's own settings."""
    name = getattr(item, "callspec", None) and item.callspec.params.get("backend")
    share = SHARE_OF_EXAMPLES.get(str(name).split("-")[0])
    test: Any = getattr(item, "obj", None)
    test = getattr(test, "__func__", test)  # attributes live on the function, not on the bound method
    own: settings | None = getattr(test, "_hypothesis_internal_use_settings", None)
    if share is None or own is None:
        return (yield)
    test._hypothesis_internal_use_settings = settings(own, max_examples=max(3, int(own.max_examples * share)))
    try:
        return (yield)
    finally:
        test._hypothesis_internal_use_settings = own


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With ``-m gpu`` import only the files that can hold such tests.

    So a machine with a GPU needs just what those tests need, not every package of the development set.
    """
    if config.option.markexpr != "gpu" or collection_path.suffix != ".py":
        return None
    text = collection_path.read_text(encoding="utf-8")
    return None if "mark.gpu" in text or _TAKES_BACKEND.search(text) else True


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the registers of the CUDA kernels, which ``device/test_nvrtc.py`` records: the most over all defines."""
    most: dict[tuple[str, str], dict[str, tuple[int, str]]] = {}
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, []):
            for key, value in getattr(report, "user_properties", []):
                if key != "registers":
                    continue
                file, kernel, architecture, registers, defines = value
                row = most.setdefault((file, kernel), {})
                row[architecture] = max(row.get(architecture, (0, "")), (registers, defines))
    if not most:
        return
    terminalreporter.section("registers a thread, the most over all defines")
    for (file, kernel), row in sorted(most.items()):
        figures = "  ".join(f"{name} {row[name][0]:3d}" for name in sorted(row))
        terminalreporter.line(f"{file:12s} {kernel:22s} {figures}  ({max(row.values())[1]})")
