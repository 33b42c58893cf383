"""Losses for classes, binary labels and numbers."""

from __future__ import annotations

import abc
import copy
import math
from math import prod
from types import ModuleType
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from sparsebp import kernels
from sparsebp.core import backend, host_pool
from sparsebp.core.check import (
    Array,
    LossFunction,
    check_choice,
    check_flag,
    check_integer,
    check_number,
    check_positive,
)
from sparsebp.core.errors import DTypeError, OptionError, ShapeError
from sparsebp.core.reprs import call_text
from sparsebp.nn.layer import check_gy, check_input
from sparsebp.patterns.pattern import DeviceCopies, frozen

__all__ = [
    "BCEWithLogitsLoss", "CrossEntropyLoss", "HuberLoss", "KLDivLoss", "L1Loss", "MSELoss", "NLLLoss", "SmoothL1Loss",
    "TripletMarginLoss",
]  # fmt: skip


# Common to all losses: the reduction to one number, and its gradient.

Reduction = Literal["mean", "sum", "none", "batchmean"]


class Loss(abc.ABC):
    """Base of the losses, with torch.nn's `reduction`.

    Parameters
    ----------
    size_average, reduce
        Only None: they are there only for PyTorch's argument order; `reduction` replaced them.
    reduction
        ``"mean"`` or ``"sum"``: the loss is one number. ``"none"``: it is an array with the loss of every element or
        position, and the gradient at it goes to `input_grad`.
    """

    reductions: ClassVar[tuple[Reduction, ...]] = ("mean", "sum", "none")

    def __init__(self, size_average: None = None, reduce: None = None, reduction: Reduction = "mean") -> None:
        for name, value in (("size_average", size_average), ("reduce", reduce)):
            if value is not None:
                raise OptionError(f"{name} is no longer used", expected="None", got=value,
                                  remedy="Pass reduction='mean', 'sum' or 'none'")  # fmt: skip
        self.reduction: Reduction = check_choice("reduction", reduction, self.reductions)

    def __repr__(self) -> str:
        """Show the constructor's call."""
        return call_text(self)

    def forward(self, prediction: Array, target: Array) -> tuple[Any, Array]:
        """Return the loss, a float (an array for ``reduction="none"``), and the saved value for `input_grad`.

        Raises
        ------
        ShapeError, DTypeError, DeviceError
            The arguments do not fit each other, or there is nothing to take the mean of.
        """
        return self._read(*self.on_device(prediction, target))

    def _read(self, value: Array, saved: Array) -> tuple[Any, Array]:
        """Return the result of `on_device`, a reduced loss as a float."""
        return (value if self.reduction == "none" else float(value)), saved  # synchronize!

    @abc.abstractmethod
    def on_device(self, prediction: Array, target: Array) -> tuple[Array, Array]:
        """As `forward`, but a reduced loss is a float64 array of shape (): the host reads nothing."""

    def count(self, target: Array) -> float:
        """Return by how much the mean over these targets divides; 0 if none of them counts.

        Means over parts of a batch, weighted by their counts, give the mean over the whole batch.
        """
        return float(len(target))

    def count_on_device(self, target: Array) -> Any:
        """As `count` for `on_device`: a number, or a float64 array of shape () that the host does not read."""
        return self.count(target)

    def input_grad(self, saved: Array, gy: Any = None) -> Array:
        """Return the gradient with respect to the prediction, of its shape.

        Parameters
        ----------
        saved
            As `forward` returned it.
        gy
            The gradient at the loss: a number, 1 if it is None. With ``reduction="none"`` an array of the loss's shape
            and the prediction's dtype.

        Raises
        ------
        OptionError
            `gy` is None although the loss is an array, or no number although the loss is one.
        ShapeError, DTypeError, DeviceError
            `gy` is another array.
        """
        if self.reduction != "none":
            return saved if gy is None else saved * saved.dtype.type(check_number("gy", gy, finite=False))
        shape = self._loss_shape(saved)
        if gy is None:
            raise OptionError("The gradient at a loss with reduction='none' is missing",
                              expected=f"gy, an array {shape}", got=None,
                              remedy="Pass input_grad(saved, gy), or use reduction='mean' or 'sum'")  # fmt: skip
        check_gy(gy, shape, saved.dtype, saved)
        return saved * self._spread(gy, saved)

    def _loss_shape(self, saved: Array) -> tuple[int, ...]:
        """Return the shape of the losses before they are reduced."""
        return saved.shape

    def _spread(self, gy: Array, saved: Array) -> Array:
        """Return gradients at the losses so that they meet the elements that each loss is made of."""
        return gy

    def _check_some(self, prediction: Array) -> None:
        """Refuse the mean of nothing."""
        if self.reduction in ("mean", "batchmean") and prediction.size == 0:
            raise ShapeError(
                "The batch is empty", expected="at least one element", got=prediction.shape, remedy="Skip empty batches"
            )


def check_mean(loss: Any) -> None:
    """Refuse a loss whose value over a batch is not the mean over its parts: training assumes that it is."""
    if isinstance(loss, TripletMarginLoss):
        raise OptionError("Training passes a prediction and a target to the loss",
                          expected="a loss of two arrays", got="TripletMarginLoss, of three",
                          remedy="Write the training step as its documentation shows")  # fmt: skip
    reduction = getattr(loss, "reduction", "mean")
    if reduction not in ("mean", "batchmean"):
        raise OptionError("Training takes the mean over samples, micro-batches and ranks",
                          expected="a loss with reduction='mean'", got=f"reduction={reduction!r}",
                          remedy="Build the loss anew, or use value_and_grad and an optimizer")  # fmt: skip


def check_counts(loss: Any) -> None:
    """Refuse a loss that does not say by how much its mean divides, where parts of a step have means of their own."""
    if not callable(getattr(loss, "count", None)):
        kind = type(loss).__name__
        raise OptionError(
            "A step in several micro-batches, or on several replicas, weights their means by what they count",
            expected=f"{kind}.count(target), the number that its mean over these targets divides by", got="none",
            remedy="Define it: return len(target) for a mean over samples; leave out what the loss ignores"
        )  # fmt: skip


def count_of(loss: Any, target: Array, *, on_device: bool = False) -> Any:
    """Return by how much a loss's mean over these targets divides; the samples, if the loss does not say."""
    # on_device: may be an array of shape () that the host has not read.
    count = getattr(loss, "count_on_device", None) if on_device else None
    count = count or getattr(loss, "count", None)
    found = len(target) if count is None else count(target)
    return found if on_device and not isinstance(found, int | float | np.generic) else float(found)


def summed(loss: Any) -> Any:
    """Return a loss with weights of classes as a sum; None for another loss, whose parts are averaged."""
    # Label smoothing gives a loss to classes of weight 0: the mean over some that have only those is infinite.
    if type(loss) not in (CrossEntropyLoss, NLLLoss) or loss._weight is None:
        return None
    summing = copy.copy(loss)
    summing.reduction = "sum"
    return summing


class ElementwiseLoss(Loss):
    """Base of the losses of every element by itself: prediction and target have one shape."""

    @abc.abstractmethod
    def element(self, prediction: Array, target: Array) -> tuple[Array, Array]:
        """Return the losses of the elements and their slopes at the prediction, new arrays of its shape."""

    def on_device(self, prediction: Array, target: Array) -> tuple[Array, Array]:
        """As `forward`, but a reduced loss is a float64 array of shape (): the host reads nothing."""
        check_input(prediction, name="prediction")
        check_input(target, name="target", dtype=prediction.dtype, shape=prediction.shape, like=prediction)
        self._check_some(prediction)
        # An axis in front: of arrays without any, NumPy would make numbers.
        losses, slopes = self.element(prediction[None], target[None])
        losses, slopes = losses.reshape(prediction.shape), slopes.reshape(prediction.shape)
        if self.reduction == "none":
            return losses, slopes
        if self.reduction == "sum":
            return losses.sum(dtype=np.float64), slopes
        slopes *= slopes.dtype.type(1 / losses.size)
        return losses.mean(dtype=np.float64), slopes

    def count(self, target: Array) -> float:
        """Return the number of elements."""
        return float(target.size)


class KernelLoss(ElementwiseLoss):
    """An `ElementwiseLoss` that the kernels compute, in one pass over memory."""

    function: ClassVar[LossFunction]  # the kernels' name

    def constant(self) -> float:
        """Return the kernel's constant; 0 for a loss without one."""
        return 0.0

    def on_device(self, prediction: Array, target: Array) -> tuple[Array, Array]:
        """As `forward`, but a reduced loss is a float64 array of shape (): the host reads nothing."""
        if getattr(self.element, "__func__", None) is not KernelLoss.element:  # another one, of a class or an object
            return super().on_device(prediction, target)
        xp = check_input(prediction, name="prediction")
        check_input(target, name="target", dtype=prediction.dtype, shape=prediction.shape, like=prediction)
        self._check_some(prediction)
        if self.reduction == "none":
            return self.element(prediction, target)
        value = xp.empty((), dtype=np.float64)
        divisor = prediction.size if self.reduction == "mean" else 1.0
        return value, self._run(xp, prediction, target, None, value, divisor)

    def element(self, prediction: Array, target: Array) -> tuple[Array, Array]:
        """Return the losses of the elements and their slopes at the prediction."""
        xp = backend.namespace(prediction)
        losses = host_pool.empty(xp, prediction.shape, prediction.dtype)
        return losses, self._run(xp, prediction, target, losses.reshape(-1), None, 1.0)

    def _run(
        self, xp: ModuleType, prediction: Array, target: Array, losses: Array | None, value: Array | None,
        divisor: float,
    ) -> Array:  # fmt: skip
        """Run the kernel, and return the slopes."""
        slopes = host_pool.empty(xp, prediction.shape, prediction.dtype)
        arrays = (
            None if array is None else xp.ascontiguousarray(array).reshape(-1)
            for array in (prediction, target, *self._weights(xp, prediction, target))
        )  # fmt: skip
        kernels.get(xp).unchecked.element_loss(
            *arrays, self.function, self.constant(), divisor, losses, slopes.reshape(-1), value
        )
        return slopes

    def _weights(self, xp: ModuleType, prediction: Array, target: Array) -> tuple[Array | None, Array | None]:
        """Return the weight of every element, and what its logarithm of a probability counts; None: 1."""
        return None, None


# Binary labels.


class _Weights:
    """A loss's weights of classes or elements: None, or a read-only copy on the host of what it was set to."""

    def __init__(self, **shape: Any) -> None:
        self._shape = shape  # of `check_input`

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, loss: Any, owner: type | None = None) -> Any:
        if loss is None:
            return self
        copies = getattr(loss, f"_{self._name}")
        return None if copies is None else copies.on(np)[0]

    def __set__(self, loss: Any, value: Array | None) -> None:
        if value is not None:
            check_input(value, name=self._name, **self._shape)
        copies = None if value is None else DeviceCopies(frozen(backend.to_host(value).copy()))
        setattr(loss, f"_{self._name}", copies)


class BCEWithLogitsLoss(KernelLoss):
    """Cross-entropy of ``sigmoid(prediction)`` against probabilities, as `torch.nn.BCEWithLogitsLoss`.

    ``-w (p t log σ(x) + (1 - t) log σ(-x))`` of every element, of the logits x and the targets t, w being `weight` and
    p `pos_weight`. Nothing overflows.

    Parameters
    ----------
    weight
        Weight of each element, an array that broadcasts to the prediction; it is copied. None: all 1.
    size_average, reduce, reduction
        As for `Loss`. The mean divides by the number of elements, not their weights.
    pos_weight
        Weight of the positive part, as `weight`; above 1 it raises recall. Both may be set later as well.
    """

    function = "bce_with_logits"
    weight, pos_weight = _Weights(), _Weights()
    _weight: DeviceCopies | None
    _pos_weight: DeviceCopies | None

    def __init__(
        self, weight: Array | None = None, size_average: None = None, reduce: None = None,
        reduction: Reduction = "mean", pos_weight: Array | None = None,
    ) -> None:  # fmt: skip
        super().__init__(size_average, reduce, reduction)
        self.weight, self.pos_weight = weight, pos_weight

    def _weights(self, xp: ModuleType, prediction: Array, target: Array) -> tuple[Array | None, Array | None]:
        weight, counts = None, None
        if self._weight is not None:
            weight = xp.broadcast_to(self._on(xp, "weight", prediction), prediction.shape)
        if self._pos_weight is not None:
            counts = 1 + (self._on(xp, "pos_weight", prediction) - 1) * target
        return weight, counts

    def _on(self, xp: ModuleType, name: str, prediction: Array) -> Any:
        (weight,) = getattr(self, f"_{name}").on(xp)
        shape = prediction.shape
        try:
            fits = np.broadcast_shapes(weight.shape, shape) == shape
        except ValueError:
            fits = False
        if not fits:
            raise ShapeError(f"{name} does not fit the prediction", expected=f"a shape that broadcasts to {shape}",
                             got=weight.shape)  # fmt: skip
        backend.check_array(name, weight, dtype=prediction.dtype)
        return weight


DEFAULT_IGNORED = -100


class OfRows(NamedTuple):
    """Losses of rows (M,) and their slopes (M, C), the weight of each row (None: 1), and False for ignored rows."""

    losses: Array
    slopes: Array
    counts: Array | None
    valid: Array | None


def _is_nan(value: Any) -> bool:
    return math.isnan(value) if isinstance(value, float) else bool(backend.namespace(value).isnan(value).any())


class ClassLoss(Loss):
    """Base of the losses of a prediction (N, C, …) against classes (N, …); (C,) against () is an unbatched sample.

    Parameters
    ----------
    weight
        (C,): weight of each class, an array of the prediction's dtype; it is copied. None: all equal. It may be set
        later as well.
    size_average, reduce, reduction
        As for `Loss`. The mean divides by the sum of the positions' weights.
    ignore_index
        Positions of this class have weight 0; their gradient is 0. Where nothing has a weight, the mean is NaN.
    """

    weight = _Weights(shape=(None,))
    _weight: DeviceCopies | None

    def __init__(
        self, weight: Array | None = None, size_average: None = None, ignore_index: int = DEFAULT_IGNORED,
        reduce: None = None, reduction: Reduction = "mean",
    ) -> None:  # fmt: skip
        super().__init__(size_average, reduce, reduction)
        self.ignore_index = check_integer("ignore_index", ignore_index, -(2**63), 2**63 - 1)
        self.weight = weight

    def forward(self, prediction: Array, target: Array) -> tuple[Any, Array]:
        """Return the loss, a float (an array (N, …) for ``reduction="none"``), and the saved value for `input_grad`.

        Parameters
        ----------
        prediction
            (N, C, …) or (C,), float32 or float64.
        target
            (N, …) or (), any integer dtype, in [0, C) or `ignore_index`. For `CrossEntropyLoss` also probabilities, an
            array like the prediction.

        Raises
        ------
        ShapeError, DTypeError, DeviceError
            The arguments do not fit each other, or there is nothing to take the mean of.
        OptionError
            A class is out of range, or probabilities meet an `ignore_index` that is a class.
        """
        xp = self._check(prediction, target)
        ignoring = self._may_ignore(xp, target)
        value, saved = self._evaluate(xp, prediction, target, ignoring)
        value = value if self.reduction == "none" else float(value)  # synchronize!
        if _is_nan(value) and target.dtype.kind != "f":  # a class out of range makes it so
            if not ignoring and self._may_ignore(xp, target, seen=True):
                value, saved = self._read(*self._evaluate(xp, prediction, target, True))
            if _is_nan(value):
                self._check_classes(target, saved.shape[_axis(saved)])
        return value, saved

    def on_device(self, prediction: Array, target: Array) -> tuple[Array, Array]:
        """As `forward`, but a reduced loss is a float64 array of shape (): the host reads nothing.

        A class out of range makes the loss NaN instead of an error. So does the default -100 on a device, unseen by the
        host: set another `ignore_index` there, or call `forward`, which checks.
        """
        xp = self._check(prediction, target)
        return self._evaluate(xp, prediction, target, self._may_ignore(xp, target))

    def count(self, target: Array) -> float:
        """Return the sum of the positions' weights: without `weight`, the number of positions that are not ignored.

        Of probabilities the number of all positions.
        """
        xp = backend.namespace(target)
        return float(self._counted(xp, target, self._may_ignore(xp, target, seen=True)))  # synchronize!

    def count_on_device(self, target: Array) -> Any:
        """As `count` for `on_device`, with its assumption about -100; an array of shape () the host does not read."""
        xp = backend.namespace(target)
        return self._counted(xp, target, self._may_ignore(xp, target))

    def _counted(self, xp: ModuleType, target: Array, ignoring: bool) -> Any:
        if target.dtype.kind == "f":
            return target.size // max(1, target.shape[_axis(target)])
        if self._weight is None and not ignoring:
            return target.size
        labels = _signed(xp, target).reshape(-1)
        valid = labels != self.ignore_index
        if self._weight is None:
            return valid.sum(dtype=np.float64)
        (weight,) = self._weight.on(xp)
        return _weighed(xp, labels, weight, valid)[1].sum(dtype=np.float64)

    def _evaluate(self, xp: ModuleType, prediction: Array, target: Array, ignoring: bool) -> tuple[Array, Array]:
        """As `on_device`; `ignoring`: whether a class may be `ignore_index`."""
        rows = prediction
        if prediction.ndim != 2 or not prediction.flags.c_contiguous:
            rows = _rows(xp, prediction)
        value, slopes = self._reduced(xp, rows, target, ignoring)
        if self.reduction == "none":
            value = value.reshape(self._shape_of(prediction))
        if prediction.ndim == 2:
            return value, slopes
        if prediction.ndim > 2:
            slopes = xp.moveaxis(slopes.reshape(len(prediction), *prediction.shape[2:], rows.shape[1]), -1, 1)
        return value, xp.ascontiguousarray(slopes).reshape(prediction.shape)

    def _reduced(self, xp: ModuleType, rows: Array, target: Array, ignoring: bool) -> tuple[Array, Array]:
        """Return the loss of rows (M, C), that of each with ``reduction="none"``, and its slopes."""
        (weight,) = self._weight.on(xp) if self._weight is not None else (None,)
        counts: Any
        losses, slopes, counts, valid = self._of_target(xp, rows, target, weight, ignoring)
        if valid is not None:
            losses = xp.where(valid, losses, losses.dtype.type(0))
        value: Any = losses
        if self.reduction == "sum":
            value = losses.sum(dtype=np.float64)
        elif self.reduction == "mean" and counts is None:
            value = losses.mean(dtype=np.float64)
            slopes *= slopes.dtype.type(1 / len(rows))
        elif self.reduction == "mean":
            with np.errstate(divide="ignore", invalid="ignore"):  # where all is ignored, the loss is NaN
                total = counts.sum(dtype=np.float64)
                value = losses.sum(dtype=np.float64) / total
                slopes /= total
        if valid is not None:
            slopes = xp.where(valid[:, None], slopes, slopes.dtype.type(0))
        return value, slopes

    def _of_target(
        self, xp: ModuleType, rows: Array, target: Array, weight: Array | None, ignoring: bool
    ) -> OfRows:  # fmt: skip
        """Return the losses of rows (M, C). A row whose class is not there is NaN."""
        target = _labels(xp, rows, target)
        valid = target != self.ignore_index if ignoring else None
        if weight is None:
            return OfRows(*self._of_rows(xp, rows, target, None), valid, valid)
        at, counts = _weighed(xp, target, weight, valid)
        return OfRows(*self._of_rows(xp, rows, at, counts), counts, valid)

    @abc.abstractmethod
    def _of_rows(self, xp: ModuleType, rows: Array, target: Array, counts: Array | None) -> tuple[Array, Array]:
        """Return the losses of rows (M, C), times their weights, and their slopes."""
        # Without `counts` a class may be out of range: its row is NaN.

    def _may_ignore(self, xp: ModuleType, target: Array, seen: bool = False) -> bool:
        """Whether a class may be `ignore_index`. Arrays on a device are only read if `seen`."""
        # On a device the default is assumed absent: looking for it would cost launches.
        if target.dtype.kind == "f":
            return False
        if xp is np and target.size < 64:  # faster than an array of truth values
            return self.ignore_index in target.reshape(-1).tolist()
        if seen or xp is np:
            return bool(xp.count_nonzero(target == self.ignore_index))  # synchronize!
        return self.ignore_index != DEFAULT_IGNORED

    def _check_classes(self, target: Array, classes: int) -> None:
        kept = _signed(backend.namespace(target), target)
        kept = kept[kept != self.ignore_index]
        low, high = (int(kept.min()), int(kept.max())) if kept.size else (0, 0)  # synchronize!
        if low < 0 or high >= classes:
            raise OptionError("target names a class that is not there", expected=f"classes from 0 to {classes - 1}",
                              got=f"classes from {low} to {high}",
                              remedy="Number the classes from 0, or give the model more outputs")  # fmt: skip

    def _check(self, prediction: Array, target: Array) -> ModuleType:
        xp, classes = check_input(prediction, name="prediction"), prediction.shape[:2][-1:]
        if not any(classes):
            raise ShapeError("prediction has no classes", expected="(N, C, …) or (C,), C of 1 or more",
                             got=prediction.shape)  # fmt: skip
        if target is None:
            raise DTypeError("target is missing", expected="an array of class numbers", got=None)
        if not type(prediction) is type(target) is np.ndarray:
            backend.namespace(prediction, target)
        if target.dtype.kind not in "iu":
            self._check_probabilities(prediction, target)
        elif target.shape != prediction.shape[:1] + prediction.shape[2:]:
            if target.shape == prediction.shape:
                raise ShapeError("target has the wrong shape", expected=f"class numbers {self._shape_of(prediction)}",
                                 got=target.shape,
                                 remedy=f"Pass one-hot labels as target.argmax(axis={_axis(prediction)})")  # fmt: skip
            backend.check_array("target", target, shape=self._shape_of(prediction), contiguous=False)
        if self._weight is not None:
            (weight,) = self._weight.on(np)
            backend.check_array("weight", weight, dtype=prediction.dtype, shape=classes)
        self._check_some(prediction)
        return xp

    def _check_probabilities(self, prediction: Array, target: Array) -> None:
        raise DTypeError("target has the wrong dtype", expected="integers (class numbers)", got=target.dtype,
                         remedy="Pass class numbers as target.astype(int), one-hot labels as "
                         f"target.argmax(axis={_axis(prediction)})")  # fmt: skip

    @staticmethod
    def _shape_of(prediction: Array) -> tuple[int, ...]:
        """Return the shape of the prediction without the classes."""
        return (*prediction.shape[:1], *prediction.shape[2:]) if prediction.ndim > 1 else ()

    def _loss_shape(self, saved: Array) -> tuple[int, ...]:
        return self._shape_of(saved)

    def _spread(self, gy: Array, saved: Array) -> Array:
        return backend.namespace(saved).expand_dims(gy, _axis(saved))


class CrossEntropyLoss(ClassLoss):
    """Softmax cross-entropy of logits against classes or probabilities, as `torch.nn.CrossEntropyLoss`.

    Parameters
    ----------
    weight, size_average, ignore_index, reduce, reduction
        As for `ClassLoss`. With probabilities the mean divides by the number of positions, and there is nothing to
        ignore.
    label_smoothing
        Share of the target, 0 … 1, that all classes get in equal parts (Szegedy et al., "Rethinking the Inception
        Architecture for Computer Vision", 2016, §7).
    """

    def __init__(
        self, weight: Array | None = None, size_average: None = None, ignore_index: int = DEFAULT_IGNORED,
        reduce: None = None, reduction: Reduction = "mean", label_smoothing: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__(weight, size_average, ignore_index, reduce, reduction)
        self.label_smoothing = check_number("label_smoothing", label_smoothing, 0, 1)

    def _reduced(self, xp: ModuleType, rows: Array, target: Array, ignoring: bool) -> tuple[Array, Array]:
        plain = not ignoring and self._weight is None and not self.label_smoothing and target.dtype.kind != "f"
        if self.reduction != "mean" or not plain:
            return super()._reduced(xp, rows, target, ignoring)
        mean = xp.empty((), dtype=np.float64)
        _, slopes = self._softmax(xp, rows, _labels(xp, rows, target), mean)
        return mean, slopes

    def _softmax(self, xp: ModuleType, rows: Array, target: Array, mean: Array | None) -> tuple[Array, Array]:
        losses, slopes = xp.empty(len(rows), dtype=rows.dtype), xp.empty(rows.shape, dtype=rows.dtype)
        kernels.get(xp).unchecked.softmax_cross_entropy(rows, target, losses, slopes, mean)
        return losses, slopes

    def _of_rows(self, xp: ModuleType, rows: Array, target: Array, counts: Array | None) -> tuple[Array, Array]:
        losses, slopes = self._softmax(xp, rows, target, None)
        if counts is not None:
            losses *= counts
            slopes *= counts[:, None]
        return losses, slopes

    def _of_target(
        self, xp: ModuleType, rows: Array, target: Array, weight: Array | None, ignoring: bool
    ) -> OfRows:  # fmt: skip
        probable = target.dtype.kind == "f"
        if not (probable or self.label_smoothing):
            return super()._of_target(xp, rows, target, weight, ignoring)
        real = rows.dtype.type
        share, rest = real(self.label_smoothing / rows.shape[1]), real(1 - self.label_smoothing)
        if probable:
            soft = _rows(xp, target)
            if self.label_smoothing:
                soft = soft * rest + share
            return OfRows(*_against(xp, rows, soft if weight is None else soft * weight), None, None)
        each = xp.ones(rows.shape[1], rows.dtype) if weight is None else weight
        found = super()._of_target(xp, rows, target, each, ignoring)
        losses, slopes = _against(xp, rows, (each * share)[None])
        return found._replace(losses=found.losses * rest + losses, slopes=found.slopes * rest + slopes)

    def _check_probabilities(self, prediction: Array, target: Array) -> None:
        if target.dtype.kind != "f" or target.shape != prediction.shape:
            raise DTypeError("target has the wrong dtype", got=f"{target.dtype} of shape {target.shape}",
                             expected=f"integers (class numbers) {self._shape_of(prediction)}, or probabilities "
                             f"{prediction.shape}", remedy="Pass class numbers as target.astype(int)")  # fmt: skip
        backend.check_array("target", target, dtype=prediction.dtype, contiguous=False)
        if self.ignore_index >= 0:
            raise OptionError("Probabilities name no class that could be ignored", expected="a negative ignore_index",
                              got=self.ignore_index,
                              remedy="Leave ignore_index out, or pass class numbers")  # fmt: skip


class NLLLoss(ClassLoss):
    """``-prediction[class]``, of logarithms of probabilities against classes, as `torch.nn.NLLLoss`.

    Parameters
    ----------
    weight, size_average, ignore_index, reduce, reduction
        As for `ClassLoss`.
    """

    def _of_rows(self, xp: ModuleType, rows: Array, target: Array, counts: Array | None) -> tuple[Array, Array]:
        classes, nan = rows.shape[1], rows.dtype.type(np.nan)
        at = target
        if counts is None:
            known = (target >= 0) & (target < classes)
            at, counts = xp.where(known, target, 0), xp.where(known, rows.dtype.type(1), nan)
        slopes, places = xp.zeros(rows.shape, dtype=rows.dtype), xp.arange(len(rows))
        slopes[places, at] = -counts
        return -rows[places, at] * counts, slopes


def _weighed(xp: ModuleType, target: Array, weight: Array, valid: Array | None) -> tuple[Array, Array]:
    """Return classes that are there, and the weight of each: NaN for one that is not, 0 where it is not `valid`."""
    known = (target >= 0) & (target < len(weight))
    at = xp.where(known, target, 0)
    counts = xp.where(known, weight[at], weight.dtype.type(np.nan))
    return at, counts if valid is None else xp.where(valid, counts, counts.dtype.type(0))


def _axis(prediction: Array) -> int:
    """Return the axis of the classes."""
    return 0 if prediction.ndim < 2 else 1


def _rows(xp: ModuleType, array: Array) -> Array:
    """Return (N, C, …) as contiguous (M, C), a row for each position."""
    turned = xp.moveaxis(array, 1, -1) if array.ndim > 2 else array
    return xp.ascontiguousarray(turned).reshape(prod(turned.shape[:-1]), turned.shape[-1])


def _labels(xp: ModuleType, rows: Array, target: Array) -> Array:
    """Return class numbers as contiguous int64, one for each row."""
    if target.dtype != np.int64 or not target.flags.c_contiguous:
        target = _signed(xp, target)
    return target.reshape(len(rows))


def _signed(xp: ModuleType, target: Array) -> Array:
    """Return class numbers as contiguous int64; larger ones must not wrap to `ignore_index`."""
    if target.dtype == np.uint64:
        target = xp.minimum(target, np.uint64(2**63 - 1))
    return xp.ascontiguousarray(target, dtype=np.int64)


def _against(xp: ModuleType, rows: Array, soft: Array) -> tuple[Array, Array]:
    """Return ``-Σ soft · log softmax(rows)`` of every row, and the slopes, ``softmax(rows) · Σ soft - soft``."""
    with np.errstate(invalid="ignore", divide="ignore"):  # infinities give NaN
        logs = rows - rows.max(axis=1, keepdims=True)
        logs -= xp.log(xp.exp(logs).sum(axis=1, keepdims=True))
        return -(soft * logs).sum(axis=1), xp.exp(logs) * soft.sum(axis=1, keepdims=True) - soft


# Losses of predicted numbers.


class MSELoss(KernelLoss):
    """``(prediction - target)²`` of every element, as `torch.nn.MSELoss`; shapes and dtypes must be equal.

    Parameters
    ----------
    size_average, reduce, reduction
        As for `Loss`.
    """

    function = "squared"


class L1Loss(KernelLoss):
    """``|prediction - target|`` of every element, as `torch.nn.L1Loss`; the slope at 0 is 0.

    Parameters
    ----------
    size_average, reduce, reduction
        As for `Loss`.
    """

    function = "distance"


class SmoothL1Loss(KernelLoss):
    """``d² / (2 beta)`` where ``d = |prediction - target| < beta``, else ``d - beta / 2``, as `torch.nn.SmoothL1Loss`.

    Parameters
    ----------
    size_average, reduce, reduction
        As for `Loss`.
    beta
        Where the parabola ends, 0 or more; with 0 it is `L1Loss`.

    Notes
    -----
    Source: Girshick, "Fast R-CNN", 2015, Eq. 3.
    """

    def __init__(
        self, size_average: None = None, reduce: None = None, reduction: Reduction = "mean", beta: float = 1.0
    ) -> None:
        super().__init__(size_average, reduce, reduction)
        self.beta = check_number("beta", beta, 0)

    @property
    def function(self) -> LossFunction:  # type: ignore[override]
        """The kernels' name: with `beta` 0 that of `L1Loss`."""
        return "smooth_l1" if self.beta else "distance"

    def constant(self) -> float:
        """Return `beta`."""
        return self.beta


class HuberLoss(KernelLoss):
    """``d² / 2`` where ``d = |prediction - target| < delta``, else ``delta (d - delta / 2)``, as `torch.nn.HuberLoss`.

    Parameters
    ----------
    reduction
        As for `Loss`.
    delta
        Where the parabola ends, more than 0.

    Notes
    -----
    Source: Huber, "Robust Estimation of a Location Parameter", 1964, Eq. 1.10.
    """

    def __init__(self, reduction: Reduction = "mean", delta: float = 1.0) -> None:
        super().__init__(reduction=reduction)
        self.delta = check_positive("delta", delta)

    function = "huber"

    def constant(self) -> float:
        """Return `delta`."""
        return self.delta


# Losses of distributions and of distances.


class KLDivLoss(ElementwiseLoss):
    """``t (log t - prediction)`` of every element, of logarithms of probabilities, as `torch.nn.KLDivLoss`.

    Parameters
    ----------
    size_average, reduce
        As for `Loss`.
    reduction
        As for `Loss`, or ``"batchmean"``: the sum over the number of samples, the Kullback-Leibler divergence of the
        target from the prediction. (``"mean"`` divides by the number of elements.)
    log_target
        Whether targets are logarithms of probabilities too.
    """

    reductions = (*Loss.reductions, "batchmean")

    def __init__(
        self, size_average: None = None, reduce: None = None, reduction: Reduction = "mean", log_target: bool = False
    ) -> None:
        super().__init__(size_average, reduce, reduction)
        self.log_target = check_flag("log_target", log_target)

    def on_device(self, prediction: Array, target: Array) -> tuple[Array, Array]:
        """As `forward`, but a reduced loss is a float64 array of shape (): the host reads nothing."""
        value, slopes = super().on_device(prediction, target)
        if self.reduction == "batchmean":  # it was the mean over the elements
            each = prod(prediction.shape[1:])
            value, slopes = value * each, slopes * slopes.dtype.type(each)
        return value, slopes

    def count(self, target: Array) -> float:
        """Return the number of elements, with ``"batchmean"`` of samples."""
        return float(len(target)) if self.reduction == "batchmean" and target.ndim else super().count(target)

    def element(self, prediction: Array, target: Array) -> tuple[Array, Array]:
        """Return the losses, and the probabilities of the target, negative."""
        xp = backend.namespace(prediction)
        if self.log_target:
            share = xp.exp(target)
            return share * (target - prediction), -share
        with np.errstate(divide="ignore", invalid="ignore"):  # 0 log 0 is 0
            logs = xp.where(target == 0, target, target * xp.log(target))
        return logs - target * prediction, -target


class TripletMarginLoss(Loss):
    """``max(d(anchor, positive) - d(anchor, negative) + margin, 0)`` of vectors, as `torch.nn.TripletMarginLoss`.

    d(x, y) is the p-norm of x - y + eps over the last axis.

    Parameters
    ----------
    margin
        By how much a negative must be farther from the anchor than a positive; more than 0.
    p
        Of the norm, more than 0; it may be infinite.
    eps
        Added to the differences.
    swap
        Whether the distance between positive and negative takes the place of d(anchor, negative) where it is less.
    size_average, reduce, reduction
        As for `Loss`. There is one loss per triplet.

    Notes
    -----
    Source: Balntas et al., "Learning local feature descriptors with triplets and shallow convolutional neural
    networks", 2016, §3; `swap` is its "in-triplet hard negative mining".

    Examples
    --------
    The three go through a model as one batch, and their gradients back as one. `Trainer` takes no such loss.

    >>> import numpy as np, sparsebp as sb
    >>> model, loss = sb.nn.Linear(4, 2, rng=0), sb.nn.TripletMarginLoss()
    >>> anchor, positive, negative = np.random.default_rng(0).standard_normal((3, 8, 4), np.float32)
    >>> y, saved = model.forward(np.concatenate([anchor, positive, negative]))
    >>> value, at_loss = loss.forward(*np.split(y, 3))
    >>> grads = model.weight_grad(np.concatenate(loss.input_grad(at_loss)), saved)
    >>> sb.optim.SGD(model.parameters(), lr=0.1).step(grads)
    """

    def __init__(
        self, margin: float = 1.0, p: float = 2.0, eps: float = 1e-6, swap: bool = False, size_average: None = None,
        reduce: None = None, reduction: Reduction = "mean",
    ) -> None:  # fmt: skip
        super().__init__(size_average, reduce, reduction)
        self.margin, self.p = check_positive("margin", margin), check_positive("p", p, finite=False)
        self.eps, self.swap = check_number("eps", eps), check_flag("swap", swap)

    def forward(self, anchor: Array, positive: Array, negative: Array) -> tuple[Any, Any]:  # type: ignore[override]
        """Return the loss, a float (an array (…) for ``reduction="none"``), and the saved value for `input_grad`.

        Parameters
        ----------
        anchor, positive, negative
            (…, D), float32 or float64, of one shape.

        Raises
        ------
        ShapeError, DTypeError, DeviceError
            The arguments do not fit each other, or there is nothing to take the mean of.
        """
        return self._read(*self.on_device(anchor, positive, negative))

    def on_device(self, anchor: Array, positive: Array, negative: Array) -> tuple[Array, Any]:  # type: ignore[override]
        """As `forward`, but a reduced loss is a float64 array of shape (): the host reads nothing."""
        xp = check_input(anchor, name="anchor")
        for name, array in (("positive", positive), ("negative", negative)):
            check_input(array, name=name, dtype=anchor.dtype, shape=anchor.shape, like=anchor)
        if anchor.ndim == 0:
            raise ShapeError("anchor is no vector", expected="(…, D)", got=anchor.shape)
        self._check_some(anchor)
        a, p, n = (array[None] for array in (anchor, positive, negative))  # of (D,), NumPy would make numbers
        near, at_near = self._distance(xp, a - p)
        far, at_far = self._distance(xp, a - n)
        at_swapped = xp.zeros_like(at_far)
        if self.swap:
            swapped, at_swapped = self._distance(xp, p - n)
            share = xp.where(swapped == far, anchor.dtype.type(0.5), swapped < far)[..., None]  # as torch.minimum
            at_swapped, at_far, far = share * at_swapped, (1 - share) * at_far, xp.minimum(far, swapped)
        losses = near - far + self.margin
        active = (~(losses < 0)).astype(anchor.dtype)[..., None]  # 1 at a NaN, which comes through
        slopes = at_near - at_far, -at_near - at_swapped, at_far + at_swapped
        losses, slopes = xp.maximum(losses, 0)[0], tuple((active * slope)[0] for slope in slopes)
        if self.reduction == "none":
            return xp.asarray(losses), slopes
        if self.reduction == "sum":
            return losses.sum(dtype=np.float64), slopes
        each = anchor.dtype.type(1 / losses.size)
        return losses.mean(dtype=np.float64), tuple(slope * each for slope in slopes)

    def _distance(self, xp: ModuleType, difference: Array) -> tuple[Array, Array]:
        """Return the norm of ``difference + eps`` over the last axis, and its slopes; 0 at 0."""
        v = difference + self.eps
        size, p = xp.abs(v), self.p
        if math.isinf(p):
            norm = size.max(axis=-1, keepdims=True)
            largest = (size == norm).astype(v.dtype)
            return norm[..., 0], xp.sign(v) * largest / largest.sum(axis=-1, keepdims=True)
        with np.errstate(divide="ignore", invalid="ignore"):
            if p == 2:
                norm = xp.sqrt((v * v).sum(axis=-1, keepdims=True))
                return norm[..., 0], v / xp.where(norm == 0, v.dtype.type(1), norm)
            norm = (size**p).sum(axis=-1, keepdims=True) ** (1 / p)
            slopes = xp.where((size == 0) | (norm == 0), v.dtype.type(0), xp.sign(v) * (size / norm) ** (p - 1))
        return norm[..., 0], slopes

    def input_grad(self, saved: Any, gy: Any = None) -> Any:
        """Return the gradients with respect to anchor, positive and negative, of their shape.

        Arguments and errors as for `Loss.input_grad`.
        """
        one = super().input_grad
        return tuple(one(slopes, gy) for slopes in saved)

    def _loss_shape(self, saved: Array) -> tuple[int, ...]:
        return saved.shape[:-1]

    def _spread(self, gy: Array, saved: Array) -> Array:
        return gy[..., None]
