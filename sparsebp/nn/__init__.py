"""Layers and losses; names, arguments, parameter shapes and state_dict keys as in torch.nn."""

from sparsebp.nn import init
from sparsebp.nn.activation import (
    ELU,
    GELU,
    SELU,
    Hardtanh,
    LeakyReLU,
    LogSoftmax,
    Mish,
    PReLU,
    ReLU,
    ReLU6,
    Sigmoid,
    SiLU,
    Softmax,
    Softplus,
    Tanh,
)
from sparsebp.nn.attention import (
    Embedding,
    MeanOverSteps,
    MultiheadAttention,
    PositionalEmbedding,
    TransformerEncoderLayer,
)
from sparsebp.nn.basic import Dropout, Dropout2d, Flatten, Identity, Unflatten, ZeroPad2d
from sparsebp.nn.conv import Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d, ConvTranspose3d
from sparsebp.nn.gradients import Back, Gradients, value_and_grad
from sparsebp.nn.init import draw_rows
from sparsebp.nn.layer import Layer, inference_mode
from sparsebp.nn.linear import Linear
from sparsebp.nn.linear_recurrent import LRU, MinGRU, MinLSTM
from sparsebp.nn.loss import BCEWithLogitsLoss, CrossEntropyLoss, L1Loss, MSELoss, NLLLoss, SmoothL1Loss
from sparsebp.nn.norm import BatchNorm1d, BatchNorm2d, GroupNorm, LayerNorm, RMSNorm
from sparsebp.nn.pool import AdaptiveAvgPool1d, AdaptiveAvgPool2d, AvgPool1d, AvgPool2d, MaxPool1d, MaxPool2d
from sparsebp.nn.pruning import PruneReport, prune
from sparsebp.nn.recurrent import GRU, LSTM, RNN, GRUCell, LSTMCell, RNNCell, SequenceClassifier
from sparsebp.nn.selective import SelectiveScan
from sparsebp.nn.sequential import Concat, Residual, Sequential, Stage

__all__ = [
    "ELU",
    "GELU",
    "GRU",
    "LRU",
    "LSTM",
    "RNN",
    "SELU",
    "AdaptiveAvgPool1d",
    "AdaptiveAvgPool2d",
    "AvgPool1d",
    "AvgPool2d",
    "BCEWithLogitsLoss",
    "Back",
    "BatchNorm1d",
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
    "Dropout2d",
    "Embedding",
    "Flatten",
    "GRUCell",
    "Gradients",
    "GroupNorm",
    "Hardtanh",
    "Identity",
    "L1Loss",
    "LSTMCell",
    "Layer",
    "LayerNorm",
    "LeakyReLU",
    "Linear",
    "LogSoftmax",
    "MSELoss",
    "MaxPool1d",
    "MaxPool2d",
    "MeanOverSteps",
    "MinGRU",
    "MinLSTM",
    "Mish",
    "MultiheadAttention",
    "NLLLoss",
    "PReLU",
    "PositionalEmbedding",
    "PruneReport",
    "RMSNorm",
    "RNNCell",
    "ReLU",
    "ReLU6",
    "Residual",
    "SelectiveScan",
    "SequenceClassifier",
    "Sequential",
    "SiLU",
    "Sigmoid",
    "SmoothL1Loss",
    "Softmax",
    "Softplus",
    "Stage",
    "Tanh",
    "TransformerEncoderLayer",
    "Unflatten",
    "ZeroPad2d",
    "draw_rows",
    "inference_mode",
    "init",
    "prune",
    "value_and_grad",
]


def __dir__() -> list[str]:
    return sorted(__all__)
