"""What travels to a GPU machine in ``.cache/gpu``, what runs keep there in ``runs/cache``, and what they bring back.

``.cache/gpu`` is only read: whoever carries it replaces the whole folder with every call. It has machine code of all
kernels, so that nothing is compiled there, and results of the host's kernels, so that Numba compiles nothing before
kernels are compared.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from sparsebp.kernels.device.launch import MACHINE_CODE

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache" / "gpu"
KEPT = ROOT / "runs" / "cache"
ARCHIVE = "machine-code.tar.gz"
REFERENCES = CACHE / "references.npz"
MOST_ARCHIVED = 15 << 20
"""Bytes of an archive that is worth its way."""
CAPABILITY = "90"
"""Of an H100 and an H200."""
NVRTC = "13.0.88"
"""The version of NVRTC whose machine code every driver of CUDA 13 loads."""


def kept() -> Path:
    """Return the folder that caches are written to: `KEPT`, or a temporary one where that is read-only."""
    try:
        KEPT.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=KEPT):
            return KEPT
    except OSError:
        folder = Path(tempfile.gettempdir()) / f"sparsebp-cache-{os.getuid()}"
        folder.mkdir(exist_ok=True)
        return folder


def environment() -> dict[str, str]:
    """Return the environment of every stage: where caches are, where sources are, and that nothing waits in buffers."""
    caches = kept()
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {
        "CUPY_CACHE_DIR": str(caches / "cupy"), "NUMBA_CACHE_DIR": str(caches / "numba"),
        MACHINE_CODE: str(caches / "machine-code"), "PYTHONPATH": path, "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1", "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }  # fmt: skip


def unpack() -> str:
    """Take the machine code that was carried here out of its archive; say how much, and what failed."""
    folder, archive, wrong = kept() / "machine-code", CACHE / ARCHIVE, ""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        if archive.exists():
            with tempfile.TemporaryDirectory(dir=kept()) as half, tarfile.open(archive) as packed:
                for member in packed:
                    packed.extract(member, half, filter="data")
                    (Path(half) / member.name).replace(folder / member.name)  # whole, where launches look for it
    except Exception as error:  # then it is compiled anew
        wrong = f"; {archive.name} cannot be unpacked: {type(error).__name__}: {error}"
    return f"machine code of {len([*folder.glob('*.cubin')])} sets of defines{wrong}"


def missing() -> list[str]:
    """Return the sources with their options that launches asked for and the machine code lacks, each once."""
    path = kept() / "machine-code" / "missing.txt"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return sorted({line.partition(" ")[2] for line in lines})


def parcel(folder: Path, archive: Path) -> str:
    """Pack all results of a folder into one archive of at most `MOST_ARCHIVED` bytes, and say so.

    What makes it too large is left out, the largest file first.
    """
    files = sorted((file for file in folder.iterdir() if file.is_file()), key=lambda file: file.stat().st_size)
    left: list[str] = []
    archive.parent.mkdir(parents=True, exist_ok=True)
    half = archive.with_suffix(f".{os.getpid()}")
    while True:
        with tarfile.open(half, "w:gz", compresslevel=4) as packed:
            for file in files:
                packed.add(file, file.name)
        if half.stat().st_size <= MOST_ARCHIVED or not files:
            break
        left.append(files.pop().name)
    half.replace(archive)
    return f"{archive.name}: {len(files)} files" + (f", without {', '.join(left)}: too large" if left else "")


def sanitizer() -> Path | None:
    """Return compute-sanitizer, on the path or of the CUDA toolkit, if any."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    folders = [str(Path(home) / "bin") for home in homes if home]
    found = shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ.get("PATH", ""), *folders]))
    return Path(found) if found else None


def prepare() -> int:
    """Make all that travels; return the exit status."""
    from gpu_runs.machine_code import compile_for, sets

    CACHE.mkdir(parents=True, exist_ok=True)
    folder, failed = kept() / "machine-code", 0
    wanted = sets()
    for line in compile_for(CAPABILITY, folder, _compiler(), wanted):
        failed += ": error: " in line
        print(line, flush=True)
    with tarfile.open(CACHE / ARCHIVE, "w:gz") as packed:
        for path in sorted(folder.glob("*.cubin")):
            packed.add(path, path.name)
    there = environment() | {"NUMBA_CACHE_DIR": os.environ.get("NUMBA_CACHE_DIR", "")}  # this machine's own is warm
    subprocess.run([sys.executable, "-m", "gpu_runs.references"], env=there, cwd=ROOT, check=True)
    for path in sorted(CACHE.iterdir()):
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size} bytes")
    print(f"{len(wanted) - failed} of {len(wanted)} sets of defines are compiled")
    return int(failed > 0)


def _compiler() -> Path:
    """Return the library of the NVRTC that machine code is made with, fetched the first time."""
    folder = kept() / f"nvrtc-{NVRTC}"
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=kept()) as half:
            fetch = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", half]
            subprocess.run([*fetch, f"nvidia-cuda-nvrtc=={NVRTC}"], check=True)
            (wheel,) = Path(half).glob("*.whl")
            with zipfile.ZipFile(wheel) as packed:
                packed.extractall(Path(half) / "whole")
            (Path(half) / "whole").rename(folder)
    return next(folder.glob("nvidia/*/lib/libnvrtc.so.*"))


def sources() -> str:
    """Return a digest of what results of the host's kernels depend on."""
    files = [*sorted((ROOT / "sparsebp" / "kernels").rglob("*.py")), ROOT / "tests/device/kernel_arguments.py"]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:20]
