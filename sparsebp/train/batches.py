"""Data sets and arrays to train on: an epoch's batches, the axis of the samples, lengths, arrays on the device."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from sparsebp.core import backend
from sparsebp.core.check import Array, check_flag, check_integer, shown
from sparsebp.core.errors import OptionError, ShapeError
from sparsebp.data import ArrayDataset
from sparsebp.data.dataset import Dataset, real_array
from sparsebp.nn.recurrent.carried import CarriedState
from sparsebp.nn.sequential import is_group, taking_lengths
from sparsebp.runtime.actions import Batch
from sparsebp.train.loader import Loader, Samples
from sparsebp.train.nonfinite import Origin

# Batches of an epoch.


def shape_of(data: Any, *, batch_size: Any, drop_last: Any, shuffle: Any, stateful: Any) -> dict[str, Any]:
    """Check how an epoch's batches are to be made, and return it with the number of samples; a loader has its own."""
    drop_last, stateful = check_flag("drop_last", drop_last), check_flag("stateful", stateful)
    shuffle = None if shuffle is None else check_flag("shuffle", shuffle)
    if isinstance(data, Loader):
        if batch_size is not None or drop_last or shuffle:
            raise OptionError("The batches are made already", expected="no batch_size, drop_last or shuffle",
                              got=f"batch_size={shown(batch_size)}, drop_last={drop_last}, shuffle={shuffle}",
                              remedy="Choose them where the batches are made: DataLoader(…, batch_size=…)")  # fmt: skip
        return {"batch_size": None, "samples": None, "drop_last": False, "shuffle": False, "stateful": stateful}
    if batch_size is None:
        raise OptionError("batch_size is missing", expected="the samples of a step", got="None")
    batch_size, samples = check_integer("batch_size", batch_size, 1), len(data)
    if stateful and shuffle:
        raise OptionError("Shuffled batches cannot go on with the sequences of the last one", expected="shuffle=False",
                          got="shuffle=True and stateful=True")  # fmt: skip
    shape = {"batch_size": batch_size, "samples": samples, "drop_last": drop_last, "stateful": stateful,
             "shuffle": not stateful if shuffle is None else shuffle}  # fmt: skip
    if steps_of(shape) == 0:
        raise OptionError("drop_last leaves no batch", expected=f"a batch_size up to {samples} samples", got=batch_size)
    if stateful and samples % batch_size and not drop_last:
        raise OptionError("The last batch cannot go on with all sequences of the one before: it is smaller",
                          expected=f"a divisor of {samples} samples, or drop_last=True", got=batch_size)  # fmt: skip
    return shape


# Data sets and arrays to train on: the axis of the samples, lengths of padded sequences, batches on the device.


def as_dataset(data: Any, model: Any, lengths: Any = None, *, targets: bool = True, name: str = "data set") -> Any:
    """Return `data`, or the data set of its arrays ``(x, target)`` or ``(x, target, lengths)``, sample first.

    Iterables and functions become a `Loader`. Without `targets`, arrays and its batches may be x alone.
    """
    make = partial(_of_arrays, model)
    array, sized = hasattr(data, "__array__") or backend.has_device_memory(data), hasattr(data, "__len__")
    batches = hasattr(data, "batch") and sized and not array  # a table may have such a column
    array |= isinstance(data, str | bytes | Mapping)  # as little a series of batches
    iterable = callable(data) or (hasattr(data, "__iter__") and not array)
    samples = hasattr(data, "__getitem__") and sized and not (iterable or array)
    if not targets and not (_holds_arrays(data) if isinstance(data, list | tuple) else iterable or samples or batches):
        data = (data,)
    if not targets and isinstance(data, tuple):
        x, *more = data
        x = real_array("x", x)
        data = x, np.zeros(x.shape[:1] or 1, np.int64), *more[1:]
    if isinstance(data, tuple):
        if len(data) not in (2, 3) or (len(data) == 3 and lengths is not None):
            raise OptionError("The arrays to train on are not understood", expected="(x, target), or with lengths",
                              got=f"{len(data)} arrays{'' if lengths is None else ' and lengths='}")  # fmt: skip
        dataset: Any = make(*(*data, lengths)[:3])
    elif lengths is not None:
        raise OptionError("lengths belong to arrays", expected="data that have them themselves", got="both",
                          remedy="Pass ArrayDataset(x, target, lengths=...), or batches (x, target, "
                          "lengths)")  # fmt: skip
    elif batches:
        dataset = data
        _check_axis(dataset, model)
    elif samples:
        dataset = Samples(data, make, targets=targets)
    elif iterable:
        return Loader(data, make, targets=targets)
    else:
        raise OptionError("Not a data set", expected="arrays (x, target), len(…) and batch(indices), or an iterable of "
                          "batches", got=type(data).__name__,
                          remedy="Pass a tuple of arrays, an ArrayDataset, or a DataLoader")  # fmt: skip
    if len(dataset) == 0:
        raise ShapeError(f"The {name} is empty", expected="at least one sample", got=0)
    if getattr(dataset, "lengths", None) is not None:
        check_takes_lengths(model)
    return dataset


def _holds_arrays(data: Any) -> bool:
    """Whether these are arrays ``(x, target)``, or a list of such batches, not a list that numpy.asarray takes."""
    first = data[0] if isinstance(data, list) and data else data
    return isinstance(first, tuple) and bool(first) and getattr(first[0], "ndim", 0) > 0


def _of_arrays(model: Any, x: Any, target: Any, lengths: Any) -> ArrayDataset:
    """Return the data set of arrays, the sample first, whose batches the model takes."""
    first = sample_axis(model)
    dtype = getattr(model, "input_dtype", None) or next(iter(model.parameters().values())).dtype
    dataset = ArrayDataset(x, target, dtype=dtype, lengths=lengths, batch_first=first == 0)
    if first == 1 and dataset.inputs.ndim != 3:
        raise ShapeError("x has the wrong shape", expected="(N, T, I): samples, steps, features",
                         got=dataset.inputs.shape)  # fmt: skip
    return dataset


def batch_of(dataset: Any, indices: np.ndarray, model: Any) -> tuple[Array, ...]:
    """Return input, target, lengths and reset, if any, of some samples, on the model's device."""
    batch = dataset.batch(indices)
    if not isinstance(batch, tuple | list) or len(batch) not in (2, 3, 4):
        raise OptionError("The data set's batch is not understood", expected="input and target, or with lengths, or "
                          "with lengths (or None) and a reset", got=type(batch).__name__)  # fmt: skip
    while batch[-1] is None and len(batch) > 2:
        batch = batch[:-1]
    if len(batch) > 2 and batch[2] is not None:
        check_takes_lengths(model)
    device = backend.device_of(next(iter(model.parameters().values())))
    more = (None if part is None else np.array(part) for part in batch[2:])
    return *(_own(array, device) for array in batch[:2]), *more


def share_of(dataset: Any, indices: np.ndarray, own: np.ndarray, model: Any) -> tuple[Array, ...]:
    """Return this rank's samples `own` of a micro-batch, as `batch_of`; a data set is never asked for none."""
    if len(own):
        return batch_of(dataset, own, model)
    x, target, *more = batch_of(dataset, indices[:1], model)
    at = (slice(None),) * sample_axis(model) + (slice(0),)
    return x[at], target[:0], *(None if part is None else part[:0] for part in more)


def _own(array: Array, device: str) -> Array:
    """Return a copy: a data set may fill the same array again for the next micro-batch."""
    moved = backend.to_device(array, device)
    return moved.copy() if moved is array else moved


def axis_of(dataset: Any, model: Any) -> int:
    """Return the sample axis of a data set's inputs, for messages."""
    given = getattr(dataset, "sample_axis", None)
    return int(getattr(model, "batch_axes", (0, 0))[0] if given is None else given)


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
    stages = model.stages() if hasattr(model, "stages") else [("", model)]
    if len(stages) > 1 or is_group(stages[0][1]):
        taking_lengths(stages)
        return
    taken = inspect.signature(stages[0][1].forward).parameters
    if "lengths" not in taken and not any(p.kind is p.VAR_KEYWORD for p in taken.values()):
        raise OptionError("The model does not take lengths", expected="forward(x, lengths=...), as SequenceClassifier "
                          "and GRU have it", got=f"{type(stages[0][1]).__name__}.forward({', '.join(taken)})",
                          remedy="Leave lengths out, or make one layer of the model that hands them on")  # fmt: skip


def origin_of(data: Dataset | Loader, rows: np.ndarray, model: Any, name: str = "the data set") -> Origin:
    """Return where samples of a data set come from, for messages."""
    return Origin(rows, axis_of(data, model), "the batch" if isinstance(data, Loader) else name)


def in_order(data: Any, size: int | None, first: int, each: int) -> Iterator[tuple[Any, np.ndarray]]:
    """Yield the data set and the samples of the batches `first`, `first + each`, …, in the set's own order."""
    if size is None:
        for one in data.epoch():
            yield one, np.arange(len(one))
        return
    for start in range(first * size, len(data), each * size):
        yield data, np.arange(start, min(start + size, len(data)))


def with_state(batch: Batch, carried: CarriedState | None) -> Batch:
    """Return a batch with the state that it begins with in the place of its reset, which is done."""
    reset = batch[3] if len(batch) > 3 else None
    if carried is None:
        if reset is not None:
            raise OptionError("There are no states to reset", expected="stateful=True", got="a batch with a reset")
        return batch[:3]
    if reset is not None:
        carried.reset(reset)
    return *batch[:3], *(None,) * (3 - len(batch)), carried


def steps_of(shape: Mapping[str, Any]) -> int | None:
    """Return the steps of an epoch; None where a loader decides."""
    samples, batch_size = shape["samples"], shape["batch_size"]
    if batch_size is None:
        return None
    return samples // batch_size if shape.get("drop_last", False) else -(-samples // batch_size)
