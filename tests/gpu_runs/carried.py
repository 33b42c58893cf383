"""What travels to a GPU machine in ``.cache/``, what runs keep there in ``runs/cache/``, and what they bring back.

``.cache/`` is only read: whoever carries it replaces the whole folder with every call. It has an archive of CuPy's
machine code, as ``check`` leaves it; the wheel of compute-sanitizer; results of the host's kernels, for a machine on
which Numba does not work; and ``gpu-first.tar.gz``, to go on with the first run on another machine. Machine code that
is compiled there stays in ``runs/cache/``, which nobody carries.
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

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache"
KEPT = ROOT / "runs" / "cache"
ARCHIVE = "cupy-cache.tar.gz"
REFERENCES = CACHE / "references.npz"
MOST_ARCHIVED = 16 << 20
"""Bytes of an archive that is worth its way."""
_SANITIZER = "nvidia_cuda_sanitizer_api-*.whl"


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
        "CUPY_CACHE_DIR": str(caches / "cupy"), "NUMBA_CACHE_DIR": str(caches / "numba"), "PYTHONPATH": path,
        "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1",
    }  # fmt: skip


def unpack(archive: Path | None = None) -> str:
    """Take CuPy's machine code from an archive, by default one that was carried here; say how much, and what failed."""
    folder, archive, wrong = kept() / "cupy", archive or CACHE / ARCHIVE, ""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        if archive.exists():
            with tarfile.open(archive) as packed:
                packed.extractall(folder, filter="data")
    except Exception as error:  # then it is compiled anew
        wrong = f"; {archive.name} cannot be unpacked: {type(error).__name__}: {error}"
    return f"{len([*folder.iterdir()])} modules of an earlier run{wrong}"


def pack(out: Path) -> str:
    """Leave CuPy's machine code as an archive in `out`, and say so; or say why not."""
    folder, archive = kept() / "cupy", out / ARCHIVE
    files = sorted(folder.glob("*.cubin")) if folder.exists() else []
    with tarfile.open(archive, "w:gz") as packed:
        for file in files:
            packed.add(file, file.name)
    size = archive.stat().st_size
    if not files or size > MOST_ARCHIVED:
        archive.unlink()
        return f"no archive of {len(files)} modules" + (f": {size} bytes are too many" if files else "")
    return f"{archive.name}: {len(files)} modules, {size} bytes; put it into .cache/ for the next run"


def parcel(folder: Path, archive: Path) -> str:
    """Pack all results of a folder into one archive of at most `MOST_ARCHIVED` bytes, and say so.

    What makes it too large is left out, the largest file first, but for the machine code, which goes before all.
    """
    files = sorted((file for file in folder.iterdir() if file.is_file()), key=lambda file: file.stat().st_size)
    files.sort(key=lambda file: file.name == ARCHIVE)
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
    """Return compute-sanitizer: on the path, of the CUDA toolkit, or from the wheel that was carried here; if any."""
    place = kept()
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    folders = [Path(home) / "bin" for home in homes if home] + [place / "compute-sanitizer"]
    found = shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ.get("PATH", ""), *map(str, folders)]))
    if found:
        return Path(found)
    wheels = sorted(CACHE.glob(_SANITIZER))
    if not wheels:
        return None
    try:
        with tempfile.TemporaryDirectory(dir=place) as half:
            _take_out(wheels[-1], Path(half) / "whole")
            (Path(half) / "whole").rename(place / "compute-sanitizer")
    except Exception as error:  # the run goes on without it
        print(f"{wheels[-1].name} cannot be unpacked: {type(error).__name__}: {error}", flush=True)
    tool = place / "compute-sanitizer" / "compute-sanitizer"
    return tool if tool.exists() else None


def _take_out(path: Path, folder: Path) -> None:
    """Unpack compute-sanitizer from its wheel."""
    with zipfile.ZipFile(path) as wheel:
        for item in wheel.infolist():
            _, inside, name = item.filename.partition("/compute-sanitizer/")
            if inside and name and not name.startswith(("docs/", "include/")):
                target = folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(wheel.read(item))
                target.chmod(0o755)


def prepare() -> int:
    """Put into ``.cache/`` what a machine without network may lack; return the exit status."""
    CACHE.mkdir(exist_ok=True)
    failed = 0
    if not [*CACHE.glob(_SANITIZER)]:
        fetch = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(CACHE)]
        failed = subprocess.run([*fetch, "nvidia-cuda-sanitizer-api>=13"], check=False).returncode
    kept = environment() | {"NUMBA_CACHE_DIR": os.environ.get("NUMBA_CACHE_DIR", "")}  # this machine's own is warm
    subprocess.run([sys.executable, "-m", "gpu_runs.references"], env=kept, cwd=ROOT, check=True)
    for path in sorted(CACHE.iterdir()):
        if path.is_file():
            print(f"{path.relative_to(ROOT)}: {path.stat().st_size} bytes")
    return failed


def sources() -> str:
    """Return a digest of what results of the host's kernels depend on."""
    files = [*sorted((ROOT / "sparsebp" / "kernels").rglob("*.py")), ROOT / "tests/device/kernel_arguments.py"]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:20]


if __name__ == "__main__":
    print(pack(Path(sys.argv[1])))
