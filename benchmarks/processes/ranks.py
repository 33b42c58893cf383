"""A measurement on several ranks: processes that ``mpiexec`` starts, and what the first of them found.

``python -m benchmarks.processes.ranks MODULE PROGRESS ARGUMENTS FILE`` is one of them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

from sparsebp.core.errors import MissingDependencyError, SparseBPError

_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")


def on_ranks(
    size: int, module: str, *, threads: int = 1, progress: bool = False, seconds: float = 1800.0, **arguments: Any
) -> Any:
    """Run a module's ``work(transport, **arguments)`` on so many processes, and return what rank 0's returned, as JSON.

    Parameters
    ----------
    size
        Number of ranks.
    module
        The module's name.
    threads
        Most threads of each.
    progress
        Whether MPI goes on beside what they compute, as `connect` takes it.
    seconds
        What they may take.
    arguments
        What JSON can hold.

    Raises
    ------
    MissingDependencyError
        mpi4py or ``mpiexec`` is not there.
    SparseBPError
        The processes have failed, and the message ends with what they said; or they do not come to an end.
    """
    found = shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec")
    if found is None or importlib.util.find_spec("mpi4py") is None:
        raise MissingDependencyError("mpi4py, or mpiexec, is not installed", expected="an MPI library", got="none",
                                     remedy="Install the extra `mpi`: pip install 'sparsebp[mpi]'")  # fmt: skip
    root = str(Path(__file__).parents[2])  # this sparsebp, whatever else there is
    paths = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    environment = os.environ | dict.fromkeys(_THREADS, str(threads)) | {"PYTHONPATH": paths}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        command = [found, "-n", str(size), sys.executable, "-P", "-m", __name__, module, str(int(progress)),
                   json.dumps(arguments), str(file)]  # fmt: skip
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=seconds, check=False,
                stdin=subprocess.DEVNULL,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise SparseBPError(f"{size} ranks do not come to an end", expected=f"less than {seconds:g} s",
                                got=str(error), remedy="Run less beside them") from error  # fmt: skip
        if done.returncode or not file.exists():
            raise SparseBPError(f"The measurement on {size} ranks has failed", expected="exit status 0",
                                got=f"{done.returncode}: {(done.stderr or done.stdout).strip()[-2000:]}",
                                remedy=f"Run it by itself: {' '.join(command[:-2])} …")  # fmt: skip
        return json.loads(file.read_text(encoding="utf-8"))


def _main(module: str, progress: str, arguments: str, file: str) -> None:
    from sparsebp.runtime.launch import connect

    transport = connect(progress=bool(int(progress)))
    found = import_module(module).work(transport, **json.loads(arguments))
    if transport.rank == 0:
        Path(file).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    _main(*sys.argv[1:])
