"""Results of the host's kernels for every case, kept for a machine where Numba would have to compile them first.

``python -m gpu_runs.references`` computes and stores them, and of each case only what the kernel has written; `Wanted`
gives the stored ones, those of Numba, or none.
"""

from __future__ import annotations

import numpy as np

from device.kernel_arguments import arrays_of
from gpu_runs.carried import REFERENCES, sources
from gpu_runs.cases import MOST_KEPT, Case, every, run, sample
from sparsebp import kernels


class Wanted:
    """What cases are compared with; `source` says whence it is."""

    def __init__(self) -> None:
        self._stored = _stored()
        self.source = "stored results of the host's kernels"
        if self._stored is None:
            try:
                self._host = kernels.get(np)
                self.source = "the host's kernels"
            except ImportError as error:
                self._host, self.source = None, f"nothing: {error}"

    def of(self, case: Case) -> dict[str, np.ndarray] | None:
        """Return the arrays after the case's call, or None where nobody can say."""
        if self._stored is None:
            return None if self._host is None else run(self._host, case)
        given = arrays_of(case.arguments())
        return {name: self._stored.get(f"{case.key}:{name}", array) for name, array in given.items()}


def _stored() -> dict[str, np.ndarray] | None:
    """Return the stored results; None where there are none, none of these kernels, or none that can be read."""
    try:
        with np.load(REFERENCES) as file:
            return dict(file) if str(file["sources"]) == sources() else None
    except FileNotFoundError:
        return None
    except Exception as error:  # a file that was cut off raises what it likes
        print(f"{REFERENCES.name} cannot be read: {type(error).__name__}: {error}", flush=True)
        return None


def main() -> None:
    """Compute and store the results."""
    host, found = kernels.get(np), {"sources": np.array(sources())}
    for case in every():
        given = arrays_of(case.arguments())
        for name, array in run(host, case).items():
            if array.tobytes() != given[name].tobytes():
                found[f"{case.key}:{name}"] = array if array.size <= MOST_KEPT else sample(array)
    REFERENCES.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(REFERENCES, **found)
    print(f"{REFERENCES.name}: {len(found) - 1} arrays")


if __name__ == "__main__":
    main()
