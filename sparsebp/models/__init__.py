"""MODELS: the convolutional networks of the papers, as chains of layers."""

from sparsebp.models.networks import densenet, lenet5, mobilenetv2, vgg11

__all__ = ["densenet", "lenet5", "mobilenetv2", "vgg11"]
