"""Files go both ways between sparsebp and torch.distributed.pipelining."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from sparsebp.core.errors import ScheduleError
from sparsebp.schedule import Overlap, StepGraph, read_csv, write_csv
from sparsebp.schedule.builders import BUILDERS, build
from sparsebp.schedule.files import for_torch, write_programs
from sparsebp.schedule.lowering import lower

pytest.importorskip("torch")
pipelining = pytest.importorskip("torch.distributed.pipelining.schedules")


class Stage:
    """What the schedules ask a stage for, without a module and a process group."""

    def __init__(self, index, stages, workers, rank):
        self.submod, self.group = None, None
        self.stage_index, self.num_stages = index, stages
        self.group_size, self.group_rank = workers, rank


def runtime(workers, stages, microbatches, kind=None):
    local = [Stage(index, stages, workers, 0) for index in range(0, stages, workers)]
    return (kind or pipelining._PipelineScheduleRuntime)(local, microbatches)


MULTI = [
    (name, stages)
    for name, stages in (
        ("ScheduleLoopedBFS", 8), ("ScheduleInterleaved1F1B", 8), ("ScheduleInterleavedZeroBubble", 8),
        ("ScheduleZBVZeroBubble", 8), ("ScheduleDualPipeV", 8), ("ScheduleInterleaved1F1B", 4),
    )
]  # fmt: skip


@pytest.mark.parametrize("form", ["compute_only", "compute_comms"])
@pytest.mark.parametrize(("name", "stages"), MULTI)
def test_files_of_pytorch_are_read_and_read_again_by_it(tmp_path, name, stages, form):
    theirs = runtime(4, stages, 8, getattr(pipelining, name))
    theirs._dump_csv(tmp_path / "theirs.csv", format=form)
    schedule = read_csv(tmp_path / "theirs.csv")
    assert schedule.graph == StepGraph(stages, 8) and schedule.workers == 4 and schedule.name == "theirs"
    order = [[str(a) for a in theirs.pipeline_order[rank] if a is not None] for rank in range(4)]
    if name != "ScheduleDualPipeV" or form == "compute_only":
        assert [[str(cell) for cell in lane.cells] for lane in schedule.lanes] == order
    if name == "ScheduleDualPipeV":
        assert any(isinstance(cell, Overlap) for lane in schedule.lanes for cell in lane.cells)

    write_csv(schedule, tmp_path / "ours.csv", torch=True)
    again = runtime(4, stages, 8)
    again._load_csv(tmp_path / "ours.csv")
    assert {rank: [str(a) for a in actions if a is not None] for rank, actions in again.pipeline_order.items()} == dict(
        enumerate(order)
    )
    assert again.stage_index_to_group_rank == dict(enumerate(schedule.allocation))
    assert again.pipeline_order_with_comms  # its own passes accept it


def test_gpipe_of_pytorch(tmp_path):
    theirs = pipelining.ScheduleGPipe(Stage(0, 4, 4, 0), 8)
    with (tmp_path / "theirs.csv").open("w", newline="") as file:  # it has an order, but no _dump_csv
        csv.writer(file).writerows(theirs._get_pipeline_order().values())
    schedule = read_csv(tmp_path / "theirs.csv")
    assert schedule.graph == StepGraph(4, 8) and schedule.allocation == (0, 1, 2, 3)


def dry_run(order, to_rank, stages):
    """PyTorch's dry run, which raises if it does not come to the end. It knows neither REDUCE_GRAD nor overlaps."""
    plain = {rank: [part for a in actions if "REDUCE" not in str(a) for part in a.sub_actions or (a,)]
             for rank, actions in order.items()}  # fmt: skip
    pipelining._simulate_comms_compute(plain, to_rank, stages)


SYNCHRONOUS = [
    name for name in BUILDERS
    if name not in ("ooo", "ooo-list", "reverse-first-k", "pipedream", "dualpipe-2018", "dualpipe")
]  # fmt: skip


@pytest.mark.parametrize("fusion", [None, "forward", "backward"])
@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_builders_run_through_pytorchs_passes(tmp_path, name, fusion):
    schedule = build(name, workers=4, stages=8, microbatches=8, fusion=fusion, strict=False)
    try:
        write_csv(schedule, tmp_path / "ours.csv", torch=True)
    except ScheduleError as error:
        assert "W before its I" in str(error)  # PyTorch's rule, not the graph's
        assert name in ("conventional", "data-parallel")
        return
    theirs = runtime(schedule.workers, 8, 8)
    theirs._load_csv(tmp_path / "ours.csv")
    to_rank = theirs.stage_index_to_group_rank.__getitem__
    sent = pipelining._add_send_recv(theirs.pipeline_order, to_rank, 8)
    dry_run(sent, to_rank, 8)


# ---- with communication ----------------------------------------------------------------------------------------------


def communications(order) -> dict[int, list[str]]:
    """Return what each rank sends and receives, and which gradients it reduces, sorted."""
    return {rank: sorted(str(a) for a in actions if any(word in str(a) for word in ("SEND", "RECV", "REDUCE")))
            for rank, actions in order.items()}  # fmt: skip


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_our_programs_are_pytorchs(tmp_path, name):
    """Its own pass adds the same communication to our cells, its loader reads ours, and its dry run ends."""
    schedule = build(name, workers=4, stages=8, microbatches=8, strict=False)
    try:
        plain = for_torch(schedule, sums=True)
    except ScheduleError as error:
        assert "W before its I" in str(error) and name in ("conventional", "data-parallel")
        return
    write_programs(lower(plain, one_stream=True), tmp_path / "ours.csv")
    write_csv(schedule, tmp_path / "cells.csv", torch=True)
    ours, theirs = runtime(plain.workers, 8, 8), runtime(plain.workers, 8, 8)
    ours._load_csv(tmp_path / "ours.csv", format="compute_comms")
    theirs._load_csv(tmp_path / "cells.csv")
    assert communications(ours.pipeline_order_with_comms) == communications(theirs.pipeline_order_with_comms)
    order = {rank: [str(a) for a in actions] for rank, actions in ours.pipeline_order_with_comms.items()}
    for rank, actions in theirs.pipeline_order_with_comms.items():
        cells = [str(a) for a in actions if a.is_compute_op]
        assert [text for text in order[rank] if text in set(cells)] == cells
    to_rank = ours.stage_index_to_group_rank.__getitem__
    dry_run(ours.pipeline_order_with_comms, to_rank, 8)


@pytest.mark.parametrize(("name", "stages"), MULTI)
def test_programs_of_pytorchs_schedules_are_its_own(tmp_path, name, stages):
    """Lowered here, they send, receive and reduce what PyTorch's own files do."""
    theirs = runtime(4, stages, 8, getattr(pipelining, name))
    theirs._dump_csv(tmp_path / "theirs.csv", format="compute_comms")
    plain = for_torch(read_csv(tmp_path / "theirs.csv"), sums=True)
    write_programs(lower(plain, one_stream=True), tmp_path / "ours.csv")
    ours = runtime(4, stages, 8)
    ours._load_csv(tmp_path / "ours.csv", format="compute_comms")
    assert communications(ours.pipeline_order_with_comms) == communications(theirs.pipeline_order_with_comms)


def test_pytorch_runs_our_programs(tmp_path):
    """Two of its processes, over gloo: the gradients are those of the whole model."""
    if not pipelining.dist.is_gloo_available():
        pytest.skip("PyTorch without gloo")
    files = []
    for name in ("gpipe", "zb-h1", "modulo", "zb-v", "dualpipe-v"):
        schedule = build(name, workers=2, stages=4, microbatches=4, input_gradient=True)
        files.append(tmp_path / f"{name}.csv")
        write_programs(lower(for_torch(schedule, sums=True), one_stream=True), files[-1])
    script = Path(__file__).with_name("torch_ranks.py")
    found = subprocess.run([sys.executable, script, tmp_path / "store", *files], capture_output=True, text=True,
                           timeout=300, check=False)  # fmt: skip
    assert found.returncode == 0, found.stderr
    apart = [float(line) for line in found.stdout.split()]
    assert len(apart) == 2 * len(files) and max(apart) < 1e-15
