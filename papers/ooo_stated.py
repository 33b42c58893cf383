"""Out-of-Order BackProp: what §8.3 and §8.4 state in their text, simulated with the costs of the paper's clusters."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean
from typing import Any

from benchmarks.scaling.layers import bert, flat, resnet
from benchmarks.scaling.machines import GIGABIT, Machine
from benchmarks.scaling.papers import LINKS, PRODUCTS, V100
from benchmarks.scaling.steps import asynchronous
from benchmarks.scaling.steps import data_parallel as replicas
from papers.figure import Claim, Context, Found, elsewhere
from papers.simulated import gain, near
from sparsebp.schedule import Action, Costs, Network, simulate
from sparsebp.schedule.builders import fast_forward, gpipe, interleaved_one_f_one_b, modulo, one_f_one_b

_RINGS = "Here sums are rings that overtake each other, and most weights of a ResNet are in its last layers"
_GPU = Machine("V100", PRODUCTS * 15.7e12, 900e9, Network())
_CLOUD = replace(_GPU, network=Network(10e-6, 25e9, 8, 50e-6, 25 * GIGABIT))
_MEGATRON = {(48, 8): 2, (48, 16): 3, (48, 24): 2}
"""Parts of the model a worker, by encoders and workers: the paper does not say how many Megatron 2 had."""


def sums(context: Context) -> Found:
    """§8.3: ResNet-50 on 16 V100, what reverse first-k takes off the time in which nothing computes."""
    layers = flat(resnet())
    costs = V100.costs(layers, 128, 1, 16)
    found = {name: replicas(name, layers, V100, 16, 128) for name in ("dp-priority", "dp-reverse")}
    waits = {name: 1e3 * (one.seconds - V100.alone(layers, 128)) for name, one in found.items()}
    before, after = found["dp-priority"], found["dp-reverse"]
    first = 1e3 * sum(costs.duration(Action(stage, "W", 0)) for stage in range(1, 45))
    whole = 1e3 * sum(costs.duration(Action(stage, "S")) for stage in range(len(layers)))
    fitted = "The rates of V100 and Ethernet are fitted to it"
    return Found((
        Claim("ResNet-50, 16 V100: computing, ms", "380", f"{1e3 * V100.alone(layers, 128):.0f}", None, fitted),
        Claim("ResNet-50, 16 V100: all sums, ms", "350", f"{whole:.0f}", None, fitted),
        near("weight gradients of layers 2 to 45, ms", 85, first, "By FLOPs, at one rate for all convolutions"),
        near("k that is best", 45, float(after.detail or 0), _RINGS),
        near("prioritised sums that nothing computes beside, ms", 350, waits["dp-priority"], _RINGS),
        near("with reverse first-k, ms", 200, waits["dp-reverse"], _RINGS),
        Claim("peak of memory, reverse first-k over prioritised sums", "below 1.01", f"{after.peak / before.peak:.3f}",
              after.peak / before.peak < 1.01, "" if after.peak / before.peak < 1.01 else _RINGS),
        elsewhere("over Horovod", "1.89× and 3.5×", "Horovod's own losses are not in the simulator"),
        elsewhere("DenseNet and MobileNet", "at most 1.10× and 1.053×", "Their layers are not simulated"),
    ))  # fmt: skip


def pipelines(context: Context) -> Found:
    """§8.4: what pipelines of BERT take, beside other systems, other networks of GPUs, and in memory."""
    claims = [*_fine_tuning(), *_pre_training((48, 8) if context.quick else None)]
    return Found((*claims, elsewhere(
        "RNN of 16 cells: over GPipe and over cross-layer model parallelism", "1.99× and 1.47×",
        "The paper gives no sizes of its cells"), elsewhere(
        "GPT-3 on 12 to 36 GPUs", "limited by 24 decoders", "No number is stated")))  # fmt: skip


def _fine_tuning() -> list[Claim]:
    """§8.4.1: BERT-24 on four V100, batch 96 in four micro-batches."""
    layers, claims = bert(24), []
    size: dict[str, Any] = {"stages": 24, "workers": 4, "microbatches": 4}
    for (name, link), stated in zip(LINKS.items(), (0.05, 0.16, 1.8), strict=True):
        costs = replace(_GPU, network=link).costs(layers, 24)
        bytes_moved = 4 * 24 * layers[0].output
        ratio = bytes_moved / link.bandwidth / costs.duration(Action(1, "F", 0))
        claims.append(near(f"BERT-24, {name}: an encoder's transfer over its forward", stated, ratio,
                           "By nominal bandwidth and FLOPs"))  # fmt: skip
    costs = replace(_GPU, network=LINKS["NVLink"]).costs(layers, 24)
    base, fast, dealt = (simulate(schedule, costs) for schedule in _three(size, costs))
    claims.append(gain("BERT-24, NVLink: modulo on four GPUs over one GPU", 3.2, 3.2,
                       _GPU.alone(layers, 96) / dealt.makespan))  # fmt: skip
    claims.append(_at_most("BERT-24: peak of memory, fast-forward over GPipe", "at most 1.11", 1.11,
                           fast.peak / base.peak))  # fmt: skip
    claims.append(Claim("BERT-24: peak of memory, modulo over GPipe", "similar, and below fast-forward's",
                        f"{dealt.peak / base.peak:.3f}", dealt.peak < fast.peak,
                        "" if dealt.peak < fast.peak else "Simulated from sizes of tensors"))  # fmt: skip
    slow = replace(_GPU, network=LINKS["10 Gb Ethernet"]).costs(layers, 24)
    one, two = (simulate(modulo(**size, costs=slow, group=group, input_gradient=True), slow).makespan
                for group in (1, 2))  # fmt: skip
    claims.append(near("BERT-24, 10 Gb Ethernet: throughput of single encoders over groups of two", 0.5, two / one,
                       "Here a group of two halves the bytes, and leaves the link the bottleneck"))  # fmt: skip
    return claims


def _pre_training(only: tuple[int, int] | None) -> list[Claim]:
    """§8.4.2: larger BERTs on 8 to 32 V100, beside PipeDream, DAPPLE (1F1B) and Megatron 2 (interleaved 1F1B)."""
    dreams, claims, forwarded = [], [], []
    points = [(12, 8, 512, (1.63, 1.63), None), (24, 16, 1024, (1.14, 1.25), None), (48, 32, 1872, (1.14, 1.25), None),
              (48, 8, 1872, None, 1.47), (48, 16, 1872, None, 1.29), (48, 24, 1872, None, None)]  # fmt: skip
    for encoders, workers, batch, over_dream, over_dapple in points:
        if only is not None and (encoders, workers) != only:
            continue
        layers = bert(encoders)
        costs = _CLOUD.costs(layers, batch / workers)
        size: dict[str, Any] = {"stages": encoders, "workers": workers, "microbatches": workers}
        ours = simulate(modulo(**size, costs=costs, input_gradient=True), costs).makespan
        where = f"BERT-{encoders}, {workers} workers: modulo over"
        if over_dream:
            dream = asynchronous("pipedream", layers, _CLOUD, workers, workers, batch / workers).seconds
            dreams.append(dream / ours)
            claims.append(gain(f"{where} PipeDream", *over_dream, dream / ours, _DREAM))
        if over_dapple:
            dapple = simulate(one_f_one_b(**size), costs).makespan
            claims.append(gain(f"{where} 1F1B, as DAPPLE runs", over_dapple, over_dapple, dapple / ours))
        if (encoders, workers) in _MEGATRON:
            chunks = _MEGATRON[encoders, workers]
            theirs = simulate(interleaved_one_f_one_b(**size, chunks=chunks), costs).makespan
            group = encoders // (workers * chunks)  # the same parts of the model on the same workers
            mixed = simulate(modulo(**size, costs=costs, group=group, input_gradient=True), costs).makespan
            forwarded.append(theirs / mixed)
            claims.append(gain(f"{where} interleaved 1F1B, {chunks} parts a worker, as Megatron 2 runs", 1.136, 1.292,
                               theirs / ours))  # fmt: skip
    if dreams:
        claims.append(gain("modulo over PipeDream, mean of these", 1.31, 1.31, fmean(dreams), _DREAM))
    if forwarded:
        claims.append(gain("fast-forward on the parts of interleaved 1F1B, mean", 1.204, 1.204, fmean(forwarded)))
        claims.append(gain("the same, the largest", 1.275, 1.275, max(forwarded)))
    return claims


_DREAM = "PipeDream never waits at the end of a step, and here stashed weights cost nothing"


def _three(size: dict[str, Any], costs: Costs) -> tuple[Any, Any, Any]:
    return (gpipe(**size), fast_forward(**size, costs=costs, input_gradient=True),
            modulo(**size, costs=costs, input_gradient=True))  # fmt: skip


def _at_most(what: str, paper: str, most: float, ours: float) -> Claim:
    return Claim(what, paper, f"{ours:.3f}", ours <= most, "" if ours <= most else "Simulated from sizes of tensors")
