"""SequenceClassifier: a recurrent layer, its last hidden state, and a linear head."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from sparsebp.core.check import Array
from sparsebp.core.errors import OptionError, ShapeError
from sparsebp.core.shortcuts import forward_of
from sparsebp.nn.gradients import Gradients, Shared, gradients_of
from sparsebp.nn.layer import Layer, check_gy, check_layer
from sparsebp.nn.linear import Linear
from sparsebp.nn.recurrent.layers import Recurrent
from sparsebp.nn.recurrent.saved import RecurrentSaved


class ClassifierSaved(NamedTuple):
    """Saved by both parts."""

    rnn: RecurrentSaved
    head: Array


class SequenceClassifier(Layer):
    """Classify a sequence by the last layer's last hidden state; with two directions, by both states side by side.

    Parameters
    ----------
    rnn
        An `RNN`, `GRU` or `LSTM`.
    head
        A `Linear` from directions · output_size to the number of classes.

    Notes
    -----
    Parameters are named ``rnn.*`` and ``head.*``. No gradient arrives at the steps' outputs, so none is allocated.
    """

    replayable = True
    joins_steps = True
    rnn: Recurrent
    head: Linear

    def __init__(self, rnn: Recurrent, head: Linear) -> None:
        super().__init__()
        self.children |= {"rnn": check_layer("rnn", rnn), "head": check_layer("head", head)}
        self._parts()

    def _parts(self) -> tuple[Recurrent, Linear]:
        """Return both parts, checked: one may have been replaced."""
        rnn: Any = self.children["rnn"]
        head: Any = self.children["head"]
        if not isinstance(rnn, Recurrent) or not isinstance(head, Linear):
            raise OptionError("A part of the classifier is of another kind",
                              expected="an RNN, GRU or LSTM, and a Linear",
                              got=f"{type(rnn).__name__}, {type(head).__name__}")  # fmt: skip
        width = rnn.directions * rnn.output_size
        if head.in_features != width:
            raise ShapeError("The head does not fit the recurrent layer", expected=f"in_features = {width}",
                             got=head.in_features, remedy=f"Pass Linear({width}, classes)")  # fmt: skip
        return rnn, head

    def forward(self, x: Array, lengths: Any = None) -> tuple[Array, ClassifierSaved]:
        """Return logits (B, classes) for x (T, B, input_size), or batch first if the recurrent layer is."""
        rnn, head = self._parts()
        if "forward_time_major" in rnn.valid_shortcuts:
            _, rnn_saved = rnn.forward_time_major(x, lengths=lengths)
        else:
            _, rnn_saved = forward_of(rnn, x, **({} if lengths is None else {"lengths": lengths}))
        states = rnn_saved.last[0][-rnn.directions :]
        features = states[0] if len(states) == 1 else states.transpose(1, 0, 2).reshape(states.shape[1], -1)
        logits, head_saved = forward_of(head, features)
        return logits, ClassifierSaved(rnn_saved, head_saved)

    def gradients(self, gy: Array, saved: ClassifierSaved) -> Gradients:
        """Return the gradients: through the head, the last states, and back through time."""
        rnn: Any = self.children["rnn"]
        linear: Any = self.children["head"]
        xp = check_gy(gy, (saved.head.shape[0], linear.out_features), saved.head.dtype, saved.head)
        head = gradients_of(linear, gy, saved.head)

        def at_h_n() -> Array:
            at_last = head.input_grad().reshape(-1, rnn.directions, rnn.output_size).transpose(1, 0, 2)
            if rnn.num_layers == 1:
                return xp.ascontiguousarray(at_last)
            found = xp.zeros(saved.rnn.h_n.shape, saved.head.dtype)
            found[-rnn.directions :] = at_last
            return found

        if "gradients_at_last" in rnn.valid_shortcuts:  # with a lock of its own
            found = rnn.gradients_at_last(saved.rnn, at_h_n)
            return Gradients(self, gy, saved, found.input_grad, lambda: {"rnn": found, "head": head})
        shared = Shared(lambda: gradients_of(rnn, None, saved.rnn, grad_h_n=at_h_n()), xp)
        return Gradients(self, gy, saved, lambda: shared().input_grad(), lambda: {"rnn": shared(), "head": head})

    def choices(self, saved: ClassifierSaved, prefix: str = "") -> Iterator[tuple[str, str, str]]:
        """Yield the recurrent layer's choices."""
        rnn, _ = self._parts()
        if "choices" not in rnn.valid_shortcuts:
            return iter(())
        return rnn.choices(saved.rnn, f"{prefix}.rnn" if prefix else "rnn")

    @property
    def batch_axes(self) -> tuple[int, int]:  # type: ignore[override]
        """As the recurrent layer has it; logits are batch first."""
        return self.children["rnn"].batch_axes[0], 0
