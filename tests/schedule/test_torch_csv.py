"""Files go both ways between sparsebp and torch.distributed.pipelining."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from sparsebp.core.errors import FileFormatError, OptionError, ScheduleError
from sparsebp.schedule import Overlap, StepGraph, programs_to_csv, read_csv, to_csv, write_csv
from sparsebp.schedule.builders import BUILDERS, build
from sparsebp.schedule.files import check_communication, for_torch, from_csv, write_programs
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
    if name not in ("ooo", "ooo-list", "reverse-first-k", "pipedream", "dualpipe-2018", "dualpipe", "forward-only")
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
    for name in ("zb-h1", "fast-forward", "zb-v", "dualpipe-v"):  # split backwards of the second stage are wrong there
        schedule = build(name, workers=2, stages=4, microbatches=4, input_gradient=True, unweighted=[0])
        files.append(tmp_path / f"bare-{name}.csv")
        write_programs(lower(for_torch(schedule, sums=True), one_stream=True), files[-1])
    for name in ("v-half", "zb-2p", "breadth-first"):
        schedule = build(name, workers=2, stages=4, microbatches=4)
        files.append(tmp_path / f"{name}.csv")
        write_programs(lower(for_torch(schedule, sums=True), one_stream=True), files[-1])
    script = Path(__file__).with_name("torch_ranks.py")
    found = subprocess.run([sys.executable, script, tmp_path / "store", *files], capture_output=True, text=True,
                           timeout=300, check=False)  # fmt: skip
    assert found.returncode == 0, found.stderr
    apart = [float(line) for line in found.stdout.split()]
    assert len(apart) == 2 * len(files) and max(apart) < 1e-15


@pytest.mark.parametrize(("name", "stages"), [one for one in MULTI if one[0] != "ScheduleDualPipeV"])
def test_sharded_stages_are_gathered_and_freed_where_pytorch_does(tmp_path, name, stages):
    """In all of its schedules but those with overlaps, of which it gathers four stages at a time."""
    theirs = runtime(4, stages, 8, getattr(pipelining, name))
    theirs._dump_csv(tmp_path / "theirs.csv")
    plain = for_torch(read_csv(tmp_path / "theirs.csv"), sums=True)
    text = programs_to_csv(lower(plain, one_stream=True), sharded=range(stages))
    for rank, cells in enumerate(csv.reader(text.splitlines())):
        ours = [cell for cell in cells if not any(word in cell for word in ("SEND", "RECV", "REDUCE"))]
        order = pipelining._add_unshard_reshard(theirs.pipeline_order[rank])
        assert [cell for cell in ours if "RESHARD" not in cell] == [str(a) for a in order if "RESHARD" not in str(a)]
        assert sorted(ours) == sorted(map(str, order))
    with pytest.raises(OptionError, match="Unknown stages are sharded"):
        programs_to_csv(lower(plain), sharded=[stages])


@pytest.mark.parametrize(("name", "stages"), MULTI)
def test_communication_of_pytorchs_files_is_checked(tmp_path, name, stages):
    theirs = runtime(4, stages, 8, getattr(pipelining, name))
    theirs._dump_csv(tmp_path / "theirs.csv", format="compute_comms")
    text = (tmp_path / "theirs.csv").read_text()
    schedule = from_csv(text)
    assert check_communication(text, schedule)
    assert not check_communication(to_csv(schedule), schedule)
    rows = list(csv.reader(text.splitlines()))
    sends = [at for at, cell in enumerate(rows[0]) if cell.startswith("0SEND_F")][:2]

    def changed(edit) -> str:
        other = [list(row) for row in rows]
        edit(other)
        return "\n".join(",".join(row) for row in other)

    def swap(cells: list[list[str]]) -> None:
        """Receive the first two messages in the opposite order, both before the first is read."""
        there = [at for at, cell in enumerate(cells[1]) if cell.startswith("1RECV_F")][:2]
        first, second = (cells[1][at] for at in there)
        cells[1] = [cell for at, cell in enumerate(cells[1]) if at not in there]
        cells[1][:0] = [second, first]

    with pytest.raises(ScheduleError, match="deadlocked"):
        check_communication(changed(swap), schedule)
    with pytest.raises(FileFormatError, match="no such communication"):
        from_csv(changed(lambda cells: cells[1].append("5RECV_F9")))
    with pytest.raises(ScheduleError, match="missing"):
        check_communication(changed(lambda cells: cells[0].pop(sends[1])), schedule)
    with pytest.raises(FileFormatError, match="not a message"):
        check_communication(changed(lambda cells: cells[0].append(rows[0][sends[0]])), schedule)
    with pytest.raises(FileFormatError, match="before it is made"):
        check_communication(changed(lambda cells: cells[0].insert(0, cells[0].pop(sends[0]))), schedule)


def test_both_ranks_send_before_they_receive(tmp_path):
    """On one stream neither send ends; with a stream for each direction both do."""
    text = "0F0,0F1,0SEND_F0,0RECV_B0,0SEND_F1,0B0,0RECV_B1,0B1\n1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n"
    schedule = from_csv(text)
    assert check_communication(text, schedule)
    crossed = text.replace("0RECV_B0,0SEND_F1", "0SEND_F1,0RECV_B0")
    assert check_communication(crossed, schedule, one_stream=False)
    with pytest.raises(ScheduleError, match="deadlocked"):
        check_communication(crossed, schedule)
