"""Multi-head attention: every step of a sequence looks at all steps of it, or of another one."""

from __future__ import annotations

import math
from collections.abc import Callable
from math import prod
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from sparsebp import backend
from sparsebp.core.arguments import check_default, check_flag, check_generator, check_integer, check_number
from sparsebp.core.errors import OptionError, ShapeError
from sparsebp.core.types import Array, Seed
from sparsebp.kernels.matmul import matmul, matmul_batches
from sparsebp.nn.arrays import full, normal, parameter_dtype, uniform
from sparsebp.nn.gradients import Gradients, Shared, gradients_of
from sparsebp.nn.layer import Layer, check_gy, check_input
from sparsebp.nn.layers.identity import dropout_mask
from sparsebp.nn.layers.linear import Linear, column_sums
from sparsebp.nn.layers.samples import Lone
from sparsebp.nn.layers.scores import Pairs, softmax, softmax_grad
from sparsebp.nn.recurrent.lengths import parse_lengths
from sparsebp.nn.work import Work


class AttentionSaved(NamedTuple):
    """What `MultiheadAttention.forward` keeps.

    Attributes
    ----------
    inputs
        x of a sequence that looks at itself; else query, key and value.
    heads
        Queries (scaled by 1/√head_dim), keys and values, (B · num_heads, steps, head_dim) each.
    attention
        How much each step looks at each (B · num_heads, T, S); rows add up to 1.
    mask
        The dropout mask that they were multiplied with, or None.
    merged
        What `out_proj` saved.
    """

    inputs: tuple[Array, ...]
    heads: tuple[Array, Array, Array]
    attention: Array
    mask: Array | None
    merged: Array


class AttentionGradients(Gradients):
    """`Gradients` of an attention, with respect to key and value among them; `input` is the query's."""

    __slots__ = ("_others",)

    def __init__(self, *args: Any, others: Callable[[], tuple[Array, Array]]) -> None:
        super().__init__(*args)
        self._others = others

    @property
    def key(self) -> Array:
        """The gradient with respect to the key, of its shape; computed once."""
        return self._once("others", self._others)[0]

    @property
    def value(self) -> Array:
        """The gradient with respect to the value, of its shape; computed once."""
        return self._once("others", self._others)[1]


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
    device
        None or ``"cpu"``: layers are built on the host, and moved by `to`.
    dtype
        float32 or float64.
    rng
        Generator or seed of the initial values; the dropout masks' generator is seeded by one draw from it.

    Raises
    ------
    OptionError
        A number is no integer from 1 on, `embed_dim` no multiple of `num_heads`, `dropout` outside 0 … 1, a flag no
        truth value, or `kdim` or `vdim` another length.

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
            raise OptionError(
                "The heads cannot share the vectors out", expected="embed_dim divisible by num_heads",
                got=f"embed_dim={embed_dim}, num_heads={num_heads}", remedy="Pass another number of heads",
            )  # fmt: skip
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
            self.children["out_proj"].params["bias"][...] = 0
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
            (T, B, embed_dim), or (B, T, embed_dim) with ``batch_first``; (T, embed_dim) is a lone sample.
        key, value
            Other sequences of S steps, both of one shape; None: the query looks at itself.
        key_padding_mask
            (B, S), of a lone sample (S,): bool, True for steps of the key that none looks at, or numbers of x's dtype
            that are added to the products.
        attn_mask
            (T, S) or (B · num_heads, T, S), in the same way for pairs of steps.
        is_causal
            That `attn_mask` is causal; without a mask it is refused, as in PyTorch. It changes nothing.
        lengths
            Valid steps of each sample of the key (B integers in 1 … S), or None for all. No step looks at one behind
            them, whose numbers must be finite all the same.

        Returns
        -------
        y
            Of the shape of the query. What it holds behind a sample's end means nothing. A step to which the masks
            leave nothing looks at nothing: its weights are 0, as in PyTorch without ``need_weights``.
        saved
            What the way back needs, and `weights`.

        Raises
        ------
        ShapeError, DTypeError, DeviceError, OptionError
            An argument does not fit.
        """
        weight = self.params["in_proj_weight"]
        inputs: tuple[Any, ...] = (query,) if key is None and value is None else (query, key, value)
        if any(array is None for array in inputs):
            raise OptionError("key and value come together", expected="both or none of them", got="one",
                              remedy="Pass the key as value too")  # fmt: skip
        backend.namespace(*inputs, weight)
        options: dict[str, Any] = {"attn_mask": attn_mask, "lengths": lengths}
        if check_flag("is_causal", is_causal) and attn_mask is None:
            raise OptionError("is_causal needs a mask", expected="attn_mask, which is_causal is a hint about", got=None,
                              remedy="Pass attn_mask=np.triu(np.ones((T, T), bool), 1)")  # fmt: skip
        if query.ndim != 2:
            return self._forward(weight, inputs, key_padding_mask, **options)
        xp, axis = backend.namespace(query, *backend.given(m=key_padding_mask).values()), self.batch_axes[0]
        lone = tuple(xp.expand_dims(array, axis) if array.ndim == 2 else array for array in inputs)
        padding = None if key_padding_mask is None else key_padding_mask[None]
        y, saved = self._forward(weight, lone, padding, **options)
        return y.squeeze(axis), Lone(saved)

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

        Of a lone sample without the B. What dropout dropped is zero.
        """
        if isinstance(saved, Lone):
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
            raise ShapeError(
                "query, key and value do not fit", expected="one batch, and key and value of one shape",
                got=" and ".join(str(array.shape) for array in inputs), remedy="Pass sequences of one batch",
            )  # fmt: skip
        valid = parse_lengths(lengths, looked_at, batch, xp) if inputs[0].size else None
        pairs = Pairs(batch, self.num_heads, steps, looked_at)
        masks = pairs.masks(xp, weight, attn_mask, key_padding_mask, None if valid is None else valid.valid[:, :, 0].T)
        queries, keys, values = self._project(xp, weight, inputs, batch)
        queries *= weight.dtype.type(1 / math.sqrt(self.head_dim))
        attention = matmul_batches(xp, queries, keys.transpose(0, 2, 1))
        attention = pairs.masked(xp, attention, masks)
        softmax(attention, masked=bool(masks))
        mask = dropout_mask(self.generator, attention, self.dropout) if self._drops else None
        looked = matmul_batches(xp, attention if mask is None else attention * mask, values)
        y, merged = self.children["out_proj"].forward(self._merge(xp, looked[None], inputs[0].shape))
        return y, AttentionSaved(inputs, (queries, keys, values), attention, mask, merged)

    def gradients(self, gy: Array, saved: Any) -> AttentionGradients:
        """Return the gradients; what leads to queries, keys and values is computed once for I and W."""
        if isinstance(saved, Lone):
            xp, axis = backend.namespace(gy=gy), self.batch_axes[0]
            inner = self.gradients(xp.expand_dims(gy, axis), saved.batch)
            return AttentionGradients(
                self, gy, saved, lambda: inner.input_grad().squeeze(axis), inner.weight_grad,
                others=lambda: (inner.key.squeeze(axis), inner.value.squeeze(axis)),
            )  # fmt: skip
        x, weight, width = saved.inputs[0], self.params["in_proj_weight"], self.embed_dim
        xp = check_gy(gy, x.shape, x.dtype, x)
        out = gradients_of(self.children["out_proj"], gy, saved.merged)
        projected = Shared(lambda: self._core(xp, out.input_grad(), saved), xp)

        def at_input() -> Array:
            found = projected()[0]
            return matmul(xp, found[0], weight if len(found) == 1 else weight[:width])

        def at_others() -> tuple[Array, Array]:
            found = projected()[0]
            if len(found) == 1:
                raise OptionError("There was no key", expected="a forward of query, key and value",
                                  got="one of x alone", remedy="Use g.input, the gradient at all three")  # fmt: skip
            return matmul(xp, found[1], weight[width : 2 * width]), matmul(xp, found[2], weight[2 * width :])

        def at_weights() -> dict[str, Any]:
            found, extra = projected()
            return {**self._projection_grads(xp, found, saved.inputs), **extra, "out_proj": out}

        return AttentionGradients(self, gy, saved, at_input, at_weights, others=at_others)

    def input_grad_work(self, shape: tuple[int, ...], saved: Any) -> Work:
        """Return the cost of both projections, of four products over all pairs of steps, and of the softmax."""
        rows, pairs = prod(shape[:-1]), (saved.batch if isinstance(saved, Lone) else saved).attention.size
        return Work(
            flops=8 * rows * self.embed_dim**2 + 8 * pairs * self.head_dim + 4 * pairs,
            values=4 * self.embed_dim**2 + 20 * rows * self.embed_dim + 8 * pairs, calls=14,
        )  # fmt: skip

    def lone(self, saved: Any) -> bool:
        """Whether the forward had a lone sample."""
        return isinstance(saved, Lone)

    def capture_obstacle(self) -> str | None:
        """While training with dropout, every mask has a seed from the host's generator."""
        return "draws the seed of its mask on the host" if self._drops else None

    @property
    def batch_axes(self) -> tuple[int, int]:  # type: ignore[override]
        """First with ``batch_first``, else behind the steps."""
        return (0, 0) if self.batch_first else (1, 1)

    @property
    def _drops(self) -> bool:
        return self.training and self.dropout > 0

    def _project(self, xp: ModuleType, weight: Array, inputs: tuple[Array, ...], batch: int) -> tuple[Array, ...]:
        """Return queries, keys and values, (B · num_heads, steps, head_dim), with what is added behind the keys."""
        count, heads = 3 // len(inputs), []
        for i, array in enumerate(inputs):
            rows = slice(i * count * self.embed_dim, (i + 1) * count * self.embed_dim)
            projected = matmul(xp, array, weight[rows].T)
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
        """Return the gradients at what `in_proj_weight` gives, from the one at what `out_proj` takes.

        They are merged as one for a sequence that looks at itself. And those at ``bias_k`` and ``bias_v``.
        """
        (queries, keys, values), attention, mask = saved.heads, saved.attention, saved.mask
        (g,) = self._split(xp, g)
        given = attention if mask is None else attention * mask
        at_values = matmul_batches(xp, given.transpose(0, 2, 1), g)
        scores = matmul_batches(xp, g, values.transpose(0, 2, 1))
        if mask is not None:
            scores *= mask
        softmax_grad(scores, attention)
        at_queries = matmul_batches(xp, scores, keys)
        at_queries *= g.dtype.type(1 / math.sqrt(self.head_dim))
        at_keys = matmul_batches(xp, scores.transpose(0, 2, 1), queries)
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
        weights = [matmul(xp, g.T, x.reshape(len(g), self.embed_dim)) for g, x in zip(flat, inputs, strict=True)]
        grads = {"in_proj_weight": weights[0] if len(weights) == 1 else xp.concatenate(weights)}
        if "in_proj_bias" in self.params:
            sums = [column_sums(xp, g) for g in flat]
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
    """Return a generator of a layer's own, seeded by one draw: its masks depend on its own forwards alone.

    With one generator for all, they would depend on the order in which the layers of a pipeline run.
    """
    return np.random.default_rng(int(rng.integers(2**63)))
