"""A pytest plugin: ``import numba`` fails, as it does where Numba refuses the machine's NumPy."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType


class _Refused:
    """Finds Numba and says no."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        if name.split(".", maxsplit=1)[0] in ("numba", "llvmlite"):
            raise ImportError(f"Numba needs an older NumPy, so {name} cannot be imported")


if "numba" in sys.modules:
    raise RuntimeError("Numba is imported already")
sys.meta_path.insert(0, _Refused())  # type: ignore[arg-type]
