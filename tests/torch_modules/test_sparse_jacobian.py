"""Sparse Jacobians of PyTorch's modules against its own dense ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import utils

import sparsebp.torch as st
from sparsebp import nn
from sparsebp.core.errors import DeviceError, DTypeError, OptionError, ShapeError

tn = torch.nn
MODULES = {
    "Linear": (lambda: tn.Linear(5, 3), (5,)),
    "Linear, no bias, of vectors": (lambda: tn.Linear(3, 2, bias=False), (4, 3)),
    "Conv1d": (lambda: tn.Conv1d(2, 4, 3, 2, 1, groups=2), (2, 7)),
    "Conv2d": (lambda: tn.Conv2d(2, 3, (3, 2), padding=1, dilation=(1, 2)), (2, 5, 4)),
    "Conv2d, same": (lambda: tn.Conv2d(1, 2, 3, padding="same", bias=False), (1, 4, 4)),
    "Conv3d": (lambda: tn.Conv3d(1, 2, 2), (1, 2, 3, 3)),
    "ConvTranspose2d": (lambda: tn.ConvTranspose2d(2, 2, 3, 2, 1, 1), (2, 3, 2)),
    "ReLU": (tn.ReLU, (2, 3)),
    "ReLU6": (tn.ReLU6, (7,)),
    "Hardtanh": (lambda: tn.Hardtanh(-0.5, 0.3), (7,)),
    "LeakyReLU": (lambda: tn.LeakyReLU(0.2), (7,)),
    "ELU": (lambda: tn.ELU(0.7), (7,)),
    "GELU": (lambda: tn.GELU("tanh"), (7,)),
    "Softplus": (lambda: tn.Softplus(2.0), (7,)),
    "Softmax": (lambda: tn.Softmax(-1), (3, 4)),
    "MaxPool1d": (lambda: tn.MaxPool1d(2, ceil_mode=True), (2, 5)),
    "MaxPool2d": (lambda: tn.MaxPool2d(3, 2, 1), (2, 5, 4)),
    "AvgPool2d": (lambda: tn.AvgPool2d(2, padding=1, divisor_override=3), (1, 4, 4)),
    "AdaptiveAvgPool2d": (lambda: tn.AdaptiveAvgPool2d((2, None)), (2, 5, 3)),
    "MaxPool3d": (lambda: tn.MaxPool3d(2, 1), (2, 3, 2, 3)),
    "AvgPool3d": (lambda: tn.AvgPool3d(2, 1, divisor_override=3), (2, 3, 2, 3)),
    "AdaptiveAvgPool3d": (lambda: tn.AdaptiveAvgPool3d(2), (2, 3, 2, 3)),
    **{f"AdaptiveMaxPool{n}d": (lambda n=n: getattr(tn, f"AdaptiveMaxPool{n}d")(2), (2, *(3, 2, 3)[:n]))
       for n in (1, 2, 3)},
    **{f"InstanceNorm{n}d": (lambda n=n: getattr(tn, f"InstanceNorm{n}d")(2, affine=True), (2, *(3, 2, 3)[:n]))
       for n in (1, 2, 3)},
    "BatchNorm3d": (lambda: tn.BatchNorm3d(2).eval(), (2, 3, 2, 3)),
    "Upsample": (lambda: tn.Upsample(scale_factor=(2, 1.5), mode="bilinear"), (2, 3, 4)),
    "Upsample, nearest": (lambda: tn.Upsample(5), (2, 3)),
    **{name: (getattr(tn, name), (7,)) for name in ("Hardswish", "LogSigmoid", "Softsign")},
    "CELU": (lambda: tn.CELU(0.5), (7,)),  # the slope's alpha is a float32 in torch
    "Softmax of channels": (lambda: tn.Softmax(1), (3, 2, 2)),
    "LogSoftmax": (lambda: tn.LogSoftmax(-1), (3, 4)),
    "Mish": (tn.Mish, (7,)),
    "PReLU": (lambda: tn.PReLU(3), (3, 4)),
    "GroupNorm": (lambda: tn.GroupNorm(2, 4), (4, 3)),
    "RMSNorm": (lambda: tn.RMSNorm(4), (3, 4)),
    "BatchNorm1d": (lambda: tn.BatchNorm1d(3).eval(), (3, 4)),
    "ZeroPad2d": (lambda: tn.ZeroPad2d((1, 0, 2, 1)), (2, 3, 2)),
    "Unflatten": (lambda: tn.Unflatten(1, (2, 3)), (6,)),
    "Flatten, from the second axis": (lambda: tn.Flatten(2), (2, 3, 2)),
    "Dropout2d": (lambda: tn.Dropout2d(0.5).eval(), (2, 3, 3)),
    "BatchNorm2d": (lambda: tn.BatchNorm2d(2).eval(), (2, 3, 2)),
    "LayerNorm": (lambda: tn.LayerNorm(4), (3, 4)),
    "Flatten": (tn.Flatten, (2, 3)),
    "Dropout": (lambda: tn.Dropout(0.5).eval(), (4,)),
    "RNN": (lambda: tn.RNN(2, 3, nonlinearity="relu", batch_first=True), (4, 2)),
    "GRU": (lambda: tn.GRU(2, 3, 2, batch_first=True, bidirectional=True), (4, 2)),
    "LSTM": (lambda: tn.LSTM(2, 3, batch_first=True, proj_size=2), (4, 2)),
    "a chain": (lambda: tn.Sequential(tn.Conv2d(1, 2, 3), tn.ReLU(), tn.Sequential(tn.MaxPool2d(2), tn.Flatten()),
                                      tn.Linear(8, 3), tn.Tanh()), (1, 6, 6)),
}  # fmt: skip


def by_autograd(module, x):
    """The dense Jacobian (B, n_out, n_in)."""

    def of_one(v):
        y = module(v[None])
        return (y[0] if isinstance(y, tuple) else y)[0].reshape(-1)

    return torch.stack([torch.autograd.functional.jacobian(of_one, row).reshape(-1, row.numel()) for row in x])


@pytest.mark.parametrize("name", MODULES)
def test_jacobians_are_those_of_autograd(name):
    torch.manual_seed(0)
    make, shape = MODULES[name]
    module = make().double()
    x = torch.randn(3, *shape, dtype=torch.float64)
    found = st.sparse_jacobian(module, x)
    expected = by_autograd(module, x)
    assert found.layout == torch.sparse_csr and found.shape == expected.shape
    torch.testing.assert_close(found.to_dense(), expected, rtol=1e-9, atol=1e-11)
    sample = found[1]
    assert sample.layout == torch.sparse_csr
    torch.testing.assert_close(sample @ torch.ones(x[0].numel(), dtype=x.dtype), expected[1].sum(1))


def test_it_is_sparse_and_of_the_weights_that_are_there_now():
    conv = tn.Conv2d(3, 8, 3, padding=1)
    x = torch.randn(2, 3, 16, 16)
    before = st.sparse_jacobian(conv, x)
    assert before._nnz() < 0.04 * before.shape[1] * before.shape[2] and before.values().dtype == torch.float32
    assert before.values().stride(0) == 0  # there once
    with torch.no_grad():
        conv.weight *= 2
    torch.testing.assert_close(st.sparse_jacobian(conv, x).values(), 2 * before.values())
    before.crow_indices().clone().fill_(0)
    assert st.sparse_jacobian(tn.ReLU(), x[:, :0]).shape == (2, 0, 0)


def test_time_major_and_our_own_layers():
    rnn = tn.GRU(2, 3).double()
    x = torch.randn(4, 2, 2, dtype=torch.float64)
    expected = by_autograd(lambda v: rnn(v.transpose(0, 1))[0].transpose(0, 1), x.transpose(0, 1))
    torch.testing.assert_close(st.sparse_jacobian(rnn, x).to_dense(), expected)
    torch.testing.assert_close(st.sparse_jacobian(st.accelerate(rnn), x).to_dense(), expected)
    own = nn.Sequential(nn.Linear(4, 3, dtype=np.float64, rng=0), nn.ReLU())
    x = torch.randn(2, 4, dtype=torch.float64)
    twin = tn.Sequential(tn.Linear(4, 3), tn.ReLU()).double()
    twin.load_state_dict({name: torch.from_numpy(a) for name, a in own.state_dict().items()})
    torch.testing.assert_close(st.sparse_jacobian(own, x).to_dense(), by_autograd(twin, x))


def test_a_view_that_changes_the_sign():
    """PyTorch changes it when the view is read; an array of its memory would have the other one."""
    x = torch.complex(torch.ones(2, 3), torch.full((2, 3), 2.0)).conj().imag
    assert x.is_neg()
    torch.testing.assert_close(st.sparse_jacobian(tn.Softplus(), x).to_dense(), by_autograd(tn.Softplus(), x))


def test_statistics_without_weights():
    norm, x = tn.BatchNorm1d(3, affine=False).double().eval(), torch.randn(2, 3, dtype=torch.float64)
    torch.testing.assert_close(st.sparse_jacobian(norm, x).to_dense(), by_autograd(norm, x))


def test_parametrized_weights_count():
    linear = utils.parametrizations.weight_norm(tn.Linear(4, 3).double())
    x = torch.randn(2, 4, dtype=torch.float64)
    torch.testing.assert_close(st.sparse_jacobian(linear, x).to_dense(), by_autograd(linear, x))


class Other(tn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def test_refusals():
    x = torch.randn(2, 4)
    hooked = tn.Linear(4, 4)
    hooked.register_forward_hook(lambda *_: None)
    replaced = tn.Linear(4, 4)
    replaced.forward = lambda x: 0 * x
    pooled = torch.randn(2, 1, 4, 4)
    wrong = [
        (OptionError, Other(4, 4), x), (OptionError, hooked, x), (OptionError, tn.Dropout(0.5), x),
        (OptionError, tn.Bilinear(2, 2, 2), x), (OptionError, torch.relu, x), (ShapeError, tn.Flatten(0), x),
        (OptionError, tn.MaxPool2d(2, return_indices=True), pooled), (OptionError, tn.BatchNorm2d(1), pooled),
        (OptionError, tn.GRU(4, 2, 2, dropout=0.5), x[None]),
        (ShapeError, tn.Linear(3, 4), x), (ShapeError, tn.ReLU(), torch.tensor(1.0)),
        (DTypeError, tn.Linear(4, 4), x.double()), (DTypeError, tn.Linear(4, 4), x.numpy()),
        (DTypeError, tn.ReLU(), x.half()), (OptionError, replaced, x),
        (DeviceError, tn.ReLU(), x.to_sparse()), (DeviceError, tn.Linear(4, 4), x.to("meta")),
        (DeviceError, tn.Linear(4, 4, device="meta"), x),
    ]  # fmt: skip
    for error, module, given in wrong:
        with pytest.raises(error, match="Expected"):
            st.sparse_jacobian(module, given)
