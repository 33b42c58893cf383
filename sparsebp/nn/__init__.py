"""Layers and losses; names, arguments, parameter shapes and state_dict keys as in torch.nn."""

from sparsebp.nn import init
from sparsebp.nn.adaptive_pool import AdaptiveAvgPool1d, AdaptiveAvgPool2d
from sparsebp.nn.avg_pool import AvgPool1d, AvgPool2d
from sparsebp.nn.batch_norm import BatchNorm2d
from sparsebp.nn.classifier import SequenceClassifier
from sparsebp.nn.concat import Concat
from sparsebp.nn.conv import Conv1d, Conv2d, Conv3d
from sparsebp.nn.conv_transpose import ConvTranspose1d, ConvTranspose2d, ConvTranspose3d
from sparsebp.nn.cross_entropy import CrossEntropyLoss
from sparsebp.nn.dropout import Dropout
from sparsebp.nn.elu import ELU
from sparsebp.nn.flatten import Flatten
from sparsebp.nn.gelu import GELU
from sparsebp.nn.gradients import Back, Gradients, value_and_grad
from sparsebp.nn.gru import GRU, GRUCell
from sparsebp.nn.hardtanh import Hardtanh
from sparsebp.nn.identity import Identity
from sparsebp.nn.layer import Layer
from sparsebp.nn.layer_norm import LayerNorm
from sparsebp.nn.leaky_relu import LeakyReLU
from sparsebp.nn.linear import Linear
from sparsebp.nn.max_pool import MaxPool1d, MaxPool2d
from sparsebp.nn.mse import MSELoss
from sparsebp.nn.pruning import PruneReport, prune
from sparsebp.nn.relu import ReLU
from sparsebp.nn.residual import Residual
from sparsebp.nn.rnn import RNN, RNNCell
from sparsebp.nn.sequential import Sequential
from sparsebp.nn.sigmoid import Sigmoid
from sparsebp.nn.silu import SiLU
from sparsebp.nn.softmax import Softmax
from sparsebp.nn.softplus import Softplus
from sparsebp.nn.tanh import Tanh

__all__ = [
    "ELU",
    "GELU",
    "GRU",
    "RNN",
    "AdaptiveAvgPool1d",
    "AdaptiveAvgPool2d",
    "AvgPool1d",
    "AvgPool2d",
    "Back",
    "BatchNorm2d",
    "Concat",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "CrossEntropyLoss",
    "Dropout",
    "Flatten",
    "GRUCell",
    "Gradients",
    "Hardtanh",
    "Identity",
    "Layer",
    "LayerNorm",
    "LeakyReLU",
    "Linear",
    "MSELoss",
    "MaxPool1d",
    "MaxPool2d",
    "PruneReport",
    "RNNCell",
    "ReLU",
    "Residual",
    "SequenceClassifier",
    "Sequential",
    "SiLU",
    "Sigmoid",
    "Softmax",
    "Softplus",
    "Tanh",
    "init",
    "prune",
    "value_and_grad",
]
