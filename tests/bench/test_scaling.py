"""Costs of layers against what is known of the models, cuts against all cuts, and what simulated workers must obey."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import scaling
from benchmarks.ranks import schedule_of
from benchmarks.scaling import (
    A100,
    ASYNCHRONOUS,
    PIPELINES,
    REPLICAS,
    Layer,
    Machine,
    asynchronous,
    bert,
    conv,
    cut,
    data_parallel,
    dense,
    flat,
    mlp,
    models,
    pipeline,
    resnet,
    simulate_row,
    transformer,
    vgg16,
)
from sparsebp.schedule import Action, Costs, Link, Network, StageBytes, parts_of, simulate


@pytest.mark.parametrize(("layers", "gigaflops", "millions"), [
    (vgg16(), 30.9, 138.3), (flat(resnet()), 8.2, 25.5), (flat(resnet((3, 4, 23, 3))), 15.6, 44.4),
    (flat(resnet((3, 8, 36, 3))), 23.0, 60.0), (bert(24), 79, 302), (mlp(32, 2048, 3072, 10), 0.264, 132.1),
])  # fmt: skip
def test_models_have_the_costs_that_are_known_of_them(layers, gigaflops: float, millions: float) -> None:  # type: ignore[no-untyped-def]
    """Multiply-adds of VGG-16: 15.5e9, of ResNet-50, 101, 152: 4.1e9, 7.8e9, 11.5e9; weights without BatchNorm."""
    assert sum(layer.forward for layer in layers) == pytest.approx(gigaflops * 1e9, rel=0.01)
    assert sum(layer.weights for layer in layers) == pytest.approx(millions * 1e6, rel=0.01)


def test_one_layer_of_each_kind_by_hand() -> None:
    found = conv("c", 2, 3, 3, 8, stride=2, pool=2)
    assert (found.forward, found.weights, found.output, found.saved) == (2 * 9 * 6 * 16, 54, 12, 2 * 64 + 48)
    assert dense("d", 3, 4)[1:] == (24, 24, 24, 12, 4, 7)
    embedding, block, output = transformer(1, 4, 3, 10, 2)
    assert (embedding.flops, embedding.weights, embedding.output) == (0, 40, 12)
    assert (block.forward, block.input_grad, block.weight_grad) == (24 * 48 + 144, 24 * 48 + 288, 24 * 48)
    assert (block.weights, block.saved) == (12 * 16 + 13 * 4, 17 * 12 + 2.5 * 2 * 9)
    assert (output.forward, output.weights, output.output) == (2 * 12 * 10, 40, 3)


def numbered(costs: list[int]) -> list[Layer]:
    return [Layer(str(i), cost, 0, 0, i, 10 + i, 1) for i, cost in enumerate(costs)]


@settings(max_examples=60)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(1, 8))
def test_cuts_are_the_best_of_all(costs: list[int], parts: int) -> None:
    layers = numbered(costs)
    parts = min(parts, len(layers))
    found = cut(layers, parts)
    assert len(found) == parts
    assert found[0].name == "0" and found[-1].output == layers[-1].output
    assert sum(part.weights for part in found) == sum(layer.weights for layer in layers)
    every = [max(sum(costs[a:b]) for a, b in pairwise((0, *chosen, len(costs))))
             for chosen in combinations(range(1, len(costs)), parts - 1)]  # fmt: skip
    assert max(part.flops for part in found) == min(every)


def test_costs_of_a_machine() -> None:
    machine = Machine("m", 100.0, 10.0, Network(1, 5, 4, 2, 5), overhead=0.5, value=2)
    costs = machine.costs([dense("d", 3, 4)], 50, workers=2, replicas=4)
    assert costs.duration(Action(0, "F", 0)) == 0.5 + 50 * 24 / 100
    assert costs.duration(Action(0, "B", 0)) == 2 * (0.5 + 50 * 24 / 100)
    assert costs.duration(Action(0, "U")) == 0.5 + 20 * 12 / 10
    assert costs.duration(Action(0, "S")) == Network(1, 5, 4, 2, 5).all_reduce(24, 4, 2)
    assert (costs.bytes_of(0).output, costs.bytes_of(0).saved, costs.bytes_of(0).weights) == (400, 700, 24)
    alone = machine.costs([dense("d", 3, 4)], 50, workers=2, replicas=2).link
    assert isinstance(alone, Network) and alone.node is None  # all in one node: no uplinks


FAST = Machine("fast", 1e9, float("inf"), Network(), overhead=0.0)


def even(stages: int) -> list[Layer]:
    return [Layer("even", 1e6, 1e6, 1e6, 1000, 10, 10)] * stages


def test_bubbles_are_those_of_the_formulas() -> None:
    """Equal stages, free transfers: GPipe (N - 1) / (M + N - 1); two chunks half of it; data-parallel none."""
    found = {name: pipeline(name, even(8), FAST, 4, 8, 1) for name in PIPELINES}
    assert found["gpipe"].bubble == pytest.approx(3 / 11)
    assert found["1f1b"].seconds == pytest.approx(found["gpipe"].seconds)
    assert found["interleaved"].bubble == pytest.approx(1.5 / 9.5)
    assert found["zb-h2"].seconds < found["zb-h1"].seconds < found["1f1b"].seconds
    assert found["modulo"].seconds < found["fast-forward"].seconds < found["gpipe"].seconds
    work = FAST.alone(even(8), 8) / 4
    assert all(one.seconds >= work * (1 - 1e-9) for one in found.values())
    own = work - FAST.alone(even(1), 2) / 3  # the first layer of one worker needs no I
    for name in REPLICAS:
        assert data_parallel(name, even(8), FAST, 4, 2).seconds == pytest.approx(own)
    for name in ASYNCHRONOUS:  # never drained: no bubble
        assert asynchronous(name, even(8), FAST, 4, 8, 1).seconds == pytest.approx(work)


def test_reverse_first_k_is_never_slower_and_overlap_helps() -> None:
    slow = Machine("slow", 1e9, float("inf"), Network(0, 2e6), overhead=0.0)
    seconds = {name: data_parallel(name, even(12), slow, 4, 2).seconds for name in (*REPLICAS, "dp-reverse-ready")}
    assert seconds["dp-reverse"] <= seconds["dp-priority"] <= seconds["dp-overlap"] < seconds["dp-end"]
    assert seconds["dp-reverse-ready"] < seconds["dp-overlap"]
    each = slow.network.all_reduce(4000, 4)
    assert seconds["dp-end"] == pytest.approx(slow.alone(even(12), 2) - 2e-3 + 12 * each)


def test_rows_leave_out_what_cannot_be() -> None:
    model = models()["VGG-16"]
    row = simulate_row(model._replace(batch=64), "strong", 128)
    assert "dp-end" not in row and "gpipe" in row and row["pipeline"] == "4 × 32"
    assert "pipedream" in simulate_row(model._replace(workers=8, batch=64), "strong", 8)
    assert not {"gpipe", "dp-end"} & simulate_row(model._replace(batch=4), "strong", 128).keys()
    assert all(0 < row[name] < 1 for name in PIPELINES)


def test_pipelines_stand_where_the_paper_has_them() -> None:
    """Oh et al., §8.4.1, BERT-24 on four GPUs: fast-forwarding 1.15, modulo allocation 1.58 (PCIe)."""
    found = scaling._pipelines(24, 4, 4, scaling.V100.costs(bert(24), 24))
    assert found[0] / found[1] == pytest.approx(1.15, rel=0.1)
    assert A100.name.startswith("A100")


def test_measured_steps_beside_their_simulation() -> None:
    """Spans made from a simulation with a slow network."""
    given = {"width": 4, "depth": 3, "microbatches": 4, "batch": 2}
    schedule = schedule_of("1f1b", given, 2)
    costs = Costs({"F": 2.0, "I": 1.0, "W": 1.0, "U": 0.5}, StageBytes(output=8), Link(0.25, 16))
    step = [(str(part), event.start, event.end) for event in simulate(schedule, costs).events
            for part in parts_of(event.cell)]  # fmt: skip
    halves = [(name, start, (start + end) / 2 if "B" in name else end) for name, start, end in step]
    found = scaling.durations([step, step, [(name, 3 * start, 3 * end) for name, start, end in step]])
    assert found["0F"] == 2 and found["0U"] == 0.5
    row = scaling.row_of(schedule, costs, [halves, halves, halves])
    assert row["difference"] == pytest.approx(0) and row["starts"] == pytest.approx(0) and row["met"] == "met"
    row = scaling.row_of(schedule, replace(costs, link=Link()), [step])
    assert row["difference"] < 0 and row["starts"] > 0


def test_means_of_the_dualpipe_paper_are_geometric() -> None:
    rows = {(row["compared"], row["setting"]): row["ours"] for row in scaling.dualpipe_rows()}
    for compared in scaling.COMPARED:
        cnn, other = (rows[compared, f"{group}, mean"] for group in ("CNN", "FCN/RNN"))
        assert rows[compared, "all, mean"] == pytest.approx((cnn**2 * other**3) ** 0.2)  # of two networks and three


@given(st.floats(1e-7, 1e-3), st.floats(1e6, 1e11), st.integers(2, 9))
def test_a_link_is_found_again(latency: float, bandwidth: float, count: int) -> None:
    sizes = [1000.0 * 8**power for power in range(count)]
    found = scaling.fit_link((size, latency + size / bandwidth) for size in sizes)
    for size in sizes:
        assert found.latency + size / found.bandwidth == pytest.approx(latency + size / bandwidth, rel=1e-4)
