"""Layers and losses; names, arguments, parameter shapes and state_dict keys as in torch.nn."""

from sparsebp.nn import init
from sparsebp.nn.activations.elu import ELU
from sparsebp.nn.activations.gelu import GELU
from sparsebp.nn.activations.hardtanh import Hardtanh
from sparsebp.nn.activations.leaky_relu import LeakyReLU
from sparsebp.nn.activations.relu import ReLU
from sparsebp.nn.activations.sigmoid import Sigmoid
from sparsebp.nn.activations.silu import SiLU
from sparsebp.nn.activations.softmax import Softmax
from sparsebp.nn.activations.softplus import Softplus
from sparsebp.nn.activations.tanh import Tanh
from sparsebp.nn.chain.concat import Concat
from sparsebp.nn.chain.residual import Residual
from sparsebp.nn.chain.sequential import Sequential
from sparsebp.nn.cross_entropy import CrossEntropyLoss
from sparsebp.nn.gradients import Back, Gradients, value_and_grad
from sparsebp.nn.layer import Layer
from sparsebp.nn.layers.adaptive_pool import AdaptiveAvgPool1d, AdaptiveAvgPool2d
from sparsebp.nn.layers.avg_pool import AvgPool1d, AvgPool2d
from sparsebp.nn.layers.batch_norm import BatchNorm2d
from sparsebp.nn.layers.conv import Conv1d, Conv2d, Conv3d
from sparsebp.nn.layers.conv_transpose import ConvTranspose1d, ConvTranspose2d, ConvTranspose3d
from sparsebp.nn.layers.dropout import Dropout
from sparsebp.nn.layers.flatten import Flatten
from sparsebp.nn.layers.identity import Identity
from sparsebp.nn.layers.layer_norm import LayerNorm
from sparsebp.nn.layers.linear import Linear
from sparsebp.nn.layers.max_pool import MaxPool1d, MaxPool2d
from sparsebp.nn.mse import MSELoss
from sparsebp.nn.pruning import PruneReport, prune
from sparsebp.nn.recurrent.classifier import SequenceClassifier
from sparsebp.nn.recurrent.gru import GRU, GRUCell
from sparsebp.nn.recurrent.rnn import RNN, RNNCell

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
