"""A rank's stretch of a sequence: what its forward keeps, and what the ways back through all stretches cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from sparsebp.core.types import Array
from sparsebp.nn.recurrent.tape import Tape
from sparsebp.scan.planning.recurrent import Stretch

Way: TypeAlias = Literal["auto", "maps", "vectors"]
WAYS: tuple[Way, ...] = ("auto", "maps", "vectors")


@dataclass
class StretchSaved:
    """What `TimeParallel.forward` keeps.

    Attributes
    ----------
    last
        The states (num_layers, B, n) at the end of the rank's stretch: on rank 0 the sequence's last. n is H; of an
        LSTM 2H, h before c.
    way
        ``"maps"`` or ``"vectors"``: how gradients get from rank to rank.
    reason
        Why.
    inner
        The `scan.planning.recurrent.Choice` of how the rank goes back through its own steps.
    chunks
        Into how many chunks it cuts them to reduce them.
    tapes
        The runs, one a layer; of no steps where the stretch is empty.
    """

    last: Array
    way: Way
    reason: str
    inner: Any
    chunks: int
    tapes: list[Tape]

    @property
    def h_n(self) -> Array:
        """The h (num_layers, B, H) at the end of the rank's stretch."""
        return self.last[..., : self.tapes[0].h.shape[2]]

    @property
    def c_n(self) -> Array:
        """An LSTM's c there."""
        return self.last[..., self.tapes[0].h.shape[2] :]


def way_seconds(estimates: list[Stretch], layers: int = 1) -> dict[Way, float]:
    """Return about how long the gradients of the states take by either way, without what is sent.

    By vectors a rank goes on with the next layer while the others have this one: the ranks' turns and one more a
    further layer. By maps a layer is finished when the slowest rank has its map, or rank 0 its vector, and the slowest
    has gone back through its steps.
    """
    run = max(estimate.run for estimate in estimates)
    reduce = max((estimate.reduce for estimate in estimates[1:-1]), default=0.0)
    return {
        "vectors": sum(estimate.run for estimate in estimates) + (layers - 1) * run,
        "maps": layers * (max(estimates[0].run, reduce) + max((e.run for e in estimates[1:]), default=0.0)),
    }
