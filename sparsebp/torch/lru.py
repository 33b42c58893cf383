"""LRU in PyTorch: a module on `linear_recurrence`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from sparsebp.core.check import check_flag, check_integer, check_number
from sparsebp.core.errors import OptionError, ShapeError
from sparsebp.torch.modules import cast_input, check_dense, without_autocast
from sparsebp.torch.recurrences import Lengths, at_ends, lengths_of, run, within

__all__ = ["LRU"]


class LRU(torch.nn.Module):
    """A linear recurrent unit: ``h[t] = λ * h[t-1] + γ * (B x[t])`` with complex h, ``y[t] = Re(C h[t]) + D * x[t]``.

    ``λ = exp(-exp(nu_log) + i exp(theta_log))`` lies inside the unit circle, and ``γ = exp(gamma_log)`` starts at
    √(1 - |λ|²). Weights move to and from `sparsebp.nn.LRU` by `state_dict`.

    Parameters
    ----------
    input_size
        Features of x and of y.
    hidden_size
        Complex states, N.
    batch_first
        As of `torch.nn.GRU`.
    r_min, r_max
        λ is drawn uniformly from the ring ``r_min ≤ |λ| ≤ r_max``, 0 ≤ r_min < r_max ≤ 1.
    max_phase
        Phases of λ are drawn from (0, max_phase), in radians; at most 2π.
    device, dtype
        As of `torch.nn.GRU`; float32 or float64, of the parameters, x and y. States are complex64 or complex128.

    Notes
    -----
    Parameters: ``nu_log``, ``theta_log`` and ``gamma_log`` (N,), ``B_re`` and ``B_im`` (N, input_size), ``C_re`` and
    ``C_im`` (input_size, N), ``D`` (input_size,).

    Source: Orvieto, Smith, Gu, Fernando, Gulcehre, Pascanu, De, "Resurrecting Recurrent Neural Networks for Long
    Sequences", ICML 2023, §3 and appendix A, names as there.

    Examples
    --------
    >>> import torch, sparsebp.torch as st
    >>> y, h_n = st.LRU(3, 8, r_min=0.9, r_max=0.999)(torch.randn(7, 4, 3))
    >>> y.shape, h_n.shape, h_n.dtype
    (torch.Size([7, 4, 3]), torch.Size([1, 4, 8]), torch.complex64)
    """

    nu_log: Tensor
    theta_log: Tensor
    gamma_log: Tensor
    B_re: Tensor
    B_im: Tensor
    C_re: Tensor
    C_im: Tensor
    D: Tensor

    def __init__(
        self, input_size: int, hidden_size: int, batch_first: bool = False, *, r_min: float = 0.0, r_max: float = 1.0,
        max_phase: float = 6.28, device: Any = None, dtype: Any = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.input_size = features = check_integer("input_size", input_size, 1)
        self.hidden_size = states = check_integer("hidden_size", hidden_size, 1)
        self.batch_first = check_flag("batch_first", batch_first)
        self.r_min, self.r_max = check_number("r_min", r_min, 0, 1), check_number("r_max", r_max, 0, 1)
        self.max_phase = check_number("max_phase", max_phase, 0, 2 * math.pi)
        if not self.r_min < self.r_max or self.max_phase == 0:
            raise OptionError("The ring of λ is empty", expected="r_min < r_max and max_phase > 0",
                              got=f"r_min={r_min}, r_max={r_max}, max_phase={max_phase}")  # fmt: skip
        shapes = {
            **dict.fromkeys(("nu_log", "theta_log", "gamma_log"), (states,)),
            **dict.fromkeys(("B_re", "B_im"), (states, features)),
            **dict.fromkeys(("C_re", "C_im"), (features, states)), "D": (features,),
        }  # fmt: skip
        for name, shape in shapes.items():
            self.register_parameter(name, torch.nn.Parameter(torch.empty(shape, device=device, dtype=dtype)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the parameters anew."""
        least, most = self.r_min**2, self.r_max**2
        with torch.no_grad():
            # above 0, whose logarithm is infinite; uniform in the ring's area
            radius, phase = torch.rand(2, self.hidden_size, dtype=torch.float64).clamp_min(1e-16)
            nu = -0.5 * torch.log(radius * (most - least) + least)
            self.nu_log.copy_(nu.log())
            self.theta_log.copy_((self.max_phase * phase).log())
            self.gamma_log.copy_(0.5 * torch.log(-torch.expm1(-2 * nu)))
            fan_ins = 2 * self.input_size, 2 * self.input_size, self.hidden_size, self.hidden_size, 1
            for maps, fan_in in zip((self.B_re, self.B_im, self.C_re, self.C_im, self.D), fan_ins, strict=True):
                torch.nn.init.normal_(maps, std=fan_in**-0.5)

    def extra_repr(self) -> str:
        """Return the arguments."""
        more = ", batch_first=True" if self.batch_first else ""
        return f"{self.input_size}, {self.hidden_size}{more}, r_min={self.r_min}, r_max={self.r_max}"

    def forward(
        self, input: Tensor, hx: Tensor | None = None, *, lengths: Lengths | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run the layer.

        Parameters
        ----------
        input
            (T, B, input_size), with ``batch_first`` (B, T, input_size), or unbatched (T, input_size); float32 or
            float64. Under autocast it is converted to the dtype of the weights.
        hx
            The initial state (1, B, hidden_size), complex, or None for zeros; unbatched without B.
        lengths
            Valid steps of each sample (B,), from 0 to T. Later input has no influence, later output is zero, and the
            last state is the last valid one, of a sample without any the initial one.

        Returns
        -------
        output
            y, laid out as the input.
        h_n
            The last state, as `hx`.

        Raises
        ------
        ShapeError, DTypeError, DeviceError, OptionError
            An argument does not fit, or T is 0.
        """
        check_dense("LRU", "input", input)
        x = cast_input("LRU", input, self.D)
        unbatched = x.dim() == 2
        if x.dim() not in (2, 3) or x.shape[-1] != self.input_size or (unbatched and lengths is not None):
            raise ShapeError("input has the wrong shape", expected=f"(T, B, {self.input_size}), batch first if asked "
                             "for, or without lengths unbatched", got=tuple(x.shape))  # fmt: skip
        x = x.unsqueeze(1) if unbatched else x.transpose(0, 1) if self.batch_first else x
        if len(x) == 0:
            raise ShapeError("input is empty", expected="at least one step", got=tuple(input.shape))
        start = self._start(hx, x, unbatched)
        with without_autocast(x):
            n = None if lengths is None else lengths_of(lengths, x)
            x = x if n is None else torch.where(within(n, x), x, 0)  # NaN in the padding must not reach the gradients
            into = torch.stack((self.B_re, self.B_im), 1) * self.gamma_log.exp()[:, None, None]
            out = torch.stack((self.C_re, -self.C_im), 2).flatten(1)
            factors = torch.polar(torch.exp(-self.nu_log.exp()), self.theta_log.exp())[None, None]
            terms = torch.nn.functional.linear(x, into.flatten(0, 1))
            h = run(factors, torch.view_as_complex(terms.unflatten(2, (-1, 2))), start, n, False)
            y = torch.nn.functional.linear(torch.view_as_real(h).flatten(2), out) + self.D * x
            h_n = (h[-1] if n is None else at_ends(h, h.new_zeros(h.shape[1:]) if start is None else start, n))[None]
        if unbatched:
            return y.squeeze(1), h_n.squeeze(1)
        return y.transpose(0, 1) if self.batch_first else y, h_n

    def _start(self, hx: Any, x: Tensor, unbatched: bool) -> Tensor | None:
        """Return the initial state (B, N), after checking it."""
        if hx is None:
            return None
        check_dense("LRU", "hx", hx)
        shape = (1, self.hidden_size) if unbatched else (1, x.shape[1], self.hidden_size)
        if hx.shape != shape or hx.dtype != x.dtype.to_complex() or hx.device != x.device:
            raise ShapeError("hx does not fit", expected=f"{shape}, {x.dtype.to_complex()} on {x.device}",
                             got=f"{tuple(hx.shape)}, {hx.dtype} on {hx.device}")  # fmt: skip
        return hx if unbatched else hx[0]
