"""Linear recurrences by use, against the package that has each: filters, finance, returns, sequence layers.

``python -m benchmarks filters``. A call computes the result, and where the row says so the gradients at all inputs from
a given one. Peers that are not installed are left out, by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np

import sparsebp as sb
from benchmarks import harness
from benchmarks.harness import Benchmark, Row, Run, columns, import_torch, optional, refuse_difference
from benchmarks.linear import torch_scan
from sparsebp import nn
from sparsebp.core import timing

Call = Callable[[], Any]


class Case(NamedTuple):
    """A use at a size: steps, and series, samples or environments; units or sections.

    Attributes
    ----------
    against
        The package to compare with, as it is imported.
    least
        Times faster than the peer.
    """

    use: str
    steps: int
    batch: int
    width: int
    against: str
    least: float


def cases(steps: int, batch: int, samples: int, widths: tuple[int, ...]) -> Iterator[Case]:
    """Return the cases: long series, a batch of shorter ones, and layers of some widths."""
    short = max(steps // 64, 1)
    yield Case("one pole", steps, 1, 1, "scipy", 2)
    yield Case("one pole, time last", short, batch, 1, "scipy", 2)
    yield Case("4 sections", short, batch, 4, "scipy", 1.5)
    yield Case("one pole, gradients", short, batch, 1, "torchlpc", 3)
    yield Case("4 sections, gradients", short, batch, 4, "torchlpc", 3)
    yield Case("ewm", steps, 1, 1, "pandas", 2)
    yield Case("ewm, 10% missing", steps // 10, 10, 1, "pandas", 2)
    yield Case("GARCH variances", steps, 1, 1, "arch", 2)
    yield Case("gae", max(short // 8, 2), batch, 1, "numpy", 8)
    for width in widths:
        yield Case("MinLSTM, gradients", max(samples * 12, 2), samples, width, "torch", 3)
    yield Case("lengths, gradients", max(samples * 60, 2), samples, 64, "torch", 3)


def normal(*sizes: int) -> np.ndarray:
    """Return the same numbers at every call."""
    return np.random.default_rng(0).standard_normal(sizes)


# A use's two sides: ours, and the peer's. Each returns arrays or tensors to compare.


def one_pole(case: Case) -> tuple[Call, Call]:
    from scipy.signal import lfilter

    x, factor = normal(case.batch, case.steps), np.full((1, 1), 0.9)
    return lambda: sb.linear_recurrence(factor, x, dim=-1), lambda: lfilter([1.0], [1.0, -0.9], x)


def sections(case: Case) -> tuple[Call, Call]:
    from scipy.signal import butter, sosfilt

    sos, x = butter(2 * case.width, 0.2, output="sos"), normal(case.batch, case.steps)
    return lambda: sb.sosfilt(sos, x).y, lambda: sosfilt(sos, x)


def one_pole_gradients(case: Case) -> tuple[Call, Call]:
    import sparsebp.torch as st

    torch, lpc = import_torch(), optional("torchlpc").sample_wise_lpc  # type: ignore[union-attr]
    x, a = torch.from_numpy(normal(case.batch, case.steps)).requires_grad_(), torch.tensor(0.9, dtype=torch.float64)
    incoming, inputs = torch.ones_like(x), (x, a.requires_grad_())

    def theirs() -> Any:
        y = lpc(x, (-a).expand(*x.shape, 1))
        return y.detach(), *torch.autograd.grad(y, inputs, incoming)

    def ours() -> Any:
        y = st.linear_recurrence(a, x, dim=-1)
        return y.detach(), *torch.autograd.grad(y, inputs, incoming)

    return ours, theirs


def sections_gradients(case: Case) -> tuple[Call, Call]:
    from scipy.signal import butter

    import sparsebp.torch as st

    torch, lpc = import_torch(), optional("torchlpc").sample_wise_lpc  # type: ignore[union-attr]
    sos = torch.from_numpy(butter(2 * case.width, 0.2, output="sos")).requires_grad_()
    x = torch.from_numpy(normal(case.batch, case.steps)).requires_grad_()
    incoming = torch.ones_like(x)

    def theirs() -> Any:
        y = x
        for b0, b1, b2, _, a1, a2 in sos:
            wide = torch.nn.functional.pad(y, (2, 0))
            poles = torch.stack([a1, a2]).expand(*x.shape, 2)
            y = lpc(b0 * wide[:, 2:] + b1 * wide[:, 1:-1] + b2 * wide[:, :-2], poles)
        return y.detach(), *torch.autograd.grad(y, (sos, x), incoming)

    def ours() -> Any:
        y, _ = st.sosfilt(sos, x)
        return y.detach(), *torch.autograd.grad(y, (sos, x), incoming)

    return ours, theirs


def ewm(case: Case, missing: float = 0.0) -> tuple[Call, Call]:
    import pandas as pd

    x = normal(case.steps, case.batch)
    x[np.random.default_rng(1).random(x.shape) < missing] = np.nan
    frame = pd.DataFrame(x)
    return lambda: sb.ewm(x, span=20), lambda: frame.ewm(span=20).mean().to_numpy()


def garch(case: Case) -> tuple[Call, Call]:
    from arch.univariate.recursions import garch_recursion

    shocks, variance = normal(case.steps) ** 2, np.empty(case.steps)
    bounds, parameters = np.tile([0.0, np.inf], (case.steps, 1)), np.array([0.1, 0.1, 0.8])
    terms, beta, first = np.empty(case.steps), np.array([0.8]), np.ones(())

    def ours() -> Any:
        terms[0] = 0.1 + 0.1
        np.multiply(shocks[:-1], 0.1, out=terms[1:])
        terms[1:] += 0.1
        return sb.linear_recurrence(beta, terms, first)

    def theirs() -> Any:
        return garch_recursion(parameters, shocks, np.sign(shocks), variance, 1, 0, 1, case.steps, 1.0, bounds)

    return ours, theirs


def gae(case: Case) -> tuple[Call, Call]:
    values, rewards = (array.astype(np.float32) for array in (normal(case.steps + 1, case.batch), normal(*case[1:3])))
    ends = np.random.default_rng(1).random((case.steps, case.batch)) < 0.02

    def ours() -> Any:
        return sb.gae(0.99, 0.95, values[:-1], values[1:], rewards, ends, time_dim=0)[0]

    def theirs() -> Any:  # as the rollout buffer of stable-baselines3
        found, last = np.zeros_like(rewards), np.zeros(case.batch, np.float32)
        for t in reversed(range(case.steps)):
            on = 1.0 - ends[t].astype(np.float32)
            delta = rewards[t] + 0.99 * values[t + 1] * on - values[t]
            found[t] = last = delta + 0.99 * 0.95 * on * last
        return found

    return ours, theirs


def min_lstm(case: Case) -> tuple[Call, Call]:
    torch, (_, steps, batch, width, *_) = import_torch(), case
    layer, x = nn.MinLSTM(width, width, rng=0), normal(steps, batch, width).astype(np.float32)
    names, given = [*layer.state_dict()], torch.from_numpy(x).requires_grad_()
    tensors = [torch.from_numpy(array.copy()).requires_grad_() for array in layer.state_dict().values()]
    grad = np.ones_like(x)

    def ours() -> Any:
        y, back = layer.vjp(x)
        found = back(grad)
        return y, found.input, *(found.weights[name] for name in names)

    def theirs() -> Any:
        weight, bias = tensors
        i, f, v = torch.nn.functional.linear(given, weight, bias).chunk(3, dim=2)
        z = (torch.nn.functional.logsigmoid(i) - torch.nn.functional.logsigmoid(f)).sigmoid()
        y = torch_scan(1 - z, z * v)
        return y.detach(), *torch.autograd.grad(y, (given, *tensors), torch.from_numpy(grad))

    return ours, theirs


def with_lengths(case: Case) -> tuple[Call, Call]:
    import sparsebp.torch as st

    torch, (_, steps, batch, width, *_) = import_torch(), case
    a, b = (torch.from_numpy(normal(steps, batch, width).astype(np.float32)).requires_grad_() for _ in range(2))
    lengths = torch.from_numpy(np.random.default_rng(1).integers(0, steps + 1, batch))
    valid, incoming = (torch.arange(steps)[:, None] < lengths)[..., None], torch.ones_like(b)

    def side(run: Callable[[Any, Any], Any]) -> Any:
        y = run(a.sigmoid(), b)
        return y.detach(), *torch.autograd.grad(y, (a, b), incoming)

    def masked(a: Any, b: Any) -> Any:
        return torch.where(valid, torch_scan(a, torch.where(valid, b, 0)), 0)

    return partial(side, partial(st.linear_recurrence, lengths=lengths)), partial(side, masked)


USES: dict[str, Callable[[Case], tuple[Call, Call]]] = {
    "one pole": one_pole, "one pole, time last": one_pole, "4 sections": sections,
    "one pole, gradients": one_pole_gradients, "4 sections, gradients": sections_gradients,
    "ewm": ewm, "ewm, 10% missing": partial(ewm, missing=0.1), "GARCH variances": garch, "gae": gae,
    "MinLSTM, gradients": min_lstm, "lengths, gradients": with_lengths,
}  # fmt: skip


def measure_filters(run: Run) -> Iterator[Row]:
    missing = [name for name in ("arch", "pandas", "torchlpc") if optional(name) is None]
    for name in missing:
        run.note(f"{name} is not installed: rows that compare with it are left out")
    for count in run.threads():
        for case in cases(**run.settings["sizes"]):
            if case.against not in missing:
                yield measure_case(case, run) | {"threads": count}


def measure_case(case: Case, run: Run) -> Row:
    """Time one use by both sides, after comparing what they return."""
    ours, theirs = USES[case.use](case)
    pairs = zip(*(found if isinstance(found, tuple) else (found,) for found in (ours(), theirs())), strict=True)
    for pair in pairs:
        got, want = (np.asarray(array, np.float64) for array in pair)
        there = ~(np.isnan(got) & np.isnan(want))  # no mean comes before the first value
        got, want = got[there], want[there]
        scale = max(float(np.abs(want).max()), 1.0)
        refuse_difference(f"{case.use}: a result", case.against, float(np.abs(got - want).max()) / scale)
    row = timing.side_by_side(timing.measure({"ours": ours, "peer": theirs}, **run.rounds))
    return {**case._asdict(), **row, **harness.reaches(row, "peer_ratio", case.least)}


FILTERS = Benchmark(
    name="filters",
    title="Linear recurrences by use, on the CPU, compared with the package that has each",
    leaves_out="nothing",
    settings={"dtype": "float64; of gae, MinLSTM and lengths float32"},
    sizes={"sizes": {"steps": 1_000_000, "batch": 64, "samples": 16, "widths": (192, 224, 256)}},
    quick={"sizes": {"steps": 40, "batch": 3, "samples": 2, "widths": (5,)}},
    rounds={"rounds": 15, "least_rounds": 5, "budget": 3.0},
    measure=measure_filters,
    columns=columns(
        words={"use": "use", "against": "compared with"},
        numbers={"steps": "steps", "batch": "series", "width": "units"},
        seconds={"peer": "the peer"},
        times={"peer_ratio": "over the peer"},
    ),
    short=("use", "steps", "batch", "width", "against", "ours", "peer", "peer_ratio"),
    in_short=lambda row: row["threads"] == 1 and row["width"] != 224,  # its neighbours say the same
    picture=harness.bars("{use}; {against}", {"peer_ratio": "over the peer"}, harness.SPEED_UP, line=1.0),
)  # fmt: skip
