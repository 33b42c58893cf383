"""Parameters of layers: how they are initialised, named and checked."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn, Self, TypeVar

import numpy as np

from sparsebp.core import backend, parts
from sparsebp.core import masks as masking
from sparsebp.core.absent import guard, is_absent
from sparsebp.core.check import Array, shown
from sparsebp.core.errors import DeviceError, DTypeError, LayoutError, NonFiniteError, OptionError, ShapeError

T = TypeVar("T")


class Named(dict[str, T]):
    """Arrays or layers of a layer by name, which its attributes of the same name show.

    Every change of an entry goes through `__setitem__` or `__delitem__`, which also set the attribute.
    """

    __slots__ = ("_owner",)

    def __init__(self, entries: Mapping[str, T] | Iterable[tuple[str, T]] = (), owner: Any = None) -> None:
        self._owner = None if owner is None else weakref.ref(owner)
        super().__init__()
        self.update(entries)

    def owner(self) -> Any:
        """Return the layer; None if it is gone, or this is a copy."""
        return None if self._owner is None else self._owner()

    def update(self, *entries: Any, **named: T) -> None:
        """As `dict.update`."""
        for name, value in dict(*entries, **named).items():
            self[name] = value

    def __ior__(self, entries: Any) -> Self:  # type: ignore[override, misc]
        self.update(entries)
        return self

    def setdefault(self, name: str, value: T = None) -> T:  # type: ignore[assignment]
        """As `dict.setdefault`."""
        if name not in self:
            self[name] = value
        return self[name]


def arrays_replaced() -> None:
    """Tell whoever rests on the arrays of layers that one has been replaced."""
    parts.changed()
    if masking.owners:
        masking.arrays_replaced()


_RECORDS = "params", "buffers", "children"


def check_name(layer: Any, kind: str, name: Any) -> None:
    """Refuse a name for a new entry of a record that `state_dict`, or an attribute, could not tell from another."""
    # Names of arrays may have dots, as PyTorch's "out_proj.weight"; those of children have none, and come before one.
    child, own = kind == "children", layer.__dict__
    if not isinstance(name, str) or not name or (child and ("." in name or name in (*_RECORDS, "training", "device"))):
        raise OptionError(f"Invalid name in the {kind} of {type(layer).__name__}", got=repr(name),
                          expected="a text without dots that no attribute of every layer has" if child else "a text",
                          remedy="Name numbered layers '0', '1', …")  # fmt: skip
    for other in _RECORDS:
        names = own.get(other, ())
        if other != kind and (name.partition(".")[0] if other == "children" else name) in (
            {key.partition(".")[0] for key in names} if child else names
        ):
            raise OptionError(f"{type(layer).__name__} has {name!r} twice", got=f"it in {kind}, and in {other}",
                              expected="a separate name for each parameter, buffer and child")  # fmt: skip


def _dtype_remedy(given: np.dtype, wanted: np.dtype) -> str:
    other = f", or call model.to(dtype={str(given)!r}) before" if given in backend.FLOAT_DTYPES else ""
    return f"Pass numpy.asarray(value, {str(wanted)!r}){other}"


class NamedArrays(Named[Array]):
    """Parameters or buffers of a layer; an array is only replaced by one of the same shape, dtype and device."""

    # A bias of shape (1,) in place of (n,), for example, would be broadcast without an error.

    __slots__ = ()

    def __setitem__(self, name: str, array: Array) -> None:
        old = self.get(name)
        if array is None:
            raise DTypeError(
                f"{name} is not an array", expected="an array", got=None, remedy="Pass what state_dict returned"
            )
        if array is old:
            return
        owner = self.owner()
        if old is None and owner is not None:
            for kind in ("params", "buffers"):
                if owner.__dict__.get(kind) is self:
                    check_name(owner, kind, name)
        backend.namespace(**{name: array})
        if old is not None:
            backend.namespace(array, old)
            backend.check_array(name, array, dtype=old.dtype, shape=old.shape, contiguous=not is_absent(array))
        elif not array.dtype.isnative:
            raise DTypeError(f"{name} has the wrong byte order", got=array.dtype,
                             expected=array.dtype.newbyteorder("="),
                             remedy="Pass array.astype(array.dtype.newbyteorder('='))")  # fmt: skip
        if backend.is_host(backend.namespace(array)) and not array.flags.writeable and not is_absent(array):
            raise LayoutError(f"{name} is read-only", expected="an array that can be written to",
                              got="one that cannot", remedy=f"Pass {name}.copy()")  # fmt: skip
        self.replace(name, array)
        if old is not None:
            arrays_replaced()

    def replace(self, name: str, array: Array) -> None:
        """Set an array without a check: of another dtype or device, when the caller converts all of the layer."""
        before, layer = self.get(name), self.owner()
        super().__setitem__(name, array)
        # An attribute that was something else, a flag called "bias" say, stays.
        if layer is not None and layer.__dict__.get(name, before) is before and not hasattr(type(layer), name):
            layer.__dict__[name] = array
        if layer is not None and (is_absent(array) or is_absent(before)):
            guard(layer)

    def instead(self, owner: Any, new: Mapping[str, Array]) -> NamedArrays:
        """Return `new`, checked against these arrays, which it replaces."""
        checked = NamedArrays(self)
        checked.update(new)
        if checked.keys() != new.keys():
            checked._kept()
        arrays = NamedArrays(self, owner)
        for name, array in checked.items():
            arrays.replace(name, array)
        return arrays

    def _kept(self, *_: Any) -> NoReturn:
        """Refuse to remove an array."""
        raise OptionError("The arrays of a layer cannot be removed", expected="a layer with all of its arrays",
                          got="a removal", remedy="Build the layer without it, with bias=False say")  # fmt: skip

    __delitem__ = pop = popitem = clear = _kept

    def __reduce__(self) -> tuple[Any, ...]:
        return NamedArrays, (dict(self),)  # the layer's __setstate__ makes another one of its own


def parameter_dtype(dtype: Any, device: Any = None) -> np.dtype:
    """Return the dtype of new parameters, float32 for None as in PyTorch."""
    if device is not None and str(device) != "cpu":
        raise DeviceError("Layers are built on the host", expected="device=None or 'cpu'", got=shown(device),
                          remedy="Build the layer and call to('cuda')")  # fmt: skip
    return backend.float_dtype(np.float32 if dtype is None else dtype)


def uniform(rng: np.random.Generator, shape: tuple[int, ...], bound: float, dtype: Any) -> np.ndarray:
    """Draw from U(-bound, bound). The same seed gives the same numbers, rounded, in both dtypes."""
    return _drawn(lambda count: rng.uniform(-bound, bound, count), shape, dtype)


def normal(rng: np.random.Generator, shape: tuple[int, ...], deviation: float, dtype: Any) -> np.ndarray:
    """Draw from N(0, deviation²), the same numbers, rounded, in both dtypes."""
    return _drawn(lambda count: rng.normal(0.0, deviation, count), shape, dtype)


def _drawn(draw: Callable[[int], np.ndarray], shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Draw in portions: the same numbers, without an array of float64 of the whole size."""
    _check_size(shape)
    array = np.empty(shape, dtype)
    flat = array.reshape(-1)
    for begin in range(0, flat.size, _PORTION):
        part = flat[begin : begin + _PORTION]
        part[...] = draw(part.size)
    return array


_PORTION = 1 << 16


def full(shape: tuple[int, ...], value: float, dtype: Any) -> np.ndarray:
    """Return an array of one value."""
    _check_size(shape)
    return np.full(shape, value, dtype)


def _check_size(shape: tuple[int, ...]) -> None:
    if max(1, *shape) * math.prod(n or 1 for n in shape) > 2**60:  # NumPy counts bytes in 63 bits
        raise OptionError("A parameter is too large for any machine", expected="fewer than 2**60 elements", got=shape)


def fan_in_bound(fan_in: int) -> float:
    """Return ``1 / sqrt(fan_in)``, PyTorch's default bound for `Linear` and, with the hidden size, recurrent layers."""
    return 1.0 / math.sqrt(fan_in) if fan_in > 0 else 0.0


def checked_like(name: str, value: Any, param: Array, *, finite: bool = True) -> Array:
    """Check shape, dtype and, if `finite`, finiteness of `value`; return it in `param`'s namespace and dtype."""
    xp = backend.namespace(param)
    try:
        array = backend.asarray(name, value)
    except DTypeError:
        raise
    except (TypeError, ValueError) as error:  # a ragged list, say
        raise DTypeError(
            f"{name} is not an array", expected="an array", got=str(error), remedy="Pass what state_dict returned"
        ) from error
    if array.shape != param.shape:
        raise ShapeError(f"{name} has the wrong shape", expected=param.shape, got=tuple(array.shape),
                         remedy="Build the model with the arguments that the state was made with")  # fmt: skip
    if array.dtype != param.dtype and not (param.dtype.kind == "f" and backend.is_half(value)):
        raise DTypeError(f"{name} has the wrong dtype", expected=param.dtype, got=array.dtype,
                         remedy=_dtype_remedy(array.dtype, param.dtype))  # fmt: skip
    array = backend.as_namespace(array, xp).astype(param.dtype, copy=False)  # exact: of half precision
    if finite and not bool(xp.isfinite(array).all()):  # synchronize!
        raise NonFiniteError(f"{name} holds NaN or infinity", expected="finite weights",
                             got=f"{int((~xp.isfinite(array)).sum())} of {array.size} values not finite",
                             remedy="Load the last good checkpoint")  # fmt: skip
    return array


# A layer's arrays, and the layers inside it. Once an array has a name, its replacement must have the same shape, dtype
# and device.
