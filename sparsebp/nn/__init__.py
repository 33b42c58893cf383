"""Layers and losses; names, arguments, parameter shapes and state_dict keys as in torch.nn."""

from sparsebp.nn import init
from sparsebp.nn.chain.concat import Concat
from sparsebp.nn.chain.residual import Residual
from sparsebp.nn.chain.sequential import Sequential
from sparsebp.nn.draws import draw_rows
from sparsebp.nn.gradients import Back, Gradients, value_and_grad
from sparsebp.nn.keeping import inference_mode
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
from sparsebp.nn.layers.identity import Dropout, Dropout2d, Flatten, Identity, Unflatten, ZeroPad2d
from sparsebp.nn.layers.linear import Linear
from sparsebp.nn.layers.pool import (
    AdaptiveAvgPool1d,
    AdaptiveAvgPool2d,
    AvgPool1d,
    AvgPool2d,
    MaxPool1d,
    MaxPool2d,
)
from sparsebp.nn.layers.softmax import LogSoftmax, Softmax
from sparsebp.nn.layers.steps import MeanOverSteps, PositionalEmbedding
from sparsebp.nn.layers.transformer import TransformerEncoderLayer
from sparsebp.nn.layers.units import SELU, Mish, PReLU, ReLU6
from sparsebp.nn.losses import BCEWithLogitsLoss, CrossEntropyLoss, L1Loss, MSELoss, NLLLoss, SmoothL1Loss
from sparsebp.nn.norms.batch import BatchNorm1d, BatchNorm2d
from sparsebp.nn.norms.group import GroupNorm
from sparsebp.nn.norms.layer import LayerNorm
from sparsebp.nn.norms.rms import RMSNorm
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
    "SequenceClassifier",
    "Sequential",
    "SiLU",
    "Sigmoid",
    "SmoothL1Loss",
    "Softmax",
    "Softplus",
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
