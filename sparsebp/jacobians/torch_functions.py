"""Functions of PyTorch tensors: their pattern from the ATen graph, their derivatives by `torch.func`.

`make_fx` records every ATen operation that f runs, without views and writes in place, and refuses control flow that
depends on values. The graph is then walked with the index sets of `sparsebp.jacobians.index_sets`: for every operation
listed here a rule says on which elements an element of the result depends. Others are refused, unless PyTorch
decomposes them into these.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import numpy as np
import torch
from torch._decomp import core_aten_decompositions
from torch.fx.experimental.proxy_tensor import make_fx

from sparsebp.core.check import shown
from sparsebp.core.errors import DTypeError, ShapeError, SparseBPError, TracingError
from sparsebp.core.locks import forkable_lock
from sparsebp.jacobians import numpy_rules  # noqa: F401  (functions of traced arrays)
from sparsebp.jacobians.index_sets import Sets
from sparsebp.jacobians.stored import Digests
from sparsebp.jacobians.tracing import Traced, check_length, refused, selection
from sparsebp.jacobians.trees import FlatFunction, replaced
from sparsebp.patterns.builders import adaptive_pool_pattern, conv_pattern, conv_transpose_pattern, pool_pattern
from sparsebp.patterns.pattern import SparsityPattern

with warnings.catch_warnings():  # forward mode imports it at its first use, and it warns
    warnings.simplefilter("ignore", DeprecationWarning)
    import torch._decomp.decompositions_for_jvp


_one_at_a_time = forkable_lock()
"""Forward mode and the tracer of PyTorch are of the process: threads would end each other's."""
CONVERSIONS = frozenset(("numpy", "tolist", "item", "__array__", "__float__", "__complex__", "__dlpack__"))
"""Methods of a tensor that return what has no derivative."""


class _Followed(torch.Tensor):
    """A tensor that refuses to be converted; so do all tensors that are computed from it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in CONVERSIONS and (args[0].dtype.is_floating_point or name in ("numpy", "tolist")):
            raise refused(f"A conversion to an array or number (Tensor.{name})",
                          "Keep tensors: x[0] for x[0].item(), torch.sin(x) for numpy.sin(x)")  # fmt: skip
        return super().__torch_function__(func, types, args, kwargs or {})


class TorchFunction:
    """A function of tensors; of a scalar one, its gradient."""

    compiled, block_bytes = False, 1 << 22

    def __init__(self, f: FlatFunction, argnum: int, scalar: bool) -> None:
        self.f, self.argnum, self.scalar = f, argnum, scalar
        self._one_by_one = False  # whether reverse directions are, since PyTorch cannot map the function

    def of(self, args: tuple[Any, ...], places: list[int], plain: bool = False) -> Callable[..., torch.Tensor]:
        """Return the function of some arguments alone, x first; of a scalar one its gradient, unless it is `plain`."""

        def of_some(*given: Any) -> torch.Tensor:
            y = self.f(*replaced(args, places, given))
            if not isinstance(y, torch.Tensor) or y.dtype not in (torch.float32, torch.float64):
                raise DTypeError("The function does not return a tensor of floats", expected="a tensor (m,), float32 "
                                 "or float64", got=getattr(y, "dtype", type(y).__name__))  # fmt: skip
            if y.layout != torch.strided:
                raise DTypeError("The function returns a sparse tensor", expected="a dense one", got=y.layout)
            if self.scalar and y.ndim:
                raise TracingError("The function is not scalar", expected="an output of shape ()", got=tuple(y.shape))
            if not self.scalar and y.ndim != 1:
                raise ShapeError(
                    "The function does not return a vector", expected="(m,)", got=tuple(y.shape),
                    remedy="Return y.ravel(); for a scalar use sparse_hessian, or return y[None]",
                )  # fmt: skip
            return y

        return torch.func.grad(of_some) if self.scalar and not plain else of_some

    def at(self, args: tuple[Any, ...]) -> tuple[Callable[..., torch.Tensor], torch.Tensor]:
        """Return the function of x alone, and x as a tensor that it may write to."""
        x = args[self.argnum]
        x = torch.from_numpy(np.array(x)) if isinstance(x, np.ndarray) else x.detach().clone()
        return self.of(args, [self.argnum]), x

    def _called(self, args: tuple[Any, ...], kind: type[torch.Tensor] = torch.Tensor) -> torch.Tensor:
        """Return what f returns, not its gradient; f may differentiate x itself, where x requires it."""
        x = self.at(args)[1].requires_grad_(getattr(args[self.argnum], "requires_grad", False)).clone()
        return self.of(args, [self.argnum], plain=True)(x.as_subclass(kind)).detach().as_subclass(torch.Tensor)

    def pattern(self, args: tuple[Any, ...]) -> SparsityPattern:
        """Walk the graph at these arguments with index sets."""
        level = Sets(len(args[self.argnum]))
        return level.pattern(self._walked(args, level), self.scalar)

    def digest(self, args: tuple[Any, ...]) -> str:
        """Return the digest of the pattern."""
        level = Digests(len(args[self.argnum]))
        return level.digest(self._walked(args, level), self.scalar)

    def _walked(self, args: tuple[Any, ...], level: Sets) -> Any:
        """Return what the result carries; other tensors of floats are arrays that depend on no input."""
        _, x = self.at(args)
        places = [self.argnum, *(i for i, a in enumerate(args) if self.varies(i, a) and i != self.argnum)]
        args = tuple(torch.tensor(a, dtype=torch.float64) if isinstance(a, float) else a for a in args)
        f, others = self.of(args, places), [args[i].detach() for i in places[1:]]
        functional = torch.func.functionalize(f, remove="mutations_and_views")
        with self._refusals(args), _one_at_a_time:
            traced = make_fx(functional, _decompositions())(x.clone(), *others)
        found = walk(traced.graph, level)
        x = _elsewhere(x)  # where what was read from x as a constant is another number
        with contextlib.suppress(Exception):  # f has no value there
            expected = f(x.clone(), *others)
            check_same("The function is another one when it is traced", expected, traced(x.clone(), *others))
        return found

    @contextlib.contextmanager
    def _refusals(self, args: tuple[Any, ...]) -> Iterator[None]:
        """Say what PyTorch cannot trace or differentiate; an error of the function itself is raised as it is."""
        try:
            yield
        except (SparseBPError, torch.OutOfMemoryError, Warning):
            raise
        except Exception as error:
            self._called(args)
            remedy = "Use torch.where for conditions on values; where only the pattern is not found, pass pattern="
            if "random" in str(error):
                remedy = "Draw random numbers before, and pass them as an argument"
            raise TracingError("PyTorch cannot trace or differentiate the function",
                               got=re.split(r"\.\s|\n", str(error))[0], remedy=remedy) from error  # fmt: skip

    def tape(self, pattern: SparsityPattern) -> None:
        """There is none."""

    def varies(self, place: int, arg: Any) -> bool:
        """Return whether it is x, a float, or a tensor of floats."""
        floats = isinstance(arg, float) or (isinstance(arg, torch.Tensor) and arg.dtype.is_floating_point)
        return place == self.argnum or floats

    def compare(self, args: tuple[Any, ...]) -> None:
        """Compare two calls, one with a tensor that refuses to be converted, and both modes along a direction."""
        f, x = self.at(args)
        first = self._called(args)
        try:
            second = self._called(args, _Followed)
        except TracingError:
            raise
        except Exception:  # what takes no other classes of tensors
            second = self._called(args)
        check_same("Two calls of the function differ", first, second)
        rng = np.random.default_rng(0)
        x = _elsewhere(x)
        along = torch.from_numpy(rng.standard_normal(len(x))).to(x)
        try:
            with _one_at_a_time:
                pushed = torch.func.jvp(f, (x.clone(),), (along,))[1]
            y, back = torch.func.vjp(f, x.clone())[:2]
            weights = torch.from_numpy(rng.standard_normal(len(y))).to(y)
            pulled = back(weights)[0]
        except Exception:  # there is one mode, or no value
            return
        one, other = pulled * along, weights * pushed
        size = one.abs().sum() + other.abs().sum()
        check_same("Forward and reverse mode of PyTorch differ", one.sum(), other.sum(), size,
                   "Forward mode ignores torch.no_grad(): use y.detach() instead. Or has an autograd.Function a wrong "
                   "jvp?")  # fmt: skip

    def value(self, args: tuple[Any, ...]) -> np.ndarray:
        """Return what f returns, not its gradient."""
        return self._called(args).cpu().numpy()

    def missing(self, mode: Literal["forward", "reverse"], args: tuple[Any, ...], length: int) -> TracingError | None:
        """Return PyTorch's reason, which it gives when it runs."""
        width = len(args[self.argnum]) if mode == "forward" else length
        try:
            (self.forward if mode == "forward" else self.reverse)(args, np.zeros((1, width), bool))
        except TracingError as error:
            return error
        return None

    def forward(self, args: tuple[Any, ...], seeds: np.ndarray) -> torch.Tensor:
        """Return derivatives along directions (p, n): shape (p, m)."""
        f, x = self.at(args)
        rows = _rows(seeds).to(x)
        with self._refusals(args), _one_at_a_time:
            return torch.func.vmap(lambda v: torch.func.jvp(f, (x.clone(),), (v,))[1])(rows).detach()

    def reverse(self, args: tuple[Any, ...], seeds: np.ndarray) -> torch.Tensor:
        """Return products of vectors (p, m) with the Jacobian: shape (p, n)."""
        f, x = self.at(args)
        rows = _rows(seeds).to(x)
        if not self._one_by_one:
            try:
                y, back = torch.func.vjp(f, x)[:2]
                check_length(len(y), seeds.shape[1])
                return torch.func.vmap(lambda v: back(v)[0])(rows.to(y)).detach()
            except SparseBPError:
                raise
            except (RuntimeError, TypeError):  # an autograd.Function without rules for transforms
                x = self.at(args)[1]
        with self._refusals(args), torch.enable_grad():
            x.requires_grad_()
            y = self.of(args, [self.argnum], plain=True)(x.clone())
            if self.scalar:
                (y,) = torch.autograd.grad(y, x, create_graph=True)
            check_length(len(y), seeds.shape[1])
            found = [torch.autograd.grad(y, x, v, retain_graph=True)[0] for v in rows.to(y)]
        self._one_by_one = True
        return torch.stack(found)

    def entries(
        self, mode: Literal["forward", "reverse"], args: tuple[Any, ...], seeds: np.ndarray, width: int,
        places: np.ndarray, reached: np.ndarray,
    ) -> tuple[Any, tuple[int, float] | None]:  # fmt: skip
        """Return elements of the derivatives, (p, width), and one not `reached` that is not zero: its place, value."""
        block = self.forward(args, seeds) if mode == "forward" else self.reverse(args, seeds)
        check_length(block.shape[1], width)
        flat = block.reshape(-1)
        values = flat[torch.from_numpy(places).to(flat.device)]
        where = torch.from_numpy(reached).to(flat.device)
        seen = values if reached is places else flat[where]
        if torch._C._functorch.is_batchedtensor(flat):
            count = flat.isnan().logical_not().logical_and(flat != 0)
            wrong = count.sum() != (count[torch.from_numpy(places).to(flat.device)] if reached is places
                                    else count[where]).sum()  # fmt: skip
            return torch.where(wrong, torch.nan, values), None
        if torch.count_nonzero(flat) != torch.count_nonzero(seen):  # synchronizes
            rest = flat.nan_to_num(nan=0.0)  # 0 · ∞ within PyTorch's derivatives is no entry
            rest[where] = 0
            if bool(rest.any()):
                place = int(rest.nonzero()[0])
                return None, (place, flat[place].item())
        return values, None

    def direct(self, args: tuple[Any, ...], places: np.ndarray, count: int, size: int) -> None:
        """There is no program."""

    def joined(self, parts: list[Any], entries: list[np.ndarray], x: Any) -> Any:
        """Return the values of all blocks; `entries`: whose values each block has. An array if x is one."""
        found = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.as_tensor(x).dtype)
        if len(parts) > 1:
            found = torch.empty_like(found).index_copy_(
                0, torch.from_numpy(np.concatenate(entries)).to(found.device), found
            )
        return found.numpy() if isinstance(x, np.ndarray) else found

    def outcome(self, args: tuple[Any, ...]) -> Any:
        """Return what f returns, with other data."""
        x = self.at(args)[1].requires_grad_(getattr(args[self.argnum], "requires_grad", False)).clone()
        return self.f.outcome(*replaced(args, [self.argnum], [x]))

    def gradient(self, args: tuple[Any, ...]) -> Any:
        """Return the gradient of a scalar function."""
        f, x = self.at(args)
        with self._refusals(args), _one_at_a_time:
            found = f(x).detach()
        return found.numpy() if isinstance(args[self.argnum], np.ndarray) else found

    def batch(self, values: Callable[[tuple[Any, ...]], Any], args: tuple[Any, ...], xs: Any) -> Any:
        """Return the values at the columns of xs by one mapped call, or None where PyTorch cannot map the function."""

        def at(x: Any) -> tuple[Any, ...]:
            return replaced(args, [self.argnum], [x])

        given = torch.from_numpy(np.array(xs)) if isinstance(xs, np.ndarray) else xs.detach()
        try:
            found = torch.func.vmap(lambda x: values(at(x)), 1, 1)(given)
        except Exception:  # whatever PyTorch raises: sample by sample it may be possible
            return None
        for column in found.isnan().any(dim=0).nonzero()[:, 0].tolist():
            values(at(xs[:, column]))  # raises the error for which these stand
        return found.numpy() if isinstance(xs, np.ndarray) else found

    def stacked(self, samples: Iterable[Any], shape: tuple[int, int], like: Any) -> Any:
        """Return samples as columns."""
        if isinstance(like, np.ndarray):
            return np.stack(list(samples), axis=1) if shape[1] else np.zeros(shape, like.dtype)
        return torch.stack(list(samples), dim=1) if shape[1] else like.new_zeros(shape)

    def to_numpy(self, values: Any) -> np.ndarray:
        """Return values on the host."""
        found: np.ndarray = values.cpu().numpy() if isinstance(values, torch.Tensor) else values
        return found


def _rows(seeds: Any) -> torch.Tensor:
    return torch.from_numpy(seeds.astype(float)) if isinstance(seeds, np.ndarray) else seeds.detach()


@functools.cache
def _decompositions() -> dict[Any, Any]:
    """Return PyTorch's core decompositions, and those of what has no rule here."""
    aten = torch.ops.aten
    others = (aten.native_layer_norm, aten.native_group_norm, aten.native_batch_norm, aten.upsample_bilinear2d)
    return {**core_aten_decompositions(), **torch._decomp.get_decompositions(others)}


def _elsewhere(x: torch.Tensor) -> torch.Tensor:
    return x + torch.from_numpy(np.random.default_rng(0).uniform(0.01, 0.02, len(x))).to(x) * (1 + x.abs())


def check_same(problem: str, expected: torch.Tensor, got: torch.Tensor, size: Any = None, remedy: str = "Draw random "
               "numbers before, and pass them as an argument; or does it keep state, or read numbers from tensors?"
               ) -> None:  # fmt: skip
    """Check that numbers agree where both are finite; `size`: of what rounding errors are a part."""
    room = 1e-3 if torch.float32 in (expected.dtype, got.dtype) else 1e-7
    if expected.shape == got.shape:
        finite = expected.isfinite() & got.isfinite()
        expected, got = expected[finite], got[finite]
        if not len(expected):
            return
        size = expected.abs().max() if size is None else size
        if bool(((expected - got).abs() <= room * (expected.abs() + size)).all()):
            return
    raise TracingError(problem, expected=shown(expected), got=shown(got), remedy=remedy)


# The graph, node by node. A value is `Traced` if it may depend on x or another argument, else a tensor or a number.


def walk(graph: Any, level: Sets) -> Any:
    """Return what the graph's output carries."""
    values: dict[Any, Any] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            val = node.meta["val"]
            first = not values
            values[node] = level.input(np.zeros(level.inputs)) if first else _array(level, val, None)
        elif node.op == "get_attr":
            values[node] = getattr(graph.owning_module, node.target)
        elif node.op == "output":
            (result,) = node.args[0] if isinstance(node.args[0], (list, tuple)) else (node.args[0],)
            found = values[result]
            return found.carried if isinstance(found, Traced) else level.nothing(tuple(found.shape), None)
        else:
            args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), lambda other: values[other])
            values[node] = _result(level, node, args, kwargs)
    raise TracingError("The graph has no output")


def _array(level: Sets, val: Any, sets: Any) -> Traced:
    """Return an array with these index sets, or with empty ones; its value is not known."""
    shape = tuple(val.shape)
    value = np.broadcast_to(np.zeros((), bool if not val.dtype.is_floating_point else float), shape)
    empty = sets is None or not val.dtype.is_floating_point  # integers and bools have no derivative
    return Traced(value, level.nothing(shape, None) if empty else sets, level)


def _flat(args: Any) -> list[Any]:
    if isinstance(args, (list, tuple)):
        return [leaf for item in args for leaf in _flat(item)]
    return [leaf for item in args.values() for leaf in _flat(item)] if isinstance(args, dict) else [args]


def _result(level: Sets, node: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return the result of one operation."""
    target, val = node.target, node.meta.get("val")
    traced = [leaf for leaf in _flat([args, kwargs]) if isinstance(leaf, Traced)]
    if target is operator.getitem:
        return target(*args, **kwargs)
    if not hasattr(target, "overloadpacket"):
        raise refused(f"torch.ops.{target}", "Write it with other operations of PyTorch, or pass pattern=")
    name = target.overloadpacket.__name__
    if torch.Tag.nondeterministic_seeded in target.tags:
        raise refused(f"Random numbers (torch.ops.{target})", "Draw them before, and pass them as an argument")
    if name == "copy_":
        raise refused("A write into x or another tensor of outside", "Write into a clone()")
    if not traced:
        return target(*args, **kwargs)
    name = name.removesuffix("_copy") if name != "_to_copy" else "clone"
    if name.startswith("new_") or (name.endswith("_like") and not name.startswith("rand")):  # of x, the shape alone
        empty = [torch.empty(leaf.shape) if isinstance(leaf, Traced) else leaf for leaf in args]
        return target(*empty, **{"dtype": val.dtype, **kwargs})
    vals = val if isinstance(val, (list, tuple)) else (val,)
    if any(isinstance(v, torch.Tensor) and v.is_complex() for v in vals):
        raise refused(f"Complex numbers (torch.ops.{target})", "Write it with real tensors, or pass pattern=")
    if not any(isinstance(v, torch.Tensor) and v.dtype.is_floating_point for v in vals):
        sets: list[Any] = [None] * len(vals)
    elif name in MOVES:
        sets = _moved(level, name, target, args, kwargs, traced)
    elif name in RULES:
        sets = [RULES[name](level, args, kwargs, vals[0])] * (2 if name == "var_mean" else 1)
    elif name in COUPLED:
        sets = _coupled(level, name, args, kwargs, vals)
    elif torch.Tag.pointwise in target.tags or name in ("clone", "detach", "alias", "contiguous", "lift_fresh"):
        sets = [_pointwise(level, name, args, traced, vals[0])]
    else:
        raise refused(f"torch.ops.{target}", "Write it with other operations of PyTorch, or pass pattern=")
    if any(isinstance(v, torch.Tensor) and v.dtype.is_floating_point for v in vals[len(sets) :]):
        raise refused(f"The second result of torch.ops.{target}", "Write it with other operations of PyTorch")
    made = tuple(_array(level, v, s) if isinstance(v, torch.Tensor) else None
                 for v, s in zip(vals, [*sets, *[None] * len(vals)], strict=False))  # fmt: skip
    return made if isinstance(val, (list, tuple)) else made[0]


def _pointwise(level: Sets, name: str, args: Any, traced: list[Traced], val: Any) -> Any:
    shape = tuple(val.shape)
    if name == "where" and not isinstance(args[0], Traced):
        a, b = (x if isinstance(x, Traced) else 0 for x in args[1:3])
        return level.select(args[0].cpu().numpy(), a, b, shape, None)
    found = level.elementwise(shape, None, [(x, lambda: 1) for x in traced])
    factor = next((x for x in args if isinstance(x, torch.Tensor) and x.ndim), None)
    if name == "mul" and factor is not None:  # zeros of a constant tensor are zeros of the result
        product = Traced(np.broadcast_to(np.zeros(()), shape), found, level)
        found = level.select(np.broadcast_to((factor != 0).cpu().numpy(), shape), product, 0, shape, None)
    return found


MOVES = frozenset((
    "_unsafe_view", "cat", "constant_pad_nd", "copy", "diag_embed", "diagonal", "diagonal_backward",
    "diagonal_scatter", "expand", "flip", "gather", "index", "index_add", "index_put", "index_select", "movedim",
    "permute", "repeat", "reshape", "roll", "rot90", "scatter", "select", "select_backward", "select_scatter",
    "slice", "slice_backward", "slice_scatter", "split", "split_with_sizes", "squeeze", "squeeze_", "stack", "t",
    "take", "transpose", "tril", "triu", "unbind", "unfold", "unsqueeze", "unsqueeze_", "view",
))  # fmt: skip
"""Operations that move elements; they run on the numbers of the elements."""
SOURCES = {"cat": (0,), "stack": (0,), "copy": (1,), "index_put": (2,), "scatter": (3,), "select_scatter": (1,),
           "slice_scatter": (1,), "diagonal_scatter": (1,)}  # fmt: skip
"""Arguments of theirs whose elements are moved, whatever their dtype."""


def _moved(level: Sets, name: str, target: Any, args: Any, kwargs: dict[str, Any], traced: list[Traced]) -> list[Any]:
    if any(x.dtype == bool for x in traced):
        raise refused(f"An index or mask of torch.ops.{target} that depends on x", "Use torch.where(mask, a, b)")
    if name == "index_put" and (kwargs.get("accumulate") or args[3:] == (True,)):
        return [_accumulated(level, *args[:3])]
    if name == "index_add":
        x, dim, index, source = args[:4]
        return [_accumulated(level, x, [None] * (dim % max(x.ndim, 1)) + [index], source)]
    if name == "constant_pad_nd":
        args = args[:2]
    elif name == "scatter" and not isinstance(args[3], (torch.Tensor, Traced)):
        args = (*args[:3], 0)
    starts, sources = iter(_numbers(traced)), SOURCES.get(name, ())
    if kwargs.get("reduce"):
        raise refused(f"torch.ops.{target} with reduce=", "Use scatter_add")

    def number(x: Any) -> Any:
        if isinstance(x, (list, tuple)):
            return [number(item) for item in x]
        if isinstance(x, Traced):
            return next(starts)
        constant = isinstance(x, torch.Tensor) and (x.dtype.is_floating_point or any(x is source for source in given))
        return torch.zeros(x.shape, dtype=torch.int64) if constant else x.cpu() if isinstance(x, torch.Tensor) else x

    given = [x for place in sources if place < len(args) for x in _flat([args[place]])]
    found = target(*number(args), **kwargs)
    parts = found if isinstance(found, (list, tuple)) else (found,)
    return [level.choose(traced, lambda *_, part=part: part.numpy(), None) for part in parts]


def _numbers(traced: list[Traced]) -> list[torch.Tensor]:
    from sparsebp.jacobians.tracing import numbered

    return [torch.from_numpy(numbers) for numbers in numbered(traced)]


def _accumulated(level: Sets, x: Any, indices: Any, values: Any) -> Any:
    """Return the sets of x with values added at indices, which may repeat."""
    size = math.prod(x.shape)
    places = torch.arange(size).reshape(tuple(x.shape))[tuple(slice(None) if i is None else i.cpu() for i in indices)]
    found = x.carried if isinstance(x, Traced) else level.nothing(tuple(x.shape), None)
    if not isinstance(values, Traced):
        return found
    source = np.broadcast_to(np.arange(values.size).reshape(values.shape), tuple(places.shape)).ravel()
    matrix = selection(places.numpy().ravel(), source, (size, values.size))
    return found + level.linear(values, (size,), None, None, None, matrix.tocsr)


def _dims(dims: Any, ndim: int) -> tuple[int, ...]:
    if dims is None or dims == []:
        return tuple(range(ndim))
    return tuple(d % ndim for d in (dims if isinstance(dims, (list, tuple)) else [dims])) if ndim else ()


def _reduction(place: int) -> Callable[..., Any]:
    """Return the rule of a reduction whose axes are its argument `place`."""

    def rule(level: Sets, args: Any, kwargs: dict[str, Any], val: Any) -> Any:
        dims = _dims(args[place] if len(args) > place else kwargs.get("dim"), args[0].ndim)
        return np.sum(args[0], axis=dims).carried

    return rule


def _along(place: int, operands: int = 1, triangle: bool = False) -> Callable[..., Any]:
    """Return the rule of an operation along one axis, its argument `place`: all elements of a line, or those before."""

    def rule(level: Sets, args: Any, kwargs: dict[str, Any], val: Any) -> Any:
        traced = [x for x in args[:operands] if isinstance(x, Traced)]
        x = Traced(traced[0].value, level.elementwise(traced[0].shape, None, [(x, lambda: 1) for x in traced]), level)
        (dim,) = _dims(args[place] if len(args) > place else kwargs.get("dim", -1), x.ndim) or (None,)
        if dim is None:
            return x.carried
        found = np.cumsum(x, axis=dim) if triangle else np.sum(x, axis=dim, keepdims=True)
        return level.elementwise(tuple(val.shape), None, [(found, lambda: 1)])

    return rule


def _scatter_add(level: Sets, args: Any, kwargs: dict[str, Any], val: Any) -> Any:
    x, dim, index, source = args
    if isinstance(index, Traced):
        raise refused("An index of torch.scatter_add that depends on x", "Use torch.where")
    size = math.prod(x.shape)
    places = torch.gather(torch.arange(size).reshape(tuple(x.shape)), dim, index.cpu()).numpy().ravel()
    found = x.carried if isinstance(x, Traced) else level.nothing(tuple(x.shape), None)
    if not isinstance(source, Traced):
        return found
    used = np.arange(source.size).reshape(source.shape)[tuple(slice(n) for n in index.shape)].ravel()
    return found + level.linear(source, (size,), None, None, None, selection(places, used, (size, source.size)).tocsr)


def _trace(level: Sets, args: Any, kwargs: dict[str, Any], val: Any) -> Any:
    numbers = np.diagonal(np.arange(args[0].size).reshape(args[0].shape))
    matrix = selection(np.zeros_like(numbers), numbers, (1, args[0].size))
    return level.linear(args[0], (1,), None, None, None, matrix.tocsr)


def _contraction(labels: str, added: bool = False) -> Callable[..., Any]:
    """Return the rule of a matrix product; `added`: to the first argument."""
    names, out = labels.split("->")

    def rule(level: Sets, args: Any, kwargs: dict[str, Any], val: Any) -> Any:
        operands = [x if isinstance(x, Traced) else x.detach().cpu().numpy() for x in args[added : added + 2]]
        shape = tuple(val.shape)
        found = level.nothing(shape, None)
        if any(isinstance(x, Traced) for x in operands):
            found = level.contract(operands, names.split(","), out, shape, None)
        if added and isinstance(args[0], Traced):
            found = found + level.elementwise(shape, None, [(args[0], lambda: 1)])
        return found

    return rule


def _convolution(level: Sets, args: Any, kwargs: dict[str, Any], val: Any) -> Any:
    x, weight, bias, stride, padding, dilation, transposed, output_padding, groups = args
    if not isinstance(x, Traced) or isinstance(weight, Traced) or isinstance(bias, Traced):
        raise refused("A convolution whose weights depend on x", "Write it with products")
    matrix = _convolution_matrix(x.shape, weight, stride, padding, dilation, transposed, output_padding, groups).T
    return level.linear(x, tuple(val.shape), None, None, None, matrix.tocsr)


def _convolution_backward(level: Sets, args: Any, kwargs: dict[str, Any], val: Any) -> Any:
    grad, _, weight, _, stride, padding, dilation, transposed, output_padding, groups, wanted = args
    if not isinstance(grad, Traced) or isinstance(weight, Traced) or list(wanted) != [True, False, False]:
        raise refused("A convolution whose weights depend on x", "Write it with products")
    matrix = _convolution_matrix(
        tuple(val.shape), weight, stride, padding, dilation, transposed, output_padding, groups
    )
    return level.linear(grad, tuple(val.shape), None, None, None, matrix.tocsr)


def _convolution_matrix(shape: tuple[int, ...], weight: torch.Tensor, stride: Any, padding: Any, dilation: Any,
                        transposed: bool, output_padding: Any, groups: int) -> Any:  # fmt: skip
    """Return the transposed Jacobian's pattern for a batch, inputs × outputs."""
    batch, channels, *sizes = shape
    kernel = tuple(weight.shape[2:])
    if transposed:
        one = conv_transpose_pattern(channels, weight.shape[1] * groups, sizes, kernel, tuple(stride), tuple(padding),
                                     tuple(output_padding), groups, tuple(dilation)).pattern  # fmt: skip
    else:
        one = conv_pattern(channels, weight.shape[0], sizes, kernel, tuple(stride), tuple(padding), tuple(dilation),
                           groups).pattern  # fmt: skip
    return _block_diagonal(one, batch)


def _block_diagonal(pattern: SparsityPattern, count: int) -> Any:
    """Return the matrix of so many blocks of a pattern."""
    from scipy.sparse import block_diag, csr_array

    matrix = pattern.to_scipy(np.ones(pattern.nnz, bool))
    return block_diag([matrix] * count, format="csr") if count else csr_array((0, 0), dtype=bool)


COUPLED: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("_linalg_det", "_linalg_slogdet", "linalg_inv_ex", "linalg_lu_factor_ex", "linalg_cholesky_ex",
                     "_linalg_svd"), (0,)),
    "_linalg_solve_ex": (0, 1), "linalg_solve_triangular": (0, 1), "linalg_lu_solve": (0, 2), "cholesky_solve": (1, 0),
}  # fmt: skip
"""Operations on stacks of matrices, and which arguments hold the matrices and the right-hand sides."""


def _coupled(level: Sets, name: str, args: Any, kwargs: dict[str, Any], vals: Any) -> list[Any]:
    """Return the sets of results: each element depends on all of its matrix, and on its right-hand side's column."""
    matrix, *rest = (args[place] for place in COUPLED[name])
    left = kwargs.get("left", True) and args[3 if name == "linalg_lu_solve" else 2 :][:1] != (False,)

    def sums(x: Any, axes: tuple[int, ...], vector: bool) -> list[Any]:
        if not isinstance(x, Traced):
            return []
        found = np.sum(x, axis=axes, keepdims=True)
        return [(found[..., 0] if vector else found, lambda: 1)]

    found: list[Any] = []
    for number, val in enumerate(vals):
        if not val.dtype.is_floating_point:
            found.append(None)
            continue
        shape, terms = tuple(val.shape), []
        if number == 0 and rest:  # a solution; others are factors
            vector = name == "_linalg_solve_ex" and rest[0].ndim == matrix.ndim - 1 and (
                matrix.ndim == 2 or tuple(rest[0].shape) == tuple(matrix.shape[:-1]))  # fmt: skip
            terms += sums(matrix, (-2, -1), vector)
            terms += sums(rest[0], (-1,) if vector or not left else (-2,), False)
        elif isinstance(matrix, Traced):
            total = np.sum(matrix, axis=(-2, -1))
            terms.append((np.reshape(total, (*total.shape, *(1,) * (len(shape) - total.ndim))), lambda: 1))
        found.append(level.elementwise(shape, None, terms))
    return found


def _pooling(name: str, args: Any, shape: tuple[int, ...]) -> Any:
    """Return the transposed Jacobian's pattern of pooling for a batch, inputs × outputs; x has this shape."""
    spatial = shape[-2:]
    if "adaptive" in name:
        one = adaptive_pool_pattern(1, spatial, tuple(args[0])).pattern
    else:
        kernel, stride, padding, *others = (*args, [], [], [], [])[: 5 if "max" in name else 4]
        dilation, ceil = (others[0] or [1], others[1]) if "max" in name else ([1], others[0])
        kernel, stride, padding, dilation = (tuple(part) * (3 - len(part)) for part in (
            kernel, stride or kernel, padding or [0], dilation))  # fmt: skip
        one = pool_pattern(1, spatial, kernel, stride, padding, dilation, bool(ceil)).pattern
    return _block_diagonal(one, math.prod(shape[:-2]))


def _pool(level: Sets, args: Any, kwargs: dict[str, Any], val: Any, name: str) -> Any:
    matrix = _pooling(name, args[1:], args[0].shape).T
    return level.linear(args[0], tuple(val.shape), None, None, None, matrix.tocsr)


def _pool_backward(level: Sets, args: Any, kwargs: dict[str, Any], val: Any, name: str) -> Any:
    grad = args[0]
    if not isinstance(grad, Traced):
        return level.nothing(tuple(val.shape), None)
    options = (tuple(grad.shape[-2:]),) if "adaptive" in name else args[2:]
    return level.linear(grad, tuple(val.shape), None, None, None, _pooling(name, options, tuple(val.shape)).tocsr)


POOLS = ("max_pool2d_with_indices", "avg_pool2d", "_adaptive_avg_pool2d")
RULES: dict[str, Callable[..., Any]] = {
    **{name: functools.partial(_pool, name=name) for name in POOLS},
    **{f"{name}_backward": functools.partial(_pool_backward, name=name) for name in POOLS},
    **dict.fromkeys(("sum", "mean", "amax", "amin", "max", "min", "prod", "var", "std", "var_mean", "logsumexp"),
                    _reduction(1)),
    **dict.fromkeys(("linalg_vector_norm", "norm"), _reduction(2)),
    "cumsum": _along(1, triangle=True),
    "cumprod": _along(1, triangle=True),
    **dict.fromkeys(("_softmax", "_log_softmax", "sort"), _along(1)),
    "topk": _along(2),
    **dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data"), _along(2, operands=2)),
    "mm": _contraction("ij,jk->ik"),
    "mv": _contraction("ij,j->i"),
    "dot": _contraction("i,i->"),
    "bmm": _contraction("bij,bjk->bik"),
    "addmm": _contraction("ij,jk->ik", added=True),
    "addmv": _contraction("ij,j->i", added=True),
    "baddbmm": _contraction("bij,bjk->bik", added=True),
    "scatter_add": _scatter_add,
    "trace": _trace,
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
}  # fmt: skip
