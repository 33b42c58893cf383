"""The convolutional networks against their torch.nn twins: outputs and all gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from networks import TorchConcat, TorchResidual
from sparsebp import models, nn
from torch_twins import assert_gradients, loaded


def twin(layer):
    """The same network of torch.nn, layer by layer, with the same weights."""
    t = torch.nn
    if isinstance(layer, nn.Sequential):
        return t.Sequential(*(twin(child) for child in layer.children.values()))
    if isinstance(layer, nn.Residual):
        return TorchResidual(*map(twin, layer.children.values()))
    if isinstance(layer, nn.Concat):
        return TorchConcat(twin(child) for child in layer.children.values())
    if isinstance(layer, nn.Conv2d):
        w = layer.windows
        padding = tuple(before for before, _ in w.padding)
        return t.Conv2d(layer.in_channels, layer.out_channels, w.kernel, w.stride, padding, w.dilation, layer.groups,
                        "bias" in layer.params)  # fmt: skip
    if isinstance(layer, nn.Linear):
        return t.Linear(layer.in_features, layer.out_features)
    if isinstance(layer, nn.BatchNorm2d):
        return t.BatchNorm2d(layer.num_features)
    plain = {nn.ReLU: t.ReLU, nn.Flatten: t.Flatten, nn.Identity: t.Identity}
    if type(layer) in plain:
        return plain[type(layer)]()
    if isinstance(layer, nn.Hardtanh):
        return t.ReLU6()
    return {nn.MaxPool2d: t.MaxPool2d(2), nn.AvgPool2d: t.AvgPool2d(2), nn.AdaptiveAvgPool2d: t.AdaptiveAvgPool2d(1)}[
        type(layer)
    ]


MODELS = {
    "lenet5": (models.lenet5, (1, 28, 28)),
    "lenet5 on colour": (lambda **o: models.lenet5(3, 7, size=32, **o), (3, 32, 32)),
    "vgg11": (lambda **o: models.vgg11(width=1 / 16, **o), (3, 32, 32)),
    "resnet": (lambda **o: models.resnet(depth=14, width=0.25, **o), (3, 8, 8)),
    "mobilenetv2": (lambda **o: models.mobilenetv2(width=0.1, stages=3, **o), (3, 12, 12)),
    "densenet": (lambda **o: models.densenet(depth=10, growth=3, blocks=3, width=0.5, **o), (3, 8, 8)),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("training", [True, False])
def test_parity_with_torch(name, training):
    make, shape = MODELS[name]
    ours = make(dtype=np.float64, rng=0).train(training)
    rng = np.random.default_rng(1)
    x = rng.standard_normal((4, *shape))
    assert_gradients(ours, loaded(twin(ours), ours).train(training), x, rng, {"rtol": 1e-9, "atol": 1e-9})


@pytest.mark.parametrize("name", MODELS)
def test_the_seed_decides_the_weights(name):
    make, _ = MODELS[name]
    first, same, other = make(rng=3).state_dict(), make(rng=3).state_dict(), make(rng=4).state_dict()
    assert all((first[key] == same[key]).all() for key in first)
    assert any((first[key] != other[key]).any() for key in first)
    assert first["0.weight"].dtype == np.float32
    double = make(rng=3, dtype=np.float64).state_dict()
    np.testing.assert_array_equal(double["0.weight"].astype(np.float32), first["0.weight"])


def test_sizes_are_those_of_the_papers():
    def weights(model):
        return sum(a.size for a in model.parameters().values())

    assert weights(models.lenet5()) == 61_706
    assert weights(models.vgg11()) == 9_225_610  # 9 220 480 in the convolutions, 5 130 in the classifier
    assert weights(models.mobilenetv2()) == 2_236_682  # torchvision's without its 1000 classes: 2 223 872 + 12 810
    assert weights(models.densenet()) == _densenet_weights(40, 12) == 1_019_722  # Table 2 of the paper: 1.0M
    assert weights(models.densenet(depth=22, growth=5)) == _densenet_weights(22, 5)
    for depth, millions in ((20, "0.27"), (32, "0.46"), (44, "0.66"), (56, "0.85")):  # Table 6 of the paper
        projections = 16 * 32 + 2 * 32 + 32 * 64 + 2 * 64  # which its shortcuts lack
        assert f"{(weights(models.resnet(depth=depth)) - projections) / 1e6:.2f}" == millions
    layers = [type(layer).__name__ for layer in models.vgg11(width=0.01).children.values()]
    assert (layers.count("Conv2d"), layers.count("ReLU"), layers.count("MaxPool2d")) == (8, 8, 5)


def _densenet_weights(depth, growth):
    """Counted by the paper's text: 16 channels, three blocks of 3×3 convolutions behind BN and ReLU, 1×1 between."""
    channels, total = 16, 16 * 3 * 9
    for block in range(3):
        if block:
            total += 2 * channels + channels * channels
        for _ in range((depth - 4) // 3):
            total += 2 * channels + growth * channels * 9
            channels += growth
    return total + 2 * channels + 10 * channels + 10


def test_he_keeps_the_signal_through_vgg11():
    model = models.vgg11(width=0.25, rng=0)
    y = model(np.random.default_rng(0).standard_normal((8, 3, 32, 32)).astype(np.float32))
    assert 0.05 < y.std() < 20
