"""Borders of a convolution's input that repeat what is inside it: padding modes beside zeros."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import NamedTuple

from sparsebp.backend import memory
from sparsebp.core.errors import ShapeError
from sparsebp.core.types import Array
from sparsebp.patterns.windows import Windows


class Borders(NamedTuple):
    """The padding of an input (B, C, …), as that of `torch.nn.functional.pad`.

    Attributes
    ----------
    mode
        ``"reflect"``: mirrored at the outermost elements, which are not repeated; ``"replicate"``: the outermost
        elements again; ``"circular"``: the elements of the other end.
    padding
        Elements (before, after) on each axis behind the channels.
    """

    mode: str
    padding: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, mode: str, windows: Windows) -> Borders | None:
        """Return the borders of a convolution's input; None if they are zeros, or if there are none."""
        return None if mode == "zeros" or not any(map(any, windows.padding)) else cls(mode, windows.padding)

    def check(self, sizes: tuple[int, ...]) -> None:
        """Check that an input with axes of such lengths has enough to repeat.

        Raises
        ------
        ShapeError
            It has not: a reflection needs more elements than it has padding, a circle as many.
        """
        spare = {"reflect": 1, "circular": 0}.get(self.mode)
        if spare is not None and any(max(pair) + spare > n for n, pair in zip(sizes, self.padding, strict=True)):
            raise ShapeError(
                f"The {self.mode} padding is larger than what it repeats",
                expected=f"axes of at least {tuple(max(pair) + spare for pair in self.padding)} elements",
                got=f"{sizes}, with padding {self.padding}", remedy="Use less padding, or a larger input",
            )  # fmt: skip

    def padded(self, xp: ModuleType, x: Array) -> Array:
        """Return x with its borders, a new array: axis by axis, so that corners repeat corners."""
        sizes = x.shape[2:]
        self.check(sizes)
        ends = [n + before + after for n, (before, after) in zip(sizes, self.padding, strict=True)]
        y = memory.empty(xp, (*x.shape[:2], *ends), x.dtype)
        y[self._inside(sizes)] = x
        for border, inner in self._repeats(sizes):
            y[border] = y[inner]
        return y

    def folded(self, xp: ModuleType, g: Array, sizes: tuple[int, ...]) -> Array:
        """Return the gradient at x from that at the padded one, which is written to: what repeats is added up."""
        for border, inner in reversed(list(self._repeats(sizes))):
            axes = tuple(axis for axis in range(2, g.ndim) if g[inner].shape[axis] != g[border].shape[axis])
            g[inner] += g[border].sum(axis=axes, keepdims=True) if axes else g[border]
        gx = memory.empty(xp, (*g.shape[:2], *sizes), g.dtype)
        gx[...] = g[self._inside(sizes)]
        return gx

    def _inside(self, sizes: tuple[int, ...]) -> tuple[slice, ...]:
        """Return where the input lies in the padded one."""
        axes = zip(sizes, self.padding, strict=True)
        return (slice(None), slice(None), *(slice(before, before + n) for n, (before, _) in axes))

    def _repeats(self, sizes: tuple[int, ...]) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
        """Yield a border in the padded input and what it repeats, in the order in which they are filled."""
        inside = self._inside(sizes)
        for axis, (n, (before, after)) in enumerate(zip(sizes, self.padding, strict=True), 2):
            last = before + n
            borders = [(slice(0, before), _source(self.mode, before, n, first=True))] if before else []
            if after:
                borders.append((slice(last, last + after), _source(self.mode, before, n, after, first=False)))
            for border, source in borders:
                place = ((slice(None),) * axis, inside[axis + 1 :])
                yield (*place[0], border, *place[1]), (*place[0], source, *place[1])


def _source(mode: str, before: int, n: int, after: int = 0, *, first: bool) -> slice:
    """Return what the border at the first end of an axis repeats, or that at its last end."""
    last = before + n
    if mode == "circular":
        return slice(n, last) if first else slice(before, before + after)
    if mode == "replicate":
        return slice(before, before + 1) if first else slice(last - 1, last)
    if first:
        return slice(2 * before, before, -1)
    stop = last - 2 - after
    return slice(last - 2, stop if stop >= 0 else None, -1)
