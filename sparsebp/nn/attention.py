"""The layers of a Transformer: multi-head attention, embeddings, positions, encoder layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from math import prod
from types import ModuleType
from typing import Any, Literal, NamedTuple

import numpy as np

from sparsebp import kernels
from sparsebp.core import backend
from sparsebp.core import masks as masking
from sparsebp.core.absent import write
from sparsebp.core.check import (
    Array,
    Seed,
    check_choice,
    check_default,
    check_flag,
    check_generator,
    check_integer,
    check_number,
)
from sparsebp.core.errors import DTypeError, OptionError, ShapeError
from sparsebp.nn.activation import GELU, ReLU
from sparsebp.nn.basic import Dropout, dropout_mask, identity_jacobian_t
from sparsebp.nn.gradients import Gradients, NamedGradients, Shared, gradients_of
from sparsebp.nn.layer import Layer, batch_first_axes, check_gy, check_input, input_grad_work
from sparsebp.nn.linear import Linear
from sparsebp.nn.norm import LayerNorm
from sparsebp.nn.parameters import full, normal, parameter_dtype, uniform
from sparsebp.nn.pool import UnbatchedSample
from sparsebp.nn.recurrent.lengths import Lengths, parse_lengths
from sparsebp.nn.work import Work, total_work

# Attention scores: masks, as torch.nn takes them, and softmax.


class Pairs(NamedTuple):
    """The pairs of steps of an attention: B samples, a number of heads, T steps that look at S."""

    batch: int
    heads: int
    steps: int
    looked_at: int

    def masks(
        self, like: Array, attn_mask: Array | None, key_padding_mask: Array | None, valid: Array | None
    ) -> list[Array]:
        """Return masks (B, heads, T, S), each axis full or of length 1: True is left out, a number is added."""
        # like: An array of the products' dtype.
        # attn_mask: (T, S) or (B · heads, T, S), bool or of that dtype.
        # key_padding_mask: (B, S), likewise.
        # valid: (B, S), bool, False for steps left out.
        batch, heads, steps, looked_at = self
        found = []
        if attn_mask is not None:
            _check("attn_mask", attn_mask, ((steps, looked_at), (batch * heads, steps, looked_at)), like)
            found.append(attn_mask[None, None] if attn_mask.ndim == 2 else attn_mask.reshape(self))
        if key_padding_mask is not None:
            _check("key_padding_mask", key_padding_mask, ((batch, looked_at),), like)
            found.append(key_padding_mask[:, None, None])
        if valid is not None:
            found.append(~valid[:, None, None])
        return found

    def put(self, xp: ModuleType, products: Array, masks: list[Array]) -> None:
        """Put the masks on products (B · heads, T, S or more), in place; columns past S are unchanged."""
        columns = products.reshape(*self[:3], products.shape[-1])[..., : self.looked_at]  # a view
        for mask in masks:
            if mask.dtype == bool:
                xp.copyto(columns, columns.dtype.type(-math.inf), where=mask)
            else:
                columns += mask


def softmax(scores: Array, masked: bool = False) -> None:
    """Turn scores into weights that add up to 1 along the last axis, in place."""
    # Where masks leave a step nothing to look at, its weights are 0, as in torch's scaled_dot_product_attention.
    if scores.size == 0:
        return
    xp = backend.namespace(scores)
    most = scores.max(axis=-1, keepdims=True)
    if masked:
        most = xp.where(most == -math.inf, most.dtype.type(0), most)  # exp(-inf) = 0
    with np.errstate(invalid="ignore"):  # infinities give NaN
        scores -= most
        xp.exp(scores, out=scores)
    total = scores.sum(axis=-1, keepdims=True)
    scores /= xp.where(total == 0, total.dtype.type(1), total) if masked else total


def softmax_grad(g: Array, y: Array) -> None:
    """Turn the gradient at a softmax's output y into that at its input, ``y (g - Σ g y)``, in place."""
    g -= (g * y).sum(axis=-1, keepdims=True)
    g *= y


def _check(name: str, mask: Array, shapes: tuple[tuple[int, ...], ...], like: Array) -> None:
    backend.namespace(**{name: mask}, like=like)
    if mask.dtype not in (bool, like.dtype):
        raise DTypeError(f"{name} has the wrong dtype", expected=f"bool or {like.dtype}", got=mask.dtype)
    if mask.shape not in shapes:
        raise ShapeError(f"{name} has the wrong shape", expected=" or ".join(map(str, shapes)), got=mask.shape)


class AttentionSaved(NamedTuple):
    """Saved by `MultiheadAttention.forward`."""

    inputs: tuple[Array, ...]  # x of a sequence that looks at itself; else query, key and value
    # Queries (scaled by 1/√head_dim), keys and values, (B · num_heads, steps, head_dim) each.
    heads: tuple[Array, Array, Array]
    attention: Array  # How much each step looks at each (B · num_heads, T, S); rows add up to 1
    mask: Array | None  # The dropout mask that they were multiplied with, or None
    merged: Array  # Saved by `out_proj`


class MultiheadAttention(Layer):
    """Attention by several heads, as `torch.nn.MultiheadAttention`: of a sequence to itself, or to another one.

    Parameters
    ----------
    embed_dim
        Length of a step's vector.
    num_heads
        How many heads share it out; each has ``embed_dim / num_heads``.
    dropout
        Probability that a step's look at another one is dropped while training.
    bias
        Whether the projections have biases.
    add_bias_kv
        Whether a learned step is added at the end of keys and values.
    add_zero_attn
        Whether a step of zeros is added at the end of keys and values.
    kdim, vdim
        Only None or `embed_dim`: keys and values are projected by one matrix with the queries.
    batch_first
        Whether sequences are (B, T, embed_dim) and not (T, B, embed_dim).
    device, dtype
        None or ``"cpu"`` (see `Layer.to`); float32 or float64.
    rng
        Generator or seed of the initial values; the dropout masks' generator is seeded by one draw from it.

    Notes
    -----
    Parameters: ``in_proj_weight`` (3 · embed_dim, embed_dim), ``in_proj_bias``, of queries, keys and values;
    ``out_proj.weight`` (embed_dim, embed_dim), ``out_proj.bias``; with `add_bias_kv` ``bias_k`` and ``bias_v``
    (1, 1, embed_dim). The transposed Jacobian of a sample is dense, with (T · embed_dim)² entries, as every step
    depends on all. Source: Vaswani et al., "Attention Is All You Need", 2017, §3.2.
    """

    replayable = True
    generator: np.random.Generator
    sample_axes = 2
    batch_axes = batch_first_axes
    joins_steps = False
    optional = "in_proj_bias", "bias_k", "bias_v"

    def __init__(
        self, embed_dim: int, num_heads: int, dropout: float = 0.0, bias: bool = True, add_bias_kv: bool = False,
        add_zero_attn: bool = False, kdim: int | None = None, vdim: int | None = None, batch_first: bool = False,
        device: Any = None, dtype: Any = np.float32, *, rng: Seed = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.embed_dim, self.num_heads = embed_dim, num_heads = (
            check_integer("embed_dim", embed_dim, 1), check_integer("num_heads", num_heads, 1),
        )  # fmt: skip
        if embed_dim % num_heads:
            raise OptionError("The heads cannot share the vectors out", expected="embed_dim divisible by num_heads",
                              got=f"embed_dim={embed_dim}, num_heads={num_heads}")  # fmt: skip
        for name, length in (("kdim", kdim), ("vdim", vdim)):
            if length != embed_dim:
                check_default(name, length, None)
        self.head_dim = embed_dim // num_heads
        self.dropout, bias = check_number("dropout", dropout, 0, 1), check_flag("bias", bias)
        self.batch_first = check_flag("batch_first", batch_first)
        self.add_zero_attn = check_flag("add_zero_attn", add_zero_attn)
        rng, real = check_generator("rng", rng), parameter_dtype(dtype, device)
        bound = math.sqrt(6 / (4 * embed_dim))  # Xavier's, of all three matrices as one
        self.params["in_proj_weight"] = uniform(rng, (3 * embed_dim, embed_dim), bound, real)
        self.children["out_proj"] = Linear(embed_dim, embed_dim, bias, dtype=real, rng=rng)
        if bias:
            self.params["in_proj_bias"] = full((3 * embed_dim,), 0, real)
            write(self.children["out_proj"].params["bias"], lambda _: 0)
        if check_flag("add_bias_kv", add_bias_kv):
            for name in ("bias_k", "bias_v"):
                self.params[name] = normal(rng, (1, 1, embed_dim), math.sqrt(1 / embed_dim), real)
        self.generator = own_generator(rng)

    def forward(
        self, query: Array, key: Array | None = None, value: Array | None = None, *,
        key_padding_mask: Array | None = None, attn_mask: Array | None = None, is_causal: bool = False,
        lengths: Any = None,
    ) -> tuple[Array, Any]:  # fmt: skip
        """Let every step of `query` look at all of `key`.

        Parameters
        ----------
        query
            (T, B, embed_dim), or (B, T, embed_dim) with ``batch_first``; (T, embed_dim) is an unbatched sample.
        key, value
            Other sequences of S steps, both of one shape; None: the query looks at itself.
        key_padding_mask
            (B, S), unbatched (S,): bool, True for steps of the key that none looks at, or numbers of x's dtype
            that are added to the products.
        attn_mask
            (T, S) or (B · num_heads, T, S), in the same way for pairs of steps.
        is_causal
            That `attn_mask` is causal; without a mask it is refused, as in PyTorch. It changes nothing.
        lengths
            Valid steps of each sample of the key (B integers in 1 … S), or None for all. No step attends to one after
            them, whose numbers must be finite all the same.

        Returns
        -------
        y
            Of the shape of the query. Values past a sample's end are meaningless. A step whose pairs are all masked
            has weights 0, as in PyTorch without ``need_weights``.
        saved
            For backward, and for `weights`.
        """
        weight = self.params["in_proj_weight"]
        inputs: tuple[Any, ...] = (query,) if key is None and value is None else (query, key, value)
        if any(array is None for array in inputs):
            raise OptionError("key and value come together", expected="both or none of them", got="one")
        backend.namespace(*inputs, weight)
        options: dict[str, Any] = {"attn_mask": attn_mask, "lengths": lengths}
        if check_flag("is_causal", is_causal) and attn_mask is None:
            raise OptionError("is_causal needs a mask", expected="attn_mask, which is_causal is a hint about", got=None,
                              remedy="Pass attn_mask=np.triu(np.ones((T, T), bool), 1)")  # fmt: skip
        if query.ndim != 2:
            return self._forward(weight, inputs, key_padding_mask, **options)
        xp, axis = backend.namespace(query, *backend.given(m=key_padding_mask).values()), self.batch_axes[0]
        batched = tuple(xp.expand_dims(array, axis) if array.ndim == 2 else array for array in inputs)
        padding = None if key_padding_mask is None else key_padding_mask[None]
        y, saved = self._forward(weight, batched, padding, **options)
        return y.squeeze(axis), UnbatchedSample(saved)

    def __call__(
        self, query: Array, key: Array | None = None, value: Array | None = None,
        key_padding_mask: Array | None = None, need_weights: bool = True, attn_mask: Array | None = None,
        average_attn_weights: bool = True, is_causal: bool = False, **options: Any,
    ) -> Any:  # fmt: skip
        """Return y for one sequence; for three, as in PyTorch, y and the `weights` (None without `need_weights`)."""
        y, saved = self.forward(
            query, key, value, key_padding_mask=key_padding_mask, attn_mask=attn_mask, is_causal=is_causal, **options
        )
        if key is None:
            return y
        return y, self.weights(saved, average_attn_weights) if need_weights else None

    def weights(self, saved: Any, average: bool = True) -> Array:
        """Return how much each step looked at each, (B, T, S), the mean of the heads, or of each (B, num_heads, T, S).

        Without the B for an unbatched sample. Dropped weights are zero.
        """
        if isinstance(saved, UnbatchedSample):
            return self.weights(saved.batch, average)[0]
        found = saved.attention if saved.mask is None else saved.attention * saved.mask
        found = found.reshape(-1, self.num_heads, *found.shape[1:])
        return found.mean(axis=1) if average else found

    def _forward(
        self, weight: Array, inputs: tuple[Array, ...], key_padding_mask: Array | None, attn_mask: Array | None,
        lengths: Any,
    ) -> tuple[Array, AttentionSaved]:  # fmt: skip
        for name, array in zip(("query", "key", "value"), inputs, strict=False):
            xp = check_input(array, name=name, dtype=weight.dtype, shape=(None, None, self.embed_dim), like=weight)
        turn = -1 if self.batch_first else 1
        (steps, batch), (looked_at, others) = inputs[0].shape[:2][::turn], inputs[-1].shape[:2][::turn]
        if others != batch or (len(inputs) > 1 and inputs[1].shape != inputs[2].shape):
            raise ShapeError("query, key and value do not fit", expected="one batch, and key and value of one shape",
                             got=" and ".join(str(array.shape) for array in inputs))  # fmt: skip
        valid = parse_lengths(lengths, looked_at, batch, xp) if inputs[0].size else None
        pairs = Pairs(batch, self.num_heads, steps, looked_at)
        masks = pairs.masks(weight, attn_mask, key_padding_mask, None if valid is None else valid.valid[:, :, 0].T)
        queries, keys, values = self._project(xp, weight, inputs, batch)
        queries *= weight.dtype.type(1 / math.sqrt(self.head_dim))
        attention = kernels.dense(xp).matmul_batches(queries, keys.transpose(0, 2, 1))
        pairs.put(xp, attention, masks)
        softmax(attention, masked=bool(masks))
        mask = dropout_mask(self.generator, attention, self.dropout) if self._drops else None
        looked = kernels.dense(xp).matmul_batches(attention if mask is None else attention * mask, values)
        y, merged = self.children["out_proj"].forward(self._merge(xp, looked[None], inputs[0].shape))
        return y, AttentionSaved(inputs, (queries, keys, values), attention, mask, merged)

    def gradients(self, gy: Array, saved: Any) -> NamedGradients:
        """Return the gradients; the gradients at queries, keys and values are computed once for I and W."""
        if isinstance(saved, UnbatchedSample):
            xp, axis = backend.namespace(gy=gy), self.batch_axes[0]
            inner = self.gradients(xp.expand_dims(gy, axis), saved.batch)
            return NamedGradients(
                self, gy, saved, lambda: inner.input_grad().squeeze(axis), inner.weight_grad, names=("key", "value"),
                more=lambda: (inner.key.squeeze(axis), inner.value.squeeze(axis)),
            )  # fmt: skip
        x, weight, width = saved.inputs[0], self.params["in_proj_weight"], self.embed_dim
        xp = check_gy(gy, x.shape, x.dtype, x)
        matmul, out = kernels.dense(xp).matmul, gradients_of(self.children["out_proj"], gy, saved.merged)
        projected = Shared(lambda: self._core(xp, out.input_grad(), saved), xp)

        def at_input() -> Array:
            found = projected()[0]
            return matmul(found[0], weight if len(found) == 1 else weight[:width])

        def at_others() -> tuple[Array, Array]:
            found = projected()[0]
            if len(found) == 1:
                raise OptionError("There was no key", expected="a forward of query, key and value",
                                  got="one of x alone", remedy="Use g.input, the gradient at all three")  # fmt: skip
            return matmul(found[1], weight[width : 2 * width]), matmul(found[2], weight[2 * width :])

        def at_weights() -> dict[str, Any]:
            found, extra = projected()
            return {**self._projection_grads(xp, found, saved.inputs), **extra, "out_proj": out}

        return NamedGradients(self, gy, saved, at_input, at_weights, names=("key", "value"), more=at_others)

    def input_grad_work(self, shape: tuple[int, ...], saved: Any) -> Work:
        """Return the cost of both projections, of four products over all pairs of steps, and of the softmax."""
        rows, pairs = prod(shape[:-1]), (saved.batch if isinstance(saved, UnbatchedSample) else saved).attention.size
        return Work(
            flops=8 * rows * self.embed_dim**2 + 8 * pairs * self.head_dim + 4 * pairs,
            values=4 * self.embed_dim**2 + 20 * rows * self.embed_dim + 8 * pairs, calls=14,
        )  # fmt: skip

    def unbatched(self, saved: Any) -> bool:
        """Whether the forward had an unbatched sample."""
        return isinstance(saved, UnbatchedSample)

    def capture_obstacle(self) -> str | None:
        """While training with dropout, every mask has a seed from the host's generator."""
        return "draws the seed of its mask on the host" if self._drops else None

    @property
    def _drops(self) -> bool:
        return self.training and self.dropout > 0

    def _project(self, xp: ModuleType, weight: Array, inputs: tuple[Array, ...], batch: int) -> tuple[Array, ...]:
        """Return queries, keys and values, (B · num_heads, steps, head_dim), with the steps added after the keys."""
        count, heads = 3 // len(inputs), []
        for i, array in enumerate(inputs):
            rows = slice(i * count * self.embed_dim, (i + 1) * count * self.embed_dim)
            projected = kernels.dense(xp).matmul(array, weight[rows].T)
            if "in_proj_bias" in self.params:
                projected += self.params["in_proj_bias"][rows]
            heads += list(self._split(xp, projected))
        zeros = xp.zeros((batch * self.num_heads, 1, self.head_dim), weight.dtype) if self.add_zero_attn else None
        for i, name in ((1, "bias_k"), (2, "bias_v")):
            more = [heads[i]]
            if name in self.params:
                more.append(xp.tile(self.params[name].reshape(self.num_heads, 1, self.head_dim), (batch, 1, 1)))
            if zeros is not None:
                more.append(zeros)
            heads[i] = heads[i] if len(more) == 1 else xp.concatenate(more, axis=1)
        return tuple(heads)

    def _core(self, xp: ModuleType, g: Array, saved: AttentionSaved) -> tuple[list[Array], dict[str, Array]]:
        """Return the gradients at the projections (one array for self-attention), and at `bias_k` and `bias_v`."""
        (queries, keys, values), attention, mask = saved.heads, saved.attention, saved.mask
        (g,) = self._split(xp, g)
        given = attention if mask is None else attention * mask
        at_values = kernels.dense(xp).matmul_batches(given.transpose(0, 2, 1), g)
        scores = kernels.dense(xp).matmul_batches(g, values.transpose(0, 2, 1))
        if mask is not None:
            scores *= mask
        softmax_grad(scores, attention)
        at_queries = kernels.dense(xp).matmul_batches(scores, keys)
        at_queries *= g.dtype.type(1 / math.sqrt(self.head_dim))
        at_keys = kernels.dense(xp).matmul_batches(scores.transpose(0, 2, 1), queries)
        steps, extra = saved.inputs[-1].shape[0 if self.batch_axes[0] else 1], {}
        if "bias_k" in self.params:
            for name, found in (("bias_k", at_keys), ("bias_v", at_values)):
                each = found[:, steps].reshape(-1, self.num_heads * self.head_dim)
                extra[name] = each.sum(axis=0).reshape(1, 1, self.embed_dim)
        parts = (at_queries, at_keys[:, :steps], at_values[:, :steps])
        if len(saved.inputs) == 1:
            return [self._merge(xp, xp.stack(parts), saved.inputs[0].shape)], extra
        return [self._merge(xp, p[None], x.shape) for p, x in zip(parts, saved.inputs, strict=True)], extra

    def _projection_grads(self, xp: ModuleType, found: list[Array], inputs: tuple[Array, ...]) -> dict[str, Array]:
        flat = [g.reshape(prod(g.shape[:2]), g.shape[2]) for g in found]
        dense = kernels.dense(xp)
        weights = [dense.matmul(g.T, x.reshape(len(g), self.embed_dim)) for g, x in zip(flat, inputs, strict=True)]
        grads = {"in_proj_weight": weights[0] if len(weights) == 1 else xp.concatenate(weights)}
        if "in_proj_bias" in self.params:
            sums = [dense.column_sums(g) for g in flat]
            grads["in_proj_bias"] = sums[0] if len(sums) == 1 else xp.concatenate(sums)
        return grads

    def _split(self, xp: ModuleType, rows: Array) -> Array:
        """Return (…, …, n · embed_dim) as n arrays (n, B · num_heads, T, head_dim)."""
        first, second, width = rows.shape
        count = width // self.embed_dim
        parts = rows.reshape(first, second, count, self.num_heads, self.head_dim)
        steps, batch = (second, first) if self.batch_first else (first, second)
        turned = parts.transpose(2, 0, 3, 1, 4) if self.batch_first else parts.transpose(2, 1, 3, 0, 4)
        return xp.ascontiguousarray(turned).reshape(count, batch * self.num_heads, steps, self.head_dim)

    def _merge(self, xp: ModuleType, heads: Array, shape: tuple[int, ...]) -> Array:
        """Return n arrays (n, B · num_heads, T, head_dim) as (…, …, n · embed_dim), for an x of `shape`."""
        first, second, _ = shape
        steps, batch = (second, first) if self.batch_first else (first, second)
        parts = heads.reshape(len(heads), batch, self.num_heads, steps, self.head_dim)
        turned = parts.transpose(1, 3, 0, 2, 4) if self.batch_first else parts.transpose(3, 1, 0, 2, 4)
        return xp.ascontiguousarray(turned).reshape(first, second, len(heads) * self.embed_dim)


def own_generator(rng: np.random.Generator) -> np.random.Generator:
    """Return a generator of a layer's own, seeded by one draw: its masks depend on its own forwards alone."""
    # With one generator for all, they would depend on the order in which the layers of a pipeline run.
    return np.random.default_rng(int(rng.integers(2**63)))


# Embedding: a row of a table for every number of the input.


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
    device, dtype
        None or ``"cpu"`` (see `Layer.to`); float32 or float64.
    rng
        Generator or seed of the initial values, N(0, 1).

    Notes
    -----
    Parameter: ``weight`` (num_embeddings, embedding_dim). Integers have no gradient, so no trained layer can come
    before this one. With respect to the weights, the output is a selection of rows, a sparse matrix with one entry a
    row; the gradient is its transpose times gy, always added in the same order.
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
            x is not an array of integers, or on another device.
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
        raise OptionError("Embedding has no gradient at its input", expected="an Embedding as the first layer, of "
                          "which only the weights' gradients are asked for",
                          got="a request for the gradient with respect to integers", remedy="Put what is to be trained "
                          "behind the Embedding, and ask for weight_grad (g.weights) alone")  # fmt: skip

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
        """Return rows of the table, with 0 where a layer that shares it is pruned."""
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
            raise OptionError("x names a row that is not there",
                              expected=f"numbers from 0 to {self.num_embeddings - 1}",
                              got=f"numbers from {low} to {high}",
                              remedy="Number from 0, or build a larger Embedding")  # fmt: skip


# Before and after an encoder: a step's position, and the mean over the steps.


class PositionalEmbedding(Layer):
    """A learned vector for every position, added to the step there.

    Parameters
    ----------
    max_length
        Most steps that a sequence has.
    embedding_dim
        Length of a step's vector.
    batch_first
        Whether sequences are (B, T, embedding_dim) and not (T, B, embedding_dim).
    dtype
        float32 or float64.
    rng
        Generator or seed of the initial values, N(0, 0.02²).

    Notes
    -----
    Parameter: ``weight`` (max_length, embedding_dim). Source: Vaswani et al., "Attention Is All You Need", 2017, §3.5
    (learned positional embeddings); initial values as in Devlin et al., "BERT", 2019.
    """

    replayable = True
    stepwise = True
    batch_axes = batch_first_axes

    def __init__(
        self, max_length: int, embedding_dim: int, batch_first: bool = False, *, dtype: Any = np.float32,
        rng: Seed = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.max_length = check_integer("max_length", max_length, 1)
        self.embedding_dim = check_integer("embedding_dim", embedding_dim, 1)
        self.batch_first = check_flag("batch_first", batch_first)
        shape = (self.max_length, self.embedding_dim)
        self.params["weight"] = normal(check_generator("rng", rng), shape, 0.02, backend.float_dtype(dtype))

    def forward(self, x: Array) -> tuple[Array, Array]:
        """Return x, plus its position's vector at every step; `saved` is x."""
        weight = self.params["weight"]
        check_input(x, dtype=weight.dtype, shape=(None, None, self.embedding_dim), like=weight)
        steps = x.shape[1 if self.batch_first else 0]
        if steps > self.max_length:
            raise ShapeError("x has too many steps", expected=f"at most {self.max_length} (max_length)", got=steps,
                             remedy="Cut the sequences, or build the layer with a larger max_length")  # fmt: skip
        return x + (weight[:steps] if self.batch_first else weight[:steps, None]), x

    def input_grad(self, gy: Array, saved: Array) -> Array:
        """Return gy itself."""
        check_gy(gy, saved.shape, saved.dtype, saved)
        return gy

    def weight_grad(self, gy: Array, saved: Array) -> dict[str, Array]:
        """Return ``{"weight": Σ gy}``, summed over the batch; zero for positions that no step is at."""
        weight = self.params["weight"]
        xp = check_gy(gy, saved.shape, weight.dtype, weight)
        batch, steps = (0, 1) if self.batch_first else (1, 0)
        grad = xp.zeros(weight.shape, weight.dtype)
        grad[: gy.shape[steps]] = gy.sum(axis=batch)
        return {"weight": grad}

    def jacobian_t(self, saved: Array) -> Any:
        """Return the identity, shared by the batch."""
        return identity_jacobian_t(saved, self.batch_axes[0])


class MeanSaved(NamedTuple):
    """Saved by `MeanOverSteps.forward`: the input, and the lengths of padded sequences."""

    x: Array
    lengths: Lengths | None


class MeanOverSteps(Layer):
    """The mean of a sequence's vectors: (B, T, d) to (B, d), or (T, B, d) to (B, d) without `batch_first`.

    Parameters
    ----------
    batch_first
        Whether sequences are (B, T, d) and not (T, B, d).
    """

    replayable = True
    joins_steps = True

    def __init__(self, batch_first: bool = False) -> None:
        super().__init__()
        self.batch_first = check_flag("batch_first", batch_first)

    def forward(self, x: Array, lengths: Any = None) -> tuple[Array, MeanSaved]:
        """Return the mean over the steps.

        Parameters
        ----------
        x
            (B, T, d) with ``batch_first``, else (T, B, d).
        lengths
            Valid steps of each sample (B integers in 1 … T), whose mean it is; or None for all.

        Returns
        -------
        y
            (B, d).
        saved
            A `MeanSaved`.
        """
        xp = check_input(x, shape=(None, None, None))
        steps = x.shape[self._axis]
        if steps == 0:
            raise ShapeError("x has no steps", expected="at least one", got=x.shape, remedy="Skip empty sequences")
        valid = parse_lengths(lengths, steps, x.shape[1 - self._axis], xp) if x.size else None
        if valid is None:
            return x.mean(axis=self._axis), MeanSaved(x, None)
        kept = xp.where(self._turned(valid.valid), x, x.dtype.type(0))  # whatever comes after an end, NaN too
        return kept.sum(axis=self._axis) / valid.values[:, None].astype(x.dtype), MeanSaved(x, valid)

    def input_grad(self, gy: Array, saved: MeanSaved) -> Array:
        """Return gy divided by the number of steps, at each of them; zero past a sample's end.

        Without lengths it is a read-only view on the host, in which all steps are one place in memory.
        """
        x, lengths = saved
        xp = check_gy(gy, (x.shape[1 - self._axis], x.shape[2]), x.dtype, x)
        if lengths is None:
            share = gy * gy.dtype.type(1 / x.shape[self._axis])
            shares = xp.broadcast_to(xp.expand_dims(share, self._axis), x.shape)
            return shares if backend.is_host(xp) else xp.ascontiguousarray(shares)
        share = xp.expand_dims(gy / lengths.values[:, None].astype(gy.dtype), self._axis)
        return xp.ascontiguousarray(xp.where(self._turned(lengths.valid), share, gy.dtype.type(0)))

    def jacobian_t(self, saved: MeanSaved) -> Any:
        """Return one entry 1/T a row, shared by the batch, or with lengths a sample's own: a selection."""
        from sparsebp.jacobians import TransposedJacobian
        from sparsebp.patterns import step_sum_pattern

        x, lengths = saved
        xp, steps = backend.namespace(x), x.shape[self._axis]
        pattern = step_sum_pattern(steps, x.shape[2])
        if lengths is None:
            return TransposedJacobian(pattern, xp.full(pattern.nnz, x.dtype.type(1 / steps), dtype=x.dtype))
        shares = xp.where(lengths.valid[:, :, 0], 1 / lengths.values, 0).astype(x.dtype)  # (T, B)
        return TransposedJacobian(pattern, xp.ascontiguousarray(xp.repeat(shares, x.shape[2], axis=0)))

    def _turned(self, valid: Array) -> Array:
        """Return (T, B, 1) on the axes of x."""
        return valid.transpose(1, 0, 2) if self.batch_first else valid

    @property
    def _axis(self) -> int:
        return 1 if self.batch_first else 0

    @property
    def batch_axes(self) -> tuple[int, int]:  # type: ignore[override]
        """First in the output; in the input first with ``batch_first``, else after the steps."""
        return (0 if self.batch_first else 1), 0


# A layer of a Transformer's encoder: self-attention and two linear layers, each residual and normalised.

_ATTENTION = ("self_attn", "dropout1")
_FEEDFORWARD = ("linear1", "activation", "dropout", "linear2", "dropout2")
_ACTIVATIONS: dict[str, type[Layer]] = {"relu": ReLU, "gelu": GELU}


class EncoderSaved(NamedTuple):
    """The saved values of the layers inside, by name; the input's shape; an empty array of its dtype and device."""

    parts: dict[str, Any]
    shape: tuple[int, ...]
    like: Array


class TransformerEncoderLayer(Layer):
    """Self-attention, then two linear layers at each step, both residual, as `torch.nn.TransformerEncoderLayer`.

    Parameters
    ----------
    d_model
        Length of a step's vector.
    nhead
        Heads of the attention; `d_model` is a multiple of it.
    dim_feedforward
        Features between the two linear layers.
    dropout
        Probability of a zero in the attention, after it, and in and after the linear layers, while training.
    activation
        ``"relu"`` or ``"gelu"``, or torch.nn.functional's function of that name, between the linear layers.
    layer_norm_eps
        The ``eps`` of the normalisations.
    batch_first
        Whether sequences are (B, T, d_model) and not (T, B, d_model).
    norm_first
        Whether the normalisations come before the attention and the linear layers, instead of after the sums.
    bias
        Whether linear layers, attention and normalisations have biases.
    device, dtype
        None or ``"cpu"`` (see `Layer.to`); float32 or float64.
    rng
        Generator or seed of the initial values; the generators of the dropout masks are seeded by draws from it.

    Notes
    -----
    Parameters as in torch.nn: ``self_attn.*``, ``linear1.*``, ``linear2.*``, ``norm1.*``, ``norm2.*``. Sources: Vaswani
    et al., "Attention Is All You Need", 2017, §3.1; with `norm_first` Xiong et al., "On Layer Normalization in the
    Transformer Architecture", 2020, Fig. 1b.
    """

    replayable = True
    sample_axes = 2
    joins_steps = False

    def __init__(
        self, d_model: int, nhead: int, dim_feedforward: int = 2048, dropout: float = 0.1,
        activation: Literal["relu", "gelu"] | Callable[..., Any] = "relu", layer_norm_eps: float = 1e-5,
        batch_first: bool = False, norm_first: bool = False, bias: bool = True, device: Any = None,
        dtype: Any = np.float32, *, rng: Seed = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.norm_first = check_flag("norm_first", norm_first)
        if str(getattr(activation, "__module__", "")).startswith("torch."):
            activation = getattr(activation, "__name__", activation)
        make_activation = _ACTIVATIONS[str(check_choice("activation", activation, tuple(_ACTIVATIONS)))]
        rng, real = check_generator("rng", rng), parameter_dtype(dtype, device)
        d_model, between = check_integer("d_model", d_model, 1), check_integer("dim_feedforward", dim_feedforward, 1)
        options: dict[str, Any] = {"dtype": real, "rng": rng}
        norm: dict[str, Any] = {"eps": layer_norm_eps, "bias": bias, "dtype": real}
        self.children |= {
            "self_attn": MultiheadAttention(d_model, nhead, dropout, bias, batch_first=batch_first, **options),
            "linear1": Linear(d_model, between, bias, **options),
            "activation": make_activation(),
            "dropout": Dropout(dropout, rng=own_generator(rng)),
            "linear2": Linear(between, d_model, bias, **options),
            "norm1": LayerNorm(d_model, **norm),
            "norm2": LayerNorm(d_model, **norm),
            "dropout1": Dropout(dropout, rng=own_generator(rng)),
            "dropout2": Dropout(dropout, rng=own_generator(rng)),
        }

    def forward(
        self, x: Array, src_mask: Array | None = None, src_key_padding_mask: Array | None = None,
        is_causal: bool = False, *, lengths: Any = None,
    ) -> tuple[Array, EncoderSaved]:  # fmt: skip
        """Run the layer.

        Parameters
        ----------
        x
            (T, B, d_model), or (B, T, d_model) with ``batch_first``; (T, d_model) is an unbatched sample.
        src_mask, src_key_padding_mask, is_causal
            ``attn_mask``, ``key_padding_mask`` and ``is_causal`` of the attention.
        lengths
            Valid steps of each sample (B integers in 1 … T), or None for all. No step attends to one after them.

        Returns
        -------
        y
            Of the shape of x. Values past a sample's end are meaningless.
        saved
            An `EncoderSaved`.
        """
        axes = self.batch_axes
        for layer in self.children.values():
            if isinstance(layer, Dropout) and layer.batch_axes != axes:
                layer.batch_axes = axes
        parts: dict[str, Any] = {}
        options = {
            "attn_mask": src_mask, "key_padding_mask": src_key_padding_mask, "is_causal": is_causal, "lengths": lengths,
        }  # fmt: skip

        def through(names: Sequence[str], at: Array) -> Array:
            for name in names:
                at, parts[name] = self.children[name].forward(at, **(options if name == "self_attn" else {}))
            return at

        if self.norm_first:
            y = x + through(("norm1", *_ATTENTION), x)
            y = y + through(("norm2", *_FEEDFORWARD), y)
        else:
            y = through(("norm1",), x + through(_ATTENTION, x))
            y = through(("norm2",), y + through(_FEEDFORWARD, y))
        return y, EncoderSaved(parts, x.shape, backend.namespace(x).empty(0, x.dtype))

    def gradients(self, gy: Array, saved: EncoderSaved) -> Gradients:
        """Return the gradients; those between the layers inside are computed once for I and W."""
        xp = check_gy(gy, saved.shape, saved.like.dtype, saved.like)
        first = "norm1" if self.norm_first else "self_attn"

        def of_parts() -> tuple[Array, dict[str, Gradients]]:
            """Return the gradient that goes past the first layer inside, and the layers' `Gradients`."""
            found: dict[str, Gradients] = {}

            def back(names: Sequence[str], at: Array) -> Array:
                for name in reversed(names):
                    found[name] = gradients_of(self.children[name], at, saved.parts[name])
                    if name == first:  # its input gradient is I's alone
                        break
                    at = found[name].input_grad()
                return at

            if self.norm_first:
                at = gy + back(("norm2", *_FEEDFORWARD), gy)
                back(("norm1", *_ATTENTION), at)
            else:
                at = back(("norm2",), gy)
                at = back(("norm1",), at + back(_FEEDFORWARD, at))
                back(_ATTENTION, at)
            return at, found

        parts = Shared(of_parts, xp)

        def at_input() -> Array:
            past, found = parts()
            return past + found[first].input_grad()

        def at_weights() -> dict[str, Gradients]:
            found = parts()[1]
            return {name: found[name] for name, layer in self.children.items() if layer.parameters()}

        return Gradients(self, gy, saved, at_input, at_weights)

    def unbatched(self, saved: EncoderSaved) -> bool:
        """Whether the forward had an unbatched sample."""
        return len(saved.shape) == 2

    def input_grad_work(self, shape: tuple[int, ...], saved: EncoderSaved) -> Work:
        """Return the sum of the costs of the layers inside, and of two sums."""
        between = (*shape[:-1], saved.parts["linear2"].shape[-1])
        wide = ("activation", "dropout", "linear2")
        works = [
            input_grad_work(layer, between if name in wide else shape, saved.parts[name])
            for name, layer in self.children.items()
        ]
        size = int(np.prod(shape))
        return total_work((*works, Work(2 * size, 6 * size, 2)))._replace(entries=0)

    @property
    def batch_axes(self) -> tuple[int, int]:  # type: ignore[override]
        """As the attention has it."""
        return self.children["self_attn"].batch_axes
