"""Recipes: from a task's name and a few numbers to data, model, loss, optimizer, schedule and trainer.

What ``sparsebp train`` and ``sparsebp demo`` run, for programs to use as well.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from sparsebp import backend
from sparsebp.data import ArrayDataset, BitstreamDataset, Dataset, load_digits
from sparsebp.data.digits import PIXELS
from sparsebp.errors import OptionError
from sparsebp.train.callbacks import Callback
from sparsebp.train.trainer import Trainer
from sparsebp.types import SCAN_ALGORITHMS, ScanAlgorithm

CLASSES = 10
_CHRONO_FROM = 100  # steps: shorter sequences need no help to be remembered
_CHOICES = {
    "task": ("seqmnist", "bitstream"),
    "model": ("rnn", "gru"),
    "optimizer": ("sgd", "adam", "adamw"),
    "schedule": ("constant", "cosine", "onecycle"),
    "dtype": ("float32", "float64"),
    "backward": SCAN_ALGORITHMS,
}


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """One training run; `config_for` fills in what suits a task.

    Attributes
    ----------
    task
        ``"seqmnist"`` (pixel-by-pixel digits) or ``"bitstream"`` (BPPSA Eq. 8).
    model, hidden, layers
        ``"rnn"`` or ``"gru"``, hidden size, number of layers; the last hidden state goes into a linear layer.
    seq_len
        T. For seqmnist a divisor of 784: 784 / T consecutive pixels make up a step.
    samples
        Training samples; None takes all (4 000 digits, 32 000 bitstreams).
    batch_size, epochs, lr, optimizer, schedule, clip_norm
        As the trainer takes them; `schedule` is ``"constant"``, ``"cosine"`` or ``"onecycle"``, over the whole run.
    chrono
        Spread the update gate's biases of a GRU over time scales up to T, for T of at least 100.
    backward
        Algorithm of the recurrent layers' backward.
    device, dtype, seed
        ``"cpu"`` or ``"cuda"``; ``"float32"`` or ``"float64"``; the seed of data, weights and order.
    """

    task: str
    model: str
    hidden: int
    layers: int
    seq_len: int
    samples: int | None
    batch_size: int
    epochs: int
    lr: float
    optimizer: str
    schedule: str
    clip_norm: float | None
    chrono: bool = True
    backward: ScanAlgorithm = "auto"
    device: str = "cpu"
    dtype: str = "float32"
    seed: int = 0

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise OptionError(
                    f"Unknown {name}",
                    expected=" or ".join(map(repr, choices)),
                    got=repr(getattr(self, name)),
                    remedy="Pass one of them",
                )
        if self.task == "seqmnist" and (self.seq_len < 1 or PIXELS % self.seq_len):
            raise OptionError(
                "The sequence length does not divide the image",
                expected="a divisor of 784",
                got=self.seq_len,
                remedy="Pass 784 for pixel by pixel or 28 for row by row",
            )
        for name in ("hidden", "layers", "seq_len", "batch_size"):
            if getattr(self, name) < 1:
                raise OptionError(
                    f"{name} is too small", expected="1 or more", got=getattr(self, name), remedy=f"Raise {name}"
                )
        if not self.lr > 0:
            raise OptionError("lr is not positive", expected="more than 0", got=self.lr, remedy="Pass 0.001, say")


# seqmnist: what `make demo` trains. bitstream: the paper's model, data and batch size (BPPSA §5.1); its learning rate
# of 1e-5 needs hundreds of epochs, this one shows progress within one.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "seqmnist": {
        "model": "gru", "hidden": 32, "layers": 1, "seq_len": 784, "samples": None, "batch_size": 25, "epochs": 25,
        "lr": 1.5e-2, "optimizer": "adam", "schedule": "onecycle", "clip_norm": 1.0,
    },
    "bitstream": {
        "model": "rnn", "hidden": 20, "layers": 1, "seq_len": 1000, "samples": None, "batch_size": 16, "epochs": 1,
        "lr": 1e-3, "optimizer": "adam", "schedule": "constant", "clip_norm": 1.0,
    },
}  # fmt: skip


def config_for(task: str, **options: Any) -> TrainConfig:
    """Return the configuration of `task` with its defaults; options that are None keep the default.

    Raises
    ------
    OptionError
        A value is outside its choices or range.
    """
    defaults = _DEFAULTS.get(task, _DEFAULTS["seqmnist"])
    return TrainConfig(task=task, **(defaults | {name: value for name, value in options.items() if value is not None}))


@dataclasses.dataclass
class Run:
    """A trainer with the data that its configuration asks for."""

    config: TrainConfig
    trainer: Trainer
    train_set: Dataset
    test_set: Dataset

    def fit(self, *, resume: bool = False) -> Any:
        """Train; see `Trainer.fit`."""
        return self.trainer.fit(
            self.train_set,
            epochs=self.config.epochs,
            batch_size=self.config.batch_size,
            validation=self.test_set,
            resume=resume,
        )


def load_data(config: TrainConfig) -> tuple[Dataset, Dataset]:
    """Return the training and the test set of `config`'s task."""
    if config.task == "seqmnist":
        train, test = load_digits(pixels_per_step=PIXELS // config.seq_len, dtype=config.dtype)
        if config.samples is not None:
            _check_samples(config.samples, len(train))
            chosen = np.random.default_rng(config.seed).permutation(len(train))[: config.samples]
            train = ArrayDataset(train.inputs[chosen], train.targets[chosen], dtype=train.dtype, scale=train.scale)
        return train, test
    samples = 32_000 if config.samples is None else config.samples
    _check_samples(samples, None)
    seeds = np.random.SeedSequence(config.seed).spawn(2)
    rngs = [np.random.default_rng(seed) for seed in seeds]
    return (
        BitstreamDataset(config.seq_len, samples, rng=rngs[0], dtype=config.dtype),
        BitstreamDataset(config.seq_len, min(1_000, samples), rng=rngs[1], dtype=config.dtype),
    )


def build_model(config: TrainConfig, input_size: int) -> Any:
    """Return the model of `config`, initialised from its seed, on its device."""
    from sparsebp import nn

    rng = np.random.default_rng(config.seed)
    cell = nn.GRU if config.model == "gru" else nn.RNN
    recurrent = cell(
        input_size, config.hidden, num_layers=config.layers, backward=config.backward, dtype=config.dtype, rng=rng
    )
    if config.chrono and config.model == "gru" and config.seq_len >= _CHRONO_FROM:
        nn.init.chrono_update_gate(recurrent.parameters(), config.hidden, config.seq_len, rng)
    head = nn.Linear(config.hidden, CLASSES, dtype=config.dtype, rng=rng)
    return nn.SequenceClassifier(recurrent, head).to(config.device)


def build(
    config: TrainConfig,
    *,
    data: tuple[Dataset, Dataset] | None = None,
    callbacks: Sequence[Callback] = (),
    checkpoint_dir: str | os.PathLike[str] | None = None,
    checkpoint_every: int | None = None,
) -> Run:
    """Build everything that a run needs, anew: the same configuration trains to the same losses.

    Parameters
    ----------
    config
        The run.
    data
        Training and test set if they are loaded already, see `load_data`.
    callbacks, checkpoint_dir, checkpoint_every
        See `Trainer`.

    Raises
    ------
    DeviceError, MissingDependencyError
        The device is not there, or a package that the data or the device needs.
    """
    from sparsebp import nn

    backend.device_namespace(config.device)  # before any time is spent on data
    train_set, test_set = load_data(config) if data is None else data
    model = build_model(config, train_set.batch(np.arange(1))[0].shape[-1])
    optimizer = _optimizer(config, model.parameters())
    trainer = Trainer(
        model,
        nn.CrossEntropyLoss(),
        optimizer,
        schedule=_schedule(config, optimizer, config.epochs * -(-len(train_set) // config.batch_size)),
        clip_norm=config.clip_norm,
        callbacks=callbacks,
        checkpoint_dir=checkpoint_dir,
        checkpoint_every=checkpoint_every,
        rng=config.seed,
        config=_same_on_resume(config),
    )
    return Run(config, trainer, train_set, test_set)


def _same_on_resume(config: TrainConfig) -> dict[str, Any]:
    """Return what must not change between a run and its resumption: all that the losses depend on."""
    described = dataclasses.asdict(config)
    if config.schedule == "constant":  # only then is the number of epochs free to grow
        del described["epochs"]
    return described


def _optimizer(config: TrainConfig, parameters: Any) -> Any:
    from sparsebp import optim

    if config.optimizer == "sgd":
        return optim.SGD(parameters, lr=config.lr, momentum=0.9)
    return (optim.Adam if config.optimizer == "adam" else optim.AdamW)(parameters, lr=config.lr)


def _schedule(config: TrainConfig, optimizer: Any, steps: int) -> Any:
    from sparsebp import optim

    if config.schedule == "constant" or steps == 0:
        return None
    if config.schedule == "cosine":
        return optim.CosineAnnealingLR(optimizer, T_max=steps)
    return optim.OneCycleLR(optimizer, max_lr=config.lr, total_steps=steps)


def _check_samples(samples: int, most: int | None) -> None:
    if samples < 1 or (most is not None and samples > most):
        raise OptionError(
            "The number of samples cannot be had",
            expected="1 or more" if most is None else f"1 to {most}",
            got=samples,
            remedy="Pass --samples in that range",
        )
