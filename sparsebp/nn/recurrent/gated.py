"""MinGRU and MinLSTM: recurrent layers whose step is linear in the state, with a diagonal Jacobian.

In ``h[t] = a[t] * h[t-1] + b[t]``, a and b depend on the input alone. So all of them are computed at once, and the
recurrence and its way back are one pass over memory each. A step's Jacobian is ``diag(a[t])``: a scan
multiplies vectors, where that of a GRU multiplies H × H matrices.

The gated layers have a in (0, 1), and nothing here divides by a product of a's. So plain float32 suffices: products
underflow to 0, which is what they are. A scan in the form of cumulative sums, ``h = A * cumsum(b / A)`` with
``A = cumprod(a)``, would overflow after some steps. That is why Feng et al. (appendix B) compute in log space, and why
they then need positive candidates.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator
from types import ModuleType
from typing import Any, ClassVar, Literal, TypeAlias, Unpack, cast

import numpy as np

from sparsebp import kernels
from sparsebp.core import backend
from sparsebp.core.check import Array, check_choice
from sparsebp.core.errors import OptionError
from sparsebp.core.host_pool import empty
from sparsebp.kernels.operands import WeightSums
from sparsebp.kernels.spec import Kernels
from sparsebp.nn.dense import project, short_products, transposed_product
from sparsebp.nn.parameters import fan_in_bound, uniform
from sparsebp.nn.recurrent import runs
from sparsebp.nn.recurrent.cells import CellMath
from sparsebp.nn.recurrent.layers import Recurrent, RecurrentOptions
from sparsebp.nn.recurrent.lengths import Lengths
from sparsebp.nn.recurrent.saved import GivenState, RunGradients, SavedRun, State, Weights, split
from sparsebp.nn.recurrent.stream import ArrayStream, Stream
from sparsebp.nn.unbatched import takes_unbatched
from sparsebp.patterns import SparsityPattern

Candidate: TypeAlias = Literal["identity", "positive"]

# The gated cells: ``h' = (1 - z) * h + z * c``.


class GatedMath(CellMath):
    """``h' = (1 - z) * h + z * c``: the gate ``z = σ(u)`` and the candidate ``c(v)`` are made of ``p = W_ih x + b_ih``.

    v is the last part of p. Kernels run both ways over p, and keep nothing but p, which is the gates of a run.
    ga (T, B, gH) is the gradient at p.
    """

    diagonal = True

    def __init__(self, nonlinearity: Candidate) -> None:
        self.nonlinearity: Candidate = check_choice("nonlinearity", nonlinearity, ("identity", "positive"))

    @abc.abstractmethod
    def gate(self, p: Array) -> Array:
        """Return u (…, H), of p (…, gH)."""

    def candidate(self, v: Array) -> tuple[Array, Array]:
        """Return c and its slope: v itself and 1, or ``v + 0.5`` where v ≥ 0, else σ(v), which is positive."""
        xp = backend.namespace(v)
        if self.nonlinearity == "identity":
            return v, xp.ones_like(v)
        s, one = sigmoid(v), v.dtype.type(1)
        return xp.where(v >= 0, v + one / 2, s), xp.where(v >= 0, one, s * (1 - s))

    def run(
        self, k: Kernels, x: Array, weights: Weights, saved: SavedRun, *projection: Array | None, fresh: bool = False
    ) -> None:
        """Run the recurrence over p, or project x as well: the gates then read p where it was just written."""
        if fresh:
            saved.h0[...] = 0
        if not projection:
            saved.gates = x
            k.min_gru_forward(x, saved.h0, None, self.nonlinearity, False, saved.h)
            return
        saved.gates = empty(np, (*x.shape[:2], len(weights.weight_ih)), x.dtype)
        w, bias = weights.weight_ih, weights.bias_ih
        kernels.on_host().gated_forward(x, w, bias, self.nonlinearity, saved.gates, saved.states[0])

    def run_back(
        self, k: Kernels, saved: SavedRun, w_hh: Array, gy: Array | None, last: GivenState, chunks: int,
        ga: Array | None, initial: State, sums: WeightSums | None = None,
    ) -> None:  # fmt: skip
        """Write ga and `initial` by the recurrence ``g[t] = gy[t] + (1 - z[t+1]) * g[t+1]``."""
        xp, p, carried = backend.namespace(saved.h), cast(Array, saved.gates), initial[0]
        if self.is_projected(saved.x, p.shape[2]):
            self._projected_back(saved, gy, last, carried, ga)
            return
        if gy is not None and last[0] is None:
            gy = xp.ascontiguousarray(gy)
        else:
            gy = xp.zeros_like(saved.h) if gy is None else gy.copy()
            gy[-1] += 0 if last[0] is None else last[0]
        k.min_gru_backward(p, saved.h, gy, saved.h0, None, self.nonlinearity, False, cast(Array, ga), carried)

    def _projected_back(
        self, saved: SavedRun, gy: Array | None, last: GivenState, carried: Array, ga: Array | None,
        grads: tuple[Array, Array | None] | None = None, through: tuple[Array, Array] | None = None,
    ) -> None:  # fmt: skip
        carried[...] = 0 if last[0] is None else last[0]
        gh = np.zeros((1, *saved.h.shape[1:]), saved.h.dtype) if gy is None else gy
        if gh.strides[0] == 0:
            gh = np.ascontiguousarray(gh[:1])
        p, states = cast(Array, saved.gates), saved.states[0]
        kernels.on_host().gated_backward(saved.x, p, states, gh, self.nonlinearity, carried, ga, grads, through)

    def summed_back(
        self, xp: ModuleType, k: Kernels, saved: SavedRun, weights: Weights, gy: Array | None, last: GivenState,
        chunks: int, keep: bool,
    ) -> RunGradients:  # fmt: skip
        """Return the gradients at the weights and the initial state; `keep` stores the one at x as well."""
        w, bias, carried = weights.weight_ih, weights.bias_ih, np.empty_like(saved.h0)
        grads = np.empty_like(w), None if bias is None else np.empty_like(bias)
        at_x = empty(np, saved.x.shape, saved.x.dtype) if keep else None
        self._projected_back(saved, gy, last, carried, None, grads, None if at_x is None else (w, at_x))
        return RunGradients((carried,), None, Weights(grads[0], None, grads[1], None), True, at_x)

    def resume(self, k: Kernels, saved: SavedRun, h0: Array) -> None:
        """Change a run's state before the first step, and run again as far as that changes the states."""
        # The memory of a gated layer fades, so both runs meet: from there on their states are bitwise equal.
        states, gates = saved.states[0], cast(Array, saved.gates)
        states[0] = h0
        for block in growing(len(gates)):
            before = states[block.stop].copy()
            part = SavedRun(saved.x[block], (states[block.start : block.stop + 1],))
            self.run(k, gates[block], Weights(gates, None, None, None), part)
            if bool((before == states[block.stop]).all()):
                return

    def resume_back(
        self, k: Kernels, saved: SavedRun, gy: Array | None, last: Array, run: RunGradients
    ) -> RunGradients:
        """Return the gradients for `last`, the gradient at the state after the last step, where `run` has those for 0.

        The way back is done again as far as `last` matters; so is the one for 0, to see where both meet.
        """
        steps, gates, ga = len(saved.h), cast(Array, saved.gates), cast(Array, run.ga)
        weights = Weights(gates, None, None, None)  # not read
        ends = [backend.namespace(last).zeros_like(last), last]
        for from_end in growing(steps):
            block = slice(steps - from_end.stop, steps - from_end.start)
            part = SavedRun(saved.x[block], (saved.states[0][block.start : block.stop + 1],), gates[block])
            gy_here = None if gy is None else gy[block]
            both = [runs.backward(k, self, part, weights, gy_here, (end,)) for end in ends]
            ga[block] = both[1].ga
            ends = [one.initial[0] for one in both]
            if bool((ends[0] == ends[1]).all()):
                return run
        return RunGradients((ends[1],), ga)

    def is_projected(self, x: Array, rows: int) -> bool:
        """Whether the kernels project x, by so many rows of weights, and sum the weight gradients."""
        return rows * x.shape[2] * x.itemsize <= RESIDENT and backend.is_host(backend.namespace(x))

    # ---- in place of what dense weights W_hh need ----------------------------------------------------------------

    def initial_weights(
        self, input_size: int, hidden_size: int, bias: bool, dtype: np.dtype, rng: np.random.Generator,
        proj_size: int = 0,
    ) -> Weights:  # fmt: skip
        """Draw parameters as `Linear` does: from U(±1/√input_size)."""
        rows, bound = self.gates * hidden_size, fan_in_bound(input_size)
        weight = uniform(rng, (rows, input_size), bound, dtype)
        return Weights(weight, None, uniform(rng, (rows,), bound, dtype) if bias else None, None)

    def inputs(self, k: Kernels, x: Array, weights: Weights) -> tuple[Any, ...]:
        """Return p (T, B, gH), or x with the weights, if `run` is to project it."""
        if self.is_projected(x, len(weights.weight_ih)):
            return x, weights.weight_ih, weights.bias_ih
        return (project(x, weights.weight_ih, weights.bias_ih),)

    def weight_grad(self, k: Kernels, ga: Array, saved: SavedRun, weights: Weights) -> Weights:
        """Return the gradients of W_ih and b_ih: the sums of `run_back`, or a GEMM and a GEMV over all steps."""
        xp, rows = backend.namespace(ga), ga.shape[0] * ga.shape[1]
        if self.is_projected(saved.x, ga.shape[2]):
            w_ih = np.empty_like(weights.weight_ih)
            b_ih = None if weights.bias_ih is None else np.empty_like(weights.bias_ih)
            ga, states, grads = np.ascontiguousarray(ga), saved.states[0], (w_ih, b_ih)
            kernels.on_host().gated_backward(
                saved.x, ga, states, saved.h, self.nonlinearity, saved.h0, ga, grads, again=True
            )
            return Weights(w_ih, None, b_ih, None)
        flat = xp.ascontiguousarray(ga.reshape(rows, ga.shape[2]))
        with short_products(xp, rows * weights.weight_ih.size):
            w_ih = transposed_product(flat, saved.x.reshape(rows, saved.x.shape[2]))
            b_ih = None if weights.bias_ih is None else xp.empty(flat.shape[1], flat.dtype)
            k.sum_gates(flat, 0, None, None, b_ih, None)
        return Weights(xp.ascontiguousarray(w_ih), None, b_ih, None)

    def pattern(self, hidden: int) -> SparsityPattern:
        """Return the diagonal."""
        return SparsityPattern.diagonal(hidden)

    def run_jacobians(self, k: Kernels, saved: SavedRun, w_hh: Array, reverse: bool, out: Array) -> None:
        """Write 1 - z."""
        found = sigmoid(-self.gate(cast(Array, saved.gates)))
        out[...] = (found[::-1] if reverse else found).transpose(0, 2, 1)

    def sums_inside(self, xp: ModuleType, saved: SavedRun, chunks: int) -> bool:
        """Whether `run_back` sums the weight gradients."""
        return self.is_projected(saved.x, cast(Array, saved.gates).shape[2])

    def reduced(self, k: Kernels, saved: SavedRun, w_hh: Array, gy: Array | None, chunks: int = 1) -> Array:
        """Return the way back as one affine map per sample, whose matrix is ``diag(Π (1 - z))``."""
        xp = backend.namespace(saved.h)
        _, batch, hidden = saved.h.shape
        maps, own = xp.zeros((batch, hidden + 1, hidden), dtype=saved.h.dtype), xp.arange(hidden)
        maps[:, own, own] = xp.prod(sigmoid(-self.gate(cast(Array, saved.gates))), axis=0)
        if gy is not None:
            weights = Weights(w_hh, None, None, None)  # not read
            maps[:, hidden] = runs.backward(k, self, saved, weights, gy, (None,)).initial[0]
        return maps


def growing(steps: int) -> Iterator[slice]:
    """Yield parts of so many steps, each twice as long as the one before."""
    first, size = 0, 64
    while first < steps:
        yield slice(first, min(first + size, steps))
        first, size = first + size, 2 * size


RESIDENT = 1 << 19
"""Bytes of weights with which the kernels project inputs: more do not stay in the second cache, as OpenBLAS's packed
blocks do."""


class MinGRUMath(GatedMath):
    """``u = W_iz x + b_iz``, ``v = W_in x + b_in`` (Feng et al., §3.1.3); rows in torch's order, z before n."""

    name = "mingru"
    gates = columns = 2

    def gate(self, p: Array) -> Array:
        """Return the first part."""
        return split(p, 2)[0]

    def close(self, saved: SavedRun, lengths: Lengths) -> None:
        """Set z = 1: the Jacobians vanish."""
        lengths.fill(split(saved.gates, 2)[0], OPEN)


class MinLSTMMath(GatedMath):
    """``i = σ(W_ii x + b_ii)``, f alike, ``v = W_ig x + b_ig``; ``z = i / (f + i)`` (Feng et al., §3.2.4).

    Rows in torch's order i, f, g. With p_i and p_f the inputs of the gates, ``z = σ(u)`` for ``u = log(i / f)``, which
    is ``softplus(-p_f) - softplus(-p_i)``. Where both gates underflow, i / (f + i) would be 0 / 0.
    """

    name = "minlstm"
    gates = columns = 3

    def gate(self, p: Array) -> Array:
        """Return ``log(i / f)``."""
        p_i, p_f, _ = split(p, 3)
        return softplus(-p_f) - softplus(-p_i)

    def close(self, saved: SavedRun, lengths: Lengths) -> None:
        """Set i = 1 and f = 0: the Jacobians vanish."""
        for part, value in zip(split(saved.gates, 3), (OPEN, -OPEN), strict=False):
            lengths.fill(part, value)


OPEN = 1000.0
"""Input of a gate that is 1, and whose complement is 0, in both dtypes."""


def sigmoid(x: Array) -> Array:
    """Return ``1 / (1 + exp(-x))`` with small relative error for negative x too: a gate near 0 is a long memory."""
    xp = backend.namespace(x)
    with np.errstate(over="ignore"):  # 1 / ∞ is the 0 it should be
        found = xp.exp(-x)
    found += 1
    return xp.divide(1, found, out=found)


def softplus(x: Array) -> Array:
    """Return ``log(1 + exp(x))`` without overflow, and with small relative error."""
    xp, tiny = backend.namespace(x), np.finfo(x.dtype).tiny
    found = xp.abs(x)
    xp.exp(xp.negative(found, out=found), out=found)
    near_one = found + 1
    log = xp.log(near_one)  # in NumPy four times as fast as log1p, of which it is what Kahan's correction makes it
    near_one -= 1
    near_one += tiny  # where nothing was left of it, the quotient is tiny / tiny
    log += tiny
    log /= near_one
    found *= log
    found += xp.maximum(x, 0)
    return found


# The gated layers.


class Gated(Recurrent):
    """Base of `MinGRU` and `MinLSTM`: frames, layouts and stacks are those of `Recurrent`."""

    math: ClassVar[type[GatedMath]]
    cell: GatedMath

    def __init__(
        self, input_size: int, hidden_size: int, num_layers: int = 1, bias: bool = True, batch_first: bool = False,
        dropout: float = 0.0, bidirectional: bool = False, *, nonlinearity: Candidate = "identity",
        **options: Unpack[RecurrentOptions],
    ) -> None:  # fmt: skip
        self.nonlinearity: Candidate = nonlinearity
        self.cell = self.math(nonlinearity)
        super().__init__(input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, **options)

    def stream(self, batch: int | None = None, state: Any = None) -> Stream:
        """Return a `Stream`, as `Recurrent.stream` does; a step is computed in NumPy and allocates."""
        if self.bidirectional:
            raise OptionError("A stream has no end to come back from", expected="a layer of one direction",
                              got="bidirectional=True", remedy="Build the layer with bidirectional=False")  # fmt: skip
        return ArrayStream(self, batch, state)

    def state_of(self, lead: tuple[int, ...]) -> Array:
        """Return an array for a stream's state (num_layers, …, H)."""
        return empty(np, (self.num_layers, *lead, self.hidden_size), self.params["weight_ih_l0"].dtype)

    def advance(self, x: Array, h: Array) -> Array:
        """Take a stream's state one step on, and return the last layer's, read-only."""
        for number in range(len(h)):
            weights = self._weights(number)
            p = x @ weights.weight_ih.T
            if weights.bias_ih is not None:
                p += weights.bias_ih
            c, _ = self.cell.candidate(split(p, self.cell.gates)[-1])
            h[number] += sigmoid(self.cell.gate(p)) * (c - h[number])
            x = h[number]
        x.flags.writeable = False
        return x


@takes_unbatched(2, 1)
class MinGRU(Gated):
    """The GRU without the state in its gates, ``h[t] = (1 - z[t]) * h[t-1] + z[t] * c[t]``.

    The gate is ``z = σ(W_iz x + b_iz)``, the candidate c is ``v = W_in x + b_in`` itself or a function of it. z
    multiplies the new value, as in the paper; a GRU's multiplies the old state.

    Parameters
    ----------
    input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional
        As of `GRU`.
    nonlinearity
        ``"identity"``: c = v (§3.1). ``"positive"``: c = v + 0.5 where v ≥ 0, else σ(v), as the paper's version in log
        space has it (appendix B.2.1), and most implementations.
    **options
        As of `Recurrent`. All algorithms of `backward` give the same gradients; by default they come from one linear
        recurrence.

    Notes
    -----
    Parameters: ``weight_ih_l{k}`` (2H, input), rows of z, then of v; ``bias_ih_l{k}`` (2H,); with the suffix
    ``_reverse`` for the second direction. All from U(±1/√input), as of the paper's linear layers.

    Source: Feng, Tung, Ahmed, Bengio, Hajimirsadeghi, "Were RNNs All We Needed?", 2024.

    Examples
    --------
    >>> import numpy as np, sparsebp as sb
    >>> layer = sb.nn.MinGRU(3, 5, rng=0)
    >>> y, saved = layer.forward(np.ones((7, 4, 3), np.float32))
    >>> layer.hidden_jacobians_t(saved)[0].pattern
    SparsityPattern(5 x 5, nnz=5, diagonal)
    """

    math = MinGRUMath


@takes_unbatched(2, 1)
class MinLSTM(Gated):
    """The LSTM without the state in its gates, ``h[t] = f' * h[t-1] + i' * c[t]``, f' = f / (f + i), i' = i / (f + i).

    The gates are ``i = σ(W_ii x + b_ii)`` and f alike, the candidate c is ``v = W_ig x + b_ig`` or a function of it.
    The state is h alone, and there is no output gate.

    Parameters
    ----------
    input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, nonlinearity, **options
        As of `MinGRU`.

    Notes
    -----
    Parameters: ``weight_ih_l{k}`` (3H, input), rows of i, f and v; ``bias_ih_l{k}`` (3H,). All from U(±1/√input).

    Source: Feng, Tung, Ahmed, Bengio, Hajimirsadeghi, "Were RNNs All We Needed?", 2024, §3.2.
    """

    math = MinLSTMMath
