"""Products, solves, linear recurrences and selective scans in JAX, by the kernels of this library on the host.

``import sparsebp.jax as sj``. The functions work under `jax.jit`, `vmap`, and derivatives of any order, forward and in
reverse; `vmap` gives a kernel all samples at once. On a CPU, XLA calls the kernels itself: a linear recurrence and its
gradients without the interpreter, all others with its lock, and no array is copied for it. Compiled computations keep
the plans that they use.

Under `jax.pmap` and `jax.shard_map` each device of a host runs its own part; `jax.jit` alone gathers arrays that are
spread over devices. `custom_calls` is for `jax.export`.

float32, or float64 with JAX's option ``jax_enable_x64``; nothing is converted. Arrays on an accelerator travel to the
host and back, by `jax.pure_callback`; so do all where JAX's interface for such calls has another version than 0.3 or a
later 0.x. On one core such callbacks can wait for the thread that dispatches the next call, and that for them. There,
the import sets JAX's option ``jax_cpu_enable_async_dispatch`` to False; it must come before the first array of JAX.

An error of a kernel, a `PivotError` say, arrives as the error of JAX, with its name and message.

Raises
------
MissingDependencyError
    On import: JAX is not installed.
"""

from __future__ import annotations

import os

from sparsebp.core.errors import MissingDependencyError

try:
    import jax
except ImportError as error:
    raise MissingDependencyError("JAX is not installed, and sparsebp.jax is for its arrays",
                                 remedy="Install the extra: pip install 'sparsebp[jax]'") from error  # fmt: skip
if len(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)) == 1:
    jax.config.update("jax_cpu_enable_async_dispatch", False)  # JAX's callbacks wait for the only thread, for ever

from sparsebp.jax.recurrence import custom_calls, linear_recurrence
from sparsebp.jax.selective import selective_scan
from sparsebp.jax.sparse import product, solve

__all__ = ["custom_calls", "linear_recurrence", "product", "selective_scan", "solve"]


def __dir__() -> list[str]:
    return sorted(__all__)
