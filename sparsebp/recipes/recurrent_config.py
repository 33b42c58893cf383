"""Recurrent networks on sequences: pixel-by-pixel digits and the bitstream task."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np

from sparsebp.core.errors import OptionError
from sparsebp.data import ArrayDataset, BitstreamDataset, Dataset, load_digits
from sparsebp.data.digits import PIXELS
from sparsebp.recipes.config import CLASSES, Option, TrainConfig, check_samples, chosen_samples

SequenceTask: TypeAlias = Literal["seqmnist", "bitstream"]
SequenceModel: TypeAlias = Literal["rnn", "gru", "lstm"]
_CHRONO_FROM = 100  # steps: shorter sequences need no help to be remembered


@dataclasses.dataclass(frozen=True, kw_only=True)
class SequenceConfig(TrainConfig):
    """What all recurrent networks are configured by.

    Attributes
    ----------
    model, hidden, layers
        ``"rnn"``, ``"gru"`` or ``"lstm"``, hidden size, number of layers.
    """

    model: SequenceModel
    hidden: Annotated[int, Option("Sequences: hidden size.", least=1)]
    layers: Annotated[int, Option("Sequences: recurrent layers.", shown="1", least=1)]

    def classifier(self, features: int, classes: int, spread: int) -> Any:
        """Return a recurrent layer and a linear head on its last hidden state, initialised from the seed.

        Gates are spread over time scales up to `spread` (see `RecurrentConfig.chrono`), unless that is below 100.
        """
        from sparsebp import nn

        rng = np.random.default_rng(self.seed)
        cells: dict[str, Any] = {"rnn": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM}
        chrono = {"gru": nn.init.chrono_update_gate, "lstm": nn.init.chrono_forget_gate}.get(self.model)
        recurrent = cells[self.model](
            features, self.hidden, num_layers=self.layers, backward=self.backward, dtype=self.dtype, rng=rng
        )
        if chrono is not None and spread >= _CHRONO_FROM:
            chrono(recurrent.parameters(), self.hidden, spread, rng)
        head = nn.Linear(self.hidden, classes, dtype=self.dtype, rng=rng)
        return nn.SequenceClassifier(recurrent, head).to(self.device)

    def backward_of(self, model: Any, x: Any) -> dict[str, str]:
        """Return what the recurrent layer chooses."""
        choice = model.forward(x)[1].rnn.backward_choice
        return {"algorithm": choice.algorithm, "reason": choice.reason}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecurrentConfig(SequenceConfig):
    """A recurrent layer and a linear head on its last hidden state.

    Attributes
    ----------
    task
        ``"seqmnist"`` (pixel-by-pixel digits, 4 000 for training) or ``"bitstream"`` (BPPSA Eq. 8; 32 000).
    seq_len
        T. For seqmnist a divisor of 784: 784 / T consecutive pixels make up a step.
    chrono
        Spread the biases of a GRU's update gate, or of an LSTM's forget gate, over time scales up to T, for T of at
        least 100.
    """

    task: SequenceTask
    seq_len: Annotated[int, Option("Sequences: time steps.", shown="784; bitstream 1000", least=1)]
    chrono: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.task == "seqmnist" and PIXELS % self.seq_len:
            raise OptionError(
                "The sequence length does not divide the image",
                expected="a divisor of 784",
                got=self.seq_len,
                remedy="Pass 784 for pixel by pixel or 28 for row by row",
            )

    @property
    def title(self) -> str:
        """Task, layer, hidden size and T."""
        return f"{self.task}: {self.model.upper()}({self.hidden}), T = {self.seq_len}"

    def load_data(self) -> tuple[Dataset, Dataset]:
        """Return the training and the test set."""
        if self.task == "seqmnist":
            train, test = load_digits(pixels_per_step=PIXELS // self.seq_len, dtype=self.dtype)
            if self.samples is not None:
                chosen = chosen_samples(self.samples, len(train), self.seed)
                train = ArrayDataset(train.inputs[chosen], train.targets[chosen], dtype=train.dtype, scale=train.scale)
            return train, test
        samples = 32_000 if self.samples is None else self.samples
        check_samples(samples, None)
        rngs = [np.random.default_rng(seed) for seed in np.random.SeedSequence(self.seed).spawn(2)]
        return (
            BitstreamDataset(self.seq_len, samples, rng=rngs[0], dtype=self.dtype),
            BitstreamDataset(self.seq_len, min(1_000, samples), rng=rngs[1], dtype=self.dtype),
        )

    def build_model(self) -> Any:
        """Return the classifier, for batches (T, B, I)."""
        features = PIXELS // self.seq_len if self.task == "seqmnist" else 1
        return self.classifier(features, CLASSES, self.seq_len if self.chrono else 0)
