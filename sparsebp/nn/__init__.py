"""Layers and losses; names, arguments, parameter shapes and state_dict keys as in torch.nn."""

from sparsebp.nn import init
from sparsebp.nn.chain.concat import Concat
from sparsebp.nn.chain.residual import Residual
from sparsebp.nn.chain.sequential import Sequential
from sparsebp.nn.gradients import Back, Gradients, value_and_grad
from sparsebp.nn.layer import Layer
from sparsebp.nn.layers.activations import (
    ELU,
    GELU,
    Hardtanh,
    LeakyReLU,
    ReLU,
    Sigmoid,
    SiLU,
    Softplus,
    Tanh,
)
from sparsebp.nn.layers.attention import MultiheadAttention
from sparsebp.nn.layers.conv import Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d, ConvTranspose3d
from sparsebp.nn.layers.embedding import Embedding
from sparsebp.nn.layers.identity import Dropout, Flatten, Identity
from sparsebp.nn.layers.linear import Linear
from sparsebp.nn.layers.norm import BatchNorm2d, LayerNorm
from sparsebp.nn.layers.pool import (
    AdaptiveAvgPool1d,
    AdaptiveAvgPool2d,
    AvgPool1d,
    AvgPool2d,
    MaxPool1d,
    MaxPool2d,
)
from sparsebp.nn.layers.selu import SELU
from sparsebp.nn.layers.softmax import Softmax
from sparsebp.nn.layers.steps import MeanOverSteps, PositionalEmbedding
from sparsebp.nn.layers.transformer import TransformerEncoderLayer
from sparsebp.nn.losses import CrossEntropyLoss, MSELoss, NLLLoss
from sparsebp.nn.pruning import PruneReport, prune
from sparsebp.nn.recurrent.classifier import SequenceClassifier
from sparsebp.nn.recurrent.gru import GRU, GRUCell
from sparsebp.nn.recurrent.lstm import LSTM, LSTMCell
from sparsebp.nn.recurrent.rnn import RNN, RNNCell

__all__ = [
    "ELU",
    "GELU",
    "GRU",
    "LSTM",
    "RNN",
    "SELU",
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
    "Embedding",
    "Flatten",
    "GRUCell",
    "Gradients",
    "Hardtanh",
    "Identity",
    "LSTMCell",
    "Layer",
    "LayerNorm",
    "LeakyReLU",
    "Linear",
    "MSELoss",
    "MaxPool1d",
    "MaxPool2d",
    "MeanOverSteps",
    "MultiheadAttention",
    "NLLLoss",
    "PositionalEmbedding",
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
    "TransformerEncoderLayer",
    "init",
    "prune",
    "value_and_grad",
]
