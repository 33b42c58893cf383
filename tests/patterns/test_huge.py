"""Shapes that do not fit in memory: errors with a remedy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import sparsebp as sb
from sparsebp import SparsityPattern
from sparsebp.core.errors import MemoryLimitError, ShapeError, within_memory
from sparsebp.jacobians import TransposedJacobian


@pytest.mark.parametrize("columns", [2**50, 2**62])
def test_a_transpose_with_more_rows_than_memory_is_refused(columns):
    pattern = SparsityPattern([0, 2], [0, columns - 1], (1, columns))
    jacobian = TransposedJacobian(pattern, np.ones(2))
    for transpose in (lambda: pattern.T, lambda: pattern.transpose_permutation, lambda: jacobian.T,
                      lambda: jacobian.jvp(np.ones((1, 1)))):  # fmt: skip
        with pytest.raises(MemoryLimitError, match=r"transpose of a pattern.*does not fit in memory"):
            transpose()
    with pytest.raises(MemoryLimitError, match=r"dense matrix.*Use to_scipy"):
        jacobian.to_dense()
    product = sb.plan_product(SparsityPattern([0, 1], [0], (1, 1)), pattern)
    assert product.pattern.shape == (1, columns)
    np.testing.assert_array_equal(product(np.full(1, 2.0), np.array([3.0, 4.0])), [6, 8])


def test_other_errors_pass():
    with pytest.raises(ShapeError, match="as it is"), within_memory("too large", "Use less"):
        raise ShapeError("as it is")
    with pytest.raises(ValueError, match="as it is"), within_memory("too large", "Use less"):
        raise ValueError("as it is")
    with pytest.raises(MemoryLimitError, match="Use less"), within_memory("too large", "Use less"):
        raise MemoryError


LIMITED = """
import resource
import numpy as np, sparsebp as sb
from sparsebp.core.errors import MemoryLimitError

sb.jacobian_t(sb.nn.Conv2d(1, 1, 3), np.ones((1, 1, 5, 5), np.float32))
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20),) * 2)
for layer, shape in ((sb.nn.Softmax(1), (40, 900)), (sb.nn.Conv2d(16, 16, 3), (1, 16, 60, 60))):
    try:
        sb.jacobian_t(layer, np.ones(shape, np.float32))
    except MemoryLimitError as error:
        assert error.remedy, error
    else:
        raise SystemExit(f"{layer} fits")
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")
def test_a_jacobian_beyond_the_systems_limit_is_refused():
    environment = os.environ | {"PYTHONPATH": str(Path(sb.__file__).parents[1]), "NUMBA_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", LIMITED], env=environment, capture_output=True, text=True, timeout=100,
                          check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
