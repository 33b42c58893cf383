"""Several learning-rate schedules on one optimizer, as torch.optim.lr_scheduler.ChainedScheduler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sparsebp.core.arguments import check_sequence
from sparsebp.core.errors import FileFormatError, OptionError
from sparsebp.optim.lr_scheduler import check_state, reads_model


class ChainedScheduler:
    """Advances schedules one after the other; each goes on from the rate that those before it have left.

    Parameters
    ----------
    schedulers
        Schedules of one optimizer, as they were built. `ReduceLROnPlateau` may be among them.

    Raises
    ------
    OptionError
        There are none, one comes twice, they are of several optimizers, or one of several sets the rate whatever the
        others have made of it, as `OneCycleLR` and `SequentialLR` do.
    """

    def __init__(self, schedulers: Sequence[Any]) -> None:
        self.schedulers = check_sequence("schedulers", schedulers, "schedules")
        for scheduler in self.schedulers:
            if not hasattr(scheduler, "step") or not hasattr(scheduler, "state_dict"):
                raise OptionError("Not a schedule", expected="step, state_dict and load_state_dict",
                                  got=type(scheduler).__name__, remedy="Pass schedules of sparsebp.optim")  # fmt: skip
        if len({id(scheduler) for scheduler in self.schedulers}) != max(len(self.schedulers), 1):
            raise OptionError("The schedules to chain are none, or one comes twice", expected="one or more schedules",
                              got=f"{len(self.schedulers)}", remedy="Pass each once")  # fmt: skip
        optimizers = [scheduler.optimizer for scheduler in self.schedulers if hasattr(scheduler, "optimizer")]
        if any(optimizer is not optimizers[0] for optimizer in optimizers):
            raise OptionError("The schedules are of several optimizers", expected="one optimizer",
                              got=f"{len({id(o) for o in optimizers})}", remedy="Build all on one")  # fmt: skip
        lone = [type(s).__name__ for s in self.schedulers if not getattr(s, "chains", True)]
        if lone and len(self.schedulers) > 1:
            raise OptionError(
                "A schedule would undo what the others make of the rate", expected="schedules that chain",
                got=f"{', '.join(lone)} among {len(self.schedulers)}",
                remedy="Use it alone, or one schedule after the other with SequentialLR",
            )  # fmt: skip
        self.optimizer = optimizers[0] if optimizers else None
        self.needs_metric = all(getattr(s, "needs_metric", False) for s in self.schedulers)
        self.reads_model = any(reads_model(s) for s in self.schedulers)

    def step(self, metric: float | None = None) -> None:
        """Advance the schedules that go by steps, or, with a metric, those that follow it."""
        for scheduler in self.schedulers:
            if getattr(scheduler, "needs_metric", False) != (metric is None):
                scheduler.step(*(() if metric is None else (metric,)))

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all, in JSON types."""
        return {"schedulers": [scheduler.state_dict() for scheduler in self.schedulers]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises
        ------
        FileFormatError
            It is the state of something else.
        """
        check_state(self, state)
        parts = state["schedulers"]
        if not isinstance(parts, list) or len(parts) != len(self.schedulers):
            raise FileFormatError("The state does not fit the chain", expected=f"{len(self.schedulers)} schedules",
                                  got=len(parts) if isinstance(parts, list) else type(parts).__name__,
                                  remedy="Chain the schedules that the state was made with")  # fmt: skip
        for scheduler, part in zip(self.schedulers, parts, strict=True):
            scheduler.load_state_dict(part)
