"""Layers inside `torch.no_grad` and `torch.inference_mode`: nothing is kept, and transforms go their own way."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch.nn.utils.rnn import pack_padded_sequence  # noqa: E402

import sparsebp.torch as sparsebp_torch  # noqa: E402
from sparsebp.torch import ops  # noqa: E402


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    whole = ops.infer_op
    monkeypatch.setattr(ops, "infer_op", lambda kind, *rest: found.append(kind) or whole(kind, *rest))
    return found


@pytest.mark.parametrize("name", ["RNN", "GRU", "LSTM"])
def test_without_gradients_nothing_is_kept(name: str, calls: list[str]) -> None:
    torch.manual_seed(0)
    theirs = getattr(torch.nn, name)(3, 5, 2, bidirectional=True)
    ours = getattr(sparsebp_torch, name)(3, 5, 2, bidirectional=True)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(6, 4, 3)
    packed = pack_padded_sequence(x, torch.tensor([6, 2, 4, 1]), enforce_sorted=False)
    for without in (torch.no_grad, torch.inference_mode):
        with without():
            for given in (x, x.transpose(0, 1).contiguous().transpose(0, 1), packed):
                (a, a_last), (b, b_last) = theirs(given), ours(given)
                torch.testing.assert_close(getattr(b, "data", b), getattr(a, "data", a))
                torch.testing.assert_close(b_last, a_last)
    assert len(calls) == 4 * 3 * 2
    with torch.no_grad():
        along = torch.ones_like(x)
        for done in (
            torch.func.jvp(lambda v: ours(v)[0], (x,), (along,))[1],
            torch.vmap(lambda v: ours(v)[0])(x[None])[0],
        ):
            assert done.shape == (6, 4, 10)
    ours(x)[0].sum().backward()
    assert len(calls) == 4 * 3 * 2
    assert ours.weight_hh_l0.grad is not None
