"""Recurrent networks that tell musical instruments by their sound (BPPSA §5.2)."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal, TypeAlias

from sparsebp.data import ArrayDataset, Dataset
from sparsebp.data.instruments import CLASSES, load_instruments, synthetic_instruments
from sparsebp.data.instruments.features import SETTINGS, FeatureSet
from sparsebp.data.instruments.folder import class_names
from sparsebp.recipes.config import Option, chosen_samples
from sparsebp.recipes.recurrent_config import SequenceConfig

InstrumentTask: TypeAlias = Literal["instruments"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class InstrumentConfig(SequenceConfig):
    """A recurrent layer and a linear head on features of audio.

    Attributes
    ----------
    task
        ``"instruments"``: recordings in the folder `data`, or **synthetic** clips (1 056 for training).
    features
        ``"S"``, ``"M"`` or ``"L"``: the rows of BPPSA Table 3.
    data
        A folder such as IRMAS's training data, see `sparsebp.data.load_instruments`; None for synthetic clips.
    """

    task: InstrumentTask
    features: Annotated[FeatureSet, Option("instruments: 259×38, 517×24 or 1034×12 (BPPSA Table 3)", shown="S")]
    data: Annotated[
        str | None, Option("cifar10: folder of the binary version; instruments: of recordings.", shown=False)
    ] = None

    @property
    def title(self) -> str:
        """Task, layer, hidden size and features, and whether the data is synthetic."""
        steps, inputs = SETTINGS[self.features].shape
        name = "synthetic instruments" if self.data is None else "instruments"
        return f"{name}: {self.model.upper()}({inputs}, {self.hidden}), T = {steps}"

    def load_data(self) -> tuple[Dataset, Dataset]:
        """Return the training and the test set."""
        if self.data is None:
            train, test = synthetic_instruments(self.features, seed=self.seed, dtype=self.dtype)
        else:
            train, test = load_instruments(self.data, self.features, dtype=self.dtype)
        if self.samples is not None:
            chosen = chosen_samples(self.samples, len(train), self.seed)
            train = ArrayDataset(train.inputs[chosen], train.targets[chosen], dtype=train.dtype)
        return train, test

    def build_model(self) -> Any:
        """Return the classifier, for batches (T, B, I)."""
        steps, inputs = SETTINGS[self.features].shape
        classes = CLASSES if self.data is None else class_names(self.data)
        return self.classifier(inputs, len(classes), steps)

    def same_on_resume(self) -> dict[str, Any]:
        """Leave the folder's place out: it may move; but neither its classes nor whether there is one."""
        described = super().same_on_resume()
        described["data"] = None if self.data is None else f"classes {', '.join(class_names(self.data))}"
        return described
