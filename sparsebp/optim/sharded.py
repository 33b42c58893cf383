"""An optimizer that updates pieces of its parameters and holds only their state."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from sparsebp.core import masks
from sparsebp.core.absent import is_absent
from sparsebp.core.check import Array
from sparsebp.core.errors import OptionError
from sparsebp.optim.optimizer import Optimizer


class PieceOptimizer:
    """The part of an optimizer that updates one piece of each of some parameters; all rules go element by element."""

    # The buffers move here: until `restore`, `optimizer` has options and counts of updates only.
    # pieces: begin and end of the piece of every parameter that has one, in elements.
    # buffers: the pieces' parts, one-dimensional, by kind and parameter.
    # kinds: the parameters of every kind of buffer; of some, the state is on other ranks.

    def __init__(self, optimizer: Optimizer, pieces: Mapping[str, tuple[int, int]]) -> None:
        if not isinstance(optimizer, Optimizer) or optimizer.rule is None:  # an own update may need whole parameters
            raise OptionError("The optimizer cannot be parted", expected="one of sparsebp.optim",
                              got=type(optimizer).__name__, remedy="Use one of them, or leave sharded out")  # fmt: skip
        optimizer._options_now()  # its groups, checked before their state moves
        self.optimizer, self.pieces = optimizer, dict(pieces)
        self._part = self._parted()
        self.kinds: Mapping[str, Sequence[str]]
        self._absent: Mapping[str, Mapping[str, Array]]
        moved = optimizer.buffers
        if isinstance(moved, Moved):
            if moved.owner.pieces != self.pieces:
                moved.refuse()
            self.kinds, self._absent = moved.owner.kinds, moved.owner._absent
            self._part, optimizer.buffers = moved.owner._part, Moved(self)
        else:
            self.kinds = {kind: list(arrays) for kind, arrays in moved.items()}
            self._absent = {
                kind: {name: a for name, a in arrays.items() if is_absent(a)} for kind, arrays in moved.items()
            }
            self.take()

    def _parted(self) -> Optimizer | None:
        groups = self.optimizer.param_groups
        options = [{key: value for key, value in group.items() if key not in _OTHER} for group in groups]
        params = [
            {name: _flat(array, *self.pieces[name]) for name, array in group["params"].items() if name in self.pieces}
            for group in groups
        ]
        if not any(params):
            return None
        part = copy.copy(self.optimizer)
        given = [{"params": p, **o} for p, o in zip(params, options, strict=True)]
        Optimizer.__init__(part, given, options[0])
        return part

    def clear(self, name: str) -> None:
        """Write 0 into the piece of a parameter where it is pruned."""
        mask = masks.mask_of(self.optimizer.params[name])
        if mask is not None:
            piece = self._part.params[name]  # type: ignore[union-attr]
            piece[...] = masks.kept(piece, _flat(mask, *self.pieces[name]))

    def take(self) -> None:
        """Move the state here, unless it is here already."""
        optimizer, whole = self.optimizer, self.optimizer.buffers
        if isinstance(whole, Moved):
            return
        optimizer.buffers = Moved(self)
        optimizer._columns = Moved(self)  # type: ignore[assignment]
        for kind, arrays in self.buffers.items():
            for name in arrays:  # one by one: most of the memory is free again before the last is copied
                arrays[name] = _flat(whole[kind].pop(name), *self.pieces[name]).copy()
        self._buffers_replaced()
        if self._part is not None:
            self._part._steps[:] = [optimizer.steps[name] for name in self._part.params]

    def expand(self, kind: str, name: str, whole: Array) -> None:
        """Let a piece be a part of the whole array, which has its values."""
        if name in self.pieces:
            self.buffers[kind][name] = _flat(whole, *self.pieces[name])

    def restore(self, buffers: Mapping[str, Mapping[str, Array]]) -> None:
        """Give the optimizer its whole state back; `take` moves it here again."""
        optimizer = self.optimizer
        optimizer.buffers = {kind: {**self._absent[kind], **arrays} for kind, arrays in buffers.items()}
        optimizer._columns = optimizer._columns_of(optimizer.buffers)
        self._buffers_replaced()

    def _buffers_replaced(self) -> None:
        if self._part is not None:
            self._part._columns = self._part._columns_of(self.buffers)

    @property
    def parted(self) -> bool:
        """Whether the state is here, and the optimizer has none."""
        return isinstance(self.optimizer.buffers, Moved)

    @property
    def buffers(self) -> dict[str, dict[str, Array]]:
        """The state of the pieces."""
        return {} if self._part is None else self._part.buffers

    @property
    def params(self) -> Mapping[str, Array]:
        """The whole parameters."""
        return self.optimizer.params

    @property
    def last_update(self) -> dict[str, int]:
        """The number of the update that each parameter had last."""
        return self.optimizer.last_update

    def begin(self) -> PieceUpdate:
        """Open one update with the optimizer's options, see `Optimizer.begin`."""
        self.optimizer._options_now()  # checked
        if self._part is not None:
            for mine, group in zip(self._part.param_groups, self.optimizer.param_groups, strict=True):
                mine.update((key, value) for key, value in group.items() if key not in _OTHER)
        return PieceUpdate(self)


class PieceUpdate:
    """An update of pieces that has begun."""

    def __init__(self, owner: PieceOptimizer) -> None:
        self._owner = owner
        self._update: Any = None if owner._part is None else owner._part.begin()
        self._open = dict.fromkeys(owner.optimizer.params)

    @property
    def remaining(self) -> tuple[str, ...]:
        """Names of the parameters that have not been updated yet, in the optimizer's order."""
        return tuple(self._open)

    def apply(self, names: Sequence[str], grads: Mapping[str, Array]) -> None:
        """Update the pieces of the parameters `names`, as `Update.apply` does."""
        # names: All that are updated, those without a piece as well.
        # grads: The gradients of the pieces, one-dimensional.
        if grads:
            self._update.apply(grads)
            for name in grads if masks.owners else ():
                self._owner.clear(name)
        rows = [self._owner.optimizer._rows[name] for name in names]
        self._owner.optimizer._steps[rows] += 1
        for name in names:
            del self._open[name]


class Moved(dict[str, Any]):
    """Takes the place of an optimizer's buffers; reading one raises an error that says where they are."""

    def __init__(self, owner: PieceOptimizer) -> None:
        super().__init__()
        self.owner = owner

    def refuse(self, *_: Any) -> NoReturn:
        """Raise `OptionError`."""
        raise OptionError("The optimizer's state is in pieces on several ranks", expected="its whole state",
                          got=f"pieces of {len(self.owner.pieces)} parameters on this one", remedy="Call gather_state "
                          "of the executor that parted it, on all ranks; after an error build a new "
                          "optimizer")  # fmt: skip

    def __iter__(self) -> Iterator[str]:
        self.refuse()

    __getitem__ = get = items = keys = values = setdefault = refuse


_OTHER = ("params", "initial_lr")
"""Entries of a group that are not options."""


def _flat(array: Array, begin: int, end: int) -> Array:
    return array.reshape(-1)[begin:end]
