"""What a training consists of, and what it tells; `Trainer` runs it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sparsebp.core.arguments import check_flag, check_integer, check_number
from sparsebp.core.errors import OptionError
from sparsebp.core.files import check_path
from sparsebp.core.types import Seed
from sparsebp.runtime.candidates import FoundSchedule
from sparsebp.runtime.out_of_order import MEMORY_RATIO
from sparsebp.runtime.trained import trained_parameters
from sparsebp.schedule import Schedule
from sparsebp.train.callbacks import Callback
from sparsebp.train.checkpoint import FILE_NAME, checked_config
from sparsebp.train.history import History
from sparsebp.train.orders import Fusion, check_order, check_parts, scheduler_of


class Training:
    """Model, loss, optimizer, options, and how far they are; `Trainer` states the arguments, attributes and errors."""

    def __init__(
        self,
        model: Any,
        loss: Any,
        optimizer: Any,
        *,
        lr_scheduler: Any | Sequence[Any] = None,
        clip_norm: float | None = None,
        fusion: Fusion = "none",
        accumulate: int = 1,
        schedule: str | os.PathLike[str] | Schedule = "conventional",
        memory_ratio: float = MEMORY_RATIO,
        graph: bool = False,
        callbacks: Sequence[Callback] = (),
        checkpoint_dir: str | os.PathLike[str] | None = None,
        checkpoint_every: int | None = None,
        rng: Seed = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        check_parts(model, loss, optimizer, callbacks)
        trained_parameters(model, optimizer)
        for name, value in (("clip_norm", clip_norm), ("memory_ratio", memory_ratio)):
            if value is not None and check_number(name, value) <= 0:
                raise OptionError(
                    f"{name} is not positive", expected="more than 0, or None", got=value, remedy=f"Raise {name}"
                )
        if checkpoint_every is not None:
            checkpoint_every = check_integer("checkpoint_every", checkpoint_every, 1)
        self.model, self.loss, self.optimizer = model, loss, optimizer
        self.lr_scheduler = scheduler_of(lr_scheduler, optimizer)
        check_order(fusion, accumulate, schedule, clip_norm)
        self.fusion, self.accumulate, self.schedule = fusion, int(accumulate), schedule
        self.memory_ratio, self.graph = memory_ratio, check_flag("graph", graph)
        self.order: Schedule | None = None
        self.found_schedule: FoundSchedule | None = None
        self._runner: Any = None
        self.clip_norm, self.checkpoint_every = clip_norm, checkpoint_every
        self.callbacks = tuple(callbacks)
        self.checkpoint_dir = None if checkpoint_dir is None else check_path("checkpoint_dir", checkpoint_dir)
        self.config = checked_config(config or {})
        self.history = History()
        drawn = rng is None or isinstance(rng, np.random.Generator)
        self._seed_given = not drawn
        self.seed = int(np.random.default_rng(rng).integers(2**32)) if drawn else check_integer("rng", rng, 0)

    def _last_good(self) -> str:
        if self.checkpoint_dir is None or not (self.checkpoint_dir / FILE_NAME).exists():
            return "No checkpoint was written"
        return f"The last good checkpoint is {self.checkpoint_dir / FILE_NAME}"

    def _flush(self) -> None:
        """Do what the schedule has left over: the model is then what the history says."""
        if self._runner is not None:
            self._runner.flush()

    def _tell(self, event: str, *args: Any) -> None:
        if any(callback.sees_model(event) for callback in self.callbacks):
            self._flush()
        for callback in self.callbacks:
            getattr(callback, f"on_{event}")(*args)
