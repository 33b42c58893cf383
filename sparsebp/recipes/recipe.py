"""Recipes: from a task's name and a few numbers to data, model, loss, optimizer, schedule and trainer.

What ``sparsebp train`` and ``sparsebp demo`` run, for programs to use as well.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

from sparsebp import backend
from sparsebp.core.arguments import check_choice
from sparsebp.core.errors import OptionError
from sparsebp.data import Dataset
from sparsebp.recipes.config import Optimizer, TrainConfig
from sparsebp.recipes.image_config import ImageConfig
from sparsebp.recipes.instrument_config import InstrumentConfig
from sparsebp.recipes.recurrent_config import RecurrentConfig
from sparsebp.train.state import load_weights
from sparsebp.train.trainer import Trainer
from sparsebp.train.training import check_ranks

if TYPE_CHECKING:
    from sparsebp.nn import PruneReport

_RECURRENT = {"layers": 1, "optimizer": "adam", "clip_norm": 1.0, "backward": "auto"}
_IMAGES = {"optimizer": "adam", "lr_schedule": "onecycle", "clip_norm": None, "backward": "bp"}
# seqmnist: what `make demo` trains. bitstream: the paper's model, data and batch size (BPPSA §5.1); its learning rate
# of 1e-5 needs hundreds of epochs, this one shows progress within one. instruments: the model of §5.2; its 3e-4 is for
# the 6 705 recordings of IRMAS and more epochs.
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
    "lenet5": {"batch_size": 32, "epochs": 8, "lr": 3e-3},
    "vgg11": {"batch_size": 32, "epochs": 4, "lr": 5e-4},
    "densenet": {"batch_size": 32, "epochs": 4, "lr": 3e-3},
    "mobilenetv2": {"batch_size": 32, "epochs": 4, "lr": 3e-3},
}
# A pruned VGG-11 starts with a signal that hardly reaches its end: it takes a larger rate, and longer.
_RETRAIN_DEFAULTS: dict[str, dict[str, Any]] = {"vgg11": {"retrain_epochs": 8, "retrain_lr": 3e-3}}
_OPTIMIZERS: dict[Optimizer, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {"momentum": 0.9}),
    "adam": ("Adam", {}),
    "adamw": ("AdamW", {}),
    "amsgrad": ("Adam", {"amsgrad": True}),
    "nadam": ("NAdam", {}),
    "radam": ("RAdam", {}),
    "adamax": ("Adamax", {}),
    "adagrad": ("Adagrad", {}),
    "adadelta": ("Adadelta", {}),
    "rmsprop": ("RMSprop", {}),
}
_FAMILIES: dict[str, type[TrainConfig]] = {
    "seqmnist": RecurrentConfig, "bitstream": RecurrentConfig, "instruments": InstrumentConfig,
}  # fmt: skip
_RETRAINING = {"prune_method", "retrain_epochs", "retrain_lr"}


def config_for(task: str, **options: Any) -> TrainConfig:
    """Return the configuration of `task` with its defaults; options that are None keep the default.

    Raises
    ------
    OptionError
        A value is outside its choices or range, or an option does not belong to the task.
    """
    check_choice("task", task, _DEFAULTS)
    family = _FAMILIES.get(task, ImageConfig)
    given = {name: value for name, value in options.items() if value is not None}
    foreign = sorted(given.keys() - {field.name for field in dataclasses.fields(family)})
    if foreign:
        raise OptionError(f"An option does not belong to {task}", got=", ".join(foreign), remedy="Leave it out")
    chosen = _DEFAULTS[task] | {name: family.checked(name, value) for name, value in given.items()}
    if family is ImageConfig:
        chosen = _MODEL_DEFAULTS[chosen["model"]] | chosen
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

    def fit(self, *, resume: bool = False) -> Any:
        """Train; see `Trainer.fit`."""
        return self.trainer.fit(
            self.train_set,
            epochs=self.epochs,
            batch_size=self.config.batch_size,
            validation=self.test_set,
            resume=resume,
        )


def config_of(described: Mapping[str, Any]) -> TrainConfig:
    """Return the configuration that a run's checkpoint keeps, with defaults for what may change on resuming.

    Raises
    ------
    OptionError
        It is not a recipe's.
    """
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
    """Build everything that a run needs, anew: the same configuration trains to the same losses.

    Parameters
    ----------
    config
        The run. Where it prunes, this is the training before that, and `build_retraining` the one after.
    data
        Training and test set if they are loaded already, see `TrainConfig.load_data`.
    weights
        A checkpoint (or its folder) whose weights and pruning masks the run starts from; None draws them from the seed.
    **options
        ``callbacks``, ``checkpoint_dir``, ``checkpoint_every`` and ``transport``: see `Trainer`.

    Raises
    ------
    DeviceError, MissingDependencyError
        The device is not there, or a package that the data or the device needs.
    FileFormatError
        `weights` is no checkpoint, or one of another architecture.
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


def build_retraining(config: ImageConfig, before: Run, **options: Any) -> tuple[Run, PruneReport]:
    """Prune a copy of the model that `before` has trained, and build the run that trains it further.

    Parameters
    ----------
    config
        The whole run; `prune` must be set.
    before
        The training before pruning, done; it is left as it is.
    **options
        As `build` takes them. The folder must not be that of `before`.
    """
    from sparsebp import nn

    sets = (before.train_set, before.test_set)
    model = config.build_model()
    model.load_state_dict(before.trainer.model.state_dict())
    report = nn.prune(model, config.prune or 0.0, config.prune_method)
    lr = config.lr if config.retrain_lr is None else config.retrain_lr
    return _run(config, model, sets, config.retrain_epochs, lr, options), report


def _run(
    config: TrainConfig, model: Any, sets: tuple[Dataset, Dataset], epochs: int, lr: float, options: Mapping[str, Any]
) -> Run:
    from sparsebp import nn, optim

    kind, more = _OPTIMIZERS[config.optimizer]
    optimizer = getattr(optim, kind)(model.parameters(), lr=lr, **more)
    trainer = Trainer(
        model,
        nn.CrossEntropyLoss(),
        optimizer,
        lr_scheduler=_lr_scheduler(config.lr_schedule, optimizer, epochs * -(-len(sets[0]) // config.batch_size)),
        clip_norm=config.clip_norm,
        fusion=config.fusion,
        accumulate=config.accumulate,
        schedule=config.schedule,
        graph=config.graph,
        rng=config.seed,
        config=config.same_on_resume(),
        **options,
    )
    return Run(config, trainer, *sets, epochs)


def _lr_scheduler(name: str, optimizer: Any, steps: int) -> Any:
    from sparsebp import optim

    if name == "constant" or steps == 0:
        return None
    if name == "cosine":
        return optim.CosineAnnealingLR(optimizer, T_max=steps)
    return optim.OneCycleLR(optimizer, max_lr=optimizer.lr, total_steps=steps)
