"""Sequences cut anywhere between ranks, compared with one worker; for any transport."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import sparsebp as sb
from sparsebp.comm.transport import Transport
from sparsebp.core.check import Array
from sparsebp.nn.recurrent.layers import Recurrent
from sparsebp.runtime.time_parallel import TimeParallel

KINDS: dict[str, Callable[..., Recurrent]] = {
    "tanh": lambda *sizes, **options: sb.nn.RNN(*sizes, nonlinearity="tanh", **options),
    "relu": lambda *sizes, **options: sb.nn.RNN(*sizes, nonlinearity="relu", **options),
    "gru": sb.nn.GRU,
    "lstm": sb.nn.LSTM,
    "mingru": sb.nn.MinGRU,
    "minlstm": lambda *sizes, **options: sb.nn.MinLSTM(*sizes, nonlinearity="positive", **options),
}
LIMITS = {np.float32: 3e-4, np.float64: 1e-10}


@dataclass(frozen=True)
class Problem:
    """A layer, a sequence, what arrives on the way back, and the ranks' cuts in order of time; all from `seed`."""

    ranks: int
    seed: int
    steps: int
    batch: int
    sizes: tuple[int, int, int]
    kind: str
    way: str
    arriving: str
    options: dict[str, Any]
    has_h0: bool
    cuts: tuple[int, ...]
    dtype: type = np.float64

    @classmethod
    def random(cls, ranks: int, seed: int) -> Problem:
        """Draw one; stretches are empty often, and sizes 1."""
        rng = np.random.default_rng(seed)
        steps = int(rng.integers(1, 24))

        def one_of(*choices: Any) -> Any:
            return choices[rng.integers(len(choices))]

        options = {
            "bias": one_of(True, False), "batch_first": one_of(True, False),
            "backward": one_of("auto", "bp", "chunked", "blelloch"),
        }  # fmt: skip
        return cls(
            ranks, seed, steps, int(rng.integers(1, 6)), (one_of(1, 3), int(rng.integers(1, 10)), one_of(1, 2, 3)),
            one_of(*KINDS), one_of("maps", "maps", "vectors", "auto"), one_of("every step", "last state", "both"),
            options, one_of(True, False), tuple(sorted(rng.integers(0, steps + 1, ranks - 1).tolist())),
        )  # fmt: skip

    def check(self, transport: Transport) -> None:
        """Compare this rank's outputs and gradients with those of one worker; a rank of each calls it."""
        rank, last = transport.rank, transport.size - 1
        rng, (features, hidden, layers) = np.random.default_rng([self.seed, 1]), self.sizes
        batch_first = self.options["batch_first"]

        def layer() -> Recurrent:
            return KINDS[self.kind](features, hidden, layers, **self.options, dtype=self.dtype, rng=self.seed % 1000)

        def normal(*shape: int) -> Array:
            return rng.standard_normal(shape).astype(self.dtype)

        edges = [0, *self.cuts, self.steps]
        steps = slice(edges[last - rank], edges[last - rank + 1])

        def own(array: Array | None) -> Array | None:
            return array if array is None else np.ascontiguousarray(array[:, steps] if batch_first else array[steps])

        lead = (self.batch, self.steps) if batch_first else (self.steps, self.batch)
        x, state = normal(*lead, features), (layers, self.batch, hidden)
        two = self.kind == "lstm"
        h0: Any = normal(*state) if self.has_h0 else None
        if two and h0 is not None:
            h0 = h0, 1 - h0
        gy = None if self.arriving == "last state" else normal(*lead, hidden)
        grad_h_n = None if self.arriving == "every step" else normal(*state)
        whole, back = layer().vjp(x, **{"hx" if two else "h0": h0})
        at_end = {} if grad_h_n is None else {"grad_h_n": grad_h_n} | ({"grad_c_n": 2 * grad_h_n} if two else {})
        expected = back(gy, **at_end)

        model = TimeParallel(layer(), transport, self.way)
        y, ranks_back = model.vjp(own(x), h0 if rank == last else None)
        g = ranks_back(own(gy), **(at_end if rank == 0 else {}))
        if (self.seed + rank) % 2:  # in any order
            _ = g.weights
        self.close(y, own(whole))
        self.close(g.input, own(expected.input))
        assert g.weights.keys() == expected.weights.keys()
        for name, grad in expected.weights.items():
            self.close(g.weights[name], grad)
        if rank == 0:
            self.close(ranks_back.saved.h_n, back.saved.h_n)
            if two:
                self.close(ranks_back.saved.c_n, back.saved.c_n)
        if rank == last:
            self.close(g.h0, expected.h0)
            if two:
                self.close(g.c0, expected.c0)
        sums = transport.share([grad.tobytes() for grad in g.weights.values()])
        assert all(other == sums[0] for other in sums)  # bit for bit

    def close(self, found: Array, wanted: Array) -> None:
        """Compare two arrays relative to the larger's largest value."""
        limit = LIMITS[self.dtype]
        assert found.dtype == wanted.dtype
        np.testing.assert_allclose(found, wanted, rtol=limit, atol=limit * np.abs(wanted).max(initial=1))
