"""Nets of layers against torch: their Jacobian, all ways back, and buffers that are used again."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fuzz.case import accepted, expect, refused, same
from fuzz.draw import JUNK, chance, laid_out, normal, one_of, real, size
from sparsebp import jacobian_t, nn
from sparsebp.core.errors import MemoryLimitError

BACKWARDS = ("bp", "auto", "linear", "blelloch", "hybrid", "chunked")


def case(rng: np.random.Generator) -> None:
    dtype, images = real(rng), chance(rng, 0.4)
    shape = (size(rng, 1, 2), size(rng, 2, 5), size(rng, 2, 5)) if images else (size(rng, 1, 7),)
    layers, twins = _chain(rng, shape, dtype, int(rng.integers(1, 6)), 0)
    model, twin = nn.Sequential(*layers), torch.nn.Sequential(*twins).to(getattr(torch, dtype.name))
    parts = [p.data for p in twin.parameters()]
    for array, tensor in zip(model.parameters().values(), parts, strict=True):
        tensor.copy_(torch.from_numpy(array))
    for _ in range(2):  # batches and ways change
        way: dict[str, Any] = {"backward": one_of(rng, *BACKWARDS)}
        if chance(rng, 0.3):
            way |= {"up_levels": size(rng, 0, 3)} if way["backward"] == "hybrid" else {"workers": one_of(rng, 1, 3)}
        with accepted(f"{way}"):
            model.set_backward(**way)
        _call(rng, model, twin, normal(rng, (size(rng, 1, 5), *shape), dtype), dtype)


def _chain(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any, count: int, depth: int) -> tuple[list, list]:
    """Return layers and their twins; the shape of a sample is the same behind every one but for the last axis."""
    layers: list[nn.Layer] = []
    twins: list[torch.nn.Module] = []
    for _ in range(count):
        kind = one_of(
            rng, "Tanh", "ReLU", "ELU", "GELU", "Linear", "Linear", "Conv", "Softmax", "Nested", "Residual", "Identity"
        )
        if kind == "Conv" and len(shape) == 3:
            out = size(rng, 1, 3)
            layers.append(nn.Conv2d(shape[0], out, 3, padding=1, dtype=dtype, rng=int(rng.integers(99))))
            twins.append(torch.nn.Conv2d(shape[0], out, 3, padding=1))
            shape = (out, *shape[1:])
        elif kind == "Linear":
            out = size(rng, 1, 7)
            layers.append(nn.Linear(shape[-1], out, chance(rng, 0.7), dtype=dtype, rng=int(rng.integers(99))))
            twins.append(torch.nn.Linear(shape[-1], out, "bias" in layers[-1].params))
            shape = (*shape[:-1], out)
        elif kind == "Softmax":
            layers.append(nn.Softmax(-1))
            twins.append(torch.nn.Softmax(-1))
        elif kind == "Nested" and depth < 2:
            inner, twin = _chain(rng, shape, dtype, int(rng.integers(1, 3)), depth + 1)
            layers.append(nn.Sequential(*inner))
            twins.append(torch.nn.Sequential(*twin))
            with torch.no_grad():
                shape = tuple(twins[-1](torch.zeros(1, *shape)).shape[1:])
        elif kind == "Residual" and depth < 2:
            layers.append(nn.Residual(nn.Tanh()))
            twins.append(_Residual())
        elif kind in ("Tanh", "ReLU", "ELU", "GELU", "Identity"):
            layers.append(getattr(nn, kind)())
            twins.append(getattr(torch.nn, kind)())
    return layers or [nn.Identity()], twins or [torch.nn.Identity()]


class _Residual(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(x)


def _call(rng: np.random.Generator, model: nn.Sequential, twin: Any, x: np.ndarray, dtype: Any) -> None:
    given = torch.from_numpy(x.copy()).requires_grad_()
    wanted = twin(given)
    gy = normal(rng, tuple(wanted.shape), dtype)
    twin.zero_grad()
    wanted.backward(torch.from_numpy(gy.copy()))
    gx = np.zeros_like(x) if given.grad is None else given.grad.numpy()
    weights = [np.zeros(tuple(p.shape), dtype) if p.grad is None else p.grad.numpy() for p in twin.parameters()]
    try:
        with accepted(f"x {x.shape}"):
            memory = laid_out(rng, x.copy())
            if chance(rng, 0.5):
                y, back = model.vjp(memory)
                if memory.flags.writeable:
                    memory[...] = 9  # the caller's own again
                grads = back
            else:
                y, saved = model.forward(memory)
                grads = lambda g: model.gradients(g, saved)  # noqa: E731
            same("y", y, wanted.detach().numpy(), dtype, 8)
            buffer = np.zeros_like(gy)
            for scale in (0, 1, 2):
                buffer[...] = scale * gy
                g = grads(laid_out(rng, buffer))
                if chance(rng, 0.5):
                    same("gx", g.input, scale * gx, dtype, 16)
                own = g.weights
                expect(list(own) == list(model.parameters()), f"names {list(own)}")
                for (name, grad), right in zip(own.items(), weights, strict=True):
                    same(name, grad, scale * right, dtype, 32)
                same("gx", g.input, scale * gx, dtype, 16)
            if chance(rng, 0.3):
                jacobian = jacobian_t(model, x)
                flat = np.ascontiguousarray(gy.reshape(len(x), -1).T)
                same("J gy", (jacobian @ flat).T.reshape(x.shape), gx, dtype, 16)
    except MemoryLimitError:
        return
    if chance(rng, 0.2):
        junk = one_of(rng, *(j for j in JUNK if not isinstance(j, (np.ndarray, np.generic))))
        refused(f"x {junk!r}", model.vjp, junk)
        refused(f"gy {junk!r}", lambda: model.vjp(x)[1](junk).input)
