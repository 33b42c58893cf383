"""Data sets and arrays to train on: the axis of the samples, lengths of padded sequences, batches on the device."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np

from sparsebp.core import backend
from sparsebp.core.check import Array
from sparsebp.core.errors import OptionError, ShapeError
from sparsebp.data.dataset import ArrayDataset, Dataset
from sparsebp.nn.sequential import is_group, taking_lengths


def as_dataset(data: Any, model: Any, lengths: Any = None) -> Dataset:
    """Return `data`, or a data set of its arrays ``(x, target)`` or ``(x, target, lengths)``, sample first."""
    if isinstance(data, tuple):
        if len(data) not in (2, 3) or (len(data) == 3 and lengths is not None):
            raise OptionError("The arrays to train on are not understood", expected="(x, target), or with lengths",
                              got=f"{len(data)} arrays{'' if lengths is None else ' and lengths='}")  # fmt: skip
        x, target, lengths = (*data, lengths)[:3]
        x, target = _array("x", x), _array("target", target)
        first = sample_axis(model)
        dtype = getattr(model, "input_dtype", None) or next(iter(model.parameters().values())).dtype
        dataset: Any = ArrayDataset(x, target, dtype=dtype, lengths=lengths, batch_first=first == 0)
        if first == 1 and dataset.inputs.ndim != 3:
            raise ShapeError("x has the wrong shape", expected="(N, T, I): samples, steps, features",
                             got=dataset.inputs.shape)  # fmt: skip
    elif not hasattr(data, "batch") or not hasattr(data, "__len__"):
        raise OptionError("Not a data set", expected="len(…) and batch(indices), or arrays (x, target)",
                          got=type(data).__name__, remedy="Pass a tuple of arrays, or an ArrayDataset")  # fmt: skip
    elif lengths is not None:
        raise OptionError("lengths belong to arrays", expected="a data set that has them itself", got="both",
                          remedy="Pass ArrayDataset(x, target, lengths=...)")  # fmt: skip
    else:
        dataset = data
        _check_axis(dataset, model)
    if len(dataset) == 0:
        raise ShapeError("The data set is empty", expected="at least one sample", got=0)
    if getattr(dataset, "lengths", None) is not None:
        check_takes_lengths(model)
    return dataset


def _array(name: str, value: Any) -> Array:
    """Return `value` as a NumPy array, or a CuPy one if it is on a GPU."""
    try:
        if hasattr(value, "__cuda_array_interface__"):
            return backend.device_namespace("cuda").asarray(value)
        if isinstance(value, np.ndarray):
            backend.namespace(**{name: value})  # a mask must not be dropped
        return np.asarray(value)
    except (ValueError, TypeError) as error:  # a ragged list, say
        raise ShapeError(f"{name} is not an array", expected="an array, or what numpy.asarray takes",
                         got=f"{type(value).__name__}: {error}",
                         remedy="Pad sequences of different lengths, and pass lengths=") from error  # fmt: skip


def batch_of(dataset: Any, indices: np.ndarray, model: Any) -> tuple[Array, ...]:
    """Return input, target and lengths, if any, of some samples, on the model's device."""
    batch = dataset.batch(indices)
    if not isinstance(batch, tuple | list) or len(batch) not in (2, 3):
        raise OptionError("The data set's batch is not understood", expected="input and target, or with lengths",
                          got=type(batch).__name__)  # fmt: skip
    if len(batch) == 3:
        check_takes_lengths(model)
    device = backend.device_of(next(iter(model.parameters().values())))
    return tuple(_own(array, device) for array in batch[:2]) + tuple(map(np.array, batch[2:]))


def share_of(dataset: Any, indices: np.ndarray, own: np.ndarray, model: Any) -> tuple[Array, ...]:
    """Return this rank's samples `own` of a micro-batch, as `batch_of`; a data set is never asked for none."""
    if len(own):
        return batch_of(dataset, own, model)
    x, target, *lengths = batch_of(dataset, indices[:1], model)
    at = (slice(None),) * sample_axis(model) + (slice(0),)
    return (x[at], target[:0], *(part[:0] for part in lengths))


def _own(array: Array, device: str) -> Array:
    """Return a copy: a data set may fill the same array again for the next micro-batch."""
    moved = backend.to_device(array, device)
    return moved.copy() if moved is array else moved


def sample_axis(model: Any) -> int:
    """Return the sample axis of the model's input."""
    given, returned = getattr(model, "batch_axes", (0, 0))
    if returned != 0:
        raise OptionError("The model is time-major: its output has the samples second", expected="batch_first=True",
                          got="batch_first=False", remedy="Build the layer with batch_first=True")  # fmt: skip
    return int(given)


def _check_axis(dataset: Any, model: Any) -> None:
    """Refuse sequences whose steps the model would read as samples, as far as both have sample axes."""
    given = getattr(dataset, "sample_axis", None)
    first = model.stages()[0][1] if hasattr(model, "stages") else model
    if given is None or getattr(type(first), "batch_axes", (0, 0)) == (0, 0):  # it does not say
        return
    if given != first.batch_axes[0]:
        raise OptionError(
            "The model reads the data set's steps as samples", expected=f"samples on axis {first.batch_axes[0]}",
            got=f"on axis {given} of the data set's batches",
            remedy="Pass the arrays (x, target) themselves, or give data set and recurrent layer the same batch_first"
        )  # fmt: skip


def check_takes_lengths(model: Any) -> None:
    """Raise `OptionError` unless ``model.forward`` takes ``lengths``, and so do the stages that a step runs."""
    # After several stages no steps may be left: the loss would see those after a sample's end.
    stages = model.stages() if hasattr(model, "stages") else [("", model)]
    if len(stages) > 1 or is_group(stages[0][1]):
        if taking_lengths(stages)[1]:
            return
        got = f"{type(model).__name__}, whose output has steps"
    else:
        taken = inspect.signature(stages[0][1].forward).parameters
        if "lengths" in taken or any(p.kind is p.VAR_KEYWORD for p in taken.values()):
            return
        got = f"{type(stages[0][1]).__name__}.forward({', '.join(taken)})"
    raise OptionError("The model does not take lengths", expected="forward(x, lengths=...), as SequenceClassifier and "
                      "GRU have it, or a chain with a MeanOverSteps", got=got,
                      remedy="Leave lengths out, or make one layer of the model that hands them on")  # fmt: skip
