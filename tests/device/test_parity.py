"""Host and device kernels have one interface: the same names, arguments, results and errors."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cuda_on_cpu.loader import ExecutorLoader, NoGpu
from cuda_on_cpu.memory import CheckedNumpy
from device.kernel_arguments import KERNELS, VARIANTS, Maker, arrays_of, copies, public
from nvrtc.sources import SOURCES, kernels_of
from sparsebp import kernels
from sparsebp.core.check import UpdateRule
from sparsebp.core.errors import SparseBPError
from sparsebp.kernels.checks import UPDATE_OPTIONS
from sparsebp.kernels.device import DeviceKernels
from sparsebp.kernels.host import HostKernels
from sparsebp.kernels.spec import Kernels
from strategies import tolerance

IMPLEMENTATIONS = (HostKernels, DeviceKernels)


@pytest.fixture(scope="module")
def device() -> Kernels:
    return Kernels(DeviceKernels(CheckedNumpy(), ExecutorLoader()))


# ---- names and signatures ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", IMPLEMENTATIONS)
def test_same_names(cls: type) -> None:
    assert set(public(cls)) == set(KERNELS)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("cls", IMPLEMENTATIONS)
def test_same_signature(cls: type, name: str) -> None:
    """Names, kinds and their order; optimizers are given what checks all arrays, too."""
    own = list(inspect.signature(getattr(cls, name)).parameters)
    assert own in (parameters := list(inspect.signature(KERNELS[name]).parameters), [*parameters, "check"])


def test_same_questions() -> None:
    """What the interface asks an implementation about sizes, host and device answer, with the same arguments."""
    host, device = (
        {name: list(inspect.signature(member).parameters) for name, member in public(cls, kernels=False).items()}
        for cls in IMPLEMENTATIONS
    )
    assert host == device
    assert {"projected_inputs", "sums_for"} == set(host)


@pytest.mark.parametrize("itemsize", [4, 8])
@pytest.mark.parametrize("gates", [1, 3, 4])
def test_answers_are_of_one_kind(gates: int, itemsize: int, device: Kernels) -> None:
    """A backward sums weight gradients only where the forward projects the input, and rather in fewer chunks."""
    for implementation in (kernels.get(np), device):
        for hidden in (1, 5, 37, 2000):
            most = implementation.projected_inputs(gates, hidden, itemsize)
            assert isinstance(most, int) and most >= 0
            for features in (1, 8, 9, 500):
                inside = [
                    implementation.sums_inside(gates, gates, (steps, 3, hidden), features, itemsize, chunks)
                    for steps, chunks in ((1000, 1), (1000, 1000))
                ]
                assert all(isinstance(answer, bool) for answer in inside)
                assert inside[0] >= inside[1]  # every chunk leaves its sums
                assert features <= most or not inside[0]


# ---- results -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KERNELS)
def test_same_results(name: str, device: Kernels) -> None:
    """Every kernel, in every variant of a launch, agrees with the host; in float32, see `test_on_the_device`."""
    in_one = "chunks" in inspect.signature(KERNELS[name]).parameters
    for variant in [*VARIANTS, *({**variant, "chunks": 1} for variant in VARIANTS if in_one)]:
        on_host = Maker(np.float64, **variant).arguments(name)
        on_device = copies(on_host)
        assert getattr(kernels.get(np), name)(*on_host.values()) is None
        assert getattr(device, name)(*on_device.values()) is None
        got = arrays_of(on_device)
        for argument, value in arrays_of(on_host).items():
            np.testing.assert_allclose(
                got[argument], value, **tolerance(np.dtype(np.float64), 4), err_msg=f"{argument}, {variant}"
            )


@pytest.mark.parametrize("optional", [True, False])
@pytest.mark.parametrize("rule", UPDATE_OPTIONS)
def test_same_results_of_every_update_rule(rule: UpdateRule, optional: bool, device: Kernels) -> None:
    on_host = Maker(np.float64).update(rule, optional)
    on_device = copies(on_host)
    kernels.get(np).optimizer_update(*on_host.values())
    device.optimizer_update(*on_device.values())
    got = arrays_of(on_device)
    for argument, value in arrays_of(on_host).items():
        np.testing.assert_allclose(got[argument], value, **tolerance(np.dtype(np.float64)), err_msg=argument)


def test_every_cuda_kernel_is_executed() -> None:
    """No kernel of the sources is left out by the launchers."""
    loader = ExecutorLoader()
    device = Kernels(DeviceKernels(CheckedNumpy(), loader))
    for name in KERNELS:
        for variant in VARIANTS:
            getattr(device, name)(*Maker(np.float32, **variant).arguments(name).values())
    for rule in UPDATE_OPTIONS:
        device.optimizer_update(*Maker(np.float32).update(rule).values())
    assert loader.launched == {(file, kernel) for file in SOURCES for kernel in kernels_of(file)}


def test_every_kernel_has_a_test_on_all_backends() -> None:
    """Some test in ``tests/kernels`` that takes the fixture ``backend`` calls it, itself or through a helper."""
    called: set[str] = set()
    for path in (Path(__file__).parents[1] / "kernels").glob("test_*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
        if any("backend" in [a.arg for a in f.args.args] and f.name.startswith("test") for f in functions):
            called |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
            called |= {str(node.value) for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    # test_recurrences.py runs each part of every cell
    wanted = {name.partition("_")[2] if name.startswith(("rnn", "gru", "lstm")) else name for name in KERNELS}
    assert not wanted - called, "tests/kernels never calls these"


# ---- errors --------------------------------------------------------------------------------------------------------


def errors_of(implementation: Any, name: str, arguments: dict[str, Any]) -> str:
    with pytest.raises(SparseBPError) as caught:
        getattr(implementation, name)(*arguments.values())
    return f"{type(caught.value).__name__}: {caught.value}"


WRONG = [(name, {"nonlinearity": "sigmoid"}) for name in KERNELS if name.startswith("rnn")]
WRONG += [(f"{cell}_backward", {"chunks": chunks}) for cell in ("rnn", "gru", "lstm") for chunks in (0, -1, 8)]


@pytest.mark.parametrize(("name", "wrong"), WRONG)
def test_same_error_for_a_wrong_option(name: str, wrong: dict[str, Any]) -> None:
    arguments = Maker(np.float32).arguments(name) | wrong
    device = errors_of(Kernels(DeviceKernels(CheckedNumpy(), NoGpu())), name, arguments)
    assert device == errors_of(kernels.get(np), name, arguments)
    assert device.startswith("OptionError")
