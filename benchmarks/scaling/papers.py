"""The papers' speed-ups on many GPUs beside what is simulated for the same models, batches and networks.

``python -m benchmarks scaling-papers``. Nothing is timed. Rates are shares of the data sheets', networks have their
nominal bandwidths; but for the data-parallel clusters, whose Ethernet is taken for as fast as the one sum that the
paper times.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import geometric_mean
from typing import Any

from benchmarks.scaling.layers import Layer, bert, cut, flat, joined, lstm, mlp, resnet, transformer, vgg16
from benchmarks.scaling.machines import GIGABIT, Machine
from benchmarks.scaling.steps import asynchronous, data_parallel
from benchmarks.tools import pictures
from benchmarks.tools.benchmark import Benchmark, Result, Row, Run
from sparsebp.core.tables import Column
from sparsebp.schedule import Costs, Network, simulate
from sparsebp.schedule.builders import fast_forward, gpipe, modulo

OOO, SPECTRAIN = "Oh et al., 2022", "Chen et al., 2018"
ETHERNET = 0.35
"""Share of 10 Gb/s at which the sums of ResNet-50 on 16 V100 take the 350 ms that Oh et al. (§8.3) measured."""
CONVOLUTIONS = 0.526
"""Share of the data sheet's rate at which 128 images of ResNet-50 take a V100 the 380 ms that they measured."""
PRODUCTS = 0.8
"""Share of it in the matrix products of Transformers."""
WITHIN = 0.1
"""How far outside of the paper's range a gain (the ratio less 1) may be and still count as in it: a share of it.
A share of the ratio itself would let no gain at all pass for one of a few percent."""

TITAN = Machine("Titan XP", CONVOLUTIONS * 12.1e12, 548e9, Network(50e-6, ETHERNET * 10 * GIGABIT))
P100 = Machine("P100", CONVOLUTIONS * 9.3e12, 732e9, Network(50e-6, ETHERNET * 20 * GIGABIT))
V100 = Machine("V100", CONVOLUTIONS * 15.7e12, 900e9,
               Network(10e-6, 25e9, 4, 50e-6, ETHERNET * 10 * GIGABIT))  # fmt: skip
LINKS = {"NVLink": Network(10e-6, 50e9), "PCIe": Network(10e-6, 16e9), "10 Gb Ethernet": Network(50e-6, 1e9)}
"""What §8.4.1 lists, in bytes a second."""
P40 = Machine("P40", 0.526 * 11.8e12, 346e9, Network(10e-6, 12e9))
"""Of the DualPipe paper: PCIe 3.0 x16, 12 GB/s of its 15.75."""


def measure(run: Run) -> Iterator[Row]:
    """Simulate what each paper compares."""
    for row in (*data_parallel_rows(run.quick), *pipeline_rows(run.quick), *dualpipe_rows(run.quick)):
        yield row | {"outcome": judge(row["ours"], row.get("low"), row.get("high"))}
    for note in NOTES:
        run.note(note)


def judge(ours: float, low: float | None, high: float | None) -> str:
    """Say where a number lies beside the paper's."""
    if low is None or high is None:
        return "not in the paper"
    gain = ours - 1
    return "above" if gain > (high - 1) * (1 + WITHIN) else "below" if gain < (low - 1) * (1 - WITHIN) else "within"


NOTES = (
    "Reverse first-k: the baseline sends the first stage's sum first (BytePS), sums are rings and are not interrupted; "
    "BytePS splits tensors and sends to servers. One number is fitted, the Ethernet's share of its nominal rate.",
    "Pipelines: as many micro-batches as workers (the paper shows 4 on 4 and says no other number), encoders alone, "
    "GPipe without recomputation.",
    "DualPipe: Inception v4 is left out; images have 224 pixels a side, to which CIFAR's must have been enlarged "
    "(Inception v4 takes none of 32); the length of the LSTM's sentences, which the paper does not say, is 100. "
    "Forward and backward take as long side by side as one after the other; means are geometric. “With a barrier”: "
    "every unit of time ends for all workers at once, as in the paper's Algorithm 1, and a unit of PipeDream is a "
    "forward or a backward; from the durations alone, without transfers.",
)


BASELINES = {
    "reverse first-k, first stage first": ("dp-priority", "dp-reverse"),
    "reverse first-k, first ready first": ("dp-overlap", "dp-reverse-ready"),
}
"""Sums that overtake each other, as BytePS wants them; and in the order in which they become ready."""


def data_parallel_rows(quick: bool = False) -> Iterator[Row]:
    """Yield reverse first-k over the prioritised sums (Oh et al., 2022, §8.3)."""
    small, large = flat(resnet()), flat(resnet((3, 4, 23, 3)))
    points: list[tuple[str, Sequence[Layer], Machine, int, int, float, float]] = [  # the last two: the paper's
        ("ResNet-101, 10 Gb", large, TITAN, 8, 64, 1.153, 1.153),
        ("ResNet-101, 20 Gb", large, P100, 20, 64, 1.271, 1.271),
        ("ResNet-50, 4 a node, 10 Gb", small, V100, 16, 128, 1.265, 1.265),
        ("ResNet-101, 4 a node, 10 Gb", large, V100, 8, 96, 1.198, 1.198),
        ("ResNet-50, 4 a node, 10 Gb", small, V100, 48, 128, 1.1, 1.27),
        ("ResNet-50, NVLink", small, V100, 4, 128, 1.01, 1.05),
    ]
    for setting, layers, machine, count, samples, low, high in points[: 1 if quick else None]:
        for compared, (old, new) in BASELINES.items():
            before, after = (data_parallel(name, layers, machine, count, samples).seconds for name in (old, new))
            yield _row(OOO, compared, f"{machine.name}: {setting}", count, low, high, before / after)


def pipeline_rows(quick: bool = False) -> Iterator[Row]:
    """Yield fast-forwarding and modulo allocation over GPipe (Oh et al., 2022, §8.4)."""
    unit: dict[str, Any] = {"stages": 16, "microbatches": 4, "workers": 4}
    base = simulate(gpipe(**unit, input_gradient=False)).makespan
    yield _row(OOO, "fast-forward over GPipe", "FFNN, unit costs", 4, 1.22, 1.22,
               base / simulate(fast_forward(**unit)).makespan)  # fmt: skip
    yield _row(OOO, "modulo over GPipe", "FFNN, unit costs", 4, 1.62, 1.62, base / simulate(modulo(**unit)).makespan)
    if quick:
        return
    gpu = Machine("V100", PRODUCTS * 15.7e12, 900e9, Network())
    fine_tuning = [("NVLink", 1, 1.59, 1.70), ("PCIe", 1, 1.58, 1.58), ("10 Gb Ethernet", 2, 1.48, 1.48)]
    for name, group, low, high in fine_tuning:
        costs = replace(gpu, network=LINKS[name]).costs(bert(24), 24)
        found = _pipelines(24, 4, 4, costs, group)
        if name == "NVLink":
            yield _row(OOO, "fast-forward over GPipe", "BERT-24, NVLink", 4, 1.15, 1.15, found[0] / found[1])
        where = name + (f", groups of {group}" if group > 1 else "")
        yield _row(OOO, "modulo over GPipe", f"BERT-24, {where}", 4, low, high, found[0] / found[2])
    cloud = replace(gpu, network=Network(10e-6, 25e9, 8, 50e-6, 25 * GIGABIT))
    seconds = {}
    growing: list[tuple[int, int, int, float | None, float | None]] = [  # encoders, workers, batch, the paper's
        (12, 8, 512, 1.73, 1.73), (24, 16, 1024, 1.41, 1.45), (48, 32, 1872, 1.41, 1.45),
        (48, 8, 1872, None, None), (48, 48, 2816, None, None),
    ]  # fmt: skip
    for encoders, count, batch, least, most in growing:
        costs = cloud.costs(bert(encoders), batch / count)
        found = _pipelines(encoders, count, count, costs)
        seconds[encoders, count] = found[2]
        yield _row(OOO, "modulo over GPipe", f"BERT-{encoders}, 8 a node, 25 Gb", count, least, most,
                   found[0] / found[2])  # fmt: skip
    yield _row(OOO, "modulo, 32 workers over 8", "BERT-48, 8 a node, 25 Gb", 32, 2.5, 2.5,
               seconds[48, 8] / seconds[48, 32])  # fmt: skip


def _pipelines(stages: int, workers: int, microbatches: int, costs: Costs, group: int = 1) -> tuple[float, ...]:
    """Return the times of GPipe, of fast-forwarding, and of that with modulo allocation."""
    size: dict[str, Any] = {"stages": stages, "workers": workers, "microbatches": microbatches}
    found = (gpipe(**size), fast_forward(**size, costs=costs, input_gradient=True),
             modulo(**size, costs=costs, group=group, input_gradient=True))  # fmt: skip
    return tuple(simulate(schedule, costs).makespan for schedule in found)


def networks() -> dict[str, tuple[str, list[Layer]]]:
    """Return the DualPipe paper's networks but Inception v4, and the group that its means are of."""
    return {
        "VGG16": ("CNN", vgg16(224, 10)),
        "ResNet-152": ("CNN", [joined(block) for block in resnet((3, 8, 36, 3), 224, 10)]),
        "SNN": ("FCN/RNN", mlp(32, 2048, 3072, 10)),
        "Transformer": ("FCN/RNN", transformer(12, 512, 20, 30_000, 8)[1:-1]),
        "Residual LSTM": ("FCN/RNN", lstm(8, 512, 1024, 100)),
    }


COMPARED = ("DualPipe over data-parallel", "DualPipe over PipeDream", "the same with a barrier")
"""Of the DualPipe paper. Its means are geometric: √(1.213 · 5.817) = 2.66 ≈ 2.64, √(1.517 · 1.849) = 1.67 ≈ 1.68."""


def dualpipe_rows(quick: bool = False) -> Iterator[Row]:
    """Yield DualPipe over data-parallel workers and over PipeDream (Chen et al., 2018, §4.2), batch 128 on 4 GPUs."""
    found: dict[str, list[tuple[float, float, float]]] = {"CNN": [], "FCN/RNN": []}
    for group, layers in networks().values():
        if quick and group == "CNN":
            continue
        apart = data_parallel("dp-overlap", layers, P40, 4, 32).throughput
        dual, dream = (asynchronous(name, layers, P40, 4, 16, 128).throughput for name in ("dualpipe", "pipedream"))
        found[group].append((dual / apart, dual / dream, _with_barriers(layers)))
    theirs = {"CNN": (1.213, 1.517), "FCN/RNN": (5.817, 1.849)}
    for group, ratios in found.items():
        if not ratios:
            continue
        for compared, paper, values in zip(COMPARED, (*theirs[group], theirs[group][1]), zip(*ratios, strict=True),
                                           strict=True):  # fmt: skip
            yield _row(SPECTRAIN, compared, f"{group}, mean", 4, paper, paper, geometric_mean(values))
    every = list(zip(*(ratio for ratios in found.values() for ratio in ratios), strict=True))
    for compared, most, mean, values in zip(COMPARED, (15.77, 2.18, 2.18), (2.64, 1.68, 1.68), every, strict=True):
        yield _row(SPECTRAIN, compared, "the largest", 4, most, most, max(values))
        if not quick:
            yield _row(SPECTRAIN, compared, "all, mean", 4, mean, mean, geometric_mean(values))


def _with_barriers(layers: Sequence[Layer], workers: int = 4) -> float:
    """Return PipeDream's time for a batch over DualPipe's, if all workers wait for each other after every unit."""
    parts = cut(layers, workers)
    forward = [part.forward for part in parts]
    backward = [part.input_grad + part.weight_grad for part in parts]
    units = [max(pair[(worker + parity) % 2][worker] for worker in range(workers))
             for pair in ((forward, backward),) for parity in (0, 1)]  # fmt: skip
    return sum(units) / max(map(sum, zip(forward, backward, strict=True)))


def _row(source: str, compared: str, setting: str, workers: int, low: float | None, high: float | None,
         ours: float) -> Row:  # fmt: skip
    row: Row = {"source": source, "compared": compared, "setting": setting, "workers": workers, "ours": ours}
    if low is None or high is None:
        return row
    return row | {"low": low, "high": high, "paper": f"{low:g}" if low == high else f"{low:g}–{high:g}"}


def picture(result: Result) -> Any:
    """Draw the papers' speed-ups and ours, side by side."""
    rows = result["rows"]
    nothing = float("nan")  # no bar
    bars = [("the paper", "#9ca3af", [(row.get("low", nothing) + row.get("high", nothing)) / 2 for row in rows]),
            ("simulated", "#1e40af", [row["ours"] for row in rows])]  # fmt: skip
    labels = [f"{row['compared']}: {row['setting']}, {row['workers']}" for row in rows]
    drawing, ax = pictures.bar_chart(labels, bars, "times as fast", each=0.34)
    ax.set_xscale("log", base=2)
    ax.axvline(1.0, color="#6b7280", linewidth=0.8, linestyle="--")
    pictures.legend_below(drawing)
    return drawing


BENCHMARK = Benchmark(
    name="scaling-papers",
    title="Speed-ups on many GPUs: what the papers measured, and what is simulated",
    leaves_out="what the papers' frameworks cost beside kernels, transfers and sums",
    settings={"within": WITHIN, "ethernet": ETHERNET, "convolutions": CONVOLUTIONS, "products": PRODUCTS},
    threads=None,
    measure=measure,
    columns=(
        Column("paper", "source", number=False),
        Column("compared", "compared", number=False),
        Column("setting", "setting", number=False),
        Column("workers", "workers"),
        Column("measured there", "paper"),
        Column("simulated", "ours", "{:.2f}".format),
        Column("outcome", "outcome", number=False),
    ),
    tables={"Speed-ups": ("source", "compared", "setting", "workers", "paper", "ours", "outcome")},
    short=("compared", "setting", "workers", "paper", "ours", "outcome"),
    picture=picture,
)
