"""Machine code in wheels: a second machine compiles nothing; what differs or is damaged is compiled as always."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from sparsebp.kernels.host.engine import shipped

pytestmark = pytest.mark.skipif(shipped.level() is None, reason="no level of x86-64 that wheels are made for")

MAKE = """
    shipped.recording = shipped.Store(shipped.FOLDER / shipped.level())
    run()
    shipped.recording.write()
"""
USE = """
    from numba.core import event
    events = event.RecordingListener()
    event.register("numba:compile", events)
    run()
    print(len(events.buffer))
"""


@pytest.fixture
def process(tmp_path):
    """Run `code` in a process whose Numba has compiled nothing; `run` multiplies by a CSR matrix and prints."""

    def call(code, cache):
        script = f"""
            import pathlib, numpy as np
            from sparsebp.kernels.host.engine import shipped
            shipped.FOLDER = pathlib.Path({str(tmp_path / "shipped")!r})
            from sparsebp import kernels
            def run():
                indptr, indices, x = np.array([0, 2, 2, 3]), np.array([0, 1, 1]), np.array([[2.0], [3.0]])
                out = np.empty((3, 1))
                kernels.get(np).csr_matvec(indptr, indices, np.array([[1.0], [10.0], [100.0]]), x, out)
                print(out.tolist())
        """
        environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / cache)}
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script) + textwrap.dedent(code)],
            env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return call


def test_what_was_recorded_is_not_compiled_again_and_damage_is(process, tmp_path):
    product = process(MAKE, "maker")
    assert process(USE, "user") == [*product, "0"]
    folder = tmp_path / "shipped" / shipped.level()
    index, blob = (folder / "index.json").read_text(), (folder / "kernels.bin").read_bytes()

    (folder / "kernels.bin").write_bytes(blob[: len(blob) // 2])
    found = process(USE, "cut")
    assert found[0] == product[0]
    assert int(found[1]) > 0

    head = json.loads(index)
    for part in ("sources", "numba", "python"):
        (folder / "index.json").write_text(json.dumps({**head, "made_for": {**head["made_for"], part: "other"}}))
        assert shipped.Store(folder).open() is None
    odd = [
        json.dumps({**head, "kernels": kernels}) for kernels in (None, [1], {"f": None}, {"f": [0, 1]}, {"f": "abc"})
    ]
    for garbage in ("", "[]", "{}", '{"made_for": 3}', "\x00", "[" * 100_000, *odd):
        (folder / "index.json").write_text(garbage)
        assert shipped.Store(folder).open() is None


JOB = "dense products, float32"
IN_A_WHEEL = f"""
    import sparsebp
    from sparsebp import warm_up
    from numba.core import event
    events = event.RecordingListener()
    event.register("numba:compile", events)
    dict(warm_up.jobs())[{JOB!r}]()
    print(sparsebp.__file__, len(events.buffer))
"""


def test_a_wheel_with_kernels_compiles_nothing_elsewhere(tmp_path):
    """As `make release` builds it, with the kernels of one job."""
    pytest.importorskip("hatchling")
    root, source = Path(__file__).parents[2], tmp_path / "source"
    for name in ("sparsebp", "tools"):
        shutil.copytree(root / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "shipped"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(root / name, source)

    def run(*command, folder, **environment):
        settings = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / folder), **environment}
        return subprocess.run(
            [sys.executable, *command], cwd=tmp_path, env=settings, capture_output=True, text=True, check=True
        ).stdout

    run(source / "tools" / "ship_kernels.py", JOB, folder="maker", PYTHONPATH=str(source))
    pip, place = ("-m", "pip", "-q", "--disable-pip-version-check"), tmp_path / "elsewhere"
    run(*pip, "wheel", source, "--no-deps", "--no-build-isolation", "-w", tmp_path, folder="maker")
    (wheel,) = tmp_path.glob("*.whl")
    run(*pip, "install", wheel, "--no-deps", "--no-compile", "--target", place, folder="maker")
    said = run("-c", textwrap.dedent(IN_A_WHEEL), folder="user", PYTHONPATH=str(place)).split()
    assert said == [str(place / "sparsebp" / "__init__.py"), "0"]


def test_a_wheel_for_another_processor_has_no_machine_code(monkeypatch, tmp_path, capsys):
    spec = importlib.util.spec_from_file_location("tool", Path(__file__).parents[2] / "tools" / "ship_kernels.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    monkeypatch.setattr(shipped, "FOLDER", tmp_path / "shipped")
    monkeypatch.setattr("llvmlite.binding.get_host_cpu_features", dict)
    assert tool.main([]) == 0
    assert "No machine code" in capsys.readouterr().out


HOST = dict.fromkeys(shipped.LEVELS["x86-64-v4"], True)


@pytest.mark.parametrize(("told", "wanted"), [
    ({}, "x86-64-v4"), ({"CPU_NAME": "sapphirerapids"}, "x86-64-v4"), ({"CPU_NAME": "x86-64-v3"}, "x86-64-v3"),
    ({"ENABLE_AVX": 0}, None), ({"CPU_NAME": "generic", "CPU_FEATURES": ""}, None),
    ({"CPU_FEATURES": ",".join(f"+{name}" for name in shipped.LEVELS["x86-64-v3"]) + ",-avx512f"}, "x86-64-v3"),
])  # fmt: skip
def test_the_level_is_that_of_the_features_that_numba_goes_by(told, wanted, monkeypatch):
    monkeypatch.setattr("llvmlite.binding.get_host_cpu_features", lambda: HOST)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    for name, value in ({"CPU_NAME": None, "CPU_FEATURES": None, "ENABLE_AVX": 1} | told).items():
        monkeypatch.setattr(shipped.config, name, value)
    assert shipped.level() == wanted
