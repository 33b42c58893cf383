"""A layer's arrays by name: what takes an array's place must be like it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from sparsebp import backend
from sparsebp.core.errors import DTypeError, LayoutError, OptionError
from sparsebp.core.types import Array


class NamedArrays(dict[str, Array]):
    """Parameters or buffers of a layer. Once there, an array is replaced by one of its shape, dtype and device only.

    So whatever a layer computes with fits the layer; a bias of shape (1,) in place of one of (n,) would be broadcast.

    Raises
    ------
    DeviceError, DTypeError, ShapeError, LayoutError
        On assignment, if it is no such array; `sparsebp.nn.Layer.to` changes dtype and device of a whole layer.
    OptionError
        On removal: a layer without a bias is built with ``bias=False``.
    """

    def __init__(self, arrays: Mapping[str, Array] | Iterable[tuple[str, Array]] = ()) -> None:
        super().__init__()
        self.update(arrays)

    def __setitem__(self, name: str, array: Array) -> None:
        old = self.get(name)
        if array is None:
            raise DTypeError(f"{name} is no array", expected="an array", got=None, remedy="Pass an array")
        if array is not old:
            backend.namespace(array)
            if old is not None:
                backend.namespace(array, old)
                backend.check_array(name, array, dtype=old.dtype, shape=old.shape)
            if backend.is_host(backend.namespace(array)) and not array.flags.writeable:
                raise LayoutError(f"{name} is read-only", expected="an array that can be written to",
                                  got="one that cannot", remedy=f"Pass {name}.copy()")  # fmt: skip
        super().__setitem__(name, array)

    @classmethod
    def instead(cls, old: Mapping[str, Array], new: Mapping[str, Array]) -> NamedArrays:
        """Return `new`, all of it in the place of `old`."""
        arrays = cls(old)
        arrays.update(new)
        return arrays if arrays.keys() == new.keys() else arrays._kept()

    @staticmethod
    def convert(arrays: dict[str, Array], name: str, array: Array) -> None:
        """Put an array of another dtype or device in the place of one: of all of a layer's, so that they stay alike."""
        dict.__setitem__(arrays, name, array)

    def update(self, *arrays: Any, **named: Array) -> None:
        """Assign every one of them."""
        for name, array in dict(*arrays, **named).items():
            self[name] = array

    def __ior__(self, arrays: Any) -> NamedArrays:  # type: ignore[override, misc]
        self.update(arrays)
        return self

    def setdefault(self, name: str, array: Array = None) -> Array:
        """Assign it if there is none of that name, and return what is there."""
        if name not in self:
            self[name] = array
        return self[name]

    def _kept(self, *_: Any) -> NoReturn:
        """Refuse to remove an array."""
        raise OptionError("The arrays of a layer cannot be removed", expected="a layer with all of its arrays",
                          got="a removal", remedy="Build the layer without it, with bias=False say")  # fmt: skip

    __delitem__ = pop = popitem = clear = _kept

    def __reduce__(self) -> tuple[Any, ...]:
        return NamedArrays, (dict(self),)
