"""The form that a product and its gradients are, with a way back of any order: eager, transformed and compiled.

The product is linear in the values of A and in those of B, and so are its gradients: with C = A @ B, the gradient at A
is a sum over the same terms of C's gradient and B, that at B of A and C's gradient. So there is one form of three
operands, of which any two make the third, and the way back of each of the three is made of the other two, as often as
one likes. An `autograd.Function` has the rules for both modes and for vmap; compiled graphs hold the operator
``sparsebp::product``, which knows a plan by a number and comes to the same function.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Literal
from weakref import WeakValueDictionary

import torch

from sparsebp import products
from sparsebp.core.errors import StaleError
from sparsebp.core.types import Array
from sparsebp.torch.arrays import on_its_stream, to_array, to_tensor
from sparsebp.torch.nesting import primals

Role = Literal["a", "b", "c"]
OPERANDS: dict[str, tuple[Role, Role]] = {"c": ("a", "b"), "a": ("c", "b"), "b": ("a", "c")}
"""Of what every one of the three is made."""

_plans: WeakValueDictionary[int, products.ProductPlan] = WeakValueDictionary()
_numbers = itertools.count()


def number_of(plan: products.ProductPlan) -> int:
    """Return a number by which the operator finds a plan, as long as somebody keeps the plan; none is used twice."""
    number = next(_numbers)
    _plans[number] = plan
    return number


def evaluate(number: int, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the values of C by the plan of that number, from those of A and of B."""
    found: torch.Tensor = (product if torch.compiler.is_compiling() else Form.apply)(number, "c", x, y)
    return found


# ---- the operator ----------------------------------------------------------------------------------------------------

torch.library.define("sparsebp::product", "(int plan, str role, Tensor x, Tensor y) -> Tensor")
product = torch.ops.sparsebp.product.default


def _plan(number: int) -> products.ProductPlan:
    found = _plans.get(number)
    if found is None:
        raise StaleError("The plan of a compiled product is gone", expected="a plan that is kept by somebody",
                         got="none of that number", remedy="Keep the object that plan_product returned")  # fmt: skip
    return found


@torch.library.impl("sparsebp::product", ("cpu", "cuda"))
def _product(plan: int, role: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return one of A, B and C, by the values of the other two in the order of `OPERANDS`."""
    how = _plan(plan)
    with on_its_stream(x):
        left, right = columns(x), columns(y)
        if role == "c":
            found = how(left, right)
        else:
            found = (how.gradients.at_a if role == "a" else how.gradients.at_b)(left, right)
        return to_tensor(found).t()


@torch.library.register_fake("sparsebp::product")
def _shape_of_product(plan: int, role: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    found = _plan(plan)
    size = {"a": found.a, "b": found.b, "c": found.pattern}[role].nnz
    batches = [v.shape[0] for v in (x, y) if v.dim() == 2]
    return x.new_empty((size, *batches[:1])).t()


def columns(values: torch.Tensor) -> Array:
    """Return values (nnz,) or (B, nnz) as an array (nnz,) or (nnz, B), the batch last; a copy if they lie otherwise."""
    return to_array(values.t())


# ---- its derivatives -------------------------------------------------------------------------------------------------


class Form(torch.autograd.Function):
    """The operator with its derivatives."""

    @staticmethod
    def forward(*inputs: Any) -> torch.Tensor:  # noqa: D102
        with torch._C._AutoDispatchBelowAutograd():
            found: torch.Tensor = product(*inputs)
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:  # noqa: D102
        ctx.number, ctx.role, x, y = inputs
        ctx.plan = _plan(ctx.number)  # for the way back, whatever becomes of it meanwhile
        ctx.save_for_backward(x, y)
        ctx.save_for_forward(x, y)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        """Return the gradients at both operands, by the form itself; of a shared one the sum over the samples."""
        names, operands = OPERANDS[ctx.role], ctx.saved_tensors
        values = {**dict(zip(names, operands, strict=True)), ctx.role: grads[0]}
        found: list[torch.Tensor | None] = [None, None]
        for name, operand, needed in zip(names, operands, ctx.needs_input_grad[2:], strict=True):
            gradient = None
            if needed:
                gradient = Form.apply(ctx.number, name, *(values[other] for other in OPERANDS[name]))
                gradient = gradient.sum(0) if gradient.dim() > operand.dim() else gradient
            found.append(gradient)
        return tuple(found)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> torch.Tensor:  # noqa: D102
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
        """Take what is mapped over for samples, beside those that are there."""
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


# So an operator in a graph that meets a transform which graphs do not know raises, and PyTorch goes on without it;
# with `torch.library.register_autograd` in place of this, tangents would be dropped without a word.
_LIBRARY = torch.library.Library("sparsebp", "FRAGMENT")
_LIBRARY.impl("product", Form.apply, "Autograd")
