"""What every training run is configured by, whatever it trains; the families add their data and models."""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import Any, ClassVar, get_args

import numpy as np

from sparsebp.core.arguments import check_choice, check_flag, check_integer, check_number, shown
from sparsebp.core.errors import OptionError
from sparsebp.data import Dataset
from sparsebp.train.orders import Fusion, check_order

CLASSES = 10
_MOST = 2**31 - 1
_WIDEST = 1000.0
_KINDS: dict[str, tuple[type, bool]] = {
    "int": (int, False), "int | None": (int, True), "float": (float, False), "float | None": (float, True),
    "str": (str, False), "str | None": (str, True), "bool": (bool, False), "Fusion": (str, False),
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig(abc.ABC):
    """One training run; `sparsebp.recipes.recipe.config_for` fills in what suits a task.

    Attributes
    ----------
    task, model
        Names of the data and the network.
    samples
        Training samples; None takes all.
    batch_size, epochs, lr, optimizer, lr_schedule, clip_norm
        As the trainer takes them; `lr_schedule` is ``"constant"``, ``"cosine"`` or ``"onecycle"``, over the whole run.
    backward
        Algorithm of the backward pass.
    fusion, accumulate, schedule, graph
        As the trainer takes them; the schedule by its name or the path of a file.
    device, dtype, seed
        ``"cpu"`` or ``"cuda"``; ``"float32"`` or ``"float64"``; the seed of data, weights and order.
    """

    task: str
    model: str
    samples: int | None = None
    batch_size: int
    epochs: int
    lr: float
    optimizer: str
    lr_schedule: str
    clip_norm: float | None
    backward: str
    fusion: Fusion = "none"
    accumulate: int = 1
    schedule: str = "conventional"
    graph: bool = False
    device: str = "cpu"
    dtype: str = "float32"
    seed: int = 0

    choices: ClassVar[dict[str, tuple[str, ...]]] = {
        "optimizer": ("sgd", "adam", "adamw", "amsgrad", "adagrad", "adadelta", "rmsprop"),
        "lr_schedule": ("constant", "cosine", "onecycle"),
        "dtype": ("float32", "float64"),
        "device": ("cpu", "cuda"),
        "fusion": get_args(Fusion),
    }
    at_least_one: ClassVar[tuple[str, ...]] = ("batch_size", "accumulate", "samples")
    positive: ClassVar[tuple[str, ...]] = ("lr", "clip_norm", "width", "retrain_lr")

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # frozen: this is where NumPy's numbers become Python's
            object.__setattr__(self, field.name, self.checked(field.name, getattr(self, field.name)))
        check_order(self.fusion, self.accumulate, self.schedule, self.clip_norm)

    @classmethod
    def checked(cls, name: str, value: Any) -> Any:
        """Return the value of an option as the configuration keeps it.

        Raises
        ------
        OptionError
            It has another type, or is outside its choices or range.
        """
        kind, optional = _KINDS[{field.name: str(field.type) for field in dataclasses.fields(cls)}[name]]
        if value is None and optional:
            return None
        if kind is int:
            return check_integer(name, value, int(name in cls.at_least_one), None if name == "seed" else _MOST)
        if kind is float:
            number = check_number(name, value, most=_WIDEST if name == "width" else math.inf)
            if not number > 0 and name in cls.positive:
                raise OptionError(f"{name} is not positive", expected="more than 0", got=value,
                                  remedy="Pass 0.001, say")  # fmt: skip
            return number
        if kind is bool:
            return check_flag(name, value)
        if name in cls.choices:
            return check_choice(name, value, cls.choices[name])
        if not isinstance(value, str):
            raise OptionError(f"{name} is no text", expected="a text", got=shown(value),
                              remedy=f"Pass another {name}")  # fmt: skip
        return value

    @property
    @abc.abstractmethod
    def title(self) -> str:
        """A line about data and model, for pictures."""

    @abc.abstractmethod
    def load_data(self) -> tuple[Dataset, Dataset]:
        """Return the training and the test set."""

    @abc.abstractmethod
    def build_model(self) -> Any:
        """Return the model, initialised from the seed, on its device."""

    @abc.abstractmethod
    def backward_of(self, model: Any, x: Any) -> dict[str, str]:
        """Return the ``algorithm`` that backward takes for a batch `x`, and the ``reason``."""

    def same_on_resume(self) -> dict[str, Any]:
        """Return what must not change between a run and its resumption: all that the losses depend on."""
        described = dataclasses.asdict(self)
        del described["fusion"], described["schedule"]  # the same losses in another order
        if not self.graph:  # a captured step may round differently
            del described["graph"]
        if self.accumulate == 1:
            del described["accumulate"]
        if self.lr_schedule == "constant":  # only then is the number of epochs free to grow
            del described["epochs"]
        return described


def check_samples(samples: int, most: int | None) -> None:
    """Check that there are so many samples; `most` is None where they are made up."""
    if samples < 1 or (most is not None and samples > most):
        raise OptionError(
            "The number of samples cannot be had",
            expected="1 or more" if most is None else f"1 to {most}",
            got=samples,
            remedy="Pass --samples in that range",
        )


def chosen_samples(samples: int, most: int, seed: int) -> np.ndarray:
    """Return the numbers of `samples` samples out of `most`, drawn without replacement."""
    check_samples(samples, most)
    return np.random.default_rng(seed).permutation(most)[:samples]
