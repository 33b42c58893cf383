"""Bridges: shared or copied memory, and the sample that is taken; faults that a round trip hides."""

import sys
import types

import numpy as np
import pytest
import scipy.sparse
import torch

from sparsebp import SparsityPattern, TransposedJacobian, nn
from sparsebp.core import backend
from sparsebp.core.errors import DeviceError, DTypeError, FileFormatError, OptionError, ShapeError
from sparsebp.interop import cupyx, dlpack
from sparsebp.interop import scipy as scipy_bridge
from sparsebp.interop import torch as torch_bridge

DTYPES = [np.float32, np.float64]


def batched(dtype=np.float32):
    """3×5 with an empty row, three samples that all differ."""
    pattern = SparsityPattern([0, 2, 2, 5], [0, 4, 1, 2, 3], (3, 5))
    return TransposedJacobian(pattern, np.arange(1, 16, dtype=dtype).reshape(5, 3))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sample", [0, 1, 2])
def test_every_bridge_takes_the_sample_that_was_asked_for(dtype, sample):
    j = batched(dtype)
    dense = np.zeros((3, 5), dtype)
    dense[[0, 0, 2, 2, 2], [0, 4, 1, 2, 3]] = [3 * entry + sample + 1 for entry in range(5)]
    for found in (scipy_bridge.to_scipy(j, sample), torch_bridge.jacobian_to_torch(j, sample)):
        there = found.toarray() if hasattr(found, "toarray") else found.to_dense().numpy()
        np.testing.assert_array_equal(there, dense)
        assert there.dtype == dtype and tuple(found.shape) == (3, 5)
    for bridge in (scipy_bridge.to_scipy, torch_bridge.jacobian_to_torch):
        with pytest.raises(OptionError, match="sample="):
            bridge(j)
        for wrong in (3, -4):
            with pytest.raises(OptionError):
                bridge(j, wrong)


def test_scipy_owns_its_arrays_only_if_asked_for():
    j = batched()
    values = j.data[:, 1].copy()
    for copy in (False, True):
        matrix = j.pattern.to_scipy(values, copy=copy)
        assert np.shares_memory(matrix.data, values) != copy
        assert np.shares_memory(matrix.indices, j.pattern.indices) != copy
        assert np.shares_memory(matrix.indptr, j.pattern.indptr) != copy
        assert matrix.indices.flags.writeable == copy


IN_PLACE = {
    "eliminate_zeros": lambda matrix: matrix.eliminate_zeros(),
    "sort_indices": lambda matrix: (setattr(matrix, "has_sorted_indices", False), matrix.sort_indices()),
    "sum_duplicates": lambda matrix: (
        setattr(matrix, "has_canonical_format", False),
        setattr(matrix, "has_sorted_indices", False),
        matrix.sum_duplicates(),
    ),
}


@pytest.mark.parametrize("change", IN_PLACE.values(), ids=IN_PLACE)
@pytest.mark.parametrize("export", [scipy_bridge.to_scipy, TransposedJacobian.to_scipy], ids=["function", "method"])
def test_scipy_may_work_in_place_on_a_copy_only(export, change):
    j = batched()
    j.data[1] = 0
    kept = j.data.copy(), j.pattern.indptr.copy(), j.pattern.indices.copy()
    with pytest.raises(ValueError, match="read-only"):
        change(export(j, 1))
    matrix = export(j, 1, copy=True)
    expected = matrix.toarray()
    change(matrix)
    np.testing.assert_array_equal(matrix.toarray(), expected)
    matrix.data += 1
    for array, before in zip((j.data, j.pattern.indptr, j.pattern.indices), kept, strict=True):
        np.testing.assert_array_equal(array, before)


def test_a_copy_of_read_only_values_may_be_written_to():
    j = TransposedJacobian(batched().pattern, np.ones(5, np.float32))
    j.data.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        j.to_scipy().data += 1
    matrix = j.to_scipy(copy=True)
    matrix.data += 1
    assert matrix.data.tolist() == [2] * 5 and j.data.tolist() == [1] * 5


@pytest.mark.parametrize("dtype", DTYPES)
def test_scipy_values_keep_their_dtype_and_explicit_zeros(dtype):
    matrix = scipy.sparse.csr_array(
        (np.array([0, 2, 0], dtype), np.array([1, 0, 2]), np.array([0, 1, 1, 3])), shape=(3, 3)
    )
    j = scipy_bridge.from_scipy(matrix)
    assert j.pattern.nnz == 3 and j.dtype == dtype  # a zero is an entry of the structure
    np.testing.assert_array_equal(j.to_dense(), matrix.toarray())
    assert j.pattern.to_scipy().data.tolist() == [1, 1, 1]


def test_read_only_arrays_are_copied_and_others_shared():
    array = np.arange(4.0)
    tensor = torch_bridge.to_torch(array)
    tensor[0] = 9
    assert array[0] == 9
    array.flags.writeable = False
    torch_bridge.to_torch(array)[1] = 9
    assert array.tolist() == [9, 1, 2, 3]


def test_tensors_that_require_gradients_are_taken_without_them():
    weight = torch.arange(5, dtype=torch.float64, requires_grad=True)
    j = torch_bridge.jacobian_from_torch(
        torch.sparse_csr_tensor(torch.tensor([0, 2, 2, 5]), torch.tensor([0, 4, 1, 2, 3]), weight, size=(3, 5))
    )
    assert j.shape == (3, 5) and j.dtype == np.float64 and j.batch is None
    np.testing.assert_array_equal(j.data, weight.detach())
    array = torch_bridge.from_torch(weight * 2)
    assert isinstance(array, np.ndarray) and array.tolist() == [0, 2, 4, 6, 8]


def test_devices_that_are_neither():
    class Elsewhere:
        def __dlpack_device__(self):
            return (8, 0)

    with pytest.raises(DeviceError, match="unknown device") as caught:
        dlpack.from_dlpack(Elsewhere())
    assert "8" in caught.value.got


def test_weights_that_do_not_fit_leave_both_sides_as_they_are():
    ours = nn.Sequential(nn.Linear(3, 4, rng=0), nn.Linear(4, 2, rng=1))
    for theirs, error, back in (
        (torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 3)), ShapeError, ShapeError),
        (torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2).double()), DTypeError, DTypeError),
        (torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2, bias=False)), ShapeError, FileFormatError),
    ):
        module = {name: tensor.clone() for name, tensor in theirs.state_dict().items()}
        layer = {name: array.copy() for name, array in ours.state_dict().items()}
        with pytest.raises(error):
            torch_bridge.load_into_torch(theirs, ours)
        with pytest.raises(back):
            torch_bridge.load_from_torch(ours, theirs)
        assert all(torch.equal(tensor, module[name]) for name, tensor in theirs.state_dict().items())
        assert all((array == layer[name]).all() for name, array in ours.state_dict().items())


def test_loaded_modules_still_require_gradients_and_share_nothing():
    ours, theirs = nn.Linear(3, 2, rng=0), torch.nn.Linear(3, 2)
    torch_bridge.load_into_torch(theirs, ours)
    assert theirs.weight.requires_grad and theirs.weight.is_leaf
    ours.params["weight"][...] = 5
    assert not (theirs.weight == 5).any()
    torch_bridge.load_from_torch(ours, theirs.state_dict())
    np.testing.assert_array_equal(ours.params["weight"], theirs.weight.detach())


@pytest.fixture
def cupy_on_host(monkeypatch):
    """NumPy and SciPy in the places of CuPy and its sparse matrices."""
    moved = []
    sparse = types.ModuleType("cupyx.scipy.sparse")
    sparse.csr_matrix = scipy.sparse.csr_matrix
    for name, module in (("cupyx", types.ModuleType("cupyx")), ("cupyx.scipy", types.ModuleType("cupyx.scipy")),
                         ("cupyx.scipy.sparse", sparse)):  # fmt: skip
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(backend, "cupy", lambda: np)
    monkeypatch.setattr(backend, "to_device", lambda array, device: moved.append(device) or array)
    return moved


@pytest.mark.parametrize("sample", [0, 2])
def test_cupys_matrices_both_ways(cupy_on_host, sample):
    j = batched()
    matrix = cupyx.to_cupyx(j, sample)
    assert cupy_on_host == ["cuda"] and matrix.shape == (3, 5) and matrix.data.flags.c_contiguous
    np.testing.assert_array_equal(matrix.toarray(), j.to_dense(sample))
    again = cupyx.from_cupyx(matrix)
    assert again.pattern == j.pattern and np.shares_memory(again.data, matrix.data)
    np.testing.assert_array_equal(again.to_dense(), j.to_dense(sample))


def test_cupys_matrices_need_cupy(monkeypatch):
    def missing():
        raise DeviceError("No GPU can be used")

    monkeypatch.setattr(backend, "cupy", missing)
    for call in (lambda: cupyx.from_cupyx(scipy.sparse.csr_matrix(np.eye(2))), lambda: cupyx.to_cupyx(batched())):
        with pytest.raises(DeviceError):
            call()
