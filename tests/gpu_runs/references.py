"""Results of the host's kernels for every case, kept for a machine where Numba cannot give them.

``python -m gpu_runs.references`` computes and stores them; `Wanted` gives the stored ones, those of Numba, or none.
"""

from __future__ import annotations

import numpy as np

from gpu_runs.carried import REFERENCES, sources
from gpu_runs.cases import Case, every, run
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
        begin = f"{case.key}:"
        return {name[len(begin) :]: self._stored[name] for name in self._stored if name.startswith(begin)}


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
        found |= {f"{case.key}:{name}": array for name, array in run(host, case).items()}
    REFERENCES.parent.mkdir(exist_ok=True)
    np.savez_compressed(REFERENCES, **found)
    print(f"{REFERENCES.name}: {len(found) - 1} arrays")


if __name__ == "__main__":
    main()
