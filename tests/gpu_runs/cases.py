"""Calls of every kernel, small: their arguments, and what the results are compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from device.kernel_arguments import KERNELS, VARIANTS, Arguments, Maker, arrays_of, copies
from sparsebp.kernels.checks import UPDATE_OPTIONS

RECURRENT: tuple[dict[str, Any], ...] = (
    {"batch": 2, "hidden": 1}, {"batch": 2, "hidden": 32}, {"batch": 3, "hidden": 33}, {"batch": 2, "hidden": 64},
    {"batch": 1, "hidden": 128},
)  # fmt: skip
"""Further sizes of the recurrences: one unit, a warp and more; weights in registers, in shared memory, streamed."""
RECURRENCES = ("rnn", "gru", "lstm")
ON_THE_HOST = {"options", "steps"}
"""Arguments of the optimizers that the caller has on the host."""


class Case(NamedTuple):
    """A call of a kernel; `rule` is an update rule's, with all or none of its `optional` buffers."""

    kernel: str
    dtype: str
    batch: int
    hidden: int
    shared: bool = False
    chunks: int = 4
    rule: str = ""
    optional: bool = True

    def arguments(self) -> Arguments:
        """Return new arguments on the host, by name in the kernel's order."""
        maker = Maker(self.dtype, self.batch, self.hidden, self.shared, self.chunks)
        return maker.update(self.rule, self.optional) if self.rule else maker.arguments(self.kernel)  # type: ignore[arg-type]

    @property
    def key(self) -> str:
        """The case as a short text."""
        return "-".join(map(str, self))


def kernels() -> list[str]:
    """Return the names of all kernels, the recurrences first."""
    return sorted(KERNELS, key=lambda name: (not name.startswith(RECURRENCES), name))


def every(*, small: bool = False) -> Iterator[Case]:
    """Yield all cases; the `small` ones launch every CUDA kernel, in float32 alone."""
    for name in kernels():
        recurrent = name.startswith(RECURRENCES)
        variants = VARIANTS[:2] if small else (*VARIANTS, *(RECURRENT if recurrent else ()))
        for dtype in ("float32",) if small else ("float32", "float64"):
            for variant in variants:
                yield Case(name, dtype, **variant)
                if name.endswith("_backward") and recurrent:
                    yield Case(name, dtype, **variant, chunks=1)
    for rule in UPDATE_OPTIONS:
        for optional in (True,) if small else (True, False):
            yield Case("optimizer_update", "float32" if small else "float64", 3, 5, rule=rule, optional=optional)


def run(kernels: Any, case: Case, place: Callable[[np.ndarray], Any] = lambda array: array) -> dict[str, Any]:
    """Return all arrays after a call: those that are written, and those that must stay; `place` puts them there."""
    given = case.arguments()
    arguments = copies(given, place) | {name: value for name, value in given.items() if name in ON_THE_HOST}
    getattr(kernels, case.kernel)(*arguments.values())
    return arrays_of(arguments)


MOST_KEPT = 8192
"""Numbers of an array that travel."""


def sample(array: np.ndarray) -> np.ndarray:
    """Return evenly spaced entries, at most `MOST_KEPT`, in one axis; an odd step meets all columns."""
    return array.ravel()[:: -(-array.size // MOST_KEPT) | 1]


def differences(got: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> list[str]:
    """Return, for every array that differs, its name and how; float32 and float64 have tolerances of their own.

    Of an array that is wanted in one axis, `sample` is compared.
    """
    found = [f"arrays {sorted(got)} in place of {sorted(wanted)}"] if got.keys() != wanted.keys() else []
    for name, value in wanted.items():
        eps = max(float(np.finfo(a.dtype).eps) for a in wanted.values() if a.dtype.kind == "f")
        try:
            given = got[name] if got[name].shape == value.shape else sample(got[name])
            np.testing.assert_allclose(given, value, rtol=800 * eps, atol=400 * eps, err_msg=name)
        except (AssertionError, KeyError) as error:
            found.append(" ".join(str(error).split())[:300])
    return found
