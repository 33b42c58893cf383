"""The reader of machine code: control bits, loops of constant length, what a warp waits for.

Listings are written by hand, in nvdisasm's form; their control bits are put together as `sass.decode` documents them.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from sass import machine
from sass.decode import NONE, functions
from sass.loops import busiest, loops
from sass.nvrtc import CUPY_OPTIONS
from sass.report import steps_of

Line = tuple[str, dict[str, int]]
"""An instruction, and of its control bits those that are not at rest."""


def listing(lines: list[Line], labels: dict[int, str]) -> str:
    """Return nvdisasm's listing of a kernel called ``k``; `labels` stand before the instruction of that number."""
    out = [".text.k:"]
    for number, (text, bits) in enumerate(lines):
        if number in labels:
            out.append(f"{labels[number]}:")
        control = {"stall": 1, "write": NONE, "read": NONE, "wait": 0} | bits
        upper = control["stall"] << 41 | control["write"] << 46 | control["read"] << 49 | control["wait"] << 52
        out += [f"        /*{number * 16:04x}*/  {text} ;  /* 0x{0:016x} */", f"  /* 0x{upper:016x} */"]
    return "\n".join(out)


def test_control_bits_of_a_compiled_kernel() -> None:
    text = """
.text.rnn_backward:
        /*1770*/                   STS [R42], R63 ;                          /* 0x0000003f2a007388 */
                                                                             /* 0x0001e40000000800 */
        /*18d0*/              @P0  LDG.E.CONSTANT R62, desc[UR10][R62.64] ;  /* 0x0000000a3e3e7981 */
                                                                             /* 0x000562000c1e9900 */
        /*1700*/                   FADD R63, R61, R63 ;                      /* 0x0000003f3d3f7221 */
                                                                             /* 0x020fe20000000000 */
"""
    store, load, add = functions(text)["rnn_backward"]
    assert (store.stall, store.write, store.read, store.wait) == (2, NONE, 0, 0)
    assert (load.stall, load.write, load.read, load.wait) == (1, 5, 2, 0)
    assert (add.stall, add.write, add.read, add.wait) == (1, NONE, NONE, 1 << 5)
    assert (load.predicate, load.base, load.writes) == ("@P0", "LDG", ("R62",))
    assert set(load.reads) == {"P0", "UR10", "UR11", "R62", "R63"}  # an address takes two registers
    assert (add.writes, add.reads) == (("R63",), ("R61", "R63"))


@pytest.mark.parametrize(
    ("text", "writes", "reads"),
    [
        ("LDS.128 R12, [UR4+0x10]", {"R12", "R13", "R14", "R15"}, {"UR4"}),
        ("STS.64 [R2], R8", set(), {"R2", "R8", "R9"}),
        ("DFMA R4, R6, R8, R4", {"R4", "R5"}, {"R4", "R5", "R6", "R7", "R8", "R9"}),
        ("IADD3 R60, P3, R46, -0x8, RZ", {"R60", "P3"}, {"R46"}),
        ("IADD3.X R59, R45, -0x1, RZ, P3, !PT", {"R59"}, {"R45", "P3"}),
        ("ISETP.GE.AND.EX P1, PT, R59, R67, PT, P2", {"P1"}, {"R59", "R67", "P2"}),
        ("IMAD.WIDE.U32 R14, R46, UR8, R64", {"R14", "R15"}, {"R46", "UR8", "R64", "R65"}),
    ],
)
def test_what_an_instruction_reads_and_writes(text: str, writes: set[str], reads: set[str]) -> None:
    [one] = functions(listing([(text, {})], {}))["k"]
    assert (set(one.writes), set(one.reads)) == (writes, reads)


def test_a_loop_of_constant_length_turns_as_often_as_it_does() -> None:
    code: list[Line] = [
        ("MOV R1, RZ", {}),
        ("FFMA R2, R3, R4, R2", {}),
        ("IADD3 R1, R1, 0x4, RZ", {}),
        ("ISETP.NE.AND P0, PT, R1, 0x14, PT", {}),
        ("@P0 BRA `(.L_inner)", {}),
        ("@P1 BRA `(.L_outer)", {}),
        ("EXIT", {}),
    ]
    [loop] = loops(functions(listing(code, {0: ".L_outer", 1: ".L_inner"}))["k"])
    assert loop.count("FFMA") == 5
    assert loop.notes == []
    assert steps_of(loop, ("FFMA", 5)) == 1
    with pytest.raises(ValueError, match="5 FFMA"):
        steps_of(loop, ("FFMA", 2))


def test_branches_on_data_fall_through_and_are_noted() -> None:
    code: list[Line] = [
        ("@P0 BRA `(.L_skip)", {}),
        ("STG.E desc[UR4][R2.64], R1", {}),
        ("@P1 BRA `(.L_head)", {}),
        ("EXIT", {}),
    ]
    kernel = functions(listing(code, {0: ".L_head", 2: ".L_skip"}))["k"]
    [through], [around] = loops(kernel), loops(kernel, taken={0})
    assert (through.count("STG"), around.count("STG")) == (1, 0)
    assert [note.endswith("falls through") for note in through.notes] == [True]


def test_where_warps_have_roles_the_one_with_the_work_is_looked_at() -> None:
    code: list[Line] = [
        ("@P0 BRA `(.L_work)", {}),
        ("LDG.E R2, desc[UR4][R8.64]", {}),
        ("BRA `(.L_end)", {}),
        ("FFMA R2, R3, R4, R2", {}),
        ("BRA.DIV UR5, `(.L_apart)", {}),
        ("@P1 BRA `(.L_head)", {}),
        ("EXIT", {}),
        ("WARPSYNC R5", {}),
        ("BRA `(.L_end)", {}),
    ]
    labels = {0: ".L_head", 3: ".L_work", 5: ".L_end", 7: ".L_apart"}
    loop = busiest(loops(functions(listing(code, labels))["k"]))
    assert [one.base for one in loop.round] == ["BRA", "FFMA", "BRA", "BRA"]
    assert loop.notes[0].endswith("taken")


def test_stall_counts_are_taken_as_they_are() -> None:
    code: list[Line] = [
        ("FFMA R2, R3, R4, R2", {"stall": 4}),
        ("FFMA R2, R3, R4, R2", {"stall": 4}),
        ("@P0 BRA `(.L_head)", {"stall": 5}),
        ("EXIT", {}),
    ]
    loop = busiest(loops(functions(listing(code, {0: ".L_head"}))["k"]))
    assert machine.run(loop.round, 90, 270).cycles == 8 + machine.TAKEN
    assert machine.chain(loop.round)[:2] == (8, 2)


def test_two_loads_on_one_scoreboard_are_waited_for_together() -> None:
    """The first load is 40 cycles older than the second, but the wait is for a counter to be zero."""
    late: list[Line] = [("NOP", {"stall": 10})] * 4
    first, second = "LDG.E R2, desc[UR4][R8.64]", "LDG.E R3, desc[UR4][R6.64]"
    loads: list[Line] = [(first, {"write": 5}), *late, (second, {"write": 5})]
    rest: list[Line] = [("FADD R2, R2, R2", {"wait": 1 << 5}), ("@P0 BRA `(.L_head)", {}), ("EXIT", {})]
    together = busiest(loops(functions(listing(loads + rest, {0: ".L_head"}))["k"]))
    loads[-1] = (second, {"write": 4})
    apart = busiest(loops(functions(listing(loads + rest, {0: ".L_head"}))["k"]))
    cycles = [machine.run(loop.round, 90, 270).cycles for loop in (together, apart)]
    assert cycles[0] - cycles[1] == 41  # a cycle for the first load's issue


def test_a_chain_goes_through_shared_memory() -> None:
    """What a step stores before a barrier, the next one loads; a store to another place without one is no bond."""
    code: list[Line] = [
        ("LDS R1, [UR4]", {"write": 0}),
        ("FADD R1, R1, R1", {"wait": 1, "stall": 4}),
        ("STS [R9], R1", {}),
        ("NOP", {}),
        ("@P0 BRA `(.L_head)", {}),
        ("EXIT", {}),
    ]
    loop = busiest(loops(functions(listing(code, {0: ".L_head"}))["k"]))
    cycles, length, path = machine.chain(loop.round)
    assert (cycles, length) == (24 + 4 + machine.MEMORY_INTERVAL, 3)
    assert [one.base for one in path] == ["LDS", "FADD", "STS"]
    del code[3]
    free = busiest(loops(functions(listing(code, {0: ".L_head"}))["k"]))
    assert machine.chain(free.round)[0] == 0


def test_options_are_those_of_the_installed_cupy() -> None:
    spec = importlib.util.find_spec("cupy")
    if spec is None or spec.origin is None:
        pytest.skip("needs CuPy's sources")
    text = (Path(spec.origin).parent / "cuda" / "compiler.py").read_text(encoding="utf-8")
    assert set(CUPY_OPTIONS) <= set(re.findall(r"options \+= \('([^']*)',\)", text))


def test_units_bound_many_warps() -> None:
    code: list[Line] = [*[("LDS.128 R4, [R1]", {})] * 3, ("@P0 BRA `(.L_head)", {}), ("EXIT", {})]
    loop = busiest(loops(functions(listing(code, {0: ".L_head"}))["k"]))
    assert machine.busy(loop.round, 90)["memory"] == 3 * machine.MEMORY_INTERVAL
    assert machine.wavefronts(loop.round) == 12
    assert machine.with_warps(20, loop.round, 90, 1) == 20
    assert machine.with_warps(20, loop.round, 90, 16) == 16 * 12


def test_a_load_of_one_place_by_all_lanes_may_take_a_pass_or_one_a_word() -> None:
    code: list[Line] = [*[("LDS.128 R4, [UR4]", {})] * 3, ("@P0 BRA `(.L_head)", {}), ("EXIT", {})]
    loop = busiest(loops(functions(listing(code, {0: ".L_head"}))["k"]))
    assert (machine.wavefronts(loop.round), machine.wavefronts(loop.round, wide=True)) == (3, 12)
    assert machine.with_warps(20, loop.round, 90, 16) == 48 < machine.with_warps(20, loop.round, 90, 16, wide=True)
