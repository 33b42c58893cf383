"""SelectiveScan: the recurrent layer inside a Mamba block, whose step sizes and couplings are projections of the input.

With them, each of E channels has N states, ``h[t] = exp(dt[t] a) h[t-1] + dt[t] b[t] x[t]``. What a step keeps, takes
in and gives out thus depends on the input, and a step's Jacobian is diagonal all the same: one kernel runs all states
of all channels, and none of them is ever in memory. See `sparsebp.selective_scan`.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any, Literal, NamedTuple

import numpy as np

from sparsebp.core import backend, cublas
from sparsebp.core.check import Array, Seed, check_flag, check_generator, check_integer, check_number
from sparsebp.core.errors import OptionError
from sparsebp.core.host_pool import empty
from sparsebp.nn.dense import product, short_products, transposed_product
from sparsebp.nn.gradients import NamedGradients, Shared
from sparsebp.nn.layer import Layer, batch_first_axes, check_gy, check_input, check_sequence_input, swap_batch_time
from sparsebp.nn.parameters import fan_in_bound, full, parameter_dtype, uniform
from sparsebp.nn.recurrent.carried import carrying
from sparsebp.nn.recurrent.gated import softplus
from sparsebp.nn.recurrent.lengths import Lengths, parse_lengths
from sparsebp.nn.recurrent.stream import ArrayStream, Stream
from sparsebp.nn.unbatched import takes_unbatched
from sparsebp.scan.selective import SelectiveScanGrads, selective_scan, selective_scan_vjp


class SelectiveSaved(NamedTuple):
    """Saved by `SelectiveScan.forward`."""

    x: Array  # (T, B, E)
    q: Array  # the projection of x (T, B, R + 2 N): before dt's second one, then b and c
    dt: Array  # (T, B, E); 0 past a sample's end, where the state then stays as it is
    states: Array  # the states before some steps and after the last, see `sparsebp.selective_scan`
    lengths: Lengths | None

    @property
    def h_n(self) -> Array:
        """The last states (B, E, N); with lengths, each sample's last valid one."""
        return self.states[-1].swapaxes(1, 2).copy()


@takes_unbatched(2, 0)
class SelectiveScan(Layer):
    """The selective state space layer of Mamba (S6), between its convolution and its gate.

    ``y[t] = Σ_n c[t, n] h[t, n] + D x[t]`` with ``h[t] = exp(dt[t] a) h[t-1] + dt[t] b[t] x[t]``, ``a = -exp(A_log)``.
    b, c and r are projections of x[t] by ``x_proj``, and ``dt = softplus(dt_proj r + bias)``.

    Parameters
    ----------
    d_inner
        Features E of x and of y.
    d_state
        States N of each feature.
    dt_rank
        Size R of r; ``"auto"``: ⌈E / 16⌉.
    batch_first
        As of `GRU`.
    dt_min, dt_max
        dt is drawn between them where r is 0, uniformly in its logarithm.
    device, dtype
        None or ``"cpu"`` (see `Layer.to`); float32 or float64.
    rng
        Generator or seed of the initial values.

    Notes
    -----
    Parameters, named and drawn as in mamba_ssm: ``x_proj.weight`` (R + 2 N, E), rows of r, b and c;
    ``dt_proj.weight`` (E, R) and ``dt_proj.bias`` (E,); ``A_log`` (E, N), log n in state n = 1, 2, …; ``D`` (E,), ones.

    Source: Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", 2023, algorithm 2 and §3.6.

    Examples
    --------
    >>> import numpy as np, sparsebp as sb
    >>> layer = sb.nn.SelectiveScan(6, d_state=4, rng=0)
    >>> y, saved = layer.forward(np.ones((7, 3, 6), np.float32))
    >>> y.shape
    (7, 3, 6)
    """

    replayable = True
    batch_axes = batch_first_axes
    joins_steps = False

    def __init__(
        self, d_inner: int, d_state: int = 16, dt_rank: int | Literal["auto"] = "auto", batch_first: bool = False, *,
        dt_min: float = 0.001, dt_max: float = 0.1, device: Any = None, dtype: Any = np.float32, rng: Seed = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.input_size = self.d_inner = features = check_integer("d_inner", d_inner, 1)
        self.d_state = states = check_integer("d_state", d_state, 1)
        rank = -(-features // 16) if isinstance(dt_rank, str) and dt_rank == "auto" else dt_rank
        self.dt_rank = rank = check_integer("dt_rank", rank, 1)
        self.batch_first = check_flag("batch_first", batch_first)
        dt_min, dt_max = check_number("dt_min", dt_min, 0), check_number("dt_max", dt_max, 0)
        if not 0 < dt_min <= dt_max:
            raise OptionError("dt has no range", expected="0 < dt_min <= dt_max", got=f"{dt_min}, {dt_max}")
        rng, real = check_generator("rng", rng), parameter_dtype(dtype, device)
        dt = np.maximum(np.exp(rng.uniform(math.log(dt_min), math.log(dt_max), features)), 1e-4)
        self.params.update({
            "x_proj.weight": uniform(rng, (rank + 2 * states, features), fan_in_bound(features), real),
            "dt_proj.weight": uniform(rng, (features, rank), fan_in_bound(rank), real),
            "dt_proj.bias": (dt + np.log(-np.expm1(-dt))).astype(real),  # the inverse of softplus
            "A_log": np.tile(np.log(np.arange(1, states + 1)), (features, 1)).astype(real),
            "D": full((features,), 1.0, real),
        })  # fmt: skip

    def forward(self, x: Array, h0: Array | None = None, lengths: Any = None) -> tuple[Array, SelectiveSaved]:
        """Run the layer.

        Parameters
        ----------
        x
            (T, B, d_inner), or (B, T, d_inner) with ``batch_first``.
        h0
            Initial states (B, d_inner, d_state), as mamba_ssm lays them out, or None for zeros.
        lengths
            Valid steps of each sample (B integers in 0 … T), or None for all. Values of x after them have no effect.

        Returns
        -------
        y
            Of the shape of x; zero past each sample's length.
        saved
            A `SelectiveSaved`; ``saved.h_n`` are the last states, laid out as h0.

        Raises
        ------
        ShapeError, DTypeError, DeviceError, OptionError
            An argument does not fit, T is 0 or the batch is empty.
        """
        xp = check_sequence_input(x, self.d_inner, self.params["D"])
        x = swap_batch_time(x, self.batch_first)
        steps, batch, _ = x.shape
        carried = carrying.carried if h0 is None else None
        (h0,) = (h0,) if carried is None else carried.take(self, batch) or (None,)
        if h0 is not None:
            like = self.params["D"]
            check_input(h0, name="h0", dtype=like.dtype, shape=(batch, self.d_inner, self.d_state), like=like)
        valid = None if lengths is None else parse_lengths(lengths, steps, batch, xp, least=0)
        x = x if valid is None else valid.mask(x)
        q = product(x, self.params["x_proj.weight"].T)
        r, b, c = self._parts(q)
        dt = self._step_sizes(product(xp.ascontiguousarray(r), self.params["dt_proj.weight"].T))
        dt = dt if valid is None else valid.mask(dt)
        y, states = selective_scan(x, dt, self._rates(xp), b, c, self.params["D"], h0)
        saved = SelectiveSaved(x, q, dt, states, valid)
        if carried is not None:
            carried.keep(self, (saved.h_n,))
        return swap_batch_time(y if valid is None else valid.mask(y), self.batch_first), saved

    def gradients(self, gy: Array | None, saved: SelectiveSaved, grad_h_n: Array | None = None) -> NamedGradients:
        """Return the gradients from `gy` (of y's shape) and `grad_h_n` (of h_n's shape); either may be None.

        ``h0`` is the gradient at the initial states. The scan goes back once, for all of them.

        Raises
        ------
        OptionError
            Both gradients are None.
        """
        x, q, dt, states, lengths = saved
        xp = backend.namespace(x)
        steps, batch, features = x.shape
        if gy is None and grad_h_n is None:
            raise OptionError("No gradient was given", expected="gy, grad_h_n or both", got="None")
        if gy is not None:
            check_gy(gy, (batch, steps, features) if self.batch_first else x.shape, x.dtype, x)
        if grad_h_n is not None:
            check_input(grad_h_n, name="grad_h_n", dtype=x.dtype, shape=(batch, features, self.d_state), like=x)

        def back() -> _Back:
            at_y = xp.zeros_like(x) if gy is None else swap_batch_time(gy, self.batch_first)
            at_y = at_y if lengths is None else lengths.mask(at_y)
            _, b, c = self._parts(q)
            found = selective_scan_vjp(x, dt, self._rates(xp), b, c, self.params["D"], states, at_y, grad_h_n)
            at_v = xp.expm1(-dt)  # softplus'(v) = σ(v) = 1 - exp(-dt)
            at_v *= found.dt
            xp.negative(at_v, out=at_v)
            at_r = product(at_v, self.params["dt_proj.weight"])
            return _Back(found, at_v, xp.concatenate((at_r, found.b, found.c), axis=-1))

        shared = Shared(back, xp)

        def at_input() -> Array:
            at_x = product(shared().at_q, self.params["x_proj.weight"])
            at_x += shared().scan.x
            return swap_batch_time(at_x, self.batch_first)

        return NamedGradients(
            self, gy, saved, at_input, lambda: self._weight_grad(xp, shared(), x, q), names=("h0",),
            more=lambda: (shared().scan.h0.copy(),),
        )  # fmt: skip

    def _weight_grad(self, xp: ModuleType, found: _Back, x: Array, q: Array) -> dict[str, Array]:
        rows = x.shape[0] * x.shape[1]
        at_v, at_q = found.at_v.reshape(rows, -1), found.at_q.reshape(rows, -1)
        with short_products(xp, rows * self.d_inner * at_q.shape[1]):
            grads = {
                "x_proj.weight": transposed_product(at_q, x.reshape(rows, -1)),
                "dt_proj.weight": transposed_product(at_v, xp.ascontiguousarray(self._parts(q)[0]).reshape(rows, -1)),
                "dt_proj.bias": cublas.matmul(xp.ones(rows, dtype=x.dtype), at_v),
                "A_log": found.scan.a * self._rates(xp),
                "D": xp.array(found.scan.d),  # the scan's results are kept
            }
        return {name: xp.ascontiguousarray(grad) for name, grad in grads.items()}

    def jacobian_t(self, saved: SelectiveSaved, memory_limit: int | None = None) -> Any:
        """Return the transposed Jacobian of y with respect to x, (T · d_inner) × (T · d_inner), per sample.

        Block-triangular: x[s] reaches y[t], t ≥ s, by h[s], and y[s] by c[s] and D too. With lengths it is zero past a
        sample's end. Its size grows with T²; training never needs it.

        Raises
        ------
        MemoryLimitError
            It would need more than `memory_limit` bytes (default: 2 GiB).
        """
        from sparsebp.nn.recurrent.jacobian import check_jacobian_room, sequence_jacobian_t

        x, q, dt, states, lengths = saved
        xp, (steps, batch, features) = backend.namespace(x), x.shape
        check_jacobian_room(2 * batch * (steps * features) ** 2, x, features, memory_limit)
        a, (_, b, c), own = self._rates(xp), self._parts(q), xp.arange(features)
        of_r, of_b, of_c = (part.T for part in self._parts(self.params["x_proj.weight"].T))
        factors, through = xp.exp(dt[..., None] * a), (dt * x)[..., None]
        h = xp.empty((steps + 1, batch, features, self.d_state), x.dtype)
        h[0] = states[0].swapaxes(1, 2)
        for t in range(steps):
            h[t + 1] = factors[t] * h[t] + through[t] * b[t, :, None]
        # h[s] by dt[s], which all of x[s] makes: (T, B, E, N), and (T, B, E) times (E of x, E of dt)
        by_dt = a * factors * h[:-1] + x[..., None] * b[:, :, None]
        slopes, of_dt = -xp.expm1(-dt), (self.params["dt_proj.weight"] @ of_r).T
        blocks = xp.zeros((batch, steps, features, steps, 1, features), x.dtype)
        reach = xp.zeros_like(factors)  # dy[t] / dh[s] but for c[t]
        for t in range(steps):
            reach[:t] *= factors[t]
            reach[t] = 1
            g = reach[: t + 1] * c[t, :, None]
            block = ((g * by_dt[: t + 1]).sum(-1) * slopes[: t + 1])[..., None, :] * of_dt
            block += xp.swapaxes((g * through[: t + 1]) @ of_b, -1, -2)
            block[..., own, own] += (g * b[: t + 1, :, None]).sum(-1) * dt[: t + 1]
            block[t] += xp.swapaxes(h[t + 1] @ of_c, -1, -2)
            block[t][:, own, own] += self.params["D"]
            if lengths is not None:
                block *= lengths.valid[t][:, :, None]
            blocks[:, : t + 1, :, t, 0] = xp.moveaxis(block, 1, 0)
        return sequence_jacobian_t(blocks)

    def stream(self, batch: int | None = None, state: Any = None) -> Stream:
        """Return a `Stream`, as `Recurrent.stream` does; its state `h` has the shape (…, d_inner, d_state)."""
        return ArrayStream(self, batch, state)

    def state_of(self, lead: tuple[int, ...]) -> Array:
        """Return an array for a stream's state (…, E, N)."""
        return empty(np, (*lead, self.d_inner, self.d_state), self.params["D"].dtype)

    def advance(self, x: Array, h: Array) -> Array:
        """Take a stream's state one step on, and return y."""
        r, b, c = self._parts(x @ self.params["x_proj.weight"].T)
        dt = self._step_sizes(r @ self.params["dt_proj.weight"].T)
        h *= np.exp(dt[..., None] * self._rates(np))
        h += (dt * x)[..., None] * b[..., None, :]
        y: Array = (h @ c[..., None])[..., 0] + self.params["D"] * x
        return y

    def _parts(self, q: Array) -> tuple[Array, Array, Array]:
        """Split the projection into r, b and c: views."""
        rank, states = self.dt_rank, self.d_state
        return q[..., :rank], q[..., rank : rank + states], q[..., rank + states :]

    def _step_sizes(self, v: Array) -> Array:
        v += self.params["dt_proj.bias"]
        return softplus(v)

    def _rates(self, xp: ModuleType) -> Array:
        a: Array = -xp.exp(self.params["A_log"])
        return a


class _Back(NamedTuple):
    scan: SelectiveScanGrads
    at_v: Array  # at dt before softplus
    at_q: Array
