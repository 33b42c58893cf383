"""Builders refuse bad options, and the message says what would work."""

from __future__ import annotations

from inspect import signature

import pytest

from sparsebp.core.errors import MemoryLimitError, OptionError, ScheduleError
from sparsebp.schedule import Costs, StageBytes, simulate
from sparsebp.schedule.builders import (
    BUILDERS,
    build,
    conventional,
    out_of_order,
    place_updates,
    reverse_first_k,
    synchronise,
)

PIPELINES = [name for name, build in BUILDERS.items() if "workers" in signature(build).parameters]


@pytest.mark.parametrize("name", PIPELINES)
def test_fewer_stages_than_workers(name):
    with pytest.raises(OptionError, match="few"):
        BUILDERS[name](workers=4, stages=3, microbatches=4)
    with pytest.raises(OptionError):
        BUILDERS[name](workers=0, stages=3, microbatches=4)
    with pytest.raises(OptionError):
        BUILDERS[name](workers=2, stages=3, microbatches=0)


@pytest.mark.parametrize("name", ["zb-v", "dualpipe-v"])
def test_fewer_stages_than_two_a_worker(name):
    with pytest.raises(OptionError, match=r"few stages.*Expected 6 or more.*Got 5"):
        BUILDERS[name](workers=3, stages=5, microbatches=6)


def test_too_few_micro_batches_to_fill_the_pipeline():
    with pytest.raises(OptionError, match=r"few micro-batches.*Expected 6 or more for 3 workers.*Got 5"):
        BUILDERS["dualpipe-v"](workers=3, stages=6, microbatches=5)
    with pytest.raises(OptionError, match=r"few micro-batches.*Expected 8 or more for 4 workers.*Got 6"):
        BUILDERS["dualpipe"](workers=4, stages=4, microbatches=6)


@pytest.mark.parametrize(("workers", "microbatches", "words"), [(3, 6, "workers"), (2, 5, "micro-batches")])
def test_dualpipe_has_two_halves(workers, microbatches, words):
    with pytest.raises(OptionError, match=f"{words} in two halves.*an even number"):
        BUILDERS["dualpipe"](workers=workers, stages=6, microbatches=microbatches)


def test_replicated_stages_have_neither_sums_nor_updates():
    schedule = BUILDERS["dualpipe"](workers=2, stages=2, microbatches=4)
    for fusion in ("none", "forward", "backward"):
        with pytest.raises(OptionError, match="updates of replicated stages follow the step"):
            place_updates(schedule, fusion)
    with pytest.raises(ScheduleError, match="replicated stage has S or U"):
        synchronise(schedule)


def test_fewer_groups_than_workers():
    with pytest.raises(OptionError, match="groups"):
        BUILDERS["modulo"](workers=3, stages=8, group=4)


@pytest.mark.parametrize("name", ["interleaved-1f1b", "zb-h1", "zb-h2"])
def test_micro_batches_in_unequal_rounds(name):
    with pytest.raises(OptionError, match="Expected a multiple of 2"):
        BUILDERS[name](workers=4, stages=8, microbatches=9, chunks=2)


@pytest.mark.parametrize("name", ["ooo", "reverse-first-k", "fast-forward", "modulo"])
@pytest.mark.parametrize("k", [-1, 5])
def test_k_outside(name, k):
    workers = {"workers": 2} if name in PIPELINES else {}
    with pytest.raises(OptionError, match="k in 0…4"):
        BUILDERS[name](stages=4, k=k, **workers)


def test_memory_ratio_that_nobody_can_meet():
    with pytest.raises(MemoryLimitError, match="memory_ratio=1 or more"):
        out_of_order(stages=6, memory_ratio=0.9)
    with pytest.raises(OptionError, match="not positive"):
        out_of_order(stages=6, memory_ratio=0)


def test_memory_limit_below_the_conventional_peak():
    costs = Costs(stages=StageBytes(1, 2, 3))
    with pytest.raises(MemoryLimitError, match="memory_limit") as raised:
        reverse_first_k(stages=4, k=2, costs=costs, memory_limit=20)
    least = float(str(raised.value).split("memory_limit=")[1].split()[0])
    schedule = reverse_first_k(stages=4, k=2, costs=costs, memory_limit=least)
    assert simulate(schedule, costs).memory[0].peak >= least


@pytest.mark.parametrize("regions", [0, [[0, 1], [2]], [[1, 0], [2, 3]], [[0, 1], [1, 2, 3]]])
def test_regions(regions):
    with pytest.raises(OptionError, match="regions"):
        out_of_order(stages=4, regions=regions)


def test_no_builder():
    with pytest.raises(OptionError, match="Unknown builder"):
        build("none of them")


def test_unknown_options():
    schedule = conventional(stages=2)
    with pytest.raises(OptionError, match="fusion"):
        conventional(stages=2, fusion="both")
    with pytest.raises(OptionError, match="streams"):
        conventional(stages=2, streams=3)
    with pytest.raises(OptionError, match="stream"):
        place_updates(schedule, "forward", stream="sub")
    with pytest.raises(OptionError, match="already"):
        synchronise(schedule)
    with pytest.raises(OptionError, match="priority"):
        synchronise(reverse_first_k(stages=2, k=0), priority="last")
    with pytest.raises(OptionError, match="every micro-batch"):
        place_updates(BUILDERS["pipedream"](workers=2, stages=2, microbatches=2), "backward")
