"""Layers and losses; names, arguments, parameter shapes and state_dict keys as in torch.nn."""

from sparsebp.core.absent import deferred_init
from sparsebp.nn import init
from sparsebp.nn.activation import (
    CELU,
    ELU,
    GELU,
    SELU,
    Hardsigmoid,
    Hardswish,
    Hardtanh,
    LeakyReLU,
    LogSigmoid,
    LogSoftmax,
    Mish,
    PReLU,
    ReLU,
    ReLU6,
    Sigmoid,
    SiLU,
    Softmax,
    Softplus,
    Softsign,
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
from sparsebp.nn.branches import Concat, Residual, Sum
from sparsebp.nn.classifier import SequenceClassifier
from sparsebp.nn.conv import Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d, ConvTranspose3d
from sparsebp.nn.deferred import materialize
from sparsebp.nn.gradients import Back, Gradients
from sparsebp.nn.init import draw_rows
from sparsebp.nn.layer import Layer
from sparsebp.nn.linear import Linear
from sparsebp.nn.loss import (
    BCEWithLogitsLoss,
    CrossEntropyLoss,
    HuberLoss,
    KLDivLoss,
    L1Loss,
    MSELoss,
    NLLLoss,
    SmoothL1Loss,
    TripletMarginLoss,
)
from sparsebp.nn.loss_gradients import value_and_grad
from sparsebp.nn.modes import inference_mode
from sparsebp.nn.norm import (
    BatchNorm1d,
    BatchNorm2d,
    BatchNorm3d,
    GroupNorm,
    InstanceNorm1d,
    InstanceNorm2d,
    InstanceNorm3d,
    LayerNorm,
    RMSNorm,
)
from sparsebp.nn.pool import (
    AdaptiveAvgPool1d,
    AdaptiveAvgPool2d,
    AdaptiveAvgPool3d,
    AdaptiveMaxPool1d,
    AdaptiveMaxPool2d,
    AdaptiveMaxPool3d,
    AvgPool1d,
    AvgPool2d,
    AvgPool3d,
    MaxPool1d,
    MaxPool2d,
    MaxPool3d,
)
from sparsebp.nn.pruning import PruneReport, prune
from sparsebp.nn.recurrent.carried import CarriedState
from sparsebp.nn.recurrent.cell_layers import GRUCell, LSTMCell, RNNCell
from sparsebp.nn.recurrent.gated import MinGRU, MinLSTM
from sparsebp.nn.recurrent.layers import GRU, LSTM, RNN
from sparsebp.nn.recurrent.lru import LRU
from sparsebp.nn.recurrent.selective import SelectiveScan
from sparsebp.nn.sequential import Sequential, Stage
from sparsebp.nn.skips import Pop, Stash
from sparsebp.nn.upsample import Upsample

__all__ = [
    "CELU",
    "ELU",
    "GELU",
    "GRU",
    "LRU",
    "LSTM",
    "RNN",
    "SELU",
    "AdaptiveAvgPool1d",
    "AdaptiveAvgPool2d",
    "AdaptiveAvgPool3d",
    "AdaptiveMaxPool1d",
    "AdaptiveMaxPool2d",
    "AdaptiveMaxPool3d",
    "AvgPool1d",
    "AvgPool2d",
    "AvgPool3d",
    "BCEWithLogitsLoss",
    "Back",
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "CarriedState",
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
    "Hardsigmoid",
    "Hardswish",
    "Hardtanh",
    "HuberLoss",
    "Identity",
    "InstanceNorm1d",
    "InstanceNorm2d",
    "InstanceNorm3d",
    "KLDivLoss",
    "L1Loss",
    "LSTMCell",
    "Layer",
    "LayerNorm",
    "LeakyReLU",
    "Linear",
    "LogSigmoid",
    "LogSoftmax",
    "MSELoss",
    "MaxPool1d",
    "MaxPool2d",
    "MaxPool3d",
    "MeanOverSteps",
    "MinGRU",
    "MinLSTM",
    "Mish",
    "MultiheadAttention",
    "NLLLoss",
    "PReLU",
    "Pop",
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
    "Softsign",
    "Stage",
    "Stash",
    "Sum",
    "Tanh",
    "TransformerEncoderLayer",
    "TripletMarginLoss",
    "Unflatten",
    "Upsample",
    "ZeroPad2d",
    "deferred_init",
    "draw_rows",
    "inference_mode",
    "init",
    "materialize",
    "prune",
    "value_and_grad",
]


def __dir__() -> list[str]:
    return sorted(__all__)
