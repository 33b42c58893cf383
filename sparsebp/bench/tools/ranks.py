"""A measurement on several ranks: processes that ``mpiexec`` starts, and what the first of them found.

``python -m sparsebp.bench.tools.ranks MODULE ARGUMENTS FILE`` is one of them.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

from sparsebp.core.errors import MissingDependencyError, SparseBPError


def on_ranks(size: int, module: str, **arguments: Any) -> Any:
    """Run a module's ``work(transport, **arguments)`` on so many processes, and return what rank 0's returned, as JSON.

    Raises
    ------
    MissingDependencyError
        There is no ``mpiexec``.
    SparseBPError
        The processes have failed; the message ends with what they said.
    """
    found = shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec")
    if found is None:
        raise MissingDependencyError("There is no mpiexec", expected="an MPI library", got="none on the path",
                                     remedy="Install the extra `mpi`: pip install 'sparsebp[mpi]'")  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        command = [found, "-n", str(size), sys.executable, "-m", __name__, module, json.dumps(arguments), str(file)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
        if done.returncode or not file.exists():
            raise SparseBPError(f"The measurement on {size} ranks has failed", expected="exit status 0",
                                got=f"{done.returncode}: {(done.stderr or done.stdout).strip()[-2000:]}",
                                remedy=f"Run it by itself: {' '.join(command[:-2])} …")  # fmt: skip
        return json.loads(file.read_text(encoding="utf-8"))


def _main(module: str, arguments: str, file: str) -> None:
    from sparsebp.distributed.start import connect

    transport = connect()
    found = import_module(module).work(transport, **json.loads(arguments))
    if transport.rank == 0:
        Path(file).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    _main(*sys.argv[1:])
