"""Batches that others make: lists of batches, PyTorch's DataLoaders, functions; and data sets of single samples."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np

from sparsebp.comm.transport import Transport
from sparsebp.core import backend
from sparsebp.core.check import shown
from sparsebp.core.errors import OptionError, ShapeError
from sparsebp.data import ArrayDataset
from sparsebp.data.dataset import check_indices, real_array
from sparsebp.optim.lr_schedules import reads_model
from sparsebp.runtime.agreement import check_same, checksum

Make: TypeAlias = Callable[[Any, Any, Any], ArrayDataset]
"""Makes the data set of inputs, targets and lengths, or None, as a model takes them."""


class OneBatch:
    """The samples of one batch, as a data set, and which of them begin a new sequence."""

    reads_model = False

    def __init__(self, samples: ArrayDataset, reset: np.ndarray | None) -> None:
        self.samples, self.reset = samples, reset

    def __len__(self) -> int:
        return len(self.samples)

    def batch(self, indices: np.ndarray) -> tuple[Any, ...]:
        """Return input, target, lengths if any, and with a reset lengths or None, and the reset."""
        found = self.samples.batch(indices)
        if self.reset is None:
            return found
        return *found, *(None,) * (3 - len(found)), self.reset[indices]

    @property
    def checksum(self) -> str:
        """A checksum of the batch."""
        return f"{checksum(self.samples.inputs)}; {checksum(self.samples.targets)}"


class Loader:
    """Batches in the order of an iterable, made anew for every epoch."""

    # source: Gives batches ``(x, target)``, with lengths and a reset if there are any, the sample first: a list, a
    # DataLoader or another iterable, or a function that returns one, which may take the number of the epoch, from 0.
    # targets: Whether batches need targets; else a batch may be x alone.
    # once: Whether it can be gone through once only, as a generator.

    def __init__(self, source: Any, make: Make, *, targets: bool = True) -> None:
        self.source, self._make, self._targets = source, make, targets
        self._function = not hasattr(source, "__iter__")
        self.once = hasattr(source, "__next__")
        self.reads_model = reads_model(source)
        if isinstance(source, list) and source and targets:
            parts_of(source[0], "batch", 4)
        try:
            self.steps: int | None = None if self._function else len(source)
        except TypeError:
            self.steps = None
        self.last: OneBatch | None = None

    def epoch(self, number: int = 0) -> Iterator[OneBatch]:
        """Yield the batches of an epoch, from 0; the last one yielded is `last`."""
        self.last = None
        for item in self._begin(number):
            self.last = self._batch(item)
            yield self.last
        if self.last is None:
            raise ShapeError("The data have no batches", expected="at least one", got=f"none in epoch {number + 1}",
                             remedy="A generator can be gone through once: pass the function that makes it"
                             if self.once else None)  # fmt: skip

    def rest_of(self, epoch: int, first: int, before: str, transport: Transport | None) -> Iterator[OneBatch]:
        """Yield the batches of an epoch from number `first` on.

        Those before it are made and dropped; `before` is the `checksum` of the last of them. All ranks must get the
        same batches.
        """
        batches, number = self.epoch(epoch), 0
        while True:
            one = next(batches, None)
            if transport is not None:
                made = "no more" if one is None else one.checksum
                check_same(transport, {f"batch {number + 1} of epoch {epoch + 1}": made})
            number += 1
            if number <= first and (one is None or (number == first and one.checksum != before)):
                raise OptionError("The data do not give the batches again that were trained on before the checkpoint",
                                  expected=f"batch {first} of epoch {epoch + 1} as it was: {before}",
                                  got="no such batch" if one is None else one.checksum,
                                  remedy="Make batches a function of the epoch's number, or leave out "
                                  "checkpoint_every: runs then go on after whole epochs")  # fmt: skip
            if one is None:
                return
            if number > first:
                yield one

    def _begin(self, number: int) -> Iterator[Any]:
        source = self.source
        if self._function:
            source = source(number) if _takes_epoch(source) else source()
        try:
            return iter(source)
        except TypeError as error:
            raise OptionError("The function returns no batches", expected="an iterable of batches (x, target)",
                              got=shown(source)) from error  # fmt: skip

    def _batch(self, item: Any) -> OneBatch:
        if not self._targets:
            x, *more = item if isinstance(item, tuple | list) else (item,)
            x = real_array("x", x)
            item = (x, np.zeros(x.shape[:1] or 1, np.int64), *more[1:])
        x, target, lengths, reset = parts_of(item, "batch", 4)
        samples = self._make(x, target, lengths)
        if len(samples) == 0:
            raise ShapeError("A batch is empty", expected="at least one sample", got=0)
        if reset is None:
            return OneBatch(samples, None)
        anew = np.asarray(reset)
        if anew.dtype != bool or anew.shape not in ((), (len(samples),)):
            raise OptionError("The reset of a batch is not understood", expected=f"a bool, or {len(samples)} of them",
                              got=f"{anew.dtype} of shape {anew.shape}")  # fmt: skip
        return OneBatch(samples, np.broadcast_to(anew, len(samples)))


def _takes_epoch(function: Any) -> bool:
    """Whether a function has an argument that must be given: the number of the epoch."""
    try:
        inspect.signature(function).bind()
    except TypeError:
        return True
    except ValueError:  # without a signature
        pass
    return False


class Samples:
    """The data set of single samples ``(x, target)``, with a length if they have one: of PyTorch's ``Dataset``, say."""

    def __init__(self, source: Any, make: Make, *, targets: bool = True) -> None:
        self.source, self._make, self._targets = source, make, targets
        self.reads_model = reads_model(source)

    def __len__(self) -> int:
        return len(self.source)

    def batch(self, indices: np.ndarray) -> tuple[Any, ...]:
        """Return samples stacked to a batch."""
        items = [self.source[int(i)] for i in check_indices(indices, len(self))]
        if not self._targets:
            items = [(*item, 0)[: max(2, len(item))] if isinstance(item, tuple | list) else (item, 0) for item in items]
        found = [parts_of(item, "sample", 3) for item in items]
        names = ("x", "target", "lengths")
        x, target, lengths = map(stacked, names, zip(*found, strict=True))
        return self._make(x, target, lengths).batch(np.arange(len(x)))


def parts_of(item: Any, name: str, most: int) -> tuple[Any, ...]:
    """Return x, target, lengths and so on, None for those that are not there."""
    if not isinstance(item, tuple | list) or not 2 <= len(item) <= most:
        more = ", or with lengths" + (", and then a reset" if most > 3 else "")
        raise OptionError(f"A {name} of the data is not understood", expected=f"a tuple (x, target){more}",
                          got=f"{type(item).__name__} of {len(item)}" if hasattr(item, "__len__") else shown(item),
                          remedy="Let the loader, or a function around it, yield tuples")  # fmt: skip
    return *item, *(None,) * (most - len(item))


def stacked(name: str, values: tuple[Any, ...]) -> Any:
    """Return the arrays of all samples as one, with the sample first."""
    if all(value is None for value in values):
        return None
    if not any(hasattr(value, "dtype") for value in values):
        return list(values)  # numbers of Python have no dtype that a stack should get
    arrays = [real_array(name, value) for value in values]
    shapes = {array.shape for array in arrays}
    if len(shapes) > 1:
        raise ShapeError(f"{name} differs from sample to sample", expected="one shape",
                         got=", ".join(map(str, sorted(shapes))),
                         remedy="Pad sequences to one length, and return their own third")  # fmt: skip
    return backend.namespace(*arrays).stack(arrays)
