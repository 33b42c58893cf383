"""Skip connections between any two layers of a chain: `Stash` keeps an activation, `Pop` joins it to a later one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from sparsebp.core.check import Array, check_choice
from sparsebp.core.errors import OptionError, ShapeError
from sparsebp.core.packed import arrays_of, names_of, never_joined, no_scan, packed
from sparsebp.nn.branches import add_up, side_by_side
from sparsebp.nn.layer import Layer, check_gy, check_input


class Stash(Layer):
    """Return the input, and keep it for the `Pop` of this name, further on in the same chain.

    The layers of a `Sequential`, inner ones included, between the two do not see it. They may be stages of a pipeline
    on several ranks: the array is sent along with the activations, and its gradient comes back with theirs and is added
    here.

    Parameters
    ----------
    name
        Of two stashes of one name that wait, `Pop` takes the later one.

    See Also
    --------
    Residual, Concat : connections around one layer, which stays on one rank and which a scan can go through.

    Notes
    -----
    After Kim et al., "torchgpipe", 2020, §3.3.

    Examples
    --------
    Three stages; what the first one returns goes past the second:

    >>> from sparsebp import nn
    >>> model = nn.Sequential(
    ...     nn.Stage(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Stash("fine"), nn.MaxPool2d(2)),
    ...     nn.Stage(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Upsample(scale_factor=2)),
    ...     nn.Stage(nn.Pop("fine", "concat"), nn.Conv2d(16, 3, 1)),
    ... )
    """

    replayable = True
    stepwise = True
    takes_stashed = True

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = _checked_name(name)

    def forward(self, x: Array) -> tuple[Any, None]:
        """Return x, and x again among the stashed arrays."""
        at, *others = arrays_of(x)
        check_input(at)
        return packed((*names_of(x), self.name), (at, *others, at)), None

    def input_grad(self, gy: Array, saved: None) -> Any:
        """Return the sum of the gradients at both."""
        if names_of(gy)[-1:] != (self.name,):
            raise never_joined(self.name)
        at, *others, own = arrays_of(gy)
        return packed(names_of(gy)[:-1], (add_up([at, own]), *others))

    def jacobian_t(self, saved: Any) -> Any:
        """Refuse: a chain with connections past its layers has no product of Jacobians."""
        raise no_scan()


class PopSaved(NamedTuple):
    """The place of the stashed array among those that waited, the dtype, and the shapes of both."""

    place: int
    dtype: np.dtype
    shape: tuple[int, ...]
    stashed: tuple[int, ...]


class Pop(Layer):
    """Join the input and the activation that the `Stash` of this name has kept.

    Parameters
    ----------
    name
        That of the `Stash`, earlier in the chain.
    join
        ``"sum"``: x + stashed, of one shape. ``"concat"``: [x, stashed] along the channels, the axis after the batch.
    """

    replayable = True
    takes_stashed = True

    def __init__(self, name: str, join: str = "sum") -> None:
        super().__init__()
        self.name, self.join = _checked_name(name), check_choice("join", join, ("sum", "concat"))

    @property
    def stepwise(self) -> bool:
        """Whether each step of a sequence is joined by itself."""
        return not self._joins_channels

    @property
    def _joins_channels(self) -> bool:
        return self.join == "concat"

    def _outline(self, array: Array) -> tuple[Any, ...]:
        """Return in what both must agree."""
        shape = array.shape
        if self._joins_channels:
            check_input(array, name="The stashed array or x", shape=(None, None, *shape[2:]))
            shape = shape[:1] + shape[2:]
        return array.dtype, shape

    def forward(self, x: Array) -> tuple[Any, PopSaved]:
        """Return both joined.

        Raises
        ------
        OptionError
            No stash of this name waits.
        ShapeError
            The two do not fit each other.
        """
        names, (at, *waiting) = names_of(x), arrays_of(x)
        if self.name not in names:
            raise _nothing_stashed(self.name, names)
        place = max(number for number, name in enumerate(names) if name == self.name)
        xp, stashed = check_input(at), waiting.pop(place)
        if self._outline(at) != self._outline(stashed):
            but = ", but for the channels" if self._joins_channels else ""
            raise ShapeError(f"The input of Pop({self.name!r}) does not fit what is stashed",
                             expected=f"{stashed.dtype} {stashed.shape}{but}",
                             got=f"{at.dtype} {at.shape}")  # fmt: skip
        saved = PopSaved(place, at.dtype, at.shape, stashed.shape)
        y = side_by_side(xp, [at, stashed]) if self._joins_channels else add_up([at, stashed])
        return packed(names[:place] + names[place + 1 :], (y, *waiting)), saved

    def input_grad(self, gy: Array, saved: PopSaved) -> Any:
        """Return the gradients at both."""
        names, (at, *others) = names_of(gy), arrays_of(gy)
        own, channels = at, saved.shape[1] if self._joins_channels else 0
        whole = (saved.shape[0], channels + saved.stashed[1], *saved.shape[2:]) if channels else saved.shape
        xp = check_gy(at, whole, saved.dtype)
        if channels:
            at, own = xp.ascontiguousarray(at[:, :channels]), xp.ascontiguousarray(at[:, channels:])
        others.insert(saved.place, own)
        return packed((*names[: saved.place], self.name, *names[saved.place :]), (at, *others))

    def jacobian_t(self, saved: Any) -> Any:
        """Refuse, as `Stash`."""
        raise no_scan()


def stashed_after(stages: Sequence[Any]) -> list[tuple[str, ...]]:
    """Return the names that wait for their `Pop` behind each stage of a model.

    Raises
    ------
    OptionError
        A `Pop` has no `Stash` before it, or a `Stash` no `Pop` behind it.
    """
    found, waiting = [], list[str]()
    for stage in stages:
        for _, layer in stage.modules() if hasattr(stage, "modules") else ():
            if isinstance(layer, Stash):
                waiting.append(layer.name)
            elif isinstance(layer, Pop):
                if layer.name not in waiting:
                    raise _nothing_stashed(layer.name, waiting)
                del waiting[max(number for number, one in enumerate(waiting) if one == layer.name)]
        found.append(tuple(waiting))
    if waiting:
        raise never_joined(waiting[-1])
    return found


def _nothing_stashed(name: str, waiting: Sequence[str]) -> OptionError:
    return OptionError(f"Nothing is stashed for Pop({name!r})", expected=f"Stash({name!r}) earlier in the chain",
                       got=", ".join(waiting) or "no stash")  # fmt: skip


def _checked_name(name: str) -> str:
    if not isinstance(name, str) or not name:
        raise OptionError("A stash needs a name", expected="a string", got=repr(name))
    return name
