"""Build all that a release uploads into ``dist/``, and try it as a user would: ``python tools/release.py``.

An sdist, a wheel for every Python (from that sdist), and, unless ``--pure``, a wheel for this Python with the machine
code of all kernels. twine checks them; each wheel is then installed into an empty environment, and runs ``sparsebp
verify``, ``sparsebp demo`` and README's examples in an empty folder. The versions that files state must agree.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
SHIPPED = ROOT / "sparsebp" / "kernels" / "host" / "shipped"
EXTRAS = "cli,plot,data"


def main() -> int:
    """Build, check and try; the exit status is 0 if a release could be uploaded."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pure", action="store_true", help="leave the wheel with machine code out")
    options = parser.parse_args()
    print(f"version {version()}", flush=True)
    shutil.rmtree(DIST, ignore_errors=True)
    shutil.rmtree(SHIPPED, ignore_errors=True)
    python = [sys.executable, "-m"]
    run(*python, "build", "--no-isolation", "--outdir", DIST)  # the wheel from the sdist
    if not options.pure:
        run(sys.executable, ROOT / "tools" / "ship_kernels.py")
        run(*python, "build", "--no-isolation", "--wheel", "--outdir", DIST)
        shutil.rmtree(SHIPPED)
    built = sorted(DIST.iterdir())
    run(*python, "twine", "check", "--strict", *built)
    for wheel in (path for path in built if path.suffix == ".whl"):
        with tempfile.TemporaryDirectory() as folder:
            try_wheel(wheel, Path(folder))
    for path in built:
        print(f"{path.stat().st_size / 1e6:6.1f} MB  {path.name}")
    return 0


def version() -> str:
    """Return the version, which the package, the changelog, the citation and the conda recipe state alike."""
    patterns = {
        "sparsebp/__init__.py": r'__version__ = "(.+)"', "CHANGELOG.md": r"## \[(\d.+?)\]",
        "CITATION.cff": r'^version: "?([\d.]+)', "conda/recipe.yaml": r'version: "(.+)"',
    }  # fmt: skip
    found = {}
    for name, pattern in patterns.items():
        match = re.search(pattern, (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE)
        found[name] = match.group(1) if match else "none"
    if len(set(found.values())) != 1:
        sys.exit(f"The versions differ: {found}")
    return found["CHANGELOG.md"]


def try_wheel(wheel: Path, folder: Path) -> None:
    """Install a wheel into an empty environment and use it, where no source is."""
    print(f"\n{wheel.name}", flush=True)
    run(sys.executable, "-m", "venv", folder / "empty")
    python = folder / "empty" / "bin" / "python"
    run(python, "-m", "pip", "install", "--disable-pip-version-check", "-q", f"{wheel}[{EXTRAS}]")
    # No kernels from elsewhere: those of the wheel, or compiled here.
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "PYTHONPATH": ""}
    command = folder / "empty" / "bin" / "sparsebp"
    run(command, "verify", cwd=folder, env=environment)
    run(command, "demo", "--out", folder / "demo", cwd=folder, env=environment)
    examples = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)
    for number, example in enumerate(
        text for text in examples if not re.search(r"\bimport (torch|jax)|\bcasadi", text)
    ):
        print(f"README's example {number + 1}", flush=True)
        run(python, "-c", example, cwd=folder, env=environment)


def run(*command: object, **options: object) -> None:
    """Run a command; a failure ends the release."""
    subprocess.run([str(part) for part in command], check=True, **options)  # type: ignore[call-overload]


if __name__ == "__main__":
    sys.exit(main())
