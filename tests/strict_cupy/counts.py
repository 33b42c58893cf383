"""Counters of what the host asks of the device, for tests that hold budgets."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass
class Counts:
    """What has been asked of the device since `counted` began, by all threads.

    Attributes
    ----------
    launched
        Launches of kernels by name: those of this package by their own, CuPy's with ``cupy.`` before, cuBLAS's
        products by that of the function.
    h2d, d2h
        Transfers to the device and from it; their bytes.
    synchronized
        Waits of the host: for a stream, an event or the device. A host read (``get``, ``float``, ``bool``, ``item``)
        counts in `d2h` alone.
    memsets, copies
        Memory filled with a byte, and copied as it lies on the device.
    graphs
        Launches of graphs; the kernels inside are not counted again.
    allocated
        Bytes asked of memory pools, and of how many arrays.
    compiled
        Modules compiled, each a (source's first line, options).
    log
        All of it in order: (what, name, bytes).
    """

    launched: Counter[str] = field(default_factory=Counter)
    h2d: int = 0
    h2d_bytes: int = 0
    d2h: int = 0
    d2h_bytes: int = 0
    synchronized: int = 0
    memsets: int = 0
    copies: int = 0
    graphs: int = 0
    allocations: int = 0
    allocated: int = 0
    compiled: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    log: list[tuple[str, str, int]] = field(default_factory=list)

    @property
    def ours(self) -> int:
        """Launches of this package's kernels."""
        return sum(n for name, n in self.launched.items() if not name.startswith(("cupy.", "cublas", "cusparse")))

    @property
    def theirs(self) -> int:
        """Launches of CuPy's own kernels, products by CuPy among them."""
        return sum(n for name, n in self.launched.items() if name.startswith("cupy."))

    @property
    def products(self) -> int:
        """Products that this package asked of cuBLAS itself."""
        return sum(n for name, n in self.launched.items() if name.startswith("cublas"))

    @property
    def launches(self) -> int:
        """All kernels: this package's, CuPy's and cuBLAS's, with what fills and copies memory."""
        return sum(self.launched.values()) + self.memsets + self.copies

    @property
    def host_reads(self) -> int:
        """Times that the host waited for the device: reads and explicit waits."""
        return self.d2h + self.synchronized

    def __str__(self) -> str:
        kernels = ", ".join(f"{n} {name}" for name, n in self.launched.most_common())
        return (
            f"{self.ours} own kernels, {self.theirs} of CuPy's, {self.products} products, {self.memsets} memsets, "
            f"{self.copies} copies, {self.graphs} graphs; {self.h2d} uploads of {self.h2d_bytes} bytes, {self.d2h} "
            f"host reads of {self.d2h_bytes} bytes, {self.synchronized} waits; {self.allocations} arrays allocated, "
            f"{self.allocated} bytes; {len(self.compiled)} modules compiled ({kernels})"
        )


_open: list[Counts] = []


@contextlib.contextmanager
def counted() -> Iterator[Counts]:
    """Count what is asked of the device within the block; blocks may be nested."""
    counts = Counts()
    _open.append(counts)
    try:
        yield counts
    finally:
        _open[:] = [each for each in _open if each is not counts]


def note(what: str, name: str = "", size: int = 0) -> None:
    """Note one event for every `counted` that is open: `what` is the plain name of a counter, or ``kernel``."""
    for counts in _open:
        counts.log.append((what, name, size))
        if what == "kernel":
            counts.launched[name] += 1
        elif what == "allocation":
            counts.allocations += 1
            counts.allocated += size
        else:
            setattr(counts, what, getattr(counts, what) + 1)
            if what in ("h2d", "d2h"):
                setattr(counts, f"{what}_bytes", getattr(counts, f"{what}_bytes") + size)


def note_compiled(source: str, options: tuple[str, ...]) -> None:
    """Note that a module is compiled."""
    for counts in _open:
        counts.compiled.append((source.splitlines()[0], options))
