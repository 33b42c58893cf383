"""Configurations of training runs: options, option files, data and models, for ``sparsebp train`` and programs."""

from __future__ import annotations

import abc
import dataclasses
import json
import math
import os
import tomllib
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeAlias, TypeGuard, get_args, get_type_hints

import numpy as np

from sparsebp import models, nn, optim
from sparsebp.core import backend
from sparsebp.core.check import Backward, check_choice, check_flag, check_integer, check_number, did_you_mean, shown
from sparsebp.core.errors import FileFormatError, OptionError
from sparsebp.core.files import check_path, parse_json, read_file, write_atomically
from sparsebp.data import (
    ArrayDataset,
    BitstreamDataset,
    Dataset,
    WithPositions,
    load_cifar10,
    load_digit_images,
    load_digits,
    load_mnist_images,
)
from sparsebp.data.dataset import PIXELS
from sparsebp.data.instruments import CLASSES as instruments_CLASSES
from sparsebp.data.instruments import SETTINGS, FeatureSet, class_names, load_instruments, synthetic_instruments
from sparsebp.nn.pruning import PruneMethod
from sparsebp.schedule.updates import Fusion
from sparsebp.train.checkpoint import load_weights
from sparsebp.train.setup import asynchronous, check_ranks, check_schedule, on_ranks
from sparsebp.train.trainer import Trainer

# Options of every training run; the families add their data and models.

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
    """A field of a configuration as a command-line option; the field's type says the rest."""

    text: str  # help; choices are listed after it
    shown: str | bool = "by task"  # the default, in the help
    least: int = 0  # smallest integer
    positive: bool = True  # whether a float must be above 0
    called: str | None = None  # name of the option, if not the field's


def kind_of(hint: Any) -> Any:
    """Return the type of a field, without None."""
    return next(kind for kind in get_args(hint) if kind is not type(None)) if isinstance(hint, UnionType) else hint


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig(abc.ABC):
    """One training run; `sparsebp.train.config.config_for` fills in what suits a task."""

    task: str
    model: str
    samples: Annotated[int | None, Option("Training samples.", shown="all", least=1)] = None
    batch_size: Annotated[int, Option("Batch size.", least=1)]
    epochs: Annotated[int, Option("Epochs in all; 0 evaluates only, and writes no file.")]
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
            f"Order of a step: conventional, ooo, or an action CSV; under mpiexec {', '.join(on_ranks())}.",
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
        """Return every field's type and `Option`."""
        hints, plain = get_type_hints(cls, include_extras=True), get_type_hints(cls)
        return {
            field.name: (plain[field.name], *getattr(hints[field.name], "__metadata__", (Option(""),)))
            for field in dataclasses.fields(cls)
        }

    @classmethod
    def checked(cls, name: str, value: Any) -> Any:
        """Check and convert an option's value."""
        hint, about = cls.options()[name]
        kind = kind_of(hint)
        if value is None and hint is not kind:
            return None
        if kind is int:
            return check_integer(name, value, about.least, None if name == "seed" else _MOST)
        if kind is float:
            number = check_number(name, value, most=_WIDEST if name == "width" else math.inf)
            if not number > 0 and about.positive:
                raise OptionError(f"{name} is not positive", expected="more than 0", got=value)
            return number
        if kind is bool:
            return check_flag(name, value)
        if kind is not str:
            return check_choice(name, value, get_args(kind))
        if not isinstance(value, str):
            raise OptionError(f"{name} is not a string", expected="a string", got=shown(value))
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
        """Return the backward ``algorithm`` for a batch `x`, and the ``reason`` for it."""

    def same_on_resume(self) -> dict[str, Any]:
        """Return the options that must not change on resuming: all that the losses depend on."""
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


def chosen_samples(samples: int, most: int, seed: int) -> np.ndarray:
    """Return `samples` of the numbers below `most`, drawn without replacement."""
    if samples > most:
        raise OptionError("There are fewer samples", expected=f"1 to {most}", got=samples)
    return np.random.default_rng(seed).permutation(most)[:samples]


# The options of a training run in a file, TOML or JSON by its suffix.

_FORM = 'a flat table such as model = "lenet5"'
_REMEDY = "Write one with sparsebp tune"


def read_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the options in a file: one flat table of texts, numbers and booleans, not checked any further."""
    path = check_path("path", path)
    parse = _parser(path)
    remedy = _REMEDY
    if not path.exists():
        there = [other.name for kind in ("*.toml", "*.json") for other in path.parent.glob(kind)]
        remedy = did_you_mean(path.name, there) or _REMEDY
    content = read_file(path, f"{path} has no options of a run", expected=_FORM, remedy=remedy)
    try:
        options = parse(content.decode())
    except ValueError as error:  # TOML, JSON or UTF-8
        raise _refused(path, str(error)) from error
    if not isinstance(options, dict):
        raise _refused(path, type(options).__name__)
    for name, value in options.items():
        if not isinstance(value, str | int | float | bool):
            raise _refused(path, f"{name[:40]} = {shown(value)}")
    return options


def write_config(options: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write options, without those that are None."""
    path = check_path("path", path)
    parse = _parser(path)
    kept = {name: value for name, value in options.items() if value is not None}
    try:
        if parse is parse_json:
            text = json.dumps(kept, indent=1) + "\n"
        else:  # JSON's texts, numbers and booleans are TOML's, except DEL
            lines = (f"{name} = {json.dumps(value, ensure_ascii=False)}\n" for name, value in kept.items())
            text = "".join(lines).replace("\x7f", "\\u007f")
        content = text.encode()
        if parse(text) != kept or not all(isinstance(value, str | int | float | bool) for value in kept.values()):
            raise ValueError("a file that would not be read as the same options")
    except (TypeError, ValueError, RecursionError) as error:
        raise OptionError("These options cannot be kept in a file", expected="texts, finite numbers and booleans",
                          got=str(error)) from error  # fmt: skip
    write_atomically(path, content)


def _parser(path: Path) -> Callable[[str], Any]:
    parsers: dict[str, Callable[[str], Any]] = {".toml": _parse_toml, ".json": parse_json}
    if path.suffix not in parsers:
        raise OptionError("The format of the file is unknown", expected=".toml or .json", got=path.suffix or "none")
    return parsers[path.suffix]


def _parse_toml(text: str) -> Any:
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _refused(path: Path, got: str) -> FileFormatError:
    return FileFormatError(f"{path} has no options of a run", expected=_FORM, got=got, remedy=_REMEDY)


# Convolutional networks on images: MNIST, scikit-learn's digits, CIFAR-10; with pruning and retraining.

ImageTask: TypeAlias = Literal["mnist", "digits", "cifar10"]
ImageModel: TypeAlias = Literal["lenet5", "vgg11", "resnet", "mobilenetv2", "densenet"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageConfig(TrainConfig):
    """A convolutional network."""

    task: ImageTask  # training images: mnist 4 000, digits (scikit-learn's, scaled up) 1 497, cifar10 50 000
    model: ImageModel  # lenet5 takes 28×28, on CIFAR-10 32×32; the others 32×32 with three channels
    width: Annotated[float, Option("Images: factor on the channels, not of lenet5.", shown="1")] = 1.0
    data: Annotated[str | None, Option("cifar10: folder of the binary version.", shown=False)] = None
    # `backward` is the algorithm of the retraining. The training before it is sequential: transposed Jacobians of
    # unpruned convolutions are too large to be scanned.
    prune: Annotated[
        float | None,
        Option("Images: share of the weights to prune after training, then retrain.", shown="none", positive=False),
    ] = None
    # The default keeps the same share of every layer. Class-blind at 97 % removes all of VGG-11's last layer, whose
    # weights are smaller than those of the convolutions, and nothing can be retrained then.
    prune_method: Annotated[PruneMethod, Option("How to share that out over the layers", shown="class_uniform")] = (
        "class_uniform"
    )
    retrain_epochs: Annotated[int, Option("Epochs after pruning.", shown="as many as before; vgg11 8")] = 0
    retrain_lr: Annotated[float | None, Option("Learning rate after pruning.", shown="that before; vgg11 0.003")] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.schedule == "ooo" and self.backward != "bp":
            raise OptionError("A scan computes all input gradients at once, with nothing to reorder",
                              expected="backward='bp' with schedule='ooo'", got=repr(self.backward))  # fmt: skip
        if self.prune is not None and not 0 <= self.prune < 1:
            raise OptionError("prune is out of range", expected="a share from 0 to below 1", got=self.prune)
        if (self.task == "cifar10") != (self.data is not None):
            raise OptionError(
                "A folder of images belongs to cifar10 alone" if self.data else "CIFAR-10 is not part of any package",
                expected="no folder" if self.data else "the folder of its binary version",
                got=self.data or "none",
                remedy="Leave --data out" if self.data else "Unpack cifar-10-binary.tar.gz and pass --data FOLDER",
            )
        if self.model == "lenet5" and self.width != 1:
            raise OptionError("lenet5 has no width", expected="1", got=self.width)

    @property
    def title(self) -> str:
        """Task, model and width."""
        width = "" if self.width == 1 else f" × {self.width:g}"
        return f"{self.task}: {self.model}{width}"

    def load_data(self) -> tuple[Dataset, Dataset]:
        """Return the training and the test set, in the size and channels that the model takes."""
        if self.data is not None:
            train, test = load_cifar10(self.data, dtype=self.dtype)
        else:
            load = load_mnist_images if self.task == "mnist" else load_digit_images
            channels, size = self.image
            train, test = load(size=size, channels=channels, dtype=self.dtype)
        if self.samples is not None:
            train = train.take(chosen_samples(self.samples, len(train), self.seed))
        return train, test

    @property
    def image(self) -> tuple[int, int]:
        """Channels, and height and width, of the images."""
        return (1, 28) if self.model == "lenet5" and self.task != "cifar10" else (3, 32)

    def build_model(self) -> Any:
        """Return the network, for batches (B, C, H, W)."""
        channels, size = self.image
        options: dict[str, Any] = {"dtype": self.dtype, "rng": self.seed}
        if self.model == "lenet5":
            model = models.lenet5(channels, CLASSES, size=size, **options)
        else:
            model = getattr(models, self.model)(channels, CLASSES, width=self.width, **options)
        model.set_backward(self.backward)
        return model.to(self.device)

    def backward_of(self, model: Any, x: Any) -> dict[str, str]:
        """Return the algorithms of the chain's scans and their reasons."""
        state = model.state_dict()
        plans = model.scan_plans(model.forward(x)[1])
        model.load_state_dict(state)  # a forward in training mode moves running statistics
        if not plans:
            return {"algorithm": "bp", "reason": "layer by layer: no scan was asked for, or there is nothing to scan"}
        algorithms = dict.fromkeys(plan.algorithm for plan in plans)
        reasons = list(dict.fromkeys(plan.reason for plan in plans))
        more = f" And {len(reasons) - 2} more." if len(reasons) > 2 else ""
        return {"algorithm": ", ".join(algorithms), "reason": " ".join(reasons[:2]) + more}

    def same_on_resume(self) -> dict[str, Any]:
        """Leave the folder of the data out: it may move."""
        described = super().same_on_resume()
        del described["data"]
        if self.prune is not None:  # the pruned weights depend on the epochs before
            described["epochs"] = self.epochs
            if self.lr_schedule == "constant":
                del described["retrain_epochs"]
        return described

    def before_pruning(self) -> ImageConfig:
        """Return the configuration of the training before pruning."""
        return dataclasses.replace(
            self, backward="bp", prune=None, prune_method="class_uniform", retrain_epochs=0, retrain_lr=None
        )


# Recurrent networks on sequences: pixel-by-pixel digits and the bitstream task.

SequenceTask: TypeAlias = Literal["seqmnist", "bitstream"]
SequenceModel: TypeAlias = Literal["rnn", "gru", "lstm", "mingru", "minlstm"]


def layer_name(model: str) -> str:
    """Return the name of the recurrent layer of a model."""
    return {"mingru": "MinGRU", "minlstm": "MinLSTM"}.get(model, model.upper())


_CHRONO_FROM = 100  # steps: shorter sequences need no help to be remembered


@dataclasses.dataclass(frozen=True, kw_only=True)
class SequenceConfig(TrainConfig):
    """A recurrent network."""

    model: SequenceModel
    hidden: Annotated[int, Option("Sequences: hidden size.", least=1)]
    layers: Annotated[int, Option("Sequences: recurrent layers.", shown="1; minlstm 2, mingru by task", least=1)]

    def classifier(self, features: int, classes: int, spread: int) -> Any:
        """Return a recurrent layer and a linear head on its last hidden state, initialised from the seed.

        The gates' biases are spread over time scales up to `spread` steps.
        """
        rng = np.random.default_rng(self.seed)
        init = nn.init
        cell, chrono = {
            "rnn": (nn.RNN, None), "gru": (nn.GRU, init.chrono_update_gate), "lstm": (nn.LSTM, init.chrono_forget_gate),
            "mingru": (nn.MinGRU, init.chrono_min_gru), "minlstm": (nn.MinLSTM, init.chrono_min_lstm),
        }[self.model]  # fmt: skip
        recurrent = cell(
            features, self.hidden, num_layers=self.layers, backward=self.backward, dtype=self.dtype, rng=rng
        )
        if chrono is not None and spread >= _CHRONO_FROM:
            chrono(recurrent.parameters(), self.hidden, spread, rng)
        head = nn.Linear(self.hidden, classes, dtype=self.dtype, rng=rng)
        return nn.SequenceClassifier(recurrent, head).to(self.device)

    def sampled(self, train: ArrayDataset) -> ArrayDataset:
        """Return `samples` of the training set, or all of it."""
        if self.samples is None:
            return train
        chosen = chosen_samples(self.samples, len(train), self.seed)
        return ArrayDataset(train.inputs[chosen], train.targets[chosen], dtype=train.dtype, scale=train.scale)

    def backward_of(self, model: Any, x: Any) -> dict[str, str]:
        """Return the recurrent layer's choice."""
        choice = model.forward(x)[1].rnn.backward_choice
        return {"algorithm": choice.algorithm, "reason": choice.reason}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecurrentConfig(SequenceConfig):
    """A recurrent layer and a linear head on its last hidden state."""

    task: SequenceTask  # training samples: seqmnist 4 000, bitstream (BPPSA Eq. 8) 32 000
    # T. For seqmnist a divisor of 784: a step is 784 / T pixels.
    seq_len: Annotated[int, Option("Sequences: time steps.", shown="784; bitstream 1000", least=1)]
    positions: Annotated[
        int, Option("Sequences: waves of a step's place, of 1, 2, 4, … periods, as inputs.", shown="0; mingru 8")
    ] = 0
    chrono: bool = True  # for T >= 100, spread the gates' biases over time scales

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.task == "seqmnist" and PIXELS % self.seq_len:
            raise OptionError("The sequence length does not divide the image", expected="a divisor of 784",
                              got=self.seq_len, remedy="Pass 784 for pixel by pixel or 28 for row by row")  # fmt: skip

    @property
    def title(self) -> str:
        """Task, layer, hidden size and T."""
        return f"{self.task}: {layer_name(self.model)}({self.hidden}), T = {self.seq_len}"

    def load_data(self) -> tuple[Dataset, Dataset]:
        """Return the training and the test set."""
        if self.task == "seqmnist":
            train, test = load_digits(pixels_per_step=PIXELS // self.seq_len, dtype=self.dtype)
            return self.placed(self.sampled(train)), self.placed(test)
        samples = 32_000 if self.samples is None else self.samples
        rngs = [np.random.default_rng(seed) for seed in np.random.SeedSequence(self.seed).spawn(2)]
        return (
            self.placed(BitstreamDataset(self.seq_len, samples, rng=rngs[0], dtype=self.dtype)),
            self.placed(BitstreamDataset(self.seq_len, min(1_000, samples), rng=rngs[1], dtype=self.dtype)),
        )

    def placed(self, sequences: Dataset) -> Dataset:
        """Return sequences with their positions, if the model gets them."""
        return WithPositions(sequences, self.positions) if self.positions else sequences

    def build_model(self) -> Any:
        """Return the classifier, for batches (T, B, I)."""
        features = PIXELS // self.seq_len if self.task == "seqmnist" else 1
        return self.classifier(features + 2 * self.positions, CLASSES, self.seq_len if self.chrono else 0)

    def same_on_resume(self) -> dict[str, Any]:
        """Leave positions out where there are none, as in older checkpoints."""
        described = super().same_on_resume()
        if not self.positions:
            del described["positions"]
        return described


# Recurrent networks that tell musical instruments by their sound (BPPSA §5.2).

InstrumentTask: TypeAlias = Literal["instruments"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class InstrumentConfig(SequenceConfig):
    """A recurrent layer and a linear head on features of audio."""

    task: InstrumentTask  # recordings in the folder `data`, or **synthetic** clips (1 056 for training)
    features: Annotated[FeatureSet, Option("instruments: 259×38, 517×24 or 1034×12 (BPPSA Table 3)", shown="S")]
    data: Annotated[
        str | None, Option("cifar10: folder of the binary version; instruments: of recordings.", shown=False)
    ] = None

    @property
    def title(self) -> str:
        """Task, layer, hidden size and features, and whether the data is synthetic."""
        steps, inputs = SETTINGS[self.features].shape
        name = "synthetic instruments" if self.data is None else "instruments"
        return f"{name}: {layer_name(self.model)}({inputs}, {self.hidden}), T = {steps}"

    def load_data(self) -> tuple[Dataset, Dataset]:
        """Return the training and the test set."""
        if self.data is None:
            train, test = synthetic_instruments(self.features, seed=self.seed, dtype=self.dtype)
        else:
            train, test = load_instruments(self.data, self.features, dtype=self.dtype)
        return self.sampled(train), test

    def build_model(self) -> Any:
        """Return the classifier, for batches (T, B, I)."""
        steps, inputs = SETTINGS[self.features].shape
        classes = instruments_CLASSES if self.data is None else class_names(self.data)
        return self.classifier(inputs, len(classes), steps)

    def same_on_resume(self) -> dict[str, Any]:
        """Leave the folder's place out: it may move; but neither its classes nor whether there is one."""
        described = super().same_on_resume()
        described["data"] = None if self.data is None else f"classes {', '.join(class_names(self.data))}"
        return described


_RECURRENT = {"optimizer": "adam", "clip_norm": 1.0, "backward": "auto"}
_IMAGES = {"optimizer": "adam", "lr_schedule": "onecycle", "clip_norm": None, "backward": "bp"}
# seqmnist is the model of `make demo`. bitstream has the paper's model, data and batch size (BPPSA §5.1), but its
# learning rate of 1e-5 needs hundreds of epochs. instruments has the model of §5.2, whose 3e-4 is for the 6 705
# recordings of IRMAS and more epochs.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "seqmnist": _RECURRENT | {
        "model": "gru", "hidden": 32, "seq_len": 784, "batch_size": 25, "epochs": 25, "lr": 1.5e-2,
        "lr_schedule": "onecycle",
    },
    "bitstream": _RECURRENT | {
        "model": "rnn", "hidden": 20, "seq_len": 1000, "batch_size": 16, "epochs": 1, "lr": 1e-3,
        "lr_schedule": "constant",
    },
    "instruments": _RECURRENT | {
        "model": "gru", "hidden": 20, "features": "S", "batch_size": 16, "epochs": 30, "lr": 1e-2,
        "lr_schedule": "onecycle",
    },
    "mnist": _IMAGES | {"model": "lenet5"},
    "digits": _IMAGES | {"model": "lenet5"},
    "cifar10": _IMAGES | {"model": "vgg11"},
}  # fmt: skip
_MODEL_DEFAULTS: dict[str, dict[str, Any]] = {
    "rnn": {"layers": 1},
    "gru": {"layers": 1},
    "lstm": {"layers": 1},
    "mingru": {"layers": 2},
    "minlstm": {"layers": 2},  # gates of one layer know the input of their own step only
    "lenet5": {"batch_size": 32, "epochs": 8, "lr": 3e-3},
    "vgg11": {"batch_size": 32, "epochs": 4, "lr": 5e-4},
    "resnet": {"batch_size": 32, "epochs": 4, "lr": 3e-3},
    "densenet": {"batch_size": 32, "epochs": 4, "lr": 3e-3},
    "mobilenetv2": {"batch_size": 32, "epochs": 4, "lr": 3e-3},
}
# A gate of a minGRU knows no past: of pixels, where they are makes up for that.
_TASK_MODEL_DEFAULTS: dict[tuple[str, str], dict[str, Any]] = {
    ("seqmnist", "mingru"): {"layers": 1, "positions": 8, "lr": 3e-2}
}
# A pruned VGG-11 starts with a signal that hardly reaches its end: it takes a larger rate, and longer.
_RETRAIN_DEFAULTS: dict[str, dict[str, Any]] = {"vgg11": {"retrain_epochs": 8, "retrain_lr": 3e-3}}
_OPTIMIZERS: dict[Optimizer, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {"momentum": 0.9}), "adam": ("Adam", {}), "adamw": ("AdamW", {}),
    "amsgrad": ("Adam", {"amsgrad": True}), "nadam": ("NAdam", {}), "radam": ("RAdam", {}), "adamax": ("Adamax", {}),
    "adagrad": ("Adagrad", {}), "adadelta": ("Adadelta", {}), "rmsprop": ("RMSprop", {}),
}  # fmt: skip
_FAMILIES: dict[str, type[TrainConfig]] = {
    "seqmnist": RecurrentConfig, "bitstream": RecurrentConfig, "instruments": InstrumentConfig,
}  # fmt: skip
_RETRAINING = {"prune_method", "retrain_epochs", "retrain_lr"}


def config_for(task: str, **options: Any) -> TrainConfig:
    """Return the configuration of `task` with its defaults; options that are None keep the default."""
    check_choice("task", task, _DEFAULTS)
    family = _FAMILIES.get(task, ImageConfig)
    given = {name: value for name, value in options.items() if value is not None}
    known = [field.name for field in dataclasses.fields(family)]
    for name in sorted(given.keys() - set(known)):
        spelled = name.replace("-", "_")  # the command line's spelling
        near = f"Did you mean {spelled!r}?" if spelled in known else did_you_mean(name, known)
        raise OptionError(f"An option does not belong to {task}", expected=", ".join(known), got=name, remedy=near)
    given = {name: family.checked(name, value) for name, value in given.items()}
    model = given.get("model", _DEFAULTS[task]["model"])
    chosen = _MODEL_DEFAULTS[model] | _DEFAULTS[task] | _TASK_MODEL_DEFAULTS.get((task, model), {}) | given
    if "prune" in chosen:
        chosen = {"retrain_epochs": chosen["epochs"]} | _RETRAIN_DEFAULTS.get(chosen["model"], {}) | chosen
    elif _RETRAINING & given.keys():
        raise OptionError("There is nothing to retrain without pruning", expected="an amount to prune", got="none",
                          remedy="Pass --prune 0.97, say")  # fmt: skip
    return family(task=task, **chosen)


@dataclasses.dataclass
class Run:
    """A trainer with the data and the number of epochs that its configuration asks for."""

    config: TrainConfig
    trainer: Trainer
    train_set: Dataset
    test_set: Dataset
    epochs: int

    @property
    def steps(self) -> int:
        """Steps of the whole training."""
        return self.epochs * -(-len(self.train_set) // self.config.batch_size)

    def fit(self, *, resume: bool = False, overwrite: bool = False, verbose: bool | None = None) -> Any:
        """Train; see `Trainer.fit`."""
        size = self.config.batch_size
        return self.trainer.fit(
            self.train_set, epochs=self.epochs, batch_size=size, validation=self.test_set, resume=resume,
            overwrite=overwrite, verbose=verbose,
        )  # fmt: skip


def config_of(described: Mapping[str, Any]) -> TrainConfig:
    """Return the configuration in a run's checkpoint, with defaults for options that may change on resuming."""
    if not {"task", "model"} <= described.keys():
        raise OptionError("The run was not built by a recipe", expected="a configuration with task and model",
                          got=sorted(described) or "nothing", remedy="Build the model yourself")  # fmt: skip
    data = {"data": ""} if described["task"] == "cifar10" else {}  # wherever the images are now
    options = {name: value for name, value in described.items() if value is not None and name != "task"}
    if "prune" not in options:
        options = {name: value for name, value in options.items() if name not in _RETRAINING}
    return config_for(described["task"], **(options | data))


def prunes(config: TrainConfig) -> TypeGuard[ImageConfig]:
    """Return whether a run has a second part: pruning and retraining."""
    return isinstance(config, ImageConfig) and config.prune is not None


def build(
    config: TrainConfig,
    *,
    data: tuple[Dataset, Dataset] | None = None,
    weights: str | os.PathLike[str] | None = None,
    **options: Any,
) -> Run:
    """Build a run: data (unless given), model, optimizer and trainer; the same configuration gives the same losses.

    If it prunes, this is the training before that; see `build_retraining`. `weights` is a checkpoint, or its folder,
    whose weights and pruning masks to start from. `options` go to the `Trainer`.
    """
    check_ranks(config.schedule, options.get("transport"))  # before any time is spent on data
    backend.device_namespace(config.device)
    if prunes(config):
        config = config.before_pruning()
    model = config.build_model()
    if weights is not None:
        load_weights(model, weights)
    sets = config.load_data() if data is None else data
    return _run(config, model, sets, config.epochs, config.lr, options)


def build_retraining(config: ImageConfig, before: Run, **options: Any) -> tuple[Run, nn.PruneReport]:
    """Prune a copy of the model that `before` has trained, and build the run that trains it further."""
    sets = (before.train_set, before.test_set)
    model = config.build_model()
    model.load_state_dict(before.trainer.model.state_dict())
    report = nn.prune(model, config.prune or 0.0, config.prune_method)
    lr = config.lr if config.retrain_lr is None else config.retrain_lr
    return _run(config, model, sets, config.retrain_epochs, lr, options), report


def _run(
    config: TrainConfig, model: Any, sets: tuple[Dataset, Dataset], epochs: int, lr: float, options: Mapping[str, Any]
) -> Run:
    kind, more = _OPTIMIZERS[config.optimizer]
    optimizer = getattr(optim, kind)(model.parameters(), lr=lr, **more)
    steps = epochs * -(-len(sets[0]) // config.batch_size)
    trainer = Trainer(
        model, nn.CrossEntropyLoss(), optimizer, lr_scheduler=_lr_scheduler(config.lr_schedule, optimizer, steps),
        clip_norm=config.clip_norm, fusion=config.fusion, accumulate=config.accumulate, schedule=config.schedule,
        graph=config.graph, rng=config.seed, config=config.same_on_resume(), **options,
    )  # fmt: skip
    return Run(config, trainer, *sets, epochs)


def _lr_scheduler(name: str, optimizer: Any, steps: int) -> Any:
    if name == "constant" or steps == 0:
        return None
    if name == "cosine":
        return optim.CosineAnnealingLR(optimizer, T_max=steps)
    return optim.OneCycleLR(optimizer, max_lr=optimizer.lr, total_steps=steps)
