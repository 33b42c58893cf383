"""Every CUDA source compiles with CuPy's options and every set of defines, and no kernel spills registers.

All sets for one architecture; for the others every file and kernel, with the sets that need most registers: everything
for each would take a minute of CPU more. NVRTC needs no GPU. The most registers that each kernel takes are printed in
the test run's summary (see conftest.py).
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cuda_on_cpu.loader import NotingLoader
from device.kernel_arguments import KERNELS, Maker
from nvrtc.compile import kept_usage, log_of, usage, usage_key, usage_of
from nvrtc.sources import SOURCES, kernels_of
from sparsebp.kernels.device import DeviceKernels, RawModuleLoader
from sparsebp.kernels.device.launch import MACHINE_CODE, Defines, machine_code, source

ARCHITECTURE = "sm_90"
OTHERS = ("sm_80", "sm_100")


def cases() -> list[tuple[str, Defines, str]]:
    everything = [(file, defines) for file, sets in SOURCES.items() for defines in sets]
    demanding = [(file, defines) for file, defines in everything if is_demanding(defines, SOURCES[file])]
    every = [(file, defines, ARCHITECTURE) for file, defines in everything]
    return every + [(file, defines, other) for other in OTHERS for file, defines in demanding]


def is_demanding(defines: Defines, sets: list[Defines]) -> bool:
    """Return whether the set is the largest of its kind in the file."""
    sizes = ("HIDDEN", "ROWS", "INPUTS")

    def kind(one: Defines) -> tuple[object, ...]:
        return "HIDDEN" in one, "ROWS" in one, *sorted(item for item in one.items() if item[0] not in sizes)

    def size(one: Defines) -> list[int]:
        return [int(one.get(name, 0)) for name in sizes]

    if defines.get("RELU") == 1:  # a line's difference
        return False
    return size(defines) == max(size(one) for one in sets if kind(one) == kind(defines))


def case_id(case: tuple[str, Defines, str]) -> str:
    file, defines, architecture = case
    names = (f"{name}={value}" for name, value in defines.items())
    return "-".join([file, *names, architecture]).replace(" ", "_")


@pytest.mark.parametrize("case", cases(), ids=case_id)
def test_compiles_without_spills(
    case: tuple[str, Defines, str], record_property: Callable[[str, object], None]
) -> None:
    file, defines, architecture = case
    kernels = usage_of(file, defines, architecture)
    assert kernels, f"{file} defines no kernel with {defines}"
    for kernel in kernels:
        named = " ".join(f"{name}={value}" for name, value in defines.items())
        record_property("registers", [file, kernel.kernel, architecture, kernel.registers, named])
        assert kernel.spill_stores == kernel.spill_loads == 0, f"{kernel} with {defines} on {architecture}"


@pytest.mark.parametrize("case", [("pointwise.cu", ARCHITECTURE), ("scan.cu", OTHERS[0]), ("csr.cu", OTHERS[1])])
def test_what_is_kept_of_a_compilation_is_what_the_compiler_says(case: tuple[str, str]) -> None:
    file, architecture = case
    defines = next(defines for name, defines, target in cases() if (name, target) == case)
    kept = kept_usage().get(usage_key(file, defines, architecture))
    if kept is None:
        pytest.skip("another version of NVRTC, or of the source: compiled by the tests above")
    assert [tuple(entry) for entry in kept] == usage(log_of(file, defines, architecture))


def test_every_file_is_listed() -> None:
    folder = resources.files("sparsebp.kernels.device") / "cuda"
    files = {entry.name for entry in folder.iterdir() if entry.name.endswith(".cu")}
    assert files == set(SOURCES)
    assert all(SOURCES.values()), "a file without a set of defines is never compiled"


@pytest.mark.parametrize("architecture", (ARCHITECTURE, *OTHERS))
@pytest.mark.parametrize("file", SOURCES)
def test_every_kernel_of_a_file_is_compiled(file: str, architecture: str) -> None:
    sets = [defines for name, defines, target in cases() if (name, target) == (file, architecture)]
    compiled = {kernel.kernel for defines in sets for kernel in usage_of(file, defines, architecture)}
    assert compiled == kernels_of(file) != set()


def test_launchers_ask_for_the_listed_sets_of_defines() -> None:
    asked: dict[str, set[frozenset[str]]] = defaultdict(set)
    kernels = DeviceKernels(np, NotingLoader(lambda file, defines, *_, **__: asked[file].add(frozenset(defines))))
    forms = {
        "forward": [(features, 1) for features in (None, 1, 3, 5, 8)],
        "backward": [(features, chunks) for features in (None, 1, 3, 8, 9) for chunks in (1, 4)],
    }
    recurrent = [name for name in KERNELS if name.startswith(("rnn", "gru", "lstm"))]
    for name, hidden, dtype in itertools.product(recurrent, (1, 5, 20, 32, 33, 64, 128, 200), (np.float32, np.float64)):
        for features, chunks in forms.get(name.partition("_")[2], [(None, 1)]):  # None: nothing is summed
            maker = Maker(dtype, 2, hidden, features is None, chunks)
            maker.features = features or 1
            arguments = maker.arguments(name)
            if features is None and "sums" in arguments:
                arguments["sums"] = None
            with np.errstate(all="ignore"):  # of what no kernel has written
                getattr(kernels, name)(*arguments.values())
    for file, sets in asked.items():
        listed = {frozenset(defines) for defines in SOURCES[file]}
        assert sets <= listed, f"{file}: the launchers ask for {sets - listed}, SOURCES lists {listed}"


def test_machine_code_is_taken_from_a_folder_and_what_it_lacks_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loaded(**options: Any) -> dict[str, Any]:
        return options

    device = SimpleNamespace(compute_capability="90")
    cuda = SimpleNamespace(Device=lambda: device, runtime=SimpleNamespace(getDevice=lambda: 0))
    cupy: Any = SimpleNamespace(RawModule=loaded, cuda=cuda)
    single, double = {"REAL": "float"}, {"REAL": "double"}
    path = tmp_path / machine_code("dense.cu", single, "90")
    path.write_bytes(b"code")
    monkeypatch.setenv(MACHINE_CODE, str(tmp_path))
    assert RawModuleLoader(cupy).get("dense.cu", single) == {"path": str(path), "backend": "nvrtc"}
    assert RawModuleLoader(cupy).get("dense.cu", double)["code"] == source("dense.cu")
    name = machine_code("dense.cu", double, "90")
    assert (tmp_path / "missing.txt").read_text() == f"{name} dense.cu -std=c++17 -DREAL=double\n"
    for folder in (tmp_path / "nowhere", path):  # where nothing can be noted
        monkeypatch.setenv(MACHINE_CODE, str(folder))
        assert "code" in RawModuleLoader(cupy).get("dense.cu", double)
    monkeypatch.setenv(MACHINE_CODE, str(tmp_path))
    device.compute_capability = "80"  # no kernel of one architecture runs on the other
    assert "code" in RawModuleLoader(cupy).get("dense.cu", single)
    monkeypatch.delenv(MACHINE_CODE)
    assert "code" in RawModuleLoader(cupy).get("dense.cu", single)
