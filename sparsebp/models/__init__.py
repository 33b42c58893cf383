"""MODELS: the convolutional networks of the papers, and a small Transformer, as chains of layers."""

from sparsebp.models.networks import densenet, lenet5, mobilenetv2, vgg11
from sparsebp.models.transformer import transformer_classifier

__all__ = ["densenet", "lenet5", "mobilenetv2", "transformer_classifier", "vgg11"]


def __dir__() -> list[str]:
    return sorted(__all__)
