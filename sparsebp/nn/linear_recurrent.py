"""MinGRU, MinLSTM and LRU: recurrent layers whose step is linear in the state, with a diagonal Jacobian.

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
import math
from collections.abc import Iterator
from types import ModuleType
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias, Unpack, cast

import numpy as np

from sparsebp import kernels
from sparsebp.core import backend
from sparsebp.core.check import Array, Seed, check_choice, check_flag, check_generator, check_integer, check_number
from sparsebp.core.errors import OptionError
from sparsebp.core.host_pool import empty
from sparsebp.kernels.operands import WeightSums
from sparsebp.kernels.spec import Kernels
from sparsebp.nn.cells import (
    CellMath,
    GivenState,
    Lengths,
    RunGradients,
    State,
    SummedGradients,
    Tape,
    Weights,
    parse_lengths,
    product,
    project,
    short_products,
    split,
    transposed_product,
)
from sparsebp.nn.gradients import NamedGradients, Shared
from sparsebp.nn.layer import Layer, batch_first_axes, check_gy, check_input, check_sequence_input, turned
from sparsebp.nn.parameters import fan_in_bound, normal, parameter_dtype, uniform
from sparsebp.nn.recurrent import Recurrent, RecurrentOptions
from sparsebp.nn.stream import ArrayStream, Stream, carrying, takes_unbatched
from sparsebp.patterns import SparsityPattern
from sparsebp.scan.recurrence import linear_recurrence, linear_recurrence_vjp

Candidate: TypeAlias = Literal["identity", "positive"]

# The gated cells: ``h' = (1 - z) * h + z * c``.


class GatedMath(CellMath):
    """``h' = (1 - z) * h + z * c``: the gate ``z = σ(u)`` and the candidate ``c(v)`` are made of ``p = W_ih x + b_ih``.

    Kernels run both ways over u and v, and keep nothing but p, which is the gates of a run. ga (T, B, gH) is the
    gradient at p.
    """

    kept = 0  # `run` brings p itself
    diagonal = True

    def __init__(self, nonlinearity: Candidate) -> None:
        self.nonlinearity: Candidate = check_choice("nonlinearity", nonlinearity, ("identity", "positive"))

    @abc.abstractmethod
    def parts(self, p: Array) -> Array:
        """Return u and v side by side (…, 2H), of p (…, gH)."""

    @abc.abstractmethod
    def parts_back(self, p: Array, grads: Array, ga: Array) -> None:
        """Write the gradient at p, from those at u and v (…, 2H)."""

    def candidate(self, v: Array) -> tuple[Array, Array]:
        """Return c and its slope: v itself and 1, or ``v + 0.5`` where v ≥ 0, else σ(v), which is positive."""
        xp = backend.namespace(v)
        if self.nonlinearity == "identity":
            return v, xp.ones_like(v)
        s, one = sigmoid(v), v.dtype.type(1)
        return xp.where(v >= 0, v + one / 2, s), xp.where(v >= 0, one, s * (1 - s))

    def run(
        self, k: Kernels, x: Array, weights: Weights, tape: Tape, *projection: Array | None, fresh: bool = False
    ) -> None:
        """Run the recurrence over p, or project x as well: the gates then read p where it was just written."""
        if fresh:
            tape.h0[...] = 0
        if not projection:
            tape.gates = x
            k.min_gru_forward(self.parts(x), tape.h0, None, self.nonlinearity, False, tape.h)
            return
        tape.gates = empty(np, (*x.shape[:2], len(weights.weight_ih)), x.dtype)
        w, bias = weights.weight_ih, weights.bias_ih
        kernels.on_host().gated_forward(x, w, bias, self.nonlinearity, tape.gates, tape.states[0])

    def run_back(
        self, k: Kernels, tape: Tape, w_hh: Array, gy: Array | None, last: GivenState, chunks: int, ga: Array | None,
        initial: State, sums: WeightSums | None = None,
    ) -> None:  # fmt: skip
        """Write ga and `initial` by the recurrence ``g[t] = gy[t] + (1 - z[t+1]) * g[t+1]``."""
        xp, p, carried = backend.namespace(tape.h), cast(Array, tape.gates), initial[0]
        if self.is_projected(tape.x, p.shape[2]):
            self._projected_back(tape, gy, last, carried, ga)
            return
        if gy is not None and last[0] is None:
            gy = xp.ascontiguousarray(gy)
        else:
            gy = xp.zeros_like(tape.h) if gy is None else gy.copy()
            gy[-1] += 0 if last[0] is None else last[0]
        uv, ga = self.parts(p), cast(Array, ga)
        grads = ga if self.gates == 2 else empty(xp, uv.shape, uv.dtype)
        k.min_gru_backward(uv, tape.h, gy, tape.h0, None, self.nonlinearity, False, grads, carried)
        self.parts_back(p, grads, ga)

    def _projected_back(
        self, tape: Tape, gy: Array | None, last: GivenState, carried: Array, ga: Array | None,
        grads: tuple[Array, Array | None] | None = None, through: tuple[Array, Array] | None = None,
    ) -> None:  # fmt: skip
        carried[...] = 0 if last[0] is None else last[0]
        gh = np.zeros((1, *tape.h.shape[1:]), tape.h.dtype) if gy is None else gy
        if gh.strides[0] == 0:
            gh = np.ascontiguousarray(gh[:1])
        p, states = cast(Array, tape.gates), tape.states[0]
        kernels.on_host().gated_backward(tape.x, p, states, gh, self.nonlinearity, carried, ga, grads, through)

    def summed_backward(
        self, k: Any, tape: Tape, weights: Weights, gy: Array | None, last: GivenState, chunks: int = 1, *,
        keep: bool = False,
    ) -> SummedGradients:  # fmt: skip
        """Return the gradients at the weights and the initial state; `keep` stores the one at x as well."""
        w, bias, carried = weights.weight_ih, weights.bias_ih, np.empty_like(tape.h0)
        grads = np.empty_like(w), None if bias is None else np.empty_like(bias)
        at_x = empty(np, tape.x.shape, tape.x.dtype) if keep else None
        self._projected_back(tape, gy, last, carried, None, grads, None if at_x is None else (w, at_x))
        return SummedGradients(Weights(grads[0], None, grads[1], None), (carried,), None, at_x)

    def resume(self, k: Kernels, tape: Tape, h0: Array) -> None:
        """Change a run's state before the first step, and run again as far as that changes the states."""
        # The memory of a gated layer fades, so both runs meet: from there on their states are bitwise equal.
        states, gates = tape.states[0], cast(Array, tape.gates)
        states[0] = h0
        for block in growing(len(gates)):
            before = states[block.stop].copy()
            part = Tape(tape.x[block], (states[block.start : block.stop + 1],))
            self.run(k, gates[block], Weights(gates, None, None, None), part)
            if bool((before == states[block.stop]).all()):
                return

    def resume_back(self, tape: Tape, gy: Array | None, last: Array, run: RunGradients) -> RunGradients:
        """Return the gradients for `last`, the gradient at the state after the last step, where `run` has those for 0.

        The way back is done again as far as `last` matters; so is the one for 0, to see where both meet.
        """
        steps, gates = len(tape.h), cast(Array, tape.gates)
        ends = [backend.namespace(last).zeros_like(last), last]
        for from_end in growing(steps):
            block = slice(steps - from_end.stop, steps - from_end.start)
            part = Tape(tape.x[block], (tape.states[0][block.start : block.stop + 1],), gates[block])
            both = [self.backward(part, gates, None if gy is None else gy[block], (end,)) for end in ends]
            run.ga[block] = both[1].ga
            ends = [one.initial[0] for one in both]
            if bool((ends[0] == ends[1]).all()):
                return run
        return RunGradients(run.ga, (ends[1],))

    def is_projected(self, x: Array, rows: int) -> bool:
        """Whether the kernels project x, by so many rows of weights, and sum the weight gradients."""
        return rows * x.shape[2] * x.itemsize <= RESIDENT and backend.is_host(backend.namespace(x))

    def gate_gradients(self, tape: Tape, grads: State, ga: Array) -> None:
        """Write ga by ``d_u = g (c - h) z (1 - z)`` and ``d_v = g z c'(v)``, as the kernel does on its way."""
        (g,) = grads
        u, v = split(self.parts(tape.gates), 2)
        z, (c, slope) = sigmoid(u), self.candidate(v)
        both = (g * (c - tape.h_prev) * z * sigmoid(-u), g * z * slope)
        self.parts_back(tape.gates, backend.namespace(g).concatenate(both, axis=-1), ga)

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

    def weight_grad(self, ga: Array, tape: Tape, weights: Weights, at_h: Array | None = None) -> Weights:
        """Return the gradients of W_ih and b_ih: the sums of `run_back`, or a GEMM and a GEMV over all steps."""
        xp, rows = backend.namespace(ga), ga.shape[0] * ga.shape[1]
        if self.is_projected(tape.x, ga.shape[2]):
            w_ih = np.empty_like(weights.weight_ih)
            b_ih = None if weights.bias_ih is None else np.empty_like(weights.bias_ih)
            ga, states, grads = np.ascontiguousarray(ga), tape.states[0], (w_ih, b_ih)
            kernels.on_host().gated_backward(
                tape.x, ga, states, tape.h, self.nonlinearity, tape.h0, ga, grads, again=True
            )
            return Weights(w_ih, None, b_ih, None)
        flat = xp.ascontiguousarray(ga.reshape(rows, ga.shape[2]))
        with short_products(xp, rows * weights.weight_ih.size):
            w_ih = transposed_product(flat, tape.x.reshape(rows, tape.x.shape[2]))
            b_ih = None if weights.bias_ih is None else xp.empty(flat.shape[1], flat.dtype)
            kernels.get(xp).unchecked.sum_gates(flat, 0, None, None, b_ih, None)
        return Weights(xp.ascontiguousarray(w_ih), None, b_ih, None)

    def kept_arrays(self, tape: Tape) -> tuple[Array | None, ...]:
        """Return h and p."""
        return tape.h, tape.gates

    def pattern(self, hidden: int) -> SparsityPattern:
        """Return the diagonal."""
        return SparsityPattern.diagonal(hidden)

    def run_jacobians(self, k: Kernels, tape: Tape, w_hh: Array, reverse: bool, out: Array) -> None:
        """Write 1 - z."""
        found = sigmoid(-split(self.parts(tape.gates), 2)[0])
        out[...] = (found[::-1] if reverse else found).transpose(0, 2, 1)

    def sums_inside(self, k: Kernels, tape: Tape, chunks: int) -> bool:
        """Whether `run_back` sums the weight gradients."""
        return self.is_projected(tape.x, cast(Array, tape.gates).shape[2])

    def reduced(self, tape: Tape, w_hh: Array, gy: Array | None, chunks: int = 1) -> Array:
        """Return the way back as one affine map per sample, whose matrix is ``diag(Π (1 - z))``."""
        xp = backend.namespace(tape.h)
        _, batch, hidden = tape.h.shape
        maps, own = xp.zeros((batch, hidden + 1, hidden), dtype=tape.h.dtype), xp.arange(hidden)
        maps[:, own, own] = xp.prod(sigmoid(-split(self.parts(tape.gates), 2)[0]), axis=0)
        if gy is not None:
            maps[:, hidden] = self.backward(tape, w_hh, gy, (None,)).initial[0]
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

    def parts(self, p: Array) -> Array:
        """Return p."""
        return p

    def parts_back(self, p: Array, grads: Array, ga: Array) -> None:
        """Write the gradients as they are."""
        if grads is not ga:
            ga[...] = grads

    def close(self, tape: Tape, lengths: Lengths) -> None:
        """Set z = 1: the Jacobians vanish."""
        lengths.fill(split(tape.gates, 2)[0], OPEN)


class MinLSTMMath(GatedMath):
    """``i = σ(W_ii x + b_ii)``, f alike, ``v = W_ig x + b_ig``; ``z = i / (f + i)`` (Feng et al., §3.2.4).

    Rows in torch's order i, f, g. With p_i and p_f the inputs of the gates, ``z = σ(u)`` for ``u = log(i / f)``, which
    is ``softplus(-p_f) - softplus(-p_i)``. Where both gates underflow, i / (f + i) would be 0 / 0.
    """

    name = "minlstm"
    gates = columns = 3

    def parts(self, p: Array) -> Array:
        """Return u and v."""
        xp, (p_i, p_f, p_v) = backend.namespace(p), split(p, 3)
        return xp.concatenate((softplus(-p_f) - softplus(-p_i), p_v), axis=-1)

    def parts_back(self, p: Array, grads: Array, ga: Array) -> None:
        """Write ``d_i = d_u (1 - i)``, ``d_f = -d_u (1 - f)`` and d_v."""
        (p_i, p_f, _), (d_u, d_v) = split(p, 3), split(grads, 2)
        backend.namespace(p).concatenate((d_u * sigmoid(-p_i), -d_u * sigmoid(-p_f), d_v), axis=-1, out=ga)

    def close(self, tape: Tape, lengths: Lengths) -> None:
        """Set i = 1 and f = 0: the Jacobians vanish."""
        for part, value in zip(split(tape.gates, 3), (OPEN, -OPEN), strict=False):
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
            u, v = split(self.cell.parts(p), 2)
            h[number] += sigmoid(u) * (self.cell.candidate(v)[0] - h[number])
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


# LRU: a linear recurrence with complex, constant coefficients.


class LRUSaved(NamedTuple):
    """Saved by `LRU.forward`."""

    x: Array  # (T, B, input_size)
    h: Array  # complex (T, B, hidden_size)
    h0: Array  # complex (B, hidden_size)
    lengths: Lengths | None
    h_n: Array  # the last states, complex (1, B, hidden_size); with lengths, each sample's last valid one


@takes_unbatched(2, 1)
class LRU(Layer):
    """A linear recurrent unit: ``h[t] = λ * h[t-1] + γ * (B x[t])`` with complex h, ``y[t] = Re(C h[t]) + D * x[t]``.

    ``λ = exp(-exp(nu_log) + i exp(theta_log))`` lies inside the unit circle whatever the parameters are, and
    ``γ = exp(gamma_log)`` starts at √(1 - |λ|²), so that h does not grow with the memory.

    Parameters
    ----------
    input_size
        Features of x and of y.
    hidden_size
        Complex states, N.
    batch_first
        As of `GRU`.
    r_min, r_max
        λ is drawn uniformly from the ring ``r_min ≤ |λ| ≤ r_max``, 0 ≤ r_min < r_max ≤ 1. Long sequences want values
        near 1.
    max_phase
        Phases of λ are drawn from (0, max_phase), in radians; at most 2π.
    device, dtype
        None or ``"cpu"`` (see `Layer.to`); float32 or float64, of the parameters, x and y. States are complex64 or
        complex128.
    rng
        Generator or seed of the initial values.

    Notes
    -----
    Parameters: ``nu_log``, ``theta_log`` and ``gamma_log`` (N,), ``B_re`` and ``B_im`` (N, input_size), ``C_re`` and
    ``C_im`` (input_size, N), ``D`` (input_size,). A gradient of a complex array is ``dL/dRe + i dL/dIm``, as in
    PyTorch.

    Source: Orvieto, Smith, Gu, Fernando, Gulcehre, Pascanu, De, "Resurrecting Recurrent Neural Networks for Long
    Sequences", ICML 2023, §3 and appendix A, names as there.

    Examples
    --------
    >>> import numpy as np, sparsebp as sb
    >>> layer = sb.nn.LRU(3, 8, r_min=0.9, r_max=0.999, rng=0)
    >>> y, saved = layer.forward(np.ones((7, 4, 3), np.float32))
    >>> y.shape, saved.h_n.shape, saved.h_n.dtype
    ((7, 4, 3), (1, 4, 8), dtype('complex64'))
    """

    replayable = True
    batch_axes = batch_first_axes
    joins_steps = False

    def __init__(
        self, input_size: int, hidden_size: int, batch_first: bool = False, *, r_min: float = 0.0, r_max: float = 1.0,
        max_phase: float = 6.28, device: Any = None, dtype: Any = np.float32, rng: Seed = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.input_size = features = check_integer("input_size", input_size, 1)
        self.hidden_size = states = check_integer("hidden_size", hidden_size, 1)
        self.batch_first = check_flag("batch_first", batch_first)
        r_min, r_max = check_number("r_min", r_min, 0, 1), check_number("r_max", r_max, 0, 1)
        max_phase = check_number("max_phase", max_phase, 0, 2 * math.pi)
        if not r_min < r_max or max_phase == 0:
            raise OptionError("The ring of λ is empty", expected="r_min < r_max and max_phase > 0",
                              got=f"r_min={r_min}, r_max={r_max}, max_phase={max_phase}")  # fmt: skip
        rng, real = check_generator("rng", rng), parameter_dtype(dtype, device)
        radius, phase = rng.uniform(np.finfo(float).tiny, 1, (2, states))  # above 0, whose logarithm is infinite
        nu = -0.5 * np.log(radius * (r_max**2 - r_min**2) + r_min**2)  # uniform in the ring's area: lemma 3.2
        self.params.update({
            "nu_log": np.log(nu).astype(real), "theta_log": np.log(max_phase * phase).astype(real),
            "gamma_log": (0.5 * np.log(-np.expm1(-2 * nu))).astype(real),
            **{name: normal(rng, (states, features), 1 / math.sqrt(2 * features), real) for name in ("B_re", "B_im")},
            **{name: normal(rng, (features, states), 1 / math.sqrt(states), real) for name in ("C_re", "C_im")},
            "D": normal(rng, (features,), 1.0, real),
        })  # fmt: skip

    def forward(self, x: Array, h0: Array | None = None, lengths: Any = None) -> tuple[Array, LRUSaved]:
        """Run the layer.

        Parameters
        ----------
        x
            (T, B, input_size), or (B, T, input_size) with ``batch_first``.
        h0
            Initial state (1, B, hidden_size), complex, or None for zeros.
        lengths
            Valid steps of each sample (B integers in 1 … T), or None for all. Values of x after them have no effect.

        Returns
        -------
        y
            Of the shape of x; zero past each sample's length.
        saved
            An `LRUSaved`; ``saved.h_n`` is the last state.

        Raises
        ------
        ShapeError, DTypeError, DeviceError, OptionError
            An argument does not fit, T is 0 or the batch is empty.
        """
        like = self.params["D"]
        xp = check_sequence_input(x, self.input_size, like)
        x = turned(x, self.batch_first)
        steps, batch, _ = x.shape
        wide = self._complex(like.dtype)
        carried = carrying() if h0 is None else None
        (h0,) = (h0,) if carried is None else carried.take(self, batch) or (None,)
        if h0 is not None:
            check_input(h0, name="h0", dtype=wide, shape=(1, batch, self.hidden_size), like=like)
        valid = None if lengths is None else parse_lengths(lengths, steps, batch, xp)
        x = x if valid is None else valid.mask(x)
        maps = self._maps(xp)
        start = xp.zeros((batch, self.hidden_size), wide) if h0 is None else h0[0].copy()
        if self._is_resident(x):
            x = np.ascontiguousarray(x)
            h, y = empty(np, (steps, batch, self.hidden_size), wide), empty(np, x.shape, x.dtype)
            reals = [array.view(x.dtype) for array in (start, h)]
            kernels.on_host().lru_forward(x, maps.a.view(x.dtype)[0, 0], maps.into, maps.out, like, *reals, y)
        else:
            h = linear_recurrence(maps.a, product(x, maps.into.T).view(wide), start)
            y = product(h.view(like.dtype), maps.out.T)
            y += like * x
        last = (h[-1] if valid is None else h[valid.values - 1, valid.samples])[None].copy()
        if carried is not None:
            carried.keep(self, (last,))
        return turned(y if valid is None else valid.mask(y), self.batch_first), LRUSaved(x, h, start, valid, last)

    def gradients(self, gy: Array | None, saved: LRUSaved, grad_h_n: Array | None = None) -> NamedGradients:
        """Return the gradients from `gy` (of y's shape) and `grad_h_n` (of h_n's shape); either may be None.

        ``h0`` is the gradient at the initial state. The recurrence goes back once, for all of them.

        Raises
        ------
        OptionError
            Both gradients are None.
        """
        x, h, h0, lengths, h_n = saved
        xp = backend.namespace(x)
        if gy is None and grad_h_n is None:
            raise OptionError("No gradient was given", expected="gy, grad_h_n or both", got="None")
        if gy is not None:
            steps, batch, features = x.shape
            check_gy(gy, (batch, steps, features) if self.batch_first else x.shape, x.dtype, x)
        if grad_h_n is not None:
            check_input(grad_h_n, name="grad_h_n", dtype=h.dtype, shape=h_n.shape, like=h)

        def back() -> _LRUGradients:
            at_y = xp.zeros_like(x) if gy is None else turned(gy, self.batch_first)
            at_y = at_y if lengths is None else lengths.mask(at_y)
            maps = self._maps(xp)
            if self._is_resident(x):
                at_y, b, at_start = np.ascontiguousarray(at_y), empty(np, h.shape, h.dtype), np.empty_like(h0)
                ends = np.full(x.shape[1], len(x)) if lengths is None else lengths.values
                at_end = np.zeros_like(h0) if grad_h_n is None else np.ascontiguousarray(grad_h_n[0])
                start, states, end, first, to_b = (array.view(x.dtype) for array in (h0, h, at_end, at_start, b))
                factors = maps.a.view(x.dtype)[0, 0]
                a = kernels.on_host().lru_backward(at_y, factors, maps.out, start, states, ends, end, first, to_b)
                return _LRUGradients(maps, at_y, a.view(h.dtype)[None, None], b, at_start)
            at_h = product(at_y, maps.out).view(h.dtype)
            if grad_h_n is not None:
                if lengths is None:
                    at_h[-1] += grad_h_n[0]
                else:
                    at_h[lengths.values - 1, lengths.samples] += grad_h_n[0]
            return _LRUGradients(maps, at_y, *linear_recurrence_vjp(maps.a, h, at_h, h0))

        shared = Shared(back, xp)
        return NamedGradients(
            self, gy, saved, lambda: self._input_grad(shared()), lambda: self._weight_grad(shared(), x, h),
            names=("h0",), more=lambda: (shared().h0[None].copy(),),
        )  # fmt: skip

    def _input_grad(self, found: _LRUGradients) -> Array:
        at_x = product(found.b.view(found.at_y.dtype), found.maps.into)
        at_x += found.at_y * self.params["D"]
        return turned(at_x, self.batch_first)

    def _weight_grad(self, found: _LRUGradients, x: Array, h: Array) -> dict[str, Array]:
        """Return the gradients through λ, through γ B and C as real matrices, and at D."""
        xp, params, maps = backend.namespace(x), self.params, found.maps
        rows = x.shape[0] * x.shape[1]
        flat, at_y = x.reshape(rows, -1), found.at_y.reshape(rows, -1)
        b, of_h = found.b.view(x.dtype).reshape(rows, -1), h.view(x.dtype).reshape(rows, -1)
        with short_products(xp, 2 * rows * self.hidden_size * self.input_size):
            into, out = transposed_product(b, flat), transposed_product(of_h, at_y).T
        real, imaginary = (found.a.conj() * maps.a).view(x.dtype).reshape(-1, 2).T
        gamma = xp.exp(params["gamma_log"])[:, None]
        grads = {
            "nu_log": -real * xp.exp(params["nu_log"]),
            "theta_log": -imaginary * xp.exp(params["theta_log"]),
            "gamma_log": (into * maps.into).sum(axis=1).reshape(-1, 2).sum(axis=1),
            "B_re": into[::2] * gamma, "B_im": into[1::2] * gamma,
            "C_re": out[:, ::2].copy(), "C_im": -out[:, 1::2], "D": xp.einsum("ri,ri->i", at_y, flat),
        }  # fmt: skip
        return {name: xp.ascontiguousarray(grads[name]) for name in params}

    def jacobian_t(self, saved: LRUSaved, memory_limit: int | None = None) -> Any:
        """Return the transposed Jacobian of y with respect to x, (T · input_size) × (T · input_size), block-triangular.

        The block from step s to step t ≥ s is that of ``Re(C λ^(t-s) γ B)``, plus D if t = s. Samples share it, unless
        they have lengths: past its end a sample's is zero. Its size grows with T²; training never needs it.

        Raises
        ------
        MemoryLimitError
            It would need more than `memory_limit` bytes (default: 2 GiB).
        """
        from sparsebp.jacobians import TransposedJacobian
        from sparsebp.nn.bptt import check_jacobian_room
        from sparsebp.patterns import sequence_pattern

        (steps, batch, features), xp, lengths = saved.x.shape, backend.namespace(saved.x), saved.lengths
        numbers = (steps * features) ** 2 * (1 if lengths is None else batch)
        check_jacobian_room(numbers, saved.x, features, memory_limit)
        maps, real = self._maps(xp), saved.x.dtype
        powers = maps.a[0] ** xp.arange(steps)[:, None]  # (T, N)
        through = maps.into.reshape(-1, 2, features).swapaxes(1, 2) @ xp.asarray([1, 1j], maps.a.dtype)  # (N, I)
        back = (maps.out.reshape(features, -1, 2) @ xp.asarray([1, -1j], maps.a.dtype)).T  # C as (N, I)
        apart = xp.einsum("ni,tn,nj->tij", through, powers, back).real
        apart[0] += xp.diag(self.params["D"])
        pattern = sequence_pattern(steps, features, features)
        (s, i), (t, j) = (xp.divmod(xp.asarray(of), features) for of in (pattern.row_of_entry, pattern.indices))
        data = apart[t - s, i, j].astype(real, copy=False)
        if lengths is not None:
            data = data[:, None] * lengths.valid[:, :, 0][t].astype(real)
        return TransposedJacobian(pattern, xp.ascontiguousarray(data))

    def _is_resident(self, x: Array) -> bool:
        """Whether the kernels take x through both maps."""
        weights = 4 * self.hidden_size * self.input_size * x.itemsize
        return weights <= RESIDENT and backend.is_host(backend.namespace(x))

    def _maps(self, xp: ModuleType) -> _LRUMaps:
        """Return λ, and real matrices from x to γ B x and from h to Re(C h): (re, im) of a state side by side."""
        p = self.params
        wide, states = self._complex(p["D"].dtype), self.hidden_size
        a = xp.exp(-xp.exp(p["nu_log"]) + xp.exp(p["theta_log"]) * wide.type(1j)).astype(wide, copy=False)
        into = xp.stack((p["B_re"], p["B_im"]), axis=1) * xp.exp(p["gamma_log"])[:, None, None]
        out = xp.stack((p["C_re"], -p["C_im"]), axis=2)
        return _LRUMaps(
            a[None, None], into.reshape(2 * states, self.input_size), out.reshape(self.input_size, 2 * states)
        )

    @staticmethod
    def _complex(real: np.dtype) -> np.dtype:
        return np.dtype(np.complex64 if real == np.float32 else np.complex128)

    def stream(self, batch: int | None = None, state: Any = None) -> Stream:
        """Return a `Stream`, as `Recurrent.stream` does; its state `h` is laid out as `h0`."""
        return ArrayStream(self, batch, state)

    def state_of(self, lead: tuple[int, ...]) -> Array:
        """Return an array for a stream's state (1, …, hidden_size), complex."""
        return empty(np, (1, *lead, self.hidden_size), self._complex(self.params["D"].dtype))

    def advance(self, x: Array, h: Array) -> Array:
        """Take a stream's state one step on, and return y."""
        maps = self._maps(np)
        h[0] = maps.a[0, 0] * h[0] + (x @ maps.into.T).view(h.dtype)
        y: Array = h[0].view(x.dtype) @ maps.out.T + self.params["D"] * x
        return y


class _LRUMaps(NamedTuple):
    a: Array  # λ (1, 1, N)
    into: Array  # (2N, input_size)
    out: Array  # (input_size, 2N)


class _LRUGradients(NamedTuple):
    maps: _LRUMaps
    at_y: Array
    a: Array
    b: Array
    h0: Array
