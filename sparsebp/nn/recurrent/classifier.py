"""SequenceClassifier: a recurrent layer, its last hidden state, and a linear head."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from sparsebp.core.arguments import forward_of
from sparsebp.core.errors import OptionError, ShapeError
from sparsebp.core.shortcuts import belongs
from sparsebp.core.types import Array
from sparsebp.nn.gradients import Gradients, Shared, gradients_of
from sparsebp.nn.layer import Layer, check_gy
from sparsebp.nn.layers.linear import Linear
from sparsebp.nn.recurrent.recurrent import Recurrent
from sparsebp.nn.recurrent.tape import RecurrentSaved


class ClassifierSaved(NamedTuple):
    """What both parts saved."""

    rnn: RecurrentSaved
    head: Array


class SequenceClassifier(Layer):
    """Classify a sequence by the last layer's last hidden state; with two directions, by both of them side by side.

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

    def __init__(self, rnn: Recurrent, head: Linear) -> None:
        super().__init__()
        if not isinstance(rnn, Recurrent) or not isinstance(head, Linear):
            raise OptionError("A part of the classifier is of another kind",
                              expected="an RNN, GRU or LSTM, and a Linear",
                              got=f"{type(rnn).__name__}, {type(head).__name__}",
                              remedy="Pass SequenceClassifier(GRU(…), Linear(…))")  # fmt: skip
        width = rnn.directions * rnn.output_size
        if head.in_features != width:
            raise ShapeError("The head does not fit the recurrent layer", expected=f"in_features = {width}",
                             got=head.in_features, remedy=f"Pass Linear({width}, classes)")  # fmt: skip
        self.rnn, self.head = rnn, head
        self.children = {"rnn": rnn, "head": head}

    def forward(self, x: Array, lengths: Any = None) -> tuple[Array, ClassifierSaved]:
        """Return logits (B, classes) for x (T, B, input_size), or batch first if the recurrent layer is."""
        if belongs(self.rnn, "forward_time_major"):
            _, rnn_saved = self.rnn.forward_time_major(x, lengths=lengths)
        else:
            _, rnn_saved = forward_of(self.rnn, x, **({} if lengths is None else {"lengths": lengths}))
        states = rnn_saved.h_n[-self.rnn.directions :]
        features = states.transpose(1, 0, 2).reshape(states.shape[1], -1)
        logits, head_saved = forward_of(self.head, features)
        return logits, ClassifierSaved(rnn_saved, head_saved)

    def gradients(self, gy: Array, saved: ClassifierSaved) -> Gradients:
        """Return the gradients: through the head, the last states, and back through time."""
        xp = check_gy(gy, (saved.head.shape[0], self.head.out_features), saved.head.dtype, saved.head)
        head = gradients_of(self.head, gy, saved.head)

        def of_rnn() -> Gradients:
            directions, size = self.rnn.directions, self.rnn.output_size
            grad_h_n = xp.zeros_like(saved.rnn.h_n)
            grad_h_n[-directions:] = head.input_grad().reshape(-1, directions, size).transpose(1, 0, 2)
            return gradients_of(self.rnn, None, saved.rnn, grad_h_n=grad_h_n)

        rnn = Shared(of_rnn, xp)
        return Gradients(self, gy, saved, lambda: rnn().input_grad(), lambda: {"rnn": rnn(), "head": head})

    def choices(self, saved: ClassifierSaved, prefix: str = "") -> Iterator[tuple[str, str, str]]:
        """Yield the recurrent layer's."""
        if not belongs(self.rnn, "choices"):
            return iter(())
        return self.rnn.choices(saved.rnn, f"{prefix}.rnn" if prefix else "rnn")

    @property
    def batch_axes(self) -> tuple[int, int]:  # type: ignore[override]
        """As the recurrent layer has it; logits are batch first."""
        return self.rnn.batch_axes[0], 0
