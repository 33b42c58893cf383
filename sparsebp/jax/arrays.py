"""Arrays that functions of JAX are given, checked."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from sparsebp.core.errors import DTypeError


def arrays_of(dtypes: tuple[str, ...] = ("float32", "float64"), **given: Any) -> list[jax.Array]:
    """Return arrays of NumPy or JAX as JAX's, of one dtype."""
    dtype = None
    for name, array in given.items():
        if not isinstance(array, jax.Array | np.ndarray | np.generic):
            raise DTypeError(f"{name} is not an array", expected="an array of JAX or NumPy", got=type(array).__name__)
        dtype = dtype or array.dtype
        if array.dtype.name not in dtypes or array.dtype != dtype:
            expected = f"{dtype}, as of {next(iter(given))}" if array.dtype.name in dtypes else " or ".join(dtypes)
            raise DTypeError(f"{name} has the wrong dtype", expected=expected, got=array.dtype)
        if jax.dtypes.canonicalize_dtype(dtype) != dtype:
            raise DTypeError(f"{name} is {dtype}, which JAX would convert", expected="float32 or complex64", got=dtype,
                             remedy='Call jax.config.update("jax_enable_x64", True) first')  # fmt: skip
    return [jnp.asarray(array) for array in given.values()]
