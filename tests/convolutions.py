"""Random convolutions for hypothesis, and torch's result for each."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st

CONVOLVE = {1: torch.nn.functional.conv1d, 2: torch.nn.functional.conv2d, 3: torch.nn.functional.conv3d}


@dataclass(frozen=True)
class Configuration:
    """The arguments of a convolution that has at least one output."""

    in_channels: int
    out_channels: int
    size: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int


@st.composite
def configurations(draw: st.DrawFn, symmetric: bool = False) -> Configuration:
    """Draw a small one over one, two or three axes; `symmetric`: as much padding before as after."""
    ndim = draw(st.integers(1, 3))
    groups = draw(st.integers(1, 3))
    of_group = st.integers(1, 2)
    size, kernel, stride, padding, dilation = [], [], [], [], []
    for _ in range(ndim):
        kernel.append(draw(st.integers(1, 3)))
        dilation.append(draw(st.integers(1, 2)))
        stride.append(draw(st.integers(1, 3)))
        before = draw(st.integers(0, 3))
        padding.append((before, before if symmetric else draw(st.integers(0, 3))))
        least = dilation[-1] * (kernel[-1] - 1) + 1 - sum(padding[-1])
        size.append(max(1, least) + draw(st.integers(0, 6 // ndim)))
    return Configuration(
        groups * draw(of_group), groups * draw(of_group), tuple(size), tuple(kernel), tuple(stride), tuple(padding),
        tuple(dilation), groups,
    )  # fmt: skip


def torch_convolve(
    c: Configuration, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return torch's result for x (B, in_channels, *size), padded first, since torch pads both ends alike."""
    ends = [n for pair in reversed(c.padding) for n in pair]
    padded = torch.nn.functional.pad(x, ends)
    return CONVOLVE[len(c.size)](padded, weight, bias, c.stride, 0, c.dilation, c.groups)
