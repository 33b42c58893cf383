"""What every training run is configured by, whatever it trains; the families add their data and models."""

from __future__ import annotations

import abc
import dataclasses
import math
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, TypeAlias, get_args, get_type_hints

import numpy as np

from sparsebp.core.arguments import check_choice, check_flag, check_integer, check_number, shown
from sparsebp.core.errors import OptionError
from sparsebp.core.types import Backward
from sparsebp.data import Dataset
from sparsebp.train.training import ON_RANKS, Fusion, asynchronous, check_schedule

CLASSES = 10
_MOST = 2**31 - 1
_WIDEST = 1000.0
Device: TypeAlias = Literal["cpu", "cuda"]
DType: TypeAlias = Literal["float32", "float64"]
LRSchedule: TypeAlias = Literal["constant", "cosine", "onecycle"]
Optimizer: TypeAlias = Literal[
    "sgd", "adam", "adamw", "amsgrad", "nadam", "radam", "adamax", "adagrad", "adadelta", "rmsprop"
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Option:
    """What the command line says and checks of a field of a configuration; the field's type says the rest.

    Attributes
    ----------
    text
        Its help. Choices are listed behind it.
    shown
        How the help says the default.
    least
        The smallest integer.
    positive
        Whether a float must be above 0.
    called
        The option's name where it is not the field's.
    """

    text: str
    shown: str | bool = "by task"
    least: int = 0
    positive: bool = True
    called: str | None = None


def kind_of(hint: Any) -> Any:
    """Return the type of a field without its annotations, and without None."""
    kinds = [kind for kind in get_args(hint) if kind is not type(None)] if isinstance(hint, UnionType) else [hint]
    return kinds[0]


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
    samples: Annotated[int | None, Option("Training samples.", shown="all", least=1)] = None
    batch_size: Annotated[int, Option("Batch size.", least=1)]
    epochs: Annotated[int, Option("Epochs in all.")]
    lr: Annotated[float, Option("Learning rate (its peak).")]
    optimizer: Annotated[Optimizer, Option("Optimizer", shown="adam")]
    lr_schedule: Annotated[LRSchedule, Option("Learning-rate schedule")]
    clip_norm: Annotated[float | None, Option("Largest gradient norm.", shown="1; images none", called="clip")]
    backward: Annotated[Backward, Option("Algorithm of the backward pass", shown="auto; images bp")]
    fusion: Annotated[Fusion, Option("Updates before the next use, or right after the gradient", shown="none")] = "none"
    accumulate: Annotated[int, Option("Micro-batches that a batch is split into.", shown="1", least=1)] = 1
    schedule: Annotated[
        str,
        Option(
            f"Order of a step: conventional, ooo, or an action CSV; under mpiexec {', '.join(ON_RANKS)}.",
            shown="conventional",
        ),
    ] = "conventional"
    graph: Annotated[bool | None, Option("GPU: capture the step into a CUDA graph.", shown="on a GPU")] = None
    device: Annotated[Device, Option("Where to compute.", shown="cpu")] = "cpu"
    dtype: Annotated[DType, Option("Precision.", shown="float32")] = "float32"
    seed: Annotated[int, Option("Seed of data, weights, order.", shown="0")] = 0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # frozen: this is where NumPy's numbers become Python's
            object.__setattr__(self, field.name, self.checked(field.name, getattr(self, field.name)))
        check_schedule(self.fusion, self.accumulate, self.schedule, self.clip_norm)

    @classmethod
    @cache
    def options(cls) -> dict[str, tuple[Any, Option]]:
        """Return the type of every field, and what is said of it as an option."""
        hints, plain = get_type_hints(cls, include_extras=True), get_type_hints(cls)
        return {
            field.name: (plain[field.name], *getattr(hints[field.name], "__metadata__", (Option(""),)))
            for field in dataclasses.fields(cls)
        }

    @classmethod
    def checked(cls, name: str, value: Any) -> Any:
        """Return the value of an option as the configuration keeps it.

        Raises
        ------
        OptionError
            It has another type, or is outside its choices or range.
        """
        hint, about = cls.options()[name]
        kind = kind_of(hint)
        if value is None and hint is not kind:
            return None
        if kind is int:
            return check_integer(name, value, about.least, None if name == "seed" else _MOST)
        if kind is float:
            number = check_number(name, value, most=_WIDEST if name == "width" else math.inf)
            if not number > 0 and about.positive:
                raise OptionError(f"{name} is not positive", expected="more than 0", got=value,
                                  remedy="Pass 0.001, say")  # fmt: skip
            return number
        if kind is bool:
            return check_flag(name, value)
        if kind is not str:
            return check_choice(name, value, get_args(kind))
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
        del described["fusion"]  # the same losses in another order
        if not asynchronous(self.schedule):
            del described["schedule"]
        del described["graph"]
        if self.graph or (self.graph is None and self.device == "cuda"):  # a captured step may round differently
            described["graph"] = True
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
