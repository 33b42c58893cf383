"""Embedding: a row of a table for every number of the input."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsebp import backend, kernels
from sparsebp.backend import masks as masking
from sparsebp.core.arguments import check_default, check_flag, check_generator, check_integer
from sparsebp.core.errors import DTypeError, OptionError
from sparsebp.core.types import Array, Seed
from sparsebp.nn.arrays import normal, parameter_dtype
from sparsebp.nn.layer import Layer, check_gy


class Embedding(Layer):
    """A row of a table for every number of the input, as `torch.nn.Embedding`. It has to be the first layer.

    Parameters
    ----------
    num_embeddings
        Rows of the table: the numbers are 0 … num_embeddings - 1.
    embedding_dim
        Length of a row.
    padding_idx
        The number, counted from the end where negative, whose row is zeros and never trained; None: all are trained.
    max_norm, norm_type, sparse
        Only PyTorch's defaults: rows are not rescaled in place, and gradients are dense arrays.
    scale_grad_by_freq
        Whether the gradient of a row is divided by how often its number stands in the input.
    device
        None or ``"cpu"``: layers are built on the host, and moved by `to`.
    dtype
        float32 or float64.
    rng
        Generator or seed of the initial values, N(0, 1).

    Raises
    ------
    OptionError
        A length is negative or no integer, there is no row `padding_idx`, or an option is not supported.

    Notes
    -----
    Parameter: ``weight`` (num_embeddings, embedding_dim). The input are integers: there is no gradient with respect to
    them, so nothing that is to be trained can stand in front. With respect to the weights, the output is a selection of
    rows, a sparse matrix with one entry a row; the gradient is its transpose times gy, always added in the same order.
    """

    stepwise = True

    def __init__(
        self, num_embeddings: int, embedding_dim: int, padding_idx: int | None = None, max_norm: None = None,
        norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False, *, device: Any = None,
        dtype: Any = np.float32, rng: Seed = None,
    ) -> None:  # fmt: skip
        super().__init__()
        check_default("max_norm", max_norm, None)
        check_default("norm_type", norm_type, 2.0)
        check_default("sparse", sparse, False)
        self.scale_grad_by_freq = check_flag("scale_grad_by_freq", scale_grad_by_freq)
        self.num_embeddings = check_integer("num_embeddings", num_embeddings, 0)
        self.embedding_dim = check_integer("embedding_dim", embedding_dim, 0)
        self.padding_idx = padding_idx
        if padding_idx is not None:
            number = check_integer("padding_idx", padding_idx, -self.num_embeddings, self.num_embeddings - 1)
            self.padding_idx = number % self.num_embeddings
        shape, dtype = (self.num_embeddings, self.embedding_dim), parameter_dtype(dtype, device)
        self.params["weight"] = normal(check_generator("rng", rng), shape, 1.0, dtype)
        if self.padding_idx is not None:
            self.params["weight"][self.padding_idx] = 0

    def forward(self, x: Array) -> tuple[Array, Array]:
        """Return rows (…, embedding_dim) for x (…) of any integer dtype; `saved` are the numbers.

        On a GPU the host does not look at the numbers: one that is not there makes its row, and so the loss, NaN.

        Raises
        ------
        DTypeError, DeviceError
            x is no array of integers, or on another device.
        OptionError
            A number is out of range.
        """
        weight = self.params["weight"]
        xp = backend.namespace(x=x, weight=weight)
        if x.dtype.kind not in "iu":
            raise DTypeError("x has the wrong dtype", expected="integers (numbers of rows)", got=x.dtype,
                             remedy="Convert it with x.astype(int)")  # fmt: skip
        if backend.is_host(xp):
            self._check_range(x)
            ids = x.astype(np.int64)
            return self._rows(ids), ids
        if self.num_embeddings == 0:
            self._check_range(x)
        wrong = (x < 0) | (x >= self.num_embeddings)
        ids = xp.where(wrong, 0, x).astype(np.int64)
        return xp.where(wrong[..., None], weight.dtype.type(np.nan), self._rows(ids)), ids

    def input_grad(self, gy: Array, saved: Array) -> Array:
        """Raise `OptionError`: the input are integers."""
        raise OptionError(
            "Embedding has no gradient at its input", expected="an Embedding as the first layer, of which only the "
            "weights' gradients are asked for", got="a request for the gradient with respect to integers",
            remedy="Put what is to be trained behind the Embedding, and ask for weight_grad (g.weights) alone",
        )  # fmt: skip

    def weight_grad(self, gy: Array, saved: Array) -> dict[str, Array]:
        """Return ``{"weight": Σ gy}``, over all places of a row's number; zero for the row of `padding_idx`."""
        weight = self.params["weight"]
        xp = check_gy(gy, (*saved.shape, self.embedding_dim), weight.dtype, weight)
        numbers = saved.reshape(-1)
        # The transposed selection as CSR: of every row the places where its number stands, in their order.
        places = xp.argsort(numbers, kind="stable")
        indptr = xp.searchsorted(numbers[places], xp.arange(self.num_embeddings + 1))
        rows = xp.ascontiguousarray(gy.reshape(numbers.size, self.embedding_dim))
        grad, ones = xp.empty(weight.shape, weight.dtype), xp.ones((numbers.size, 1), weight.dtype)
        kernels.get(xp).csr_matvec(indptr, places, ones, rows, grad)
        if self.scale_grad_by_freq:
            grad /= xp.maximum(xp.diff(indptr), 1).astype(grad.dtype)[:, None]
        if self.padding_idx is not None:
            grad[self.padding_idx] = 0
        mask = masking.mask_of(weight)
        return {"weight": grad if mask is None else masking.kept(grad, mask)}

    def _rows(self, ids: Array) -> Array:
        """Return rows of the table, with 0 for what a layer that shares it has pruned."""
        weight = self.params["weight"]
        rows, mask = weight.take(ids, axis=0), masking.mask_of(weight)
        return rows if mask is None else masking.kept(rows, mask.take(ids, axis=0))

    def capture_obstacle(self) -> str | None:
        """The numbers are sorted on the way back: CuPy's sort waits for the device."""
        return "sorts its input on the way back, for which CuPy waits"

    @property
    def input_dtype(self) -> np.dtype:
        """int64, for any integers."""
        return np.dtype(np.int64)

    def _check_range(self, x: Array) -> None:
        if x.size == 0:
            return
        low, high = int(x.min()), int(x.max())
        if low < 0 or high >= self.num_embeddings:
            raise OptionError(
                "x names a row that is not there", expected=f"numbers from 0 to {self.num_embeddings - 1}",
                got=f"numbers from {low} to {high}", remedy="Number from 0, or build a larger Embedding",
            )  # fmt: skip
