"""The arrays that ranks send each other in one step: activations with the data, gradients against it.

A receiver must know how large an array will be. What a stage returns for a micro-batch follows from the input of the
model alone, which every rank has: so both ends of a message know whether such an input has been there before. If not,
the array's shape goes ahead of it, and is kept.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Sequence
from types import ModuleType
from typing import NamedTuple

import numpy as np

from sparsebp import backend
from sparsebp.core.errors import ShapeError
from sparsebp.core.types import Array
from sparsebp.distributed.transport import Handle, Transport
from sparsebp.schedule.lowering.programs import Message

_MOST_AXES = 32
_DTYPES = (np.dtype(np.float32), np.dtype(np.float64))


class _Form(NamedTuple):
    shape: tuple[int, ...]
    dtype: np.dtype


class Mail:
    """Sends and receives the messages of a rank's steps.

    Parameters
    ----------
    transport
        Carries them.
    xp
        The namespace of the model's arrays.

    Notes
    -----
    In a step with an input of a new shape, a receive begins when an array is waited for, behind all that its sender has
    sent before, and no send is waited for before the step's end. The order of the computations alone then keeps the
    ranks from waiting for each other for ever, and `sparsebp.schedule.validate` has seen to that.
    """

    def __init__(self, transport: Transport, xp: ModuleType) -> None:
        self._transport, self._xp = transport, xp
        self._carrier = xp if transport.on_device else np
        self._forms: dict[tuple[int, Hashable], _Form] = {}
        self._known: set[Hashable] = set()
        self._inputs: Sequence[Hashable] = ()
        self._posted: dict[Message, tuple[Handle, Array]] = {}
        self._due: defaultdict[int, deque[Message]] = defaultdict(deque)  # by sender, in their order: not begun yet
        self._sent: dict[Message, list[tuple[Handle, Array]]] = {}
        self._defers = False

    def begin(self, inputs: Sequence[Hashable]) -> None:
        """Begin a step.

        Parameters
        ----------
        inputs
            What tells the shapes of each micro-batch's input: equal where they are.
        """
        self._inputs = inputs
        self._defers = not self._known.issuperset(inputs)
        self._posted.clear()
        self._due.clear()
        self._sent.clear()

    def post(self, message: Message) -> None:
        """Begin to receive, if it is known how much."""
        if self._defers:
            self._due[message.sender].append(message)
        else:
            self._receive(message, self._forms[self._key(message)])

    def take(self, message: Message) -> Array:
        """Return the array of a message when it is there.

        Raises
        ------
        TransportError
            It will never be, or is another one than was expected.
        """
        while message not in self._posted:
            first = self._due[message.sender].popleft()
            key = self._key(first)
            if first.source.kind == "F" and key[1] not in self._known:
                self._forms[key] = self._header(first)
            self._receive(first, self._forms[key])  # of a gradient: that of the output that this rank has sent
        handle, array = self._posted.pop(message)
        handle.wait()
        return backend.as_namespace(array, self._xp)

    def send(self, message: Message, array: Array) -> None:
        """Begin to send.

        Raises
        ------
        ShapeError
            The array has another shape or dtype than before for an input of the same shape, or one that cannot be sent.
        """
        key, form = self._key(message), _Form(array.shape, array.dtype)
        sends = self._sent.setdefault(message, [])
        if message.source.kind == "F" and key[1] not in self._known:
            self._forms[key] = form
            header = _written(form)
            sends.append((self._transport.isend(self._carried(header), message.receiver, message.tag), header))
        elif self._forms[key] != form:
            raise ShapeError(
                f"What {message.source} returns has another shape than before, or than what it is a gradient of",
                expected=_shown(self._forms[key]), got=_shown(form), remedy="Let shapes follow from the input's alone",
            )  # fmt: skip
        carried = self._carried(array)
        sends.append((self._transport.isend(carried, message.receiver, message.tag), carried))

    def sent(self, message: Message) -> None:
        """Wait until a message has left, and give its array up."""
        if not self._defers:
            self._leave(message)

    def end(self) -> None:
        """Wait until all messages have left: the end of a step."""
        for message in list(self._sent):
            self._leave(message)
        self._known.update(self._inputs)

    def _leave(self, message: Message) -> None:
        for handle, _ in self._sent.pop(message, ()):
            handle.wait()

    def _key(self, message: Message) -> tuple[int, Hashable]:
        return message.boundary, self._inputs[message.source.microbatch or 0]

    def _receive(self, message: Message, form: _Form) -> None:
        out = self._carrier.empty(form.shape, form.dtype)
        self._posted[message] = self._transport.irecv(out, message.sender, message.tag), out

    def _header(self, message: Message) -> _Form:
        header = self._carrier.empty(2 + _MOST_AXES, np.float64)
        self._transport.irecv(header, message.sender, message.tag).wait()
        kind, axes, *shape = map(int, backend.to_host(header))  # synchronize!
        return _Form(tuple(shape[:axes]), _DTYPES[kind])

    def _carried(self, array: Array) -> Array:
        """Return an array as the transport takes it."""
        return self._carrier.ascontiguousarray(backend.as_namespace(array, self._carrier))


def _written(form: _Form) -> np.ndarray:
    if form.dtype not in _DTYPES or len(form.shape) > _MOST_AXES:
        raise ShapeError("What a stage returns cannot be sent to another rank", got=_shown(form),
                         expected=f"float32 or float64, at most {_MOST_AXES} axes",
                         remedy="Keep this stage and the next one on one rank")  # fmt: skip
    header = np.zeros(2 + _MOST_AXES)
    header[:2] = _DTYPES.index(form.dtype), len(form.shape)
    header[2 : 2 + len(form.shape)] = form.shape
    return header


def _shown(form: _Form) -> str:
    return f"{form.dtype} {form.shape}"
