"""What layers, losses and cells refuse: one table of calls, and gradients that do not fit any layer."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sparsebp import models, nn
from sparsebp.core.errors import DTypeError, MemoryLimitError, OptionError, ShapeError
from sparsebp.jacobians import conv_transpose_jacobian_t, max_pool_jacobian_t
from sparsebp.patterns import conv_transpose_pattern, pool_pattern

F8 = {"dtype": np.float64}
X, Y = np.ones((4, 2, 3)), np.ones((4, 2, 5))  # what the recurrent layers take and return
X4, STATE = np.ones((4, 2, 3), np.float32), np.ones((1, 2, 5), np.float32)
GRU, RNN, LSTM = nn.GRU(3, 5, rng=0, **F8), nn.RNN(3, 5, rng=0, **F8), nn.LSTM(3, 5, rng=0)
STREAM = nn.GRU(3, 5, rng=0).stream()
LOGITS, CLASSES = np.ones((2, 3)), np.array([0, 1])
IMAGES = np.ones((1, 2, 6, 6), np.float32)
STEPS = np.ones((3, 2, 4), np.float32)
ATTENTION, ENCODER = nn.MultiheadAttention(4, 2, rng=0), nn.TransformerEncoderLayer(4, 2, 5, rng=0)
CONV, BACK = nn.Conv2d(2, 3, 3, dilation=2, rng=0), nn.ConvTranspose2d(2, 3, 3, padding=2, rng=0)
WORDS, PLACES = nn.Embedding(5, 2, rng=0), nn.PositionalEmbedding(3, 2, True, rng=0)


def saved_of(layer, x):
    return layer.forward(x)[1]


CALLS = [
    # layers
    (OptionError, "self.children = {'name': layer}", lambda: setattr(nn.ReLU(), "children", [nn.ReLU()])),
    (OptionError, r"Sequential\(\*layers\)", lambda: nn.Sequential([nn.ReLU()])),
    (DTypeError, "byte order", lambda: nn.ReLU().params.update(scale=np.ones(2, ">f4"))),
    # activations
    (OptionError, "approximation", lambda: nn.GELU("erf")),
    (OptionError, "max_val > min_val", lambda: nn.Hardtanh(1.0, 1.0)),
    (OptionError, "inplace", lambda: nn.ReLU6(1)),
    (OptionError, "inplace", lambda: nn.Mish(None)),
    (OptionError, "dim", lambda: nn.LogSoftmax("x")),
    (OptionError, "no such axis", lambda: nn.Softmax(dim=2).forward(LOGITS)),
    (OptionError, "num_parameters", lambda: nn.PReLU(0)),
    (OptionError, "init", lambda: nn.PReLU(1, "a")),
    (ShapeError, "channels", lambda: nn.PReLU(3, **F8).forward(np.ones((2, 4)))),
    # losses
    (DTypeError, "class numbers", lambda: nn.CrossEntropyLoss().forward(LOGITS, np.ones(2))),
    (DTypeError, r"astype\(int\)", lambda: nn.CrossEntropyLoss().forward(LOGITS, CLASSES * 1.0)),
    (ShapeError, r"argmax\(axis=1\)", lambda: nn.CrossEntropyLoss().forward(LOGITS, np.eye(2, 3, dtype=int))),
    (ShapeError, r"reshape\(-1\)", lambda: nn.CrossEntropyLoss().forward(LOGITS, CLASSES[:, None])),
    (DTypeError, r"argmax\(axis=1\)", lambda: nn.NLLLoss().forward(LOGITS, LOGITS)),
    (ShapeError, "target", lambda: nn.CrossEntropyLoss().forward(LOGITS, np.zeros(3, int))),
    (ShapeError, "empty", lambda: nn.CrossEntropyLoss().forward(np.ones((0, 3)), np.zeros(0, int))),
    (ShapeError, "no classes", lambda: nn.CrossEntropyLoss().forward(np.ones((2, 0)), CLASSES)),
    (ValueError, "target", lambda: nn.CrossEntropyLoss().forward(LOGITS, np.array([0, 3]))),
    (OptionError, "not there", lambda: nn.CrossEntropyLoss(np.ones(3), reduction="none").forward(LOGITS, CLASSES + 2)),
    (OptionError, "not there", lambda: nn.NLLLoss().forward(LOGITS, np.array([-1, 0]))),
    (DTypeError, "weight", lambda: nn.CrossEntropyLoss(np.ones(3, np.float32)).forward(LOGITS, CLASSES)),
    (ShapeError, "weight", lambda: nn.CrossEntropyLoss(np.ones(2)).forward(LOGITS, CLASSES)),
    (OptionError, "reduction", lambda: nn.CrossEntropyLoss(reduction="all")),
    (OptionError, "label_smoothing", lambda: nn.CrossEntropyLoss(label_smoothing=1.5)),
    (OptionError, "size_average", lambda: nn.CrossEntropyLoss(size_average=True)),
    (OptionError, "ignore_index", lambda: nn.CrossEntropyLoss(ignore_index=1.5)),
    (ShapeError, r"Got \(3, 2\)\.$", lambda: nn.MSELoss().forward(LOGITS, LOGITS.T)),
    (ShapeError, r"reshape\(-1, 1\)", lambda: nn.MSELoss().forward(LOGITS[:, :1], LOGITS[:, 0])),
    (DTypeError, "target", lambda: nn.MSELoss().forward(LOGITS, LOGITS.astype(np.float32))),
    (ShapeError, "empty", lambda: nn.MSELoss().forward(LOGITS[:0], LOGITS[:0])),
    (OptionError, "missing", lambda: nn.MSELoss(reduction="none").input_grad(LOGITS)),
    (ShapeError, "gy", lambda: nn.MSELoss(reduction="none").input_grad(LOGITS, LOGITS[:1])),
    (OptionError, "gy", lambda: nn.MSELoss().input_grad(LOGITS, LOGITS)),
    # normalisation and shapes
    (OptionError, "num_features", lambda: nn.BatchNorm2d(0)),
    (OptionError, "momentum", lambda: nn.BatchNorm2d(2, momentum=1.5)),
    (ShapeError, "number of axes", lambda: nn.BatchNorm1d(3, **F8).forward(np.ones((2, 3, 2, 2)))),
    (ShapeError, "wrong shape", lambda: nn.BatchNorm1d(3, **F8).forward(np.ones((2, 4)))),
    (ShapeError, "too few values", lambda: nn.BatchNorm1d(3, **F8).forward(np.ones((1, 3)))),
    (ShapeError, "wrong shape", lambda: nn.BatchNorm3d(3, **F8).forward(np.ones((2, 3, 4, 4)))),
    (ShapeError, "wrong shape", lambda: nn.InstanceNorm2d(3, **F8).forward(np.ones((2, 4, 4, 4)))),
    (ShapeError, "wrong shape", lambda: nn.InstanceNorm1d(3, **F8).forward(np.ones(3))),
    (ShapeError, "one element", lambda: nn.InstanceNorm1d(3, **F8).eval().forward(np.ones((4, 3, 1)))),
    (DTypeError, "x has", lambda: nn.InstanceNorm1d(3, affine=True).forward(np.ones((4, 3, 2)))),
    (OptionError, "alpha is zero", lambda: nn.CELU(0)),
    (OptionError, "groups do not divide", lambda: nn.GroupNorm(2, 3)),
    (OptionError, "num_groups", lambda: nn.GroupNorm(0, 3)),
    (OptionError, "eps", lambda: nn.GroupNorm(1, 3, eps=-1)),
    (ShapeError, "wrong shape", lambda: nn.GroupNorm(1, 2, **F8).forward(np.ones((2, 3, 4)))),
    (ShapeError, "wrong shape", lambda: nn.GroupNorm(1, 2, **F8).forward(np.ones((2, 2, 0)))),
    (OptionError, "normalized_shape", lambda: nn.LayerNorm(())),
    (ShapeError, "wrong shape", lambda: nn.LayerNorm(3).forward(np.ones((2, 4), np.float32))),
    (ShapeError, "too few axes", lambda: nn.LayerNorm((2, 3)).forward(np.ones(3, np.float32))),
    (DTypeError, "x has", lambda: nn.LayerNorm(3).forward(np.ones((2, 3)))),
    (ShapeError, "batch", lambda: (n := nn.LayerNorm(3, **F8)).jacobian_t(saved_of(n, np.ones(3)))),
    (OptionError, "normalized_shape", lambda: nn.RMSNorm(())),
    (OptionError, "eps", lambda: nn.RMSNorm(3, eps=-1.0)),
    (ShapeError, "wrong shape", lambda: nn.RMSNorm(3, **F8).forward(np.ones((2, 4)))),
    (OptionError, "unflatten", lambda: nn.Unflatten(0, (2, 3))),
    (OptionError, "unflatten", lambda: nn.Unflatten(1, (-1, -1))),
    (OptionError, "unflattened_size", lambda: nn.Unflatten(1, 3)),
    (ShapeError, "unflattens", lambda: nn.Unflatten(1, (2, 3)).forward(np.ones((2, 5)))),
    (ShapeError, "unflattens", lambda: nn.Unflatten(3, (2, 3)).forward(np.ones((2, 6)))),
    (ShapeError, "unflattens", lambda: nn.Unflatten(-1, (2, 3)).forward(np.ones(6))),
    (OptionError, "padding", lambda: nn.ZeroPad2d((1, 2))),
    (OptionError, "padding", lambda: nn.ZeroPad2d(1.5)),
    (ShapeError, "wrong shape", lambda: nn.ZeroPad2d(1).forward(np.ones((2, 3)))),
    (ShapeError, "smaller", lambda: nn.ZeroPad2d(-3).forward(np.ones((1, 1, 4, 9)))),
    (OptionError, "p is", lambda: nn.Dropout(-0.1)),
    (OptionError, "p is", lambda: nn.Dropout2d(2)),
    (ShapeError, "no images", lambda: nn.Dropout2d().forward(np.ones((2, 3)))),
    (ShapeError, r"do not fit each other.*body: \(2, 2\)",
     lambda: nn.Residual(nn.Linear(3, 2, rng=0)).forward(np.ones((2, 3), np.float32))),
    (OptionError, "branch shortcut is not a layer", lambda: nn.Residual(nn.Tanh(), nn.Tanh)),
    (OptionError, "no branches", nn.Sum),
    (OptionError, "no branches", nn.Concat),
    (OptionError, "no layers", nn.Sequential),
    (ShapeError, "side by side", lambda: nn.Concat(nn.Identity(), nn.MaxPool2d(2)).forward(IMAGES)),
    # pools
    (OptionError, "more than half", lambda: nn.MaxPool1d(3, padding=2)),
    (OptionError, "more than half", lambda: nn.AvgPool2d((4, 2), padding=2)),
    (OptionError, "kernel_size does not fit", lambda: nn.MaxPool2d(0)),
    (OptionError, "kernel_size does not fit", lambda: nn.AvgPool1d((2, 2))),
    (OptionError, "stride does not fit", lambda: nn.AvgPool2d(2, -1)),
    (OptionError, "dilation does not fit", lambda: nn.MaxPool1d(2, dilation=0)),
    (OptionError, "divisor_override is zero", lambda: nn.AvgPool2d(2, divisor_override=0)),
    (OptionError, "output_size is too small", lambda: nn.AdaptiveAvgPool1d(0)),
    (OptionError, "output_size does not fit", lambda: nn.AdaptiveAvgPool2d((1, 2, 3))),
    (ShapeError, "larger than the padded input", lambda: nn.MaxPool2d(7).forward(IMAGES)),
    (ShapeError, "larger than the padded input", lambda: nn.AvgPool2d((7, 1)).forward(IMAGES)),
    *((ShapeError, "x has the wrong shape", lambda pool=pool, dims=dims, more=more: getattr(nn, f"{pool}{dims}d")(2)
       .forward(np.ones((4,) * (dims + more))))
      for pool in ("MaxPool", "AvgPool", "AdaptiveAvgPool", "AdaptiveMaxPool") for dims in (1, 2, 3)
      for more in (0, 3)),
    (ShapeError, "empty", lambda: nn.AdaptiveMaxPool1d(2).forward(np.ones((2, 3, 0)))),
    (ShapeError, "empty", lambda: nn.AdaptiveAvgPool2d(2).forward(np.ones((2, 3, 0, 4)))),
    (OptionError, "output_size does not fit", lambda: nn.AdaptiveMaxPool3d((1, 2))),
    (OptionError, "return_indices", lambda: nn.AdaptiveMaxPool1d(1, 2)),
    (ShapeError, "winner", lambda: max_pool_jacobian_t(pool_pattern(1, (4, 4), 2), np.zeros((2, 5), np.uint8))),
    # convolutions
    (OptionError, "groups do not divide", lambda: nn.Conv2d(4, 6, 3, groups=4)),
    (OptionError, "groups do not divide", lambda: nn.Conv2d(6, 4, 3, groups=3)),
    (OptionError, "in_channels is too small", lambda: nn.Conv2d(0, 4, 3)),
    (OptionError, "kernel_size does not fit 2 axes", lambda: nn.Conv2d(1, 1, (3,))),
    (OptionError, "stride does not fit 1 axes", lambda: nn.Conv1d(1, 1, 3, stride=0)),
    (OptionError, "needs stride 1", lambda: nn.Conv3d(1, 1, 3, stride=2, padding="same")),
    (OptionError, "Unknown padding_mode", lambda: nn.Conv1d(1, 1, 3, padding_mode="mirror")),
    (DTypeError, "float32 or float64", lambda: nn.Conv1d(1, 1, 3, dtype=np.float16)),
    (ShapeError, r"Expected \(any, 2, any, any\)", lambda: CONV.forward(np.ones((1, 3, 6, 6), np.float32))),
    (ShapeError, "x has the wrong shape", lambda: CONV.forward(IMAGES[0, 0])),
    (ShapeError, r"kernel is larger than the padded input.*\(5, 5\).*\(4, 6\)", lambda: CONV.forward(IMAGES[:, :, :4])),
    (DTypeError, "x has the wrong dtype", lambda: CONV.forward(IMAGES.astype(np.float64))),
    (OptionError, "groups do not divide", lambda: nn.ConvTranspose2d(4, 6, 3, groups=4)),
    (OptionError, "out_channels is too small", lambda: nn.ConvTranspose2d(4, 0, 3)),
    (OptionError, "output_padding is too large", lambda: nn.ConvTranspose2d(1, 1, 3, 2, output_padding=2)),
    (OptionError, "output_padding does not fit", lambda: nn.ConvTranspose1d(1, 1, 3, 2, output_padding=-1)),
    (OptionError, "padding_mode", lambda: nn.ConvTranspose1d(1, 1, 3, padding_mode="circular")),
    (DTypeError, "float32 or float64", lambda: nn.ConvTranspose1d(1, 1, 3, dtype=np.float16)),
    (ShapeError, r"Expected \(any, 2, any, any\)", lambda: BACK.forward(np.ones((1, 3, 3, 3), np.float32))),
    (ShapeError, "no output", lambda: BACK.forward(IMAGES[:, :, :2])),
    (ShapeError, "no output", lambda: conv_transpose_pattern(1, 1, 1, 3, padding=2)),
    (ShapeError, "no output", lambda: conv_transpose_pattern(1, 1, 0, 3)),
    (ShapeError, "4 axes", lambda: conv_transpose_jacobian_t(np.ones((2, 3, 3)), (5, 5))),
    (MemoryLimitError, "at most 100 bytes", lambda: conv_transpose_pattern(4, 2, 5, 3, memory_limit=100)),
    # attention
    *((OptionError, None, lambda given=given: nn.MultiheadAttention(*given))
      for given in ((5, 2), (0, 1), (4, 0), (4, 2.0), (4, 2, 1.5), (4, 2, 0.0, 1), (4, 2, 0.0, True, None))),
    *((OptionError, "not supported", lambda given=given: nn.MultiheadAttention(4, 2, **given))
      for given in ({"kdim": 3}, {"vdim": 5})),
    *((OptionError, None, lambda given=given: nn.TransformerEncoderLayer(*given))
      for given in ((4, 3), (4, 2, 0), (4, 2, 8, -0.1), (4, 2, 8, 0.1, "tanh"))),
    (OptionError, "eps", lambda: nn.TransformerEncoderLayer(4, 2, layer_norm_eps=-1)),
    (OptionError, "activation", lambda: nn.TransformerEncoderLayer(4, 2, activation=torch.nn.functional.silu)),
    (DTypeError, "float16", lambda: nn.TransformerEncoderLayer(4, 2, dtype=np.float16)),
    *((error, text, lambda layer=layer, x=x, options=options: layer.forward(x, **options))
      for layer in (ATTENTION, ENCODER) for error, text, x, options in (
          (ShapeError, "wrong shape", np.ones((3, 2, 5), np.float32), {}),
          (ShapeError, "wrong shape", np.ones((3, 5), np.float32), {}), (DTypeError, "dtype", np.ones((3, 2, 4)), {}),
          (OptionError, "lengths", STEPS, {"lengths": [0, 3]}), (ShapeError, "lengths", STEPS, {"lengths": [3]}))),
    (OptionError, "come together", lambda: ATTENTION.forward(STEPS, STEPS)),
    (ShapeError, "do not fit", lambda: ATTENTION.forward(STEPS, STEPS[:2], STEPS)),
    (ShapeError, "do not fit", lambda: ATTENTION.forward(STEPS, STEPS[:, :1], STEPS[:, :1])),
    (DTypeError, "attn_mask", lambda: ATTENTION.forward(STEPS, attn_mask=np.ones((3, 3), int))),
    (ShapeError, "attn_mask", lambda: ATTENTION.forward(STEPS, attn_mask=np.ones((2, 3), bool))),
    (ShapeError, "key_padding_mask", lambda: ATTENTION.forward(STEPS, key_padding_mask=np.ones((3, 2), bool))),
    (OptionError, "is_causal", lambda: ATTENTION.forward(STEPS, is_causal=True)),
    # embeddings, positions, means
    (OptionError, "row that is not there.*numbers from 0 to 4", lambda: WORDS.forward(np.array([[0, 5]]))),
    (OptionError, "row that is not there.*numbers from 0 to 4", lambda: WORDS.forward(np.array([[-1, 0]]))),
    (DTypeError, "integers", lambda: WORDS.forward(np.zeros((2, 2), np.float32))),
    (DTypeError, "integers", lambda: WORDS.forward(np.zeros((2, 2), bool))),
    (OptionError, "row", lambda: nn.Embedding(0, 2).forward(np.array([0]))),
    (ShapeError, "gy", lambda: WORDS.weight_grad(np.ones((3, 2), np.float32), np.array([0, 1]))),
    *((OptionError, None, lambda given=given: nn.Embedding(*given))
      for given in ((-1, 2), (5, 1.0), (5, 2, 5), (5, 2, -6), (0, 2, 0))),
    *((OptionError, "not supported", lambda given=given: nn.Embedding(4, 2, **given))
      for given in ({"max_norm": 1.0}, {"norm_type": 1.0}, {"sparse": True})),
    (ShapeError, "too many steps", lambda: PLACES.forward(np.zeros((1, 4, 2), np.float32))),
    (ShapeError, "wrong shape", lambda: PLACES.forward(np.zeros((1, 3, 3), np.float32))),
    (ShapeError, "wrong shape", lambda: PLACES.forward(np.zeros((3, 2), np.float32))),
    (DTypeError, "dtype", lambda: PLACES.forward(np.zeros((1, 3, 2)))),
    (ShapeError, "no steps", lambda: nn.MeanOverSteps().forward(np.zeros((0, 3, 2)))),
    (ShapeError, "wrong shape", lambda: nn.MeanOverSteps().forward(np.zeros((3, 2)))),
    (OptionError, "max_length", lambda: nn.PositionalEmbedding(0, 2)),
    (OptionError, "batch_first", lambda: nn.PositionalEmbedding(2, 2, 1)),
    (OptionError, "batch_first", lambda: nn.MeanOverSteps(1)),
    # recurrent layers
    *((error, text, lambda layer=layer, call=call: call(layer)) for layer in (RNN, GRU) for error, text, call in (
        (ShapeError, "at least one step", lambda m: m.forward(X[:0])),
        (ShapeError, "at least one step", lambda m: m.forward(X[:, :0])),
        (ShapeError, "x has the wrong shape", lambda m: m.forward(Y)),
        (ShapeError, "x has the wrong shape", lambda m: m.forward(X[..., None])),
        (DTypeError, "x has the wrong dtype", lambda m: m.forward(X4)),
        (DTypeError, "x has the wrong dtype", lambda m: m.forward(X.astype(int))),
        (DTypeError, "not an array", lambda m: m.forward([[1.0]])),
        (DTypeError, "not an array", lambda m: m.forward(torch.ones(4, 2, 3))),
        (ShapeError, "h0 has the wrong shape", lambda m: m.forward(X, np.ones((1, 3, 5)))),
        (DTypeError, "h0 has the wrong dtype", lambda m: m.forward(X, STATE)),
        (OptionError, "lengths is out of range", lambda m: m.forward(X, lengths=[4, 5])),
        (OptionError, "lengths is out of range", lambda m: m.forward(X, lengths=[0, 4])),
        (ShapeError, "lengths has the wrong shape", lambda m: m.forward(X, lengths=[4])),
        (DTypeError, "lengths has the wrong dtype", lambda m: m.forward(X, lengths=[4.0, 1.0])),
        (OptionError, "No gradient", lambda m: m.input_grad(None, saved_of(m, X))),
        (ShapeError, "gy has the wrong shape", lambda m: m.input_grad(np.ones((2, 4, 5)), saved_of(m, X))),
        (DTypeError, "gy has", lambda m: m.weight_grad(Y.astype(np.float32), saved_of(m, X))),
        (ShapeError, "grad_h_n has", lambda m: m.gradients(None, saved_of(m, X), np.ones((2, 5)))),
        (MemoryLimitError, "input_grad", lambda m: m.jacobian_t(saved_of(m, X), memory_limit=1000)))),
    (OptionError, "Unknown backward algorithm", lambda: nn.RNN(1, 2, backward="fast")),
    (OptionError, "Unknown nonlinearity", lambda: nn.RNN(1, 2, nonlinearity="gelu")),
    (OptionError, "hidden_size is too small", lambda: nn.GRU(1, 0)),
    (OptionError, "num_layers is too small", lambda: nn.GRU(1, 2, num_layers=0)),
    (OptionError, "chunks is too small", lambda: nn.GRU(1, 2, chunks=0)),
    (OptionError, "dropout is out of range", lambda: nn.GRU(1, 2, dropout=1.5)),
    (DTypeError, "Unsupported dtype", lambda: nn.GRU(1, 2, dtype=np.float16)),
    (OptionError, "proj_size", lambda: nn.LSTM(3, 5, proj_size=5)),
    (OptionError, "proj_size", lambda: nn.LSTM(3, 5, proj_size=-1)),
    (OptionError, r"pair of arrays \(h0, c0\)", lambda: LSTM.forward(X4, STATE)),
    (OptionError, r"pair of arrays \(h0, c0\)", lambda: LSTM.forward(X4, (STATE, STATE, STATE))),
    (ShapeError, "h0 has", lambda: LSTM.forward(X4, (STATE[:, :1], STATE))),
    (ShapeError, "c0 has", lambda: LSTM.forward(X4, (STATE, STATE[0]))),
    (DTypeError, "c0 has", lambda: LSTM.forward(X4, (STATE, STATE.astype(np.float64)))),
    (OptionError, "No gradient was given", lambda: LSTM.gradients(None, saved_of(LSTM, X4))),
    (ShapeError, "grad_c_n has", lambda: LSTM.gradients(None, saved_of(LSTM, X4), None, STATE[0])),
    (MemoryLimitError, "memory", lambda: LSTM.jacobian_t(saved_of(LSTM, X4), 100)),
    (ShapeError, r"Linear\(6, classes\)",
     lambda: nn.SequenceClassifier(nn.GRU(2, 3, bidirectional=True), nn.Linear(3, 2))),
    # cells and streams
    *((error, text, lambda cell=cell, call=call: call(cell)) for cell in (nn.RNNCell, nn.GRUCell)
      for error, text, call in (
        (ShapeError, "batch is empty", lambda c: c(2, 3).forward(np.ones((0, 2), np.float32))),
        (ShapeError, "x has the wrong shape", lambda c: c(2, 3).forward(np.ones((1, 3), np.float32))),
        (ShapeError, "h has the wrong", lambda c: c(2, 3).forward(np.ones((1, 2), np.float32), STATE[0])),
        (OptionError, "hidden_size is too small", lambda c: c(2, 0)))),
    (OptionError, "gy or grad_c", lambda: (c := nn.LSTMCell(3, 5)).gradients(None, saved_of(c, X4[0]))),
    (OptionError, "bidirectional", lambda: nn.GRU(3, 5, bidirectional=True).stream()),
    (OptionError, "proj_size", lambda: nn.LSTM(3, 5, proj_size=2).stream()),
    (OptionError, "batch", lambda: nn.GRU(3, 5).stream(0)),
    (MemoryLimitError, "memory", lambda: nn.GRU(3, 5).stream(2**50)),
    (OptionError, "pair", lambda: LSTM.stream(state=np.zeros((1, 5), np.float32))),
    (ShapeError, "x has", lambda: STREAM.step(np.zeros((1, 3), np.float32))),
    (DTypeError, "x has", lambda: STREAM.step(np.zeros(3))),
    (ShapeError, "state has", lambda: STREAM.reset(np.zeros((1, 2, 5), np.float32))),
    # the ways back
    (ShapeError, "gy", lambda: nn.Linear(3, 2).vjp(X4)[1](X4).input),
    (DTypeError, "not an array", lambda: nn.Linear(3, 2).vjp([[1.0, 2.0, 3.0]])),
    (OptionError, "loss cannot be differentiated", lambda: nn.value_and_grad(GRU, "cross entropy")),
    (OptionError, "model cannot be differentiated", lambda: nn.value_and_grad(np.ones(3), nn.CrossEntropyLoss())),
    # initial values
    (OptionError, "3 or more", lambda: nn.init.chrono_update_gate(GRU.parameters(), 5, 2)),
    (OptionError, "bias=True", lambda: nn.init.chrono_update_gate(nn.GRU(1, 50, bias=False).parameters(), 50, 784)),
    # models
    (OptionError, "size", lambda: models.lenet5(size=30)),
    (OptionError, "in_channels", lambda: models.lenet5(0)),
    (OptionError, "classes", lambda: models.lenet5(classes=0)),
    (DTypeError, "foo", lambda: models.lenet5(dtype="foo")),
    (OptionError, "width", lambda: models.vgg11(width=0)),
    (OptionError, "width", lambda: models.vgg11(width=float("nan"))),
    (OptionError, "classes", lambda: models.vgg11(classes=-1)),
    (OptionError, "rng", lambda: models.vgg11(rng="seed")),
    (OptionError, "rng", lambda: models.vgg11(rng=-1)),
    (OptionError, "width", lambda: models.mobilenetv2(width=-1)),
    (OptionError, "width", lambda: models.mobilenetv2(width="half")),
    (OptionError, "stages", lambda: models.mobilenetv2(stages=0)),
    (OptionError, "stages", lambda: models.mobilenetv2(stages=8)),
    (OptionError, "depth", lambda: models.resnet(depth=21)), (OptionError, "depth", lambda: models.resnet(depth=2)),
    (OptionError, "depth", lambda: models.densenet(depth=41)),
    (OptionError, "depth", lambda: models.densenet(depth=4)),
    (OptionError, "blocks", lambda: models.densenet(blocks=0)),
    (OptionError, "width", lambda: models.densenet(width=0)),
    (OptionError, "growth", lambda: models.densenet(growth=-1)),
    (ShapeError, None, lambda: models.lenet5()(np.zeros((1, 1, 32, 32), np.float32))),
    (ShapeError, None, lambda: models.lenet5()(np.zeros((1, 3, 28, 28), np.float32))),
    (ShapeError, r"\(1, 3, 64, 64\) does not fit the chain at layer 22 \(Linear\)",
     lambda: models.vgg11(width=0.02)(np.zeros((1, 3, 64, 64), np.float32))),
    (DTypeError, r"\(1, 3\) does not fit the chain at layer 1 \(Linear\)", lambda: nn.Sequential(
        nn.Linear(3, 3), nn.Linear(3, 3, dtype=np.float64))(np.zeros((1, 3), np.float32))),
    (ShapeError, None, lambda: models.vgg11(width=0.02)(np.zeros((1, 3, 16, 16), np.float32))),
    *(((OptionError, DTypeError), None, lambda given=given: models.transformer_classifier(
        **{"inputs": 5, "classes": 3, "steps": 7, "width": 12, "heads": 3, "layers": 2} | given))
      for given in ({"inputs": 0}, {"classes": 0}, {"steps": 0}, {"width": 10}, {"heads": 0}, {"layers": 0},
                    {"dropout": 2}, {"tokens": 1}, {"dtype": "int64"}, {"rng": "seed"})),
    *((error, text, lambda x=x, tokens=tokens: models.transformer_classifier(5, 3, steps=7, tokens=tokens)(x))
      for error, text, x, tokens in (
          (ShapeError, "too many steps", np.zeros((2, 8, 5), np.float32), False),
          (ShapeError, "wrong shape", np.zeros((2, 7, 4), np.float32), False),
          (DTypeError, "integers", np.zeros((2, 7), np.float32), True))),
]  # fmt: skip


@pytest.mark.parametrize(("error", "text", "call"), CALLS, ids=range(len(CALLS)))
def test_calls(error, text, call):
    with pytest.raises(error, match=text) as caught:
        call()
    assert caught.value.expected is not None


LAYERS = [
    (nn.Linear(3, 2), (2, 3)), (nn.ReLU(), (2, 3)), (nn.GELU(), (2, 3)), (nn.Softmax(), (2, 3)),
    (nn.LogSoftmax(), (2, 3)), (nn.PReLU(), (2, 3)), (nn.Flatten(), (2, 3)), (nn.Unflatten(1, (1, 3)), (2, 3)),
    (nn.Dropout(), (2, 3)), (nn.Dropout2d(), (1, 2, 2)), (nn.ZeroPad2d(1), (1, 2, 2, 2)), (nn.LayerNorm(3), (2, 3)),
    (nn.BatchNorm1d(3), (2, 3)), (nn.BatchNorm2d(2), (2, 2, 4, 4)), (nn.GroupNorm(1, 3), (2, 3)),
    (nn.RMSNorm(3), (2, 3)), (nn.MaxPool1d(2), (2, 3, 4)), (nn.MaxPool2d(2), (2, 3, 4, 4)),
    (nn.AvgPool1d(2), (2, 3, 4)), (nn.AvgPool2d(2), (2, 3, 4, 4)), (nn.AdaptiveAvgPool1d(2), (2, 3, 4)),
    (nn.AdaptiveAvgPool2d(2), (2, 3, 4, 4)), (CONV, IMAGES.shape), (BACK, IMAGES.shape),
    (nn.MaxPool3d(2), (2, 3, 4, 4, 4)), (nn.AvgPool3d(2), (2, 3, 4, 4, 4)), (nn.AdaptiveAvgPool3d(2), (2, 3, 4, 4, 4)),
    *((getattr(nn, f"AdaptiveMaxPool{dims}d")(2), (2, 3, *(4,) * dims)) for dims in (1, 2, 3)),
    *((getattr(nn, f"InstanceNorm{dims}d")(3), (2, 3, *(4,) * dims)) for dims in (1, 2, 3)),
    (nn.BatchNorm3d(2), (2, 2, 4, 4, 4)), (nn.Upsample(size=3), (2, 3, 4)), (nn.Hardswish(), (2, 3)),
    (nn.Residual(nn.Tanh()), (2, 3)), (nn.Sum(nn.Identity(), nn.Identity()), (2, 3)),
    (nn.Concat(nn.Identity(), nn.Identity()), (2, 3)),
    (nn.Sequential(nn.Linear(3, 2), nn.Tanh()), (2, 3)),
    (nn.Sequential(nn.Linear(3, 2), nn.Tanh(), backward="blelloch"), (2, 3)), (ATTENTION, STEPS.shape),
    (ENCODER, STEPS.shape), (PLACES, (1, 3, 2)),
]  # fmt: skip


@pytest.mark.parametrize(("layer", "shape"), LAYERS, ids=lambda value: type(value).__name__)
def test_arrays_that_do_not_fit(layer, shape):
    with pytest.raises(DTypeError):
        layer.forward(np.ones(shape, int))
    y, saved = layer.forward(np.ones(shape, np.float32))
    for way in (layer.input_grad, layer.weight_grad) if layer.parameters() else (layer.input_grad,):
        with pytest.raises(ShapeError, match="gy"):
            way(np.ones((*y.shape, 1), np.float32), saved)
        if not isinstance(layer, nn.Concat):
            with pytest.raises(DTypeError, match="gy"):
                way(y.astype(np.float64), saved)
