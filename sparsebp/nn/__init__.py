"""Layers and losses; names, arguments, parameter shapes and state_dict keys as in torch.nn."""

from sparsebp.nn import init
from sparsebp.nn.sequential import Concat
from sparsebp.nn.sequential import Residual
from sparsebp.nn.sequential import Sequential
from sparsebp.nn.draws import draw_rows
from sparsebp.nn.gradients import Back
from sparsebp.nn.gradients import Gradients
from sparsebp.nn.gradients import value_and_grad
from sparsebp.nn.layer import inference_mode
from sparsebp.nn.layer import Layer
from sparsebp.nn.activation import ELU
from sparsebp.nn.activation import GELU
from sparsebp.nn.activation import Hardtanh
from sparsebp.nn.activation import LeakyReLU
from sparsebp.nn.activation import ReLU
from sparsebp.nn.activation import Sigmoid
from sparsebp.nn.activation import SiLU
from sparsebp.nn.activation import Softplus
from sparsebp.nn.activation import Tanh
from sparsebp.nn.attention import MultiheadAttention
from sparsebp.nn.conv import Conv1d
from sparsebp.nn.conv import Conv2d
from sparsebp.nn.conv import Conv3d
from sparsebp.nn.conv import ConvTranspose1d
from sparsebp.nn.conv import ConvTranspose2d
from sparsebp.nn.conv import ConvTranspose3d
from sparsebp.nn.attention import Embedding
from sparsebp.nn.basic import Dropout
from sparsebp.nn.basic import Dropout2d
from sparsebp.nn.basic import Flatten
from sparsebp.nn.basic import Identity
from sparsebp.nn.basic import Unflatten
from sparsebp.nn.basic import ZeroPad2d
from sparsebp.nn.linear import Linear
from sparsebp.nn.pool import AdaptiveAvgPool1d
from sparsebp.nn.pool import AdaptiveAvgPool2d
from sparsebp.nn.pool import AvgPool1d
from sparsebp.nn.pool import AvgPool2d
from sparsebp.nn.pool import MaxPool1d
from sparsebp.nn.pool import MaxPool2d
from sparsebp.nn.activation import LogSoftmax
from sparsebp.nn.activation import Softmax
from sparsebp.nn.attention import MeanOverSteps
from sparsebp.nn.attention import PositionalEmbedding
from sparsebp.nn.attention import TransformerEncoderLayer
from sparsebp.nn.activation import SELU
from sparsebp.nn.activation import Mish
from sparsebp.nn.activation import PReLU
from sparsebp.nn.activation import ReLU6
from sparsebp.nn.loss import BCEWithLogitsLoss
from sparsebp.nn.loss import CrossEntropyLoss
from sparsebp.nn.loss import L1Loss
from sparsebp.nn.loss import MSELoss
from sparsebp.nn.loss import NLLLoss
from sparsebp.nn.loss import SmoothL1Loss
from sparsebp.nn.norm import BatchNorm1d
from sparsebp.nn.norm import BatchNorm2d
from sparsebp.nn.norm import GroupNorm
from sparsebp.nn.norm import LayerNorm
from sparsebp.nn.norm import RMSNorm
from sparsebp.nn.prune import PruneReport
from sparsebp.nn.prune import prune
from sparsebp.nn.recurrent import SequenceClassifier
from sparsebp.nn.recurrent import GRU
from sparsebp.nn.recurrent import GRUCell
from sparsebp.nn.recurrent import LSTM
from sparsebp.nn.recurrent import LSTMCell
from sparsebp.nn.recurrent import RNN
from sparsebp.nn.recurrent import RNNCell

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
