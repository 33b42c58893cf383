"""Host arrays or NumPy scalars among device arrays are an error, never a wrong pointer."""

from __future__ import annotations

import numpy as np
import pytest

from backends import needs_numba
from sparsebp import kernels
from sparsebp.core import backend
from sparsebp.core.errors import DeviceError, LayoutError, MissingDependencyError

pytestmark = pytest.mark.gpu


@pytest.fixture
def cupy():
    try:
        return backend.cupy()
    except (MissingDependencyError, DeviceError) as error:
        pytest.skip(f"no GPU: {error}")


@pytest.mark.parametrize("call", ["scale_arrays", "clamp_arrays"])
def test_lists_of_arrays(cupy, call):
    needs_numba("the host kernels are asked too")
    there, here = cupy.ones(3, np.float32), np.ones(3, np.float32)
    device, host = getattr(kernels.get(cupy), call), getattr(kernels.get(np), call)
    for run in (device, host):
        for arrays in ([there, here], [here, there]):
            with pytest.raises(DeviceError, match="mixed"):
                run(arrays, 0.5)
        with pytest.raises(LayoutError, match=r"arrays\[1\] is not an array"):
            run([there, np.float32(1)], 0.5)
    with pytest.raises(DeviceError, match="another namespace"):
        host([there], 0.5)
    with pytest.raises(DeviceError, match="these kernels' namespace"):
        device([here], 0.5)
    assert (backend.to_host(there) == 1).all() and (here == 1).all()


def test_sums_go_where_the_arrays_are(cupy):
    needs_numba("the host kernels are asked too")
    there, here = cupy.ones(3, np.float32), np.ones(3, np.float32)
    with pytest.raises(DeviceError):
        kernels.get(np).square_sums([there], np.zeros(1))
    with pytest.raises(DeviceError):
        kernels.get(cupy).square_sums([there], np.zeros(1))
    with pytest.raises(DeviceError):
        kernels.get(cupy).square_sums([here], np.zeros(1))
