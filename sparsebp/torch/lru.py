"""LRU in PyTorch: a module on `linear_recurrence`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from sparsebp.core.check import check_flag, check_integer, check_number
from sparsebp.core.errors import DeviceError, DTypeError, OptionError
from sparsebp.torch.linearly_recurrent import LinearlyRecurrent
from sparsebp.torch.recurrences import last_states, run

__all__ = ["LRU"]


class LRU(LinearlyRecurrent):
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

    def _run(self, x: Tensor, hx: Tensor | None, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
        into = torch.stack((self.B_re, self.B_im), 1) * self.gamma_log.exp()[:, None, None]
        out = torch.stack((self.C_re, -self.C_im), 2).flatten(1)
        factors = torch.polar(torch.exp(-self.nu_log.exp()), self.theta_log.exp())[None, None]
        terms = torch.view_as_complex(functional.linear(x, into.flatten(0, 1)).unflatten(2, (-1, 2)))
        start = None if hx is None else hx[0]
        h = run(factors, terms, start, lengths, False)
        y = functional.linear(torch.view_as_real(h).flatten(2), out) + self.D * x
        return y, last_states(h, torch.zeros_like(h[0]) if start is None else start, lengths, False)[None]

    def _first_weight(self) -> Tensor:
        return self.D

    def _runs(self) -> int:
        return 1

    def _checked_state(self, hx: Tensor, x: Tensor) -> Tensor:
        if hx.dtype != x.dtype.to_complex():
            raise DTypeError("hx has the wrong dtype", expected=x.dtype.to_complex(), got=hx.dtype)
        if hx.device != x.device:
            raise DeviceError("hx is elsewhere", expected=x.device, got=hx.device)
        return hx
