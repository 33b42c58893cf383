"""Sparse products in PyTorch, differentiable to any order; batches of one pattern, Jacobians of modules.

The product is linear in the values of A and of B, and so are its gradients: with C = A @ B, the gradient at A sums C's
gradient times B over the same terms, the gradient at B sums A times C's gradient. So any two of three operands give
the third, and the backward of each is made of the other two, to any order. An `autograd.Function` has the rules for
both modes and for vmap; compiled graphs hold the operator ``sparsebp::product``, which finds its plan by a number.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.nn.utils.parametrize import type_before_parametrizations

from sparsebp import nn, products
from sparsebp.core import backend
from sparsebp.core.check import Array
from sparsebp.core.errors import DeviceError, DTypeError, OptionError, PatternError, ShapeError, StaleError
from sparsebp.interop.torch import from_torch
from sparsebp.jacobians import jacobian_t
from sparsebp.patterns import SparsityPattern
from sparsebp.products.product import OPERANDS, Role
from sparsebp.torch import modules
from sparsebp.torch.dispatch import dispatch_of
from sparsebp.torch.graph_breaks import breaks_graphs
from sparsebp.torch.ops import apply, below_autograd, on_its_stream, primals, to_array, to_tensor

__all__ = ["BatchedCSR", "ProductPlan", "plan_product", "sparse_jacobian"]


# The structure of a sparse matrix of any library, as a `SparsityPattern` whose values count.


def pattern_of(name: str, matrix: Any) -> SparsityPattern:
    """Return the structure of a sparse matrix.

    Raises
    ------
    PatternError
        `matrix` is not a sparse matrix, or not canonical.
    """
    if isinstance(matrix, torch.Tensor):
        return _pattern_of_tensor(name, matrix)
    found = matrix if isinstance(matrix, SparsityPattern) else getattr(matrix, "pattern", None)
    if isinstance(found, SparsityPattern):
        return SparsityPattern.diagonal(found.shape[0]) if found.kind == "identity" else found
    if getattr(matrix, "format", None) == "csr":
        return SparsityPattern.from_scipy(matrix)
    raise PatternError(f"{name} is not a sparse matrix",
                       expected="a torch.sparse_csr tensor, SciPy's CSR, a BatchedCSR or a SparsityPattern",
                       got=type(matrix).__name__, remedy="Convert it with .to_sparse_csr() or .tocsr()")  # fmt: skip


def _pattern_of_tensor(name: str, tensor: torch.Tensor) -> SparsityPattern:
    if tensor.layout is not torch.sparse_csr or tensor.dim() not in (2, 3):
        raise PatternError(f"{name} is not a CSR tensor", expected="layout torch.sparse_csr, (m, n) or (B, m, n)",
                           got=f"layout {tensor.layout}, shape {tuple(tensor.shape)}",
                           remedy="Convert it with .to_sparse_csr()")  # fmt: skip
    parts = [tensor.crow_indices().cpu(), tensor.col_indices().cpu()]  # synchronize!
    if tensor.dim() == 3:
        if tensor.shape[0] == 0:
            raise PatternError(f"{name} is an empty batch", expected="a sample, or a SparsityPattern", got=0)
        if not all(bool((part == part[:1]).all()) for part in parts):
            raise PatternError(f"The samples of {name} have different structures", expected="one structure for all",
                               got="rows or columns that differ",
                               remedy="Build the batch on the union of the structures, with stored zeros")  # fmt: skip
        parts = [part[0] for part in parts]
    rows, columns = tensor.shape[-2:]
    return SparsityPattern(parts[0].numpy(), parts[1].numpy(), (rows, columns))


_plans: WeakValueDictionary[int, products.ProductPlan] = WeakValueDictionary()
_numbers = itertools.count()


def number_of(plan: products.ProductPlan) -> int:
    """Return a unique number by which the operator finds a plan while somebody keeps it."""
    number = next(_numbers)
    _plans[number] = plan
    return number


def evaluate(number: int, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the values of C from those of A and B, by the plan of that number."""
    inputs = number, "c", x, y
    found: torch.Tensor = product(*inputs) if torch.compiler.is_compiling() else apply(Form, *inputs)
    return found


# ---- the operator ----------------------------------------------------------------------------------------------------

torch.library.define("sparsebp::product", "(int plan, str role, Tensor x, Tensor y) -> Tensor")
product = torch.ops.sparsebp.product.default


def _plan(number: int) -> products.ProductPlan:
    found = _plans.get(number)
    if found is None:
        raise StaleError("The plan of a compiled product is gone", expected="a plan that somebody keeps",
                         got="none of that number", remedy="Keep the object that plan_product returned")  # fmt: skip
    return found


def _product(plan: int, role: Role, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return one of A, B and C from the values of the other two, in the order of `OPERANDS`."""
    with on_its_stream(x):
        return _turned(to_tensor(_plan(plan).form(role, columns(x), columns(y))))


torch.library.impl("sparsebp::product", ("cpu", "cuda"), _product)


@torch.library.register_fake("sparsebp::product")
def _shape_of_product(plan: int, role: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    found = _plan(plan)
    size = {"a": found.a, "b": found.b, "c": found.pattern}[role].nnz
    batches = [v.shape[0] for v in (x, y) if v.dim() == 2]
    return x.new_empty((size, *batches[:1])).t()


def columns(values: torch.Tensor) -> Array:
    """Return values (nnz,) or (B, nnz) as an array (nnz,) or (nnz, B), batch last; copied only if not contiguous."""
    return to_array(_turned(values))


def _turned(values: torch.Tensor) -> torch.Tensor:
    """Return the transposed matrix; a vector as it is, without the microsecond that a view takes."""
    return values.t() if values.dim() == 2 else values


# ---- its derivatives -------------------------------------------------------------------------------------------------


class Form(torch.autograd.Function):
    """The operator with its derivatives."""

    operator, forward = product, below_autograd(product, _product)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.number, ctx.role, x, y = inputs
        ctx.plan = _plan(ctx.number)  # keeps it alive for the backward
        ctx.save_for_backward(x, y)
        ctx.save_for_forward(x, y)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        """Return the gradients at both operands by the form itself, summed over the samples for a shared operand."""
        names, operands = OPERANDS[ctx.role], ctx.saved_tensors
        values = {names[0]: operands[0].conj(), names[1]: operands[1].conj(), ctx.role: grads[0]}
        found: list[torch.Tensor | None] = [None, None]
        for name, operand, needed in zip(names, operands, ctx.needs_input_grad[2:], strict=True):
            gradient = None
            if needed:
                gradient = apply(Form, ctx.number, name, *(values[other] for other in OPERANDS[name]))
                gradient = gradient.sum(0) if gradient.dim() > operand.dim() else gradient
            found.append(gradient)
        return tuple(found)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> torch.Tensor:
        _, _, dx, dy = tangents
        with primals(ctx.saved_tensors) as (x, y):
            terms = [(tangent, y) for tangent in (dx,) if tangent is not None]
            terms += [(x, tangent) for tangent in (dy,) if tangent is not None]
            parts = [Form.apply(ctx.number, ctx.role, *term) for term in terms]
            return parts[0] if len(parts) == 1 else parts[0] + parts[1]

    @staticmethod
    def vmap(
        info: Any, in_dims: Sequence[int | None], number: int, role: Role, x: torch.Tensor, y: torch.Tensor,
    ) -> tuple[torch.Tensor, int]:  # fmt: skip
        """Treat the mapped axis as samples, in addition to existing ones."""
        size = info.batch_size
        operands = [v if dim is None else v.movedim(dim, 0) for v, dim in zip((x, y), in_dims[2:], strict=True)]
        ranks = [v.dim() - (dim is not None) for v, dim in zip(operands, in_dims[2:], strict=True)]
        if max(ranks) == 1:
            return Form.apply(number, role, *operands), 0
        batch = next(v.shape[-2] for v, rank in zip(operands, ranks, strict=True) if rank == 2)
        flat = []
        for v, rank, dim in zip(operands, ranks, in_dims[2:], strict=True):
            if dim is None and rank == 1:
                flat.append(v)  # shared by all
                continue
            wide = v[:, None] if rank == 1 else v
            flat.append(wide.expand(size, batch, v.shape[-1]).reshape(size * batch, v.shape[-1]))
        found = Form.apply(number, role, *flat)
        return found.reshape(size, batch, found.shape[-1]), 0


# As in `sparsebp.torch.ops`: with `torch.library.register_autograd` instead, tangents would silently be dropped.
_LIBRARY = torch.library.Library("sparsebp", "FRAGMENT")
_LIBRARY.impl("product", Form.apply, "Autograd")


# Products of batches of sparse matrices of one pattern, differentiable: planned once, then run for any values.


@breaks_graphs
def plan_product(a: Any, b: Any, *, mask: Any = None) -> ProductPlan:
    """Do the symbolic work of C = A @ B once, for sparse matrices or batches of them; values come later.

    Parameters
    ----------
    a, b
        The structures, of shapes (m, k) and (k, n): `torch.sparse_csr` tensors (samples of a batch share one
        structure), SciPy's CSR matrices, `BatchedCSR`, `sparsebp.SparsityPattern` or `sparsebp.TransposedJacobian`.
        Stored zeros are entries; values are ignored. Index arrays are copied.
    mask
        The structure of C, (m, n), where only these entries are to be computed: see `sparsebp.plan_product`.

    Returns
    -------
    ProductPlan
        Call it with the values.

    Raises
    ------
    PatternError
        An operand is something else, its columns are not sorted, or the samples of a batch differ in structure.
    ShapeError
        The shapes do not chain, or the mask has another one than C.

    Examples
    --------
    >>> import torch, sparsebp.torch as st
    >>> A, B = (torch.eye(3).to_sparse_csr() for _ in range(2))
    >>> plan = st.plan_product(A, B)
    >>> plan(torch.full((5, 3), 2.0), torch.full((3,), 4.0)).shape
    torch.Size([5, 3])
    """
    mask = None if mask is None else pattern_of("mask", mask)
    return ProductPlan(products.plan_product(pattern_of("a", a), pattern_of("b", b), mask=mask))


class ProductPlan:
    """How C = A @ B is computed for two structures, any number of times. Made by `plan_product`.

    Attributes
    ----------
    pattern
        C's structure, a `sparsebp.SparsityPattern`; calls return values in the order of its entries.
    """

    def __init__(self, plan: products.ProductPlan) -> None:
        self._plan, self._number = plan, number_of(plan)
        self.pattern: SparsityPattern = plan.pattern

    @property
    def shape(self) -> tuple[int, int]:
        """C's (m, n)."""
        return self.pattern.shape

    @property
    def nnz(self) -> int:
        """Number of C's entries."""
        return self.pattern.nnz

    def __call__(self, a_values: torch.Tensor, b_values: torch.Tensor) -> torch.Tensor:
        """Compute the values of C.

        Differentiable at both operands, to any order, also under `torch.func.vmap`, `grad` and `jvp`; a compiled graph
        holds the call as one operator.

        Parameters
        ----------
        a_values, b_values
            Values of A and B in the order of their entries: (nnz,), shared by all samples, or (B, nnz); float32,
            float64, complex64 or complex128, of one dtype, on one device (CPU, or CUDA with CuPy installed).

        Returns
        -------
        torch.Tensor
            (nnz of C,) if both are shared, else (B, nnz of C); new in every call.

        Notes
        -----
        The kernels keep the batch last, so the result is a transposed view of (nnz, B). Values that are such a view (of
        another product, or ``torch.empty(nnz, B).T``) are used without a copy; others are copied once.
        """
        checked("a_values", a_values, self._plan.a.nnz)
        checked("b_values", b_values, self._plan.b.nnz)
        _check_alike(a_values, b_values)
        return evaluate(self._number, a_values, b_values)

    def __reduce__(self) -> tuple[Any, ...]:
        return ProductPlan, (self._plan,)

    def __repr__(self) -> str:
        return f"ProductPlan({self._plan.a!r} @ {self._plan.b!r} -> {self.pattern!r}, {self._plan.strategy})"


DTYPES = (torch.float32, torch.float64, torch.complex64, torch.complex128)
"""The dtypes of values."""


def checked(name: str, values: Any, nnz: int) -> torch.Tensor:
    """Return values, checked for a structure of `nnz` entries."""
    if not isinstance(values, torch.Tensor) or values.layout is not torch.strided:
        got = type(values).__name__ if not isinstance(values, torch.Tensor) else f"a tensor of layout {values.layout}"
        raise DTypeError(f"{name} is not a dense tensor", expected="a tensor of values in the order of the entries",
                         got=got, remedy="Multiply sparse tensors as BatchedCSR(A) @ BatchedCSR(B)")  # fmt: skip
    if values.dtype not in DTYPES:
        expected = "float32 or float64, complex64 or complex128"
        raise DTypeError(f"{name} has an unsupported dtype", expected=expected, got=values.dtype)
    if values.dim() not in (1, 2) or values.shape[-1] != nnz:
        raise ShapeError(f"{name} does not fit its structure", expected=f"({nnz},) or (B, {nnz})", got=(*values.shape,))
    if values.device.type not in ("cpu", "cuda"):
        raise DeviceError(f"{name} is on an unsupported device", expected="cpu or cuda", got=values.device)
    return values


def _check_alike(a: torch.Tensor, b: torch.Tensor) -> None:
    if a.device != b.device:
        raise DeviceError("The values are on different devices", expected="one device", got=f"{a.device}, {b.device}")
    if a.dtype != b.dtype:
        raise DTypeError("The values have different dtypes", expected="one dtype", got=f"{a.dtype}, {b.dtype}")
    if a.dim() == b.dim() == 2 and len(a) != len(b):
        got = f"{(*a.shape,)}, {(*b.shape,)}"
        raise ShapeError("The values have different batch sizes", expected="one, or (nnz,) for all", got=got)


# A batch of sparse matrices of one structure, with PyTorch tensors as values.


class BatchedCSR:
    """A batch of sparse matrices with one structure; products and transposes are differentiable.

    `torch.compile` breaks its graph here, but holds the call of a `ProductPlan` made beforehand as one operator.

    Parameters
    ----------
    structure
        As for `plan_product`.
    values
        (B, nnz), or (nnz,) for one matrix for all samples, in the order of the entries; kept, not copied. None: the
        values of `structure`, a `torch.sparse_csr` tensor.

    Raises
    ------
    PatternError
        The structure is invalid, or no values are given.
    ShapeError, DTypeError, DeviceError
        The values do not fit.

    Examples
    --------
    >>> import torch, sparsebp.torch as st
    >>> A = st.BatchedCSR(torch.tensor([[1.0, 0.0], [2.0, 3.0]]).to_sparse_csr(), torch.ones(5, 3))
    >>> (A @ A).to_dense()[0]
    tensor([[1., 0.],
            [2., 1.]])
    """

    @breaks_graphs
    def __init__(self, structure: Any, values: torch.Tensor | None = None) -> None:
        self.pattern: SparsityPattern = pattern_of("structure", structure)
        if values is None:
            if not isinstance(structure, torch.Tensor):
                raise PatternError("The matrices have no values", expected="a sparse_csr tensor, or values", got=None)
            values = structure.values()
        self.values = checked("values", values, self.pattern.nnz)

    @property
    def shape(self) -> tuple[int, ...]:
        """(B, m, n), or (m, n) of one matrix for all samples."""
        return (*self.values.shape[:-1], *self.pattern.shape)

    @property
    @breaks_graphs
    def T(self) -> BatchedCSR:
        """The transposed matrices; values are copied into the order of the transposed structure."""
        order = torch.from_numpy(self.pattern.transpose_permutation.astype("int64")).to(self.values.device)
        return BatchedCSR(self.pattern.T, self.values[..., order])

    @breaks_graphs
    def __matmul__(self, other: BatchedCSR | torch.Tensor) -> BatchedCSR | torch.Tensor:
        """Multiply by another batch of sparse matrices, or by dense ones."""
        if isinstance(other, BatchedCSR):
            plan = self._plan(other)
            return BatchedCSR(plan.pattern, plan(self.values, other.values))
        if not isinstance(other, torch.Tensor):
            return NotImplemented
        if other.dim() not in (1, 2, 3) or other.layout is not torch.strided:
            got = f"{tuple(other.shape)}, {other.layout}"
            raise ShapeError("The operand is not dense", expected="a tensor (n,), (n, p) or (B, n, p)", got=got)
        wide = other[:, None] if other.dim() == 1 else other
        dense = BatchedCSR(SparsityPattern.dense(*wide.shape[-2:]), wide.flatten(-2))
        plan = self._plan(dense)
        found = BatchedCSR(plan.pattern, plan(self.values, dense.values)).to_dense()
        return found.squeeze(-1) if other.dim() == 1 else found

    def _plan(self, other: BatchedCSR) -> ProductPlan:
        return plan_product(self.pattern, other.pattern)

    @breaks_graphs
    def to_dense(self) -> torch.Tensor:
        """Return the matrices as a dense tensor of `shape`; differentiable."""
        m, n = self.pattern.shape
        places = torch.from_numpy(self.pattern.row_of_entry.astype("int64") * n + self.pattern.indices)
        zeros = self.values.new_zeros(*self.values.shape[:-1], m * n)
        return zeros.index_copy(-1, places.to(zeros.device), self.values).reshape(self.shape)

    def to_sparse_csr(self) -> torch.Tensor:
        """Return a `torch.sparse_csr` tensor of `shape` that shares the values, without the autograd graph."""
        indptr, indices = (torch.from_numpy(array.copy()).to(self.values.device)
                           for array in (self.pattern.indptr, self.pattern.indices))  # fmt: skip
        batch = self.values.shape[:-1]
        values = self.values.detach()
        return torch.sparse_csr_tensor(indptr.expand(*batch, -1), indices.expand(*batch, -1), values, size=self.shape,
                                       check_invariants=False)  # fmt: skip

    def __repr__(self) -> str:
        return f"BatchedCSR({tuple(self.shape)}, nnz={self.pattern.nnz}, {self.values.dtype}, {self.values.device})"


# PyTorch's modules as layers of ours, with copied weights, for functions that need a layer's sparse Jacobian.

_CONV = "in_channels out_channels kernel_size stride padding"
_RECURRENT = "input_size hidden_size num_layers bias batch_first dropout bidirectional dtype"
_NORM = "num_features eps momentum affine track_running_stats dtype"
_ARGUMENTS = {
    "Linear": "in_features out_features bias dtype",
    **dict.fromkeys(("Conv1d", "Conv2d", "Conv3d"), f"{_CONV} dilation groups bias padding_mode dtype"),
    **dict.fromkeys(("ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d"),
                    f"{_CONV} output_padding groups bias dilation padding_mode dtype"),
    **dict.fromkeys(("ReLU", "ReLU6", "Tanh", "Sigmoid", "SiLU", "SELU", "Mish", "Identity", "Hardsigmoid", "Hardswish",
                     "LogSigmoid", "Softsign"), ""),
    "LeakyReLU": "negative_slope",
    **dict.fromkeys(("ELU", "CELU"), "alpha"),
    "GELU": "approximate",
    "Hardtanh": "min_val max_val",
    "Softplus": "beta threshold",
    **dict.fromkeys(("Softmax", "LogSoftmax"), "dim"),
    "PReLU": "num_parameters dtype",
    **dict.fromkeys(("MaxPool1d", "MaxPool2d", "MaxPool3d"), "kernel_size stride padding dilation ceil_mode"),
    "AvgPool1d": "kernel_size stride padding ceil_mode count_include_pad",
    **dict.fromkeys(("AvgPool2d", "AvgPool3d"),
                    "kernel_size stride padding ceil_mode count_include_pad divisor_override"),
    **dict.fromkeys((f"Adaptive{kind}Pool{axes}d" for kind in ("Avg", "Max") for axes in (1, 2, 3)), "output_size"),
    **dict.fromkeys((f"{kind}Norm{axes}d" for kind in ("Batch", "Instance") for axes in (1, 2, 3)), _NORM),
    "Upsample": "size scale_factor mode align_corners recompute_scale_factor",
    "GroupNorm": "num_groups num_channels eps affine dtype",
    "RMSNorm": "normalized_shape eps elementwise_affine dtype",
    "LayerNorm": "normalized_shape eps elementwise_affine bias dtype",
    **dict.fromkeys(("Dropout", "Dropout2d"), "p"),
    "Flatten": "start_dim end_dim",
    "Unflatten": "dim unflattened_size",
    "ZeroPad2d": "padding",
    "RNN": f"{_RECURRENT} nonlinearity",
    "GRU": _RECURRENT,
    "LSTM": f"{_RECURRENT} proj_size",
}  # fmt: skip
"""By module, the arguments that it shares with our layer of the same name, by PyTorch's names."""
_RECURRENTS = ("RNN", "GRU", "LSTM")


def layer_of(module: Any) -> nn.Layer:
    """Return a layer that computes the same as `module`, with copied weights; a layer of ours as it is."""
    if isinstance(module, nn.Layer):
        return module
    if not isinstance(module, torch.nn.Module):
        raise _no_layer(type(module).__name__, "a module of torch.nn, or a layer of sparsebp.nn")
    kind = type_before_parametrizations(module)
    if module._forward_hooks or module._forward_pre_hooks:
        raise _no_layer(f"{kind.__name__} with forward hooks", "a module without hooks, which may change its output")
    if "forward" in module.__dict__ and dispatch_of(module) is None:
        raise _no_layer(f"{kind.__name__} whose forward was replaced", "a module with the forward of its class")
    if kind is torch.nn.Sequential:
        return nn.Sequential(*(layer_of(child) for child in module.children())).train(module.training)
    name = kind.__name__
    if name not in _ARGUMENTS or kind not in (getattr(torch.nn, name, None), getattr(modules, name, None)):
        raise _no_layer(name, "torch.nn's " + ", ".join(sorted({*_ARGUMENTS, "Sequential"})))
    if module.training and getattr(module, "dropout" if name in _RECURRENTS else "p", 0) > 0:
        raise _no_layer(f"{name} that drops elements while training", "a module in evaluation: module.eval()")
    if getattr(module, "return_indices", False):
        raise _no_layer(f"{name}(return_indices=True)", "a module that returns the maxima alone")
    return _with_weights(getattr(nn, name)(**_arguments(module, name)), module)


def _arguments(module: Any, name: str) -> dict[str, Any]:
    """Return the arguments of the layer."""
    found: dict[str, Any] = {}
    for argument in _ARGUMENTS[name].split():
        if argument == "dtype":
            weights = (*module.parameters(), *module.buffers())  # statistics without weights also have a dtype
            if weights:
                found["dtype"] = str(weights[0].dtype).removeprefix("torch.")
        elif argument == "bias":
            found["bias"] = module.bias if isinstance(module.bias, bool) else module.bias is not None
        else:
            found[argument] = getattr(module, argument)
    return found


def _with_weights(layer: nn.Layer, module: Any) -> nn.Layer:
    """Give the layer the module's parameters and buffers, its mode and its device."""
    names = [*layer.params, *layer.buffers]
    tensors = {name: getattr(module, name).detach() for name in names}
    if any(tensor.is_cuda for tensor in tensors.values()):
        layer.to("cuda")
    layer.load_state_dict({name: from_torch(tensor) for name, tensor in tensors.items()})
    return layer.train(module.training)


def _no_layer(got: str, expected: str) -> OptionError:
    return OptionError("sparsebp has no layer for this module", expected=expected, got=got,
                       remedy="For a function use sparsebp.sparse_jacobian; for a module, pass its parts")  # fmt: skip


# Sparse Jacobians of PyTorch's modules: values on a pattern known from the architecture, without backward passes.


def sparse_jacobian(module: Any, x: torch.Tensor) -> torch.Tensor:
    """Return the Jacobian of every sample of a batch as one `torch.sparse_csr` tensor.

    It is **the Jacobian**, not its transpose, flattened as by `torch.func.jacrev`: entry [b, i, j] is the derivative of
    output i of sample b with respect to its input j, both in C order. Every entry that the architecture allows is
    stored, even where its value is 0 (a ReLU that is off).

    Parameters
    ----------
    module
        A module of `torch.nn` with a counterpart in sparsebp: Linear, convolutions and transposed ones, pointwise
        activations, Softmax, pooling, padding, upsampling, normalisations (BatchNorm in evaluation), RNN, GRU and LSTM
        (their output sequences), Flatten, Dropout in evaluation, and Sequentials of them, whose Jacobian is the
        product; or a layer of `sparsebp.nn`. Weights are read at every call.
    x
        The input batch, batch first (recurrent modules: as their ``batch_first`` says), in the module's float32 or
        float64.

    Returns
    -------
    torch.Tensor
        ``torch.sparse_csr`` of shape (B, n_out, n_in), on the device of x, without an autograd graph; ``J[b]`` is the
        matrix of sample b. int32 indices, the same for every sample. Values that do not depend on x (a convolution) are
        stored once and shared by all samples: do not write to them.

    Raises
    ------
    OptionError
        The module has no counterpart, or its samples depend on each other (batch statistics).
    ShapeError, DTypeError, DeviceError
        x has no batch axis, or does not fit the module.
    MemoryLimitError
        An operator without its own pattern would take more than 2 GiB.

    See Also
    --------
    sparsebp.jacobian_t : the transposed Jacobian for scans, with products, `vjp` and `jvp`.

    Examples
    --------
    >>> import torch, sparsebp.torch as st
    >>> J = st.sparse_jacobian(torch.nn.Conv2d(3, 8, 3, padding=1), torch.randn(4, 3, 16, 16))
    >>> tuple(J.shape), J[0].layout
    ((4, 2048, 768), torch.sparse_csr)
    """
    if not isinstance(x, torch.Tensor) or x.dtype not in (torch.float32, torch.float64):
        raise DTypeError("x is not a tensor of floats", expected="a torch.Tensor, float32 or float64",
                         got=getattr(x, "dtype", type(x).__name__))  # fmt: skip
    with on_its_stream(x):
        layer = layer_of(module)
        found = jacobian_t(layer, from_torch(x))
        jacobian, batch = found.T, x.shape[layer.batch_axes[0]]
        xp = backend.namespace(jacobian.data)
        indptr, indices = (to_tensor(array.copy()) for array in jacobian.pattern.device_arrays(xp))
        if jacobian.batch is None:
            values = to_tensor(jacobian.data).expand(batch, -1)
        else:
            values = to_tensor(xp.ascontiguousarray(jacobian.data.T))
    return torch.sparse_csr_tensor(
        indptr.expand(batch, -1), indices.expand(batch, -1), values, size=(batch, *jacobian.shape),
        check_invariants=False,  # a pattern is valid by construction
    )  # fmt: skip
