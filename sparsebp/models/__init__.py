"""MODELS: the convolutional networks of the papers, as chains of layers."""

from sparsebp.models.densenet import densenet
from sparsebp.models.lenet import lenet5
from sparsebp.models.mobilenet import mobilenetv2
from sparsebp.models.vgg import vgg11

__all__ = ["densenet", "lenet5", "mobilenetv2", "vgg11"]
