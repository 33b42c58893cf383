"""Recurrent layers and cells against torch.nn: directions, layers, lengths, states, all ways back."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fuzz.case import accepted, refused, same
from fuzz.draw import NO_ARRAYS, chance, laid_out, normal, one_of, real, size
from sparsebp import nn
from sparsebp.core.errors import MemoryLimitError

BACKWARDS = ("auto", "linear", "chunked", "blelloch", "hybrid")


def case(rng: np.random.Generator) -> None:
    (_cell if chance(rng, 0.2) else _layer)(rng, real(rng))


def _load(twin: torch.nn.Module, layer: nn.Layer, dtype: Any) -> torch.nn.Module:
    twin = twin.to(getattr(torch, dtype.name))
    twin.load_state_dict({name: torch.from_numpy(array) for name, array in layer.state_dict().items()})
    return twin


def _layer(rng: np.random.Generator, dtype: Any) -> None:
    kind, inputs, hidden = one_of(rng, "RNN", "GRU"), size(rng, 1, 11), size(rng, 1, 7)
    options: dict[str, Any] = {
        "num_layers": one_of(rng, 1, 1, 2, 3),
        "bidirectional": chance(rng, 0.4),
        "bias": chance(rng, 0.7),
        "batch_first": chance(rng, 0.5),
    }
    if kind == "RNN":
        options["nonlinearity"] = one_of(rng, "tanh", "relu")
    back: dict[str, Any] = {"backward": one_of(rng, *BACKWARDS)}
    if chance(rng, 0.3):
        back |= {"chunks": one_of(rng, 1, 2, np.int64(3), 100), "up_levels": size(rng, 0, 3)}
    if chance(rng, 0.2):
        back["memory_limit"] = int(10 ** rng.uniform(0, 7))
    with accepted(f"{kind}({inputs}, {hidden}, {options}, {back})"):
        layer = getattr(nn, kind)(inputs, hidden, **options, **back, dtype=dtype, rng=int(rng.integers(99)))
    twin = _load(getattr(torch.nn, kind)(inputs, hidden, **options), layer, dtype)
    directions = 2 if options["bidirectional"] else 1
    for _ in range(2):
        _call(rng, layer, twin, dtype, options["num_layers"] * directions)


def _call(rng: np.random.Generator, layer: Any, twin: Any, dtype: Any, rows: int) -> None:
    steps, batch, first = size(rng, 1, 13), size(rng, 1, 5), layer.batch_first
    shape = (batch, steps) if first else (steps, batch)
    x = normal(rng, (*shape, layer.input_size), dtype)
    h0 = normal(rng, (rows, batch, layer.hidden_size), dtype) if chance(rng, 0.5) else None
    lengths = rng.integers(1, steps + 1, batch) if chance(rng, 0.4) else None
    if chance(rng, 0.15):
        _bad(rng, layer, x, h0, steps, batch)
        return
    given, state = torch.from_numpy(x.copy()).requires_grad_(), None if h0 is None else torch.from_numpy(h0.copy())
    if state is not None:
        state.requires_grad_()
    if lengths is None:
        wanted, last = twin(given, state)
    else:
        pack = torch.nn.utils.rnn.pack_padded_sequence
        packed, last = twin(pack(given, torch.from_numpy(lengths), first, enforce_sorted=False), state)
        wanted, _ = torch.nn.utils.rnn.pad_packed_sequence(packed, first, total_length=steps)
        padding = np.arange(steps)[:, None] >= lengths
        x[padding.T if first else padding] = one_of(rng, np.nan, np.inf, 1.0)  # what is there has no influence
    try:
        with accepted(f"x {x.shape}, lengths {lengths}"):
            y, saved = layer.forward(
                laid_out(rng, x),
                None if h0 is None else laid_out(rng, h0),
                lengths if chance(rng, 0.5) or lengths is None else lengths.tolist(),
            )
        same("y", y, wanted.detach().numpy(), dtype, 4)
        same("h_n", saved.h_n, last.detach().numpy(), dtype, 4)
        gy = normal(rng, y.shape, dtype) if chance(rng, 0.8) else None
        gh = normal(rng, last.shape, dtype) if gy is None or chance(rng, 0.4) else None
        loss = sum((a * torch.from_numpy(g)).sum() for a, g in ((wanted, gy), (last, gh)) if g is not None)
        twin.zero_grad()
        loss.backward()
        buffers = [None if g is None else np.zeros_like(g) for g in (gy, gh)]
        for scale in (0, 1, 2):  # the caller's buffers are used again
            for buffer, g in zip(buffers, (gy, gh), strict=True):
                if buffer is not None:
                    buffer[...] = scale * g
            _compare(rng, layer, twin, saved, buffers, scale, given.grad.numpy(), state, dtype)
    except MemoryLimitError:
        if layer.options.memory_limit is None:
            raise


def _compare(
    rng: np.random.Generator,
    layer: Any,
    twin: Any,
    saved: Any,
    buffers: list,
    scale: int,
    gx: np.ndarray,
    state: Any,
    dtype: Any,
) -> None:
    gy, gh = (b if b is None or chance(rng, 0.6) else laid_out(rng, b) for b in buffers)
    g = layer.gradients(gy, saved, gh)
    if chance(rng, 0.5):
        same("gx", g.input, scale * gx, dtype, 8)
    for name, parameter in twin.named_parameters():
        same(name, g.weights[name], scale * parameter.grad.numpy(), dtype, 16)
    same("gx", g.input, scale * gx, dtype, 8)
    if state is not None:
        same("gh0", g.h0, scale * state.grad.numpy(), dtype, 8)


def _bad(rng: np.random.Generator, layer: Any, x: np.ndarray, h0: Any, steps: int, batch: int) -> None:
    junk = one_of(rng, *NO_ARRAYS)
    way = int(rng.integers(5))
    if way == 0:
        refused(f"x {junk!r}", layer.forward, junk)
    elif way == 1:
        refused(f"h0 {junk!r}", layer.forward, x, junk)
    elif way == 2:
        wrong = one_of(rng, junk, [0] * batch, [steps + 1] * batch, [[1], [1, 2]])
        if not (isinstance(wrong, (list, tuple)) and list(wrong) == [1] and batch == 1):
            refused(f"lengths {wrong!r}", layer.forward, x, h0, wrong)
    elif way == 3:
        _, saved = layer.forward(x, h0)
        refused(f"gy {junk!r}", one_of(rng, layer.gradients, layer.input_grad, layer.weight_grad), junk, saved)
    else:
        _, saved = layer.forward(x, h0)
        refused(f"grad_h_n {junk!r}", layer.gradients, None, saved, junk)


def _cell(rng: np.random.Generator, dtype: Any) -> None:
    kind, inputs, hidden, batch = one_of(rng, "RNNCell", "GRUCell"), size(rng, 1, 11), size(rng, 1, 7), size(rng, 1, 5)
    options: dict[str, Any] = {"bias": chance(rng, 0.7)}
    if kind == "RNNCell":
        options["nonlinearity"] = one_of(rng, "tanh", "relu")
    with accepted(f"{kind}({inputs}, {hidden}, {options})"):
        cell = getattr(nn, kind)(inputs, hidden, **options, dtype=dtype, rng=int(rng.integers(99)))
    twin = _load(getattr(torch.nn, kind)(inputs, hidden, **options), cell, dtype)
    x, h = normal(rng, (batch, inputs), dtype), normal(rng, (batch, hidden), dtype)
    given, state = torch.from_numpy(x.copy()).requires_grad_(), torch.from_numpy(h.copy()).requires_grad_()
    wanted = twin(given, state)
    with accepted("a step"):
        y, saved = cell.forward(laid_out(rng, x), laid_out(rng, h))
    same("y", y, wanted.detach().numpy(), dtype, 4)
    gy = normal(rng, y.shape, dtype)
    wanted.backward(torch.from_numpy(gy.copy()))
    buffer = np.zeros_like(gy)
    for scale in (0, 1, 2):
        buffer[...] = scale * gy
        g = cell.gradients(laid_out(rng, buffer), saved)
        same("gx", g.input, scale * given.grad.numpy(), dtype, 8)
        same("gh", g.hidden, scale * state.grad.numpy(), dtype, 8)
        for name, parameter in twin.named_parameters():
            same(name, g.weights[name], scale * parameter.grad.numpy(), dtype, 8)
    junk = one_of(rng, *NO_ARRAYS)
    refused(f"x {junk!r}", cell.forward, junk, h)
    refused(f"h {junk!r}", cell.forward, x, junk)
