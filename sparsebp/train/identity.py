"""What a run is of, to be compared with another: its options as they were given, and samples of its data."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
from typing import Any

import numpy as np

from sparsebp.core import backend
from sparsebp.data import ArrayDataset, BitstreamDataset, ImageDataset, WithPositions
from sparsebp.patterns.pattern import DeviceCopies
from sparsebp.runtime.agreement import checksum, names_of_groups, options_of
from sparsebp.train.state import TrainingState

_COMPARED = 64
"""Samples of a data set that ranks compare."""
_FINGERPRINT_SAMPLES, _FINGERPRINT_BYTES = 1024, 2**22
"""Samples of a data set that a checkpoint describes, and about how many bytes of them, but at least `_COMPARED`."""
_PURE = (ArrayDataset.batch, BitstreamDataset.batch, ImageDataset.batch)
"""Functions of the indices alone."""


def weights_of(loss: Any) -> dict[str, Any]:
    """Return a loss's weights of classes or elements."""
    weights: dict[str, Any] = {}
    for name, value in vars(loss).items() if hasattr(loss, "__dict__") else ():
        for key, part in value.items() if isinstance(value, dict) else ((name, value),):
            if isinstance(part, DeviceCopies):
                weights |= {str(key).strip("_"): array for array in part.on(np)}
    return weights


def samples_of(dataset: Any, count: int = _COMPARED) -> dict[str, Any]:
    """Return `count` samples of a data set of `sparsebp.data`, spread over it."""
    inner = dataset.dataset if type(dataset) is WithPositions else dataset
    if getattr(type(inner), "batch", None) not in _PURE or not len(dataset):
        return {}
    batch = dataset.batch(_spread(len(dataset), count))
    return {("inputs", "targets", "lengths")[at]: part for at, part in enumerate(batch)}


# The run that a checkpoint is of: its options as they were given, and its data.


def options_given(run: TrainingState) -> dict[str, Any]:
    """Return the options that losses depend on, by their names in messages, in JSON types.

    What training moves (a scheduled rate, a schedule's steps) is left out, and functions cannot be told apart.
    """
    optimizer, scheduler, loss, model = run.optimizer, run.lr_scheduler, run.loss, run.model
    groups, held = options_of(optimizer), names_of_groups(optimizer)
    moved = scheduler.get_last_lr() if hasattr(scheduler, "get_last_lr") else []
    for number, group in enumerate(groups):
        base = group.pop("initial_lr", None)
        if base is not None and moved[number : number + 1] == [group["lr"]]:  # else it has been set by hand
            group["lr"] = base
    firsts = [min(names, default="") for names in held] or [""]  # groups may come in another order
    options: dict[str, Any] = {
        "the optimizer": type(optimizer).__name__, "groups": dict(zip(firsts, groups, strict=True))
    }  # fmt: skip
    weights = {name: checksum(array) for name, array in weights_of(loss).items()}
    options |= {
        "the learning-rate schedule": None if scheduler is None else _schedule_given(scheduler),
        "clip_norm": run.clip_norm, "accumulate": run.accumulate, "the loss": _given(loss) | weights,
        "the predictor": None if run.predictor is None else _given(run.predictor),
    }  # fmt: skip
    layers = dict(model.modules()) if hasattr(model, "modules") else {}
    options |= {f"the layer {name or 'that is the model'}": _given(layer) for name, layer in layers.items()}
    described: dict[str, Any] = json.loads(json.dumps(options, default=str), parse_constant=str)  # NaN equals itself
    return described


def _schedule_given(scheduler: Any) -> dict[str, Any]:
    inner = [_schedule_given(one) for one in getattr(scheduler, "schedulers", ())]
    moving = scheduler.state_dict()
    given = {name: value for name, value in _given(scheduler).items() if name not in moving}
    return given | ({"schedulers": inner} if inner else {})


def _given(thing: Any) -> dict[str, Any]:
    """Return a class with its options: of a user's class, what its constructor takes and the object keeps."""
    kind, own = type(thing), getattr(thing, "__dict__", {})
    names = own.keys() - {"training", "device", "inplace"}
    if kind.__module__.partition(".")[0] != __name__.partition(".")[0]:
        with contextlib.suppress(TypeError, ValueError):  # a class without a signature
            names &= inspect.signature(kind).parameters.keys()
    options = {name: _fields(own[name]) for name in sorted(names) if not name.startswith("_")}
    return {"class": kind.__name__} | {name: value for name, value in options.items() if _plain(value)}


def _fields(value: Any) -> Any:
    """Return a dataclass, as a pooling layer's windows, as a dict."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def _plain(value: Any) -> bool:
    if isinstance(value, list | tuple | dict):
        return all(map(_plain, value.values() if isinstance(value, dict) else value))
    return value is None or isinstance(value, bool | int | float | str | np.dtype)


def fingerprint(dataset: Any) -> dict[str, np.ndarray]:
    """Return numbers that tell a data set from another: for each array, those of some samples, float64 (2, samples).

    A sample's number is a weighted sum of its values; the second row is how far it may be off where the same data are
    computed by another machine. Nothing is known of data sets whose batches may be random or have effects.
    """
    size = sum(part.nbytes for part in samples_of(dataset, 1).values())
    count = min(_FINGERPRINT_SAMPLES, max(_COMPARED, _FINGERPRINT_BYTES // max(1, size)))
    numbers = {}
    for name, part in samples_of(dataset, count).items():
        axis = getattr(dataset, "sample_axis", 0) if name == "inputs" else 0
        array = np.moveaxis(backend.to_host(part), axis, 0)
        rows = array.reshape(len(array), -1).astype(np.float64)
        with np.errstate(all="ignore"):
            sums, norms = rows @ np.cos(np.arange(rows.shape[1])), np.sqrt((rows**2).sum(axis=1) * rows.shape[1])
        numbers[name] = np.stack((sums, norms * (1e-6 if array.dtype.kind == "f" else 1e-12)))
    return numbers


def _spread(samples: int, count: int) -> np.ndarray:
    return np.unique(np.linspace(0, samples - 1, min(samples, count)).astype(np.int64))
