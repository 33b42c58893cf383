"""Sequential: a chain of layers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sparsebp.errors import OptionError
from sparsebp.nn.layer import Layer
from sparsebp.types import Array


@dataclass
class SequentialSaved:
    """What the layers saved, and the gradients between them for the gy that was last asked for."""

    layers: list[Any]
    gy: Array | None = None
    between: dict[int, Array] = field(default_factory=dict)


class Sequential(Layer):
    """Layers one after the other, as `torch.nn.Sequential`; children are named ``"0"``, ``"1"``, …

    The gradients between the layers are computed once and shared by `input_grad` and `weight_grad` of the same `gy`
    object. `weight_grad` does not compute the input gradient of the first layer that has parameters.
    """

    def __init__(self, *layers: Layer) -> None:
        super().__init__()
        if not layers:
            raise OptionError(
                "Sequential has no layers", expected="at least one", got="none", remedy="Use Identity() for no change"
            )
        self.children = {str(i): layer for i, layer in enumerate(layers)}

    def __len__(self) -> int:
        return len(self.children)

    def __getitem__(self, index: int) -> Layer:
        return list(self.children.values())[index]

    def forward(self, x: Array) -> tuple[Array, SequentialSaved]:
        """Run the chain."""
        saved = SequentialSaved([])
        for layer in self.children.values():
            x, layer_saved = layer.forward(x)
            saved.layers.append(layer_saved)
        return x, saved

    def input_grad(self, gy: Array, saved: SequentialSaved) -> Array:
        """Run the chain of I; linear in the number of layers."""
        return self._grad_at(0, gy, saved)

    def weight_grad(self, gy: Array, saved: SequentialSaved) -> dict[str, Array]:
        """Return every layer's weight gradients under dotted names."""
        grads: dict[str, Array] = {}
        for i in reversed(range(len(self))):
            if self[i].parameters():
                for name, grad in self[i].weight_grad(self._grad_at(i + 1, gy, saved), saved.layers[i]).items():
                    grads[f"{i}.{name}"] = grad
        return {name: grads[name] for name in self.parameters()}

    def jacobian_t(self, saved: SequentialSaved) -> Any:
        """Return J₁ J₂ … J_L, the product of the layers' transposed Jacobians (its plans are cached by pattern)."""
        jacobians = [layer.jacobian_t(s) for layer, s in zip(self.children.values(), saved.layers, strict=True)]
        product = jacobians[-1]
        for jacobian in reversed(jacobians[:-1]):  # outputs are usually fewer than inputs, so start at the output
            product = jacobian @ product
        return product

    def _grad_at(self, index: int, gy: Array, saved: SequentialSaved) -> Array:
        """Return the gradient at the input of layer `index`, from the nearest one that is known."""
        if saved.gy is not gy:
            saved.gy, saved.between = gy, {len(self): gy}
        known = min(i for i in saved.between if i >= index)
        for i in reversed(range(index, known)):
            saved.between[i] = self[i].input_grad(saved.between[i + 1], saved.layers[i])
        return saved.between[index]
