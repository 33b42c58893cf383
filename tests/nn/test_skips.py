"""`Stash` and `Pop`: gradients of PyTorch for any connections in a chain, whatever its groups, and clear refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import orders
import pipelines as p
from sparsebp import jacobian_t, nn, optim, value_and_grad
from sparsebp.core.errors import OptionError, ShapeError
from sparsebp.runtime.actions import Stages
from sparsebp.runtime.executor import PlainExecutor


@st.composite
def chains(draw):
    """Return the kinds of layers: a name stashes or joins, by turns."""
    kinds, waiting = [], []
    for _ in range(draw(st.integers(1, 9))):
        kind = draw(st.sampled_from(["linear", "tanh", "stash", "sum", "concat"]))
        if kind == "stash":
            waiting.append(draw(st.sampled_from("ab")))
            kinds.append(("stash", waiting[-1]))
        elif kind in ("linear", "tanh"):
            kinds.append((kind, ""))
        elif waiting:
            kinds.append((kind, waiting[-1] if draw(st.booleans()) else draw(st.sampled_from(waiting))))
            del waiting[max(at for at, name in enumerate(waiting) if name == kinds[-1][1])]
    while waiting:
        kinds.append(("sum", waiting.pop()))
    return kinds


def built(kinds, n):
    """Return layers and the same computation in PyTorch, with widths that fit."""
    layers, steps, width, waiting = [], [], n, []
    for number, (kind, name) in enumerate(kinds):
        if kind == "stash":
            layers.append(nn.Stash(name))
            waiting.append((name, width))
            steps.append((kind, name))
        elif kind in ("sum", "concat"):
            at = max(place for place, (one, _) in enumerate(waiting) if one == name)
            _, stashed = waiting.pop(at)
            if kind == "sum" and stashed != width:
                layers.append(nn.Linear(width, stashed, dtype=float, rng=number))
                steps.append(("linear", layers[-1]))
                width = stashed
            layers.append(nn.Pop(name, kind))
            steps.append((kind, name))
            width += stashed * (kind == "concat")
        else:
            layers.append(nn.Tanh() if kind == "tanh" else nn.Linear(width, width, dtype=float, rng=number))
            steps.append((kind, layers[-1]))
    layers.append(nn.Linear(width, 3, dtype=float, rng=99))
    return layers, [*steps, ("linear", layers[-1])]


def by_torch(steps, x):
    """Return the output and the arrays of weights, with gradients."""
    waiting, leaves = [], []
    for kind, part in steps:
        if kind == "stash":
            waiting.append((part, x))
        elif kind == "linear":
            leaves += [torch.tensor(array, requires_grad=True) for array in part.params.values()]
            x = torch.nn.functional.linear(x, *leaves[-2:])
        elif kind == "tanh":
            x = torch.tanh(x)
        else:
            _, other = waiting.pop(max(at for at, (name, _) in enumerate(waiting) if name == part))
            x = x + other if kind == "sum" else torch.cat([x, other], 1)
    return x, leaves


def groups(draw, layers):
    """Return the layers in a Sequential, some in inner ones and in stages."""
    cuts = sorted(draw(st.lists(st.integers(0, len(layers)), max_size=3)))
    parts = [layers[a:b] for a, b in zip([0, *cuts], [*cuts, len(layers)], strict=True) if a < b]
    kinds = [draw(st.sampled_from([nn.Sequential, nn.Stage, None])) for _ in parts]
    made = [[kind(*part)] if kind else part for kind, part in zip(kinds, parts, strict=True)]
    return nn.Sequential(*(layer for some in made for layer in some))


@settings(max_examples=60)
@given(st.data(), chains(), st.integers(1, 3), st.integers(1, 5))
def test_gradients_are_those_of_pytorch(data, kinds, n, batch):
    layers, steps = built(kinds, n)
    rng = np.random.default_rng(n)
    x, target = rng.standard_normal((batch, n)), rng.integers(0, 3, batch)
    model = groups(data.draw, layers)
    at = torch.tensor(x, requires_grad=True)
    y, leaves = by_torch(steps, at)
    loss = torch.nn.functional.cross_entropy(y, torch.tensor(target))
    loss.backward()
    value, grads = value_and_grad(model, nn.CrossEntropyLoss())(x, target)
    assert value == pytest.approx(loss.item())
    close = {"rtol": 1e-9, "atol": 1e-12}
    for grad, leaf in zip(grads.values(), leaves, strict=True):
        np.testing.assert_allclose(grad, leaf.grad.numpy(), **close)
    found, back = model.vjp(x)
    np.testing.assert_allclose(found, y.detach().numpy(), **close)
    gy = rng.standard_normal(found.shape)
    (wanted,) = torch.autograd.grad(by_torch(steps, at)[0], at, torch.tensor(gy))
    np.testing.assert_allclose(back(gy).input, wanted.numpy(), **close)
    some = list(grads)[-1:]
    partly = value_and_grad(model, nn.CrossEntropyLoss(), params=some)(x, target)[1]
    np.testing.assert_array_equal(partly[some[0]], grads[some[0]])

    optimizer = optim.SGD(model.parameters(), lr=1.0)  # stage by stage
    before = {name: array.copy() for name, array in model.parameters().items()}
    order = orders.order_for(model, microbatches=1, fusion="none")
    PlainExecutor(model, nn.CrossEntropyLoss(), optimizer, order).step([(x, target)])
    for name, array in model.parameters().items():
        np.testing.assert_allclose(before[name] - array, grads[name], **close)


def test_auto_goes_layer_by_layer_and_scans_are_refused():
    x, target = p.batches("unet", [3])[0][:2]
    wanted = value_and_grad(p.unet(), nn.CrossEntropyLoss())(x, target)[1]
    model = p.unet()
    model.set_backward("auto", workers=1000)
    grads = value_and_grad(model, nn.CrossEntropyLoss())(x, target)[1]
    orders.assert_close(grads, wanted, rtol=0, atol=0)
    model.set_backward("blelloch")
    with pytest.raises(OptionError, match="no product"):
        value_and_grad(model, nn.CrossEntropyLoss())(x, target)
    with pytest.raises(OptionError, match="no product"):
        jacobian_t(p.unet(), x)


def test_what_does_not_fit_is_refused():
    linear = nn.Linear(4, 5, rng=0)
    x, target = np.ones((2, 4), np.float32), np.array([0, 1])

    def refused(error, words, *layers):
        with pytest.raises(error, match=words):
            value_and_grad(nn.Sequential(*layers), nn.CrossEntropyLoss())(x, target)

    refused(OptionError, "Nothing is stashed for Pop.'a'", nn.Stash("b"), nn.Pop("a"))
    refused(ShapeError, "does not fit what is stashed", nn.Stash("a"), linear, nn.Pop("a"))
    refused(ShapeError, "but for the channels", nn.Stash("a"), nn.Unflatten(1, (2, 2)), nn.Pop("a", "concat"))
    refused(OptionError, "not joined", nn.Stash("a"), linear)
    for way in nn.Sequential(nn.Stash("a"), linear), nn.Sequential(nn.Stash("a"), linear).vjp:
        with pytest.raises(OptionError, match="not joined"):
            way(x)
    with pytest.raises(OptionError, match="not joined"):
        Stages(nn.Sequential(nn.Stash("a"), linear))
    with pytest.raises(OptionError, match="Nothing is stashed"):
        Stages(nn.Sequential(nn.Pop("a"), linear, nn.Stash("a")))
    with pytest.raises(OptionError, match="name"):
        nn.Stash("")
    with pytest.raises(OptionError, match="join"):
        nn.Pop("a", "product")
