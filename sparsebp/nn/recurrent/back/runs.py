"""The ways back through the runs of a recurrent layer, shared by its gradients at input, weights and initial state."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from sparsebp import backend
from sparsebp.core.locks import forkable_lock
from sparsebp.nn.recurrent.tape import RunGradients, State, SummedGradients, Weights

Found = dict[int, RunGradients]
Summed = dict[int, SummedGradients]


class RunsBack:
    """Takes the ways back when they are first needed, once, whichever thread asks. All is by the number of the run.

    Who asks for the weights first gets the first layer's from kernels that sum them as they go, where there are such;
    what the gradient at the input needs is not stored then. Should that be asked for after all, those runs go back
    again.

    Parameters
    ----------
    every
        ``every(for_weights)`` takes all runs back: with ga, or summed, which only `for_weights` allows.
    again
        ``again(found)`` does those anew that were summed, with ga.
    xp
        On a GPU, another stream waits for what was computed.
    """

    def __init__(
        self, every: Callable[[bool], tuple[Found, Summed]], again: Callable[[Found], Found], xp: ModuleType
    ) -> None:
        self._every, self._again, self._xp = every, again, xp
        self._lock = forkable_lock()
        self._done = False
        self._found: Found = {}
        self._summed: Summed = {}
        self._given: set[int] = set()
        self._mark: Any = None

    def with_ga(self, runs: Iterable[int]) -> Found:
        """Return the gradients of these runs at everything that a weight feeds."""
        wanted = list(runs)
        with self._lock:
            self._take(for_weights=False)
            if any(run not in self._found for run in wanted):
                self._found = self._found | self._again(self._found)
                self._mark = backend.record(self._xp)
            return {run: self._found[run] for run in wanted}

    def sums(self) -> dict[int, Weights]:
        """Return the weight gradients that were summed on the way, once: whoever has them may write to them."""
        with self._lock:
            self._take(for_weights=True)
            new = {run: grads.weights for run, grads in self._summed.items() if run not in self._given}
            self._given |= new.keys()
            return new

    def at_initial(self, runs: Iterable[int]) -> list[State]:
        """Return the gradients at the state before the first step."""
        with self._lock:
            self._take(for_weights=False)
            return [(self._found.get(run) or self._summed[run]).initial for run in runs]

    def _take(self, for_weights: bool) -> None:
        if self._done:
            backend.wait(self._xp, self._mark)
            return
        self._found, self._summed = self._every(for_weights)
        self._mark, self._done = backend.record(self._xp), True
