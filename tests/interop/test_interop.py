"""Bridges to SciPy, DLPack and PyTorch, both ways; CuPy's where there is a GPU."""

import subprocess
import sys

import numpy as np
import pytest
import scipy.sparse
import torch

from sparsebp import SparsityPattern, TransposedJacobian, nn
from sparsebp.core.errors import DeviceError, DTypeError, LayoutError, OptionError, PatternError, ShapeError
from sparsebp.interop import cupyx as to_cupyx_module
from sparsebp.interop import dlpack
from sparsebp.interop import scipy as scipy_bridge
from sparsebp.interop import torch as torch_bridge

PATTERN = SparsityPattern([0, 2, 2, 5], [0, 3, 1, 2, 3], (3, 4))


@pytest.mark.parametrize("kind", [scipy.sparse.csr_array, scipy.sparse.csr_matrix])
def test_scipy_both_ways_shares_values(kind):
    matrix = kind(np.array([[1.0, 0, 2], [0, 0, 3]], np.float32))
    j = scipy_bridge.from_scipy(matrix)
    assert np.shares_memory(j.data, matrix.data) and j.batch is None and j.dtype == np.float32
    again = scipy_bridge.to_scipy(j)
    assert np.shares_memory(again.data, matrix.data) and not np.shares_memory(again.indices, matrix.indices)
    np.testing.assert_array_equal(again.toarray(), matrix.toarray())
    copied = scipy_bridge.from_scipy(matrix, copy=True)
    assert not np.shares_memory(copied.data, matrix.data)


def test_scipy_structure_and_refusals():
    matrix = PATTERN.to_scipy()
    assert matrix.sum() == PATTERN.nnz and matrix.has_canonical_format
    with pytest.raises(ShapeError, match="Expected"):
        PATTERN.to_scipy(np.ones(4))
    with pytest.raises(DTypeError):
        scipy_bridge.from_scipy(scipy.sparse.csr_array(np.eye(2, dtype=int)))
    with pytest.raises(PatternError, match=r"scipy\.sparse\.csr_array"):
        scipy_bridge.from_scipy(scipy.sparse.coo_array(np.eye(2)))
    unsorted = scipy.sparse.csr_array((np.ones(2), np.array([1, 0]), np.array([0, 2])), shape=(1, 2))
    with pytest.raises(PatternError, match=r"A\.sum_duplicates\(\)"):
        scipy_bridge.from_scipy(unsorted)


@pytest.mark.parametrize("shape", [(5,), (5, 2)])
def test_dlpack_shares_values(shape):
    values = torch.arange(np.prod(shape), dtype=torch.float64).reshape(shape)
    parts = torch.tensor([0, 2, 2, 5]), torch.tensor([0, 3, 1, 2, 3])
    j = dlpack.jacobian_from_dlpack(*parts, values, (3, 4))
    assert j.pattern == PATTERN
    values[0] = 7
    assert (j.data[0] == 7).all()
    indptr, indices, data = dlpack.dlpack_arrays(j)
    assert torch.from_dlpack(data).data_ptr() == values.data_ptr()
    np.testing.assert_array_equal(torch.from_dlpack(indptr), parts[0])
    np.testing.assert_array_equal(torch.from_dlpack(indices), parts[1])


def test_what_leaves_is_no_part_of_the_pattern():
    """Other frameworks write through what they get; patterns are for good."""
    before = PATTERN.indptr.copy(), PATTERN.indices.copy()
    j = TransposedJacobian(PATTERN, np.arange(5.0))
    for array in dlpack.dlpack_arrays(j)[:2]:
        torch.from_dlpack(array).fill_(7)
        array[...] = 7
    sparse = torch_bridge.jacobian_to_torch(j)
    sparse.crow_indices().fill_(0)
    sparse.col_indices().fill_(0)
    matrix = j.to_scipy()
    for array in (matrix.indptr, matrix.indices):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 7
    np.testing.assert_array_equal(PATTERN.indptr, before[0])
    np.testing.assert_array_equal(PATTERN.indices, before[1])
    parts = torch.tensor([0, 2, 2, 5]), torch.tensor([0, 3, 1, 2, 3], dtype=torch.int32)
    j = dlpack.jacobian_from_dlpack(*parts, torch.ones(5), (3, 4))
    for part in parts:
        part.fill_(2**30)
    assert j.pattern == PATTERN


def test_dlpack_refusals():
    with pytest.raises(DeviceError, match="DLPack"):
        dlpack.from_dlpack([1.0])
    with pytest.raises(LayoutError):
        dlpack.jacobian_from_dlpack(torch.tensor([0, 2]), torch.tensor([0, 1]), torch.ones(4)[::2], (1, 2))


def test_torch_tensors_and_sparse_tensors():
    tensor = torch.ones(3, requires_grad=True)
    array = torch_bridge.from_torch(tensor)
    array[0] = 5
    assert tensor[0] == 5
    assert torch_bridge.to_torch(array).data_ptr() == tensor.data_ptr()
    j = TransposedJacobian(PATTERN, np.arange(10.0).reshape(5, 2))
    sparse = torch_bridge.jacobian_to_torch(j, 1)
    np.testing.assert_array_equal(sparse.to_dense(), j.to_dense(1))
    again = torch_bridge.jacobian_from_torch(sparse)
    assert again.pattern == PATTERN
    np.testing.assert_array_equal(again.data, j.data[:, 1])
    with pytest.raises(OptionError, match="sample"):
        torch_bridge.jacobian_to_torch(j, 2)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (lambda: nn.Linear(3, 4, rng=0), lambda: torch.nn.Linear(3, 4)),
        (
            lambda: nn.GRU(3, 4, num_layers=2, bidirectional=True, rng=0),
            lambda: torch.nn.GRU(3, 4, 2, bidirectional=True),
        ),
        (
            lambda: nn.LSTM(3, 4, bidirectional=True, proj_size=2, rng=0),
            lambda: torch.nn.LSTM(3, 4, bidirectional=True, proj_size=2),
        ),
    ],
)
def test_weights_move_both_ways(ours, theirs):
    layer, module = ours(), theirs()
    torch_bridge.load_from_torch(layer, module)
    for name, tensor in module.state_dict().items():
        np.testing.assert_array_equal(layer.state_dict()[name], tensor)
    fresh = theirs()
    torch_bridge.load_into_torch(fresh, layer)
    for name, tensor in module.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], tensor)
    with torch.no_grad():  # the weights were copied, not shared
        next(module.parameters()).fill_(9)
    name = next(iter(module.state_dict()))
    assert not (layer.state_dict()[name] == 9).any()


def test_the_bridges_import_nothing_until_they_are_used():
    code = (
        "import sys, sparsebp.interop; "
        "found = [m for m in ('torch', 'scipy', 'cupy', 'numba') if m in sys.modules]; "
        "sys.exit(str(found) if found else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.gpu
def test_cupyx_both_ways():
    from sparsebp.core import backend

    try:
        cp = backend.cupy()
    except (ImportError, DeviceError) as error:
        pytest.skip(f"no GPU: {error}")
    values = cp.arange(5, dtype=cp.float32)
    j = TransposedJacobian(PATTERN, values)
    matrix = to_cupyx_module.to_cupyx(j)
    np.testing.assert_array_equal(matrix.get().toarray(), backend.to_host(j.to_dense()))
    again = to_cupyx_module.from_cupyx(matrix)
    assert again.pattern == PATTERN
    np.testing.assert_array_equal(again.data.get(), values.get())
    host = TransposedJacobian(PATTERN, np.ones((5, 2), np.float32))
    assert to_cupyx_module.to_cupyx(host, 1).sum() == 5
