"""LRU: a linear recurrence with complex, constant coefficients."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from sparsebp import kernels
from sparsebp.core import backend
from sparsebp.core.check import Array, Seed, check_flag, check_generator, check_integer, check_number
from sparsebp.core.errors import OptionError
from sparsebp.core.host_pool import empty
from sparsebp.nn.dense import product, short_products, transposed_product
from sparsebp.nn.gradients import NamedGradients, Shared
from sparsebp.nn.layer import Layer, batch_first_axes, check_gy, check_input, check_sequence_input, swap_batch_time
from sparsebp.nn.parameters import normal, parameter_dtype
from sparsebp.nn.recurrent.carried import carrying
from sparsebp.nn.recurrent.gated import RESIDENT
from sparsebp.nn.recurrent.lengths import Lengths, parse_lengths
from sparsebp.nn.recurrent.stream import ArrayStream, Stream
from sparsebp.nn.unbatched import takes_unbatched
from sparsebp.scan.recurrence import linear_recurrence, linear_recurrence_vjp


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
            Valid steps of each sample (B integers in 0 … T), or None for all. Values of x after them have no effect.

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
        x = swap_batch_time(x, self.batch_first)
        steps, batch, _ = x.shape
        wide = self._complex(like.dtype)
        carried = carrying.carried if h0 is None else None
        (h0,) = (h0,) if carried is None else carried.take(self, batch) or (None,)
        if h0 is not None:
            check_input(h0, name="h0", dtype=wide, shape=(1, batch, self.hidden_size), like=like)
        valid = None if lengths is None else parse_lengths(lengths, steps, batch, xp, least=0)
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
        if valid is None:
            last = h[-1:].copy()
        else:  # of an empty sequence the initial state
            last = xp.where(valid.values[:, None] > 0, h[valid.values - 1, valid.samples], start)[None]
        if carried is not None:
            carried.keep(self, (last,))
        y = swap_batch_time(y if valid is None else valid.mask(y), self.batch_first)
        return y, LRUSaved(x, h, start, valid, last)

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
            at_y = xp.zeros_like(x) if gy is None else swap_batch_time(gy, self.batch_first)
            at_y = at_y if lengths is None else lengths.mask(at_y)
            maps = self._maps(xp)
            ends = xp.full(x.shape[1], len(x)) if lengths is None else lengths.values
            at_end = xp.zeros_like(h0) if grad_h_n is None else xp.ascontiguousarray(grad_h_n[0])
            empty_ones = ends[:, None] == 0  # whose last state is the initial one
            if self._is_resident(x):
                at_y, b, at_start = np.ascontiguousarray(at_y), empty(np, h.shape, h.dtype), np.empty_like(h0)
                start, states, end, first, to_b = (array.view(x.dtype) for array in (h0, h, at_end, at_start, b))
                factors = maps.a.view(x.dtype)[0, 0]
                a = kernels.on_host().lru_backward(at_y, factors, maps.out, start, states, ends, end, first, to_b)
                a = a.view(h.dtype)[None, None]
            else:
                at_h = product(at_y, maps.out).view(h.dtype)
                at_h[ends - 1, xp.arange(len(ends))] += xp.where(empty_ones, 0, at_end)
                a, b, at_start = linear_recurrence_vjp(maps.a, h, at_h, h0)
            return _LRUGradients(maps, at_y, a, b, at_start + xp.where(empty_ones, at_end, 0))

        shared = Shared(back, xp)
        return NamedGradients(
            self, gy, saved, lambda: self._input_grad(shared()), lambda: self._weight_grad(shared(), x, h),
            names=("h0",), more=lambda: (shared().h0[None].copy(),),
        )  # fmt: skip

    def _input_grad(self, found: _LRUGradients) -> Array:
        at_x = product(found.b.view(found.at_y.dtype), found.maps.into)
        at_x += found.at_y * self.params["D"]
        return swap_batch_time(at_x, self.batch_first)

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
        from sparsebp.nn.recurrent.jacobian import check_jacobian_room
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
