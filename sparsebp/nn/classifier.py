"""SequenceClassifier: a recurrent layer, its last hidden state, and a linear head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sparsebp import backend
from sparsebp.errors import ShapeError
from sparsebp.nn.layer import Layer, check_gy
from sparsebp.nn.linear import Linear
from sparsebp.nn.recurrent import Recurrent, RecurrentSaved
from sparsebp.types import Array


@dataclass
class ClassifierSaved:
    """What both parts saved, and the gradient at the last states for the gy that was last asked for."""

    rnn: RecurrentSaved
    head: Array
    gy: Array | None = None
    grad_h_n: Array | None = None


class SequenceClassifier(Layer):
    """Classify a sequence by the last layer's last hidden state; with two directions, by both of them side by side.

    Parameters
    ----------
    rnn
        An `RNN` or `GRU`.
    head
        A `Linear` from directions · hidden_size to the number of classes.

    Notes
    -----
    Parameters are named ``rnn.*`` and ``head.*``. No gradient arrives at the steps' outputs, so none is allocated.
    """

    def __init__(self, rnn: Recurrent, head: Linear) -> None:
        super().__init__()
        width = rnn.directions * rnn.hidden_size
        if head.in_features != width:
            raise ShapeError("The head does not fit the recurrent layer", expected=f"in_features = {width}",
                             got=head.in_features, remedy=f"Pass Linear({width}, classes)")  # fmt: skip
        self.rnn, self.head = rnn, head
        self.children = {"rnn": rnn, "head": head}

    def forward(self, x: Array, lengths: Any = None) -> tuple[Array, ClassifierSaved]:
        """Return logits (B, classes) for x (T, B, input_size), or batch first if the recurrent layer is."""
        _, rnn_saved = self.rnn.forward_time_major(x, lengths=lengths)
        states = rnn_saved.h_n[-self.rnn.directions :]
        features = states.transpose(1, 0, 2).reshape(states.shape[1], -1)
        logits, head_saved = self.head.forward(features)
        return logits, ClassifierSaved(rnn_saved, head_saved)

    def input_grad(self, gy: Array, saved: ClassifierSaved) -> Array:
        """I: the gradient at x."""
        return self.rnn.input_grad(None, saved.rnn, self._grad_h_n(gy, saved))

    def weight_grad(self, gy: Array, saved: ClassifierSaved) -> dict[str, Array]:
        """W: gradients of all parameters."""
        rnn = self.rnn.weight_grad(None, saved.rnn, self._grad_h_n(gy, saved))
        head = self.head.weight_grad(gy, saved.head)
        return {f"rnn.{name}": g for name, g in rnn.items()} | {f"head.{name}": g for name, g in head.items()}

    def jacobian_t(self, saved: ClassifierSaved) -> Any:
        """Return the transposed Jacobian (T · input_size) × classes, dense per sample: a backward pass a class."""
        from sparsebp.jacobians import TransposedJacobian
        from sparsebp.patterns import SparsityPattern

        xp = backend.namespace(saved.head)
        batch, classes = saved.head.shape[0], self.head.out_features
        columns = []
        for c in range(classes):
            gy = xp.zeros((batch, classes), dtype=saved.head.dtype)
            gy[:, c] = 1
            gx = self.input_grad(gy, saved)
            columns.append((gx if self.rnn.batch_first else gx.transpose(1, 0, 2)).reshape(batch, -1))
        data = xp.stack(columns, axis=2)  # (B, T·I, classes)
        rows = data.shape[1]
        flat = xp.ascontiguousarray(data.reshape(batch, rows * classes).T)
        return TransposedJacobian(SparsityPattern.dense(rows, classes), flat)

    def _grad_h_n(self, gy: Array, saved: ClassifierSaved) -> Array:
        """Return the gradient at h_n, the same object for the same gy, so that the scan is shared."""
        if saved.gy is not gy or saved.grad_h_n is None:
            xp = check_gy(gy, (saved.head.shape[0], self.head.out_features), saved.head.dtype, saved.head)
            directions, hidden = self.rnn.directions, self.rnn.hidden_size
            grad = self.head.input_grad(gy, saved.head).reshape(-1, directions, hidden).transpose(1, 0, 2)
            saved.grad_h_n = xp.zeros_like(saved.rnn.h_n)
            saved.grad_h_n[-directions:] = grad
            saved.gy = gy
        return saved.grad_h_n
