"""One warp through a loop, in order, and what that assumes of the hardware.

Exact, because ptxas wrote it into the code: the order, stall counts, which scoreboards an instruction waits for.
Assumed: the tables below, with rounded figures from these:

[H] Huerta et al. 2025, "Analyzing modern NVIDIA GPU cores", arXiv 2503.20481: latencies of memory instructions and the
    queue before the memory unit on Ampere, what the control bits do.
[A] Abdelkhalik et al. 2022, "Demystifying the NVIDIA Ampere architecture", arXiv 2208.11174: instruction latencies.
[L] Luo et al. 2024, "Benchmarking and dissecting the NVIDIA Hopper GPU architecture", arXiv 2402.13499: latencies of
    shared memory, L2 and DRAM on H100.
[W] NVIDIA's white papers of A100, H100 and B200: lanes of each unit in a quarter of a multiprocessor (one scheduler).

Left out: bank conflicts, instruction fetch, other warps (see `with_warps` for the limits they share), clock changes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from sass.decode import DOUBLE, NONE, Instruction

LOAD_LATENCY = {"hidden": 35, "L2": 270, "DRAM": 700}
"""Cycles of a load from global memory [L]; "hidden" is a hit in L1: what is left when all of it was loaded in time."""

_LATENCY: dict[str, tuple[int, int]] = {
    "LDS": (9, 24), "LDS.64": (9, 24), "LDS.128": (9, 26),  # [H]; pointer chases on H100 see 29 [L]
    "STS": (12, 12), "STS.64": (14, 14), "STS.128": (18, 18),  # [H]
    "STG": (14, 14), "STG.64": (16, 16), "STG.128": (20, 20),  # [H]
    "LDG": (11, 0),  # [H]; the result comes after one of LOAD_LATENCY
    "LDC": (10, 30), "ULDC": (10, 20), "LDCU": (10, 20),  # [H]: constants by way of a load
    "MUFU": (8, 20),  # [A]: 18 to 23
    "SHFL": (9, 23),  # [A]
    "I2F": (8, 14), "F2I": (8, 14), "F2F": (8, 14), "S2R": (8, 24), "S2UR": (8, 24), "R2UR": (8, 12),
    "DFMA": (6, 8), "DADD": (6, 8), "DMUL": (6, 8), "DSETP": (6, 10),  # [A]
    "BAR": (20, 24), "VOTE": (6, 12), "REDUX": (10, 24), "ATOM": (14, 700), "RED": (14, 14),
}  # fmt: skip
"""Cycles until the operands are read, and until the result can be used, of instructions that set a scoreboard."""
_OTHER = (8, 20)
_FIXED = {"IMAD.WIDE": 5, "DFMA": 8, "DADD": 8, "DMUL": 8}
"""Cycles until the result of an instruction without a scoreboard can be used, where it is not 4; for `chain` only."""

TAKEN = 10
"""Cycles from a branch to the first instruction where it goes: a guess, about the depth of the front end [H]."""
RECONVERGE = 10
"""Cycles of the instruction at which a warp that a branch has split comes together (BSYNC): a guess, as above."""
MEMORY_INTERVAL = 4
"""Cycles that an instruction of a warp takes in the eight load/store lanes of a scheduler [W, H]."""
_QUEUE, _QUEUE_RELEASE = 4, 7
"""Memory instructions that stand before the memory unit, and cycles from one's turn until its place is free [H]."""

_MEMORY = ("LDS", "STS", "LDG", "STG", "SHFL", "LD", "ST", "LDL", "STL", "ATOM", "ATOMS", "RED", "LDGSTS")
_FLOAT = ("FFMA", "FADD", "FMUL")
_SPECIAL = ("MUFU", "I2F", "F2I", "F2F", "POPC", "FLO", "BREV", "FRND")
_MULTIPLY = ("IMAD", "HFMA2", "HADD2", "HMUL2", "IDP")
_CONTROL = ("BRA", "EXIT", "BSSY", "BSYNC", "WARPSYNC", "BAR", "NOP", "CALL", "RET", "BRX", "YIELD", "BREAK", "DEPBAR")
BARRIERS = ("NOP", "WARPSYNC", "BAR")
"""What a barrier becomes; __syncwarp of a whole warp leaves a NOP."""


def unit(one: Instruction, architecture: int) -> tuple[str, int]:
    """Return the unit that an instruction of a warp takes, and for how many cycles: 32 lanes over the unit's [W]."""
    if one.base in _FLOAT:
        return "float", 2 if architecture < 86 else 1
    if one.base in DOUBLE:
        return "double", 4 if architecture < 90 else 2
    if one.base in _MEMORY:
        return "memory", MEMORY_INTERVAL
    if one.base in _SPECIAL:
        return "special", 8
    if one.base in _MULTIPLY:
        return "integer multiply", 2
    if one.base in _CONTROL:
        return "control", 1
    return "uniform" if one.base[0] == "U" or one.base in ("R2UR", "S2UR") else "integer", 2


@dataclass(frozen=True)
class Steady:
    """A round in the steady state: its cycles, cycles lost by cause, and each instruction with its cycle and cause."""

    cycles: float
    lost: Counter[str]
    trace: list[tuple[int, Instruction, str]]


def run(instructions: Sequence[Instruction], architecture: int, load_latency: int, rounds: int = 6) -> Steady:
    """Run one warp through `rounds` equal rounds; the last three give the figures."""
    boards: list[list[tuple[int, str]]] = [[] for _ in range(6)]
    free: Counter[str] = Counter()
    turns: list[int] = []  # when the last memory instructions had theirs
    clock, begins, split = 0, [], False
    lost: Counter[str] = Counter()
    trace: list[tuple[int, Instruction, str]] = []
    for _ in range(rounds):
        begins.append(clock)
        lost.clear()
        trace.clear()
        for position, one in enumerate(instructions):
            issue, cause = clock, ""
            for board in (b for b in range(6) if one.wait >> b & 1):
                for when, opcode in boards[board]:
                    if when > issue:
                        issue, cause = when, opcode
                boards[board].clear()  # counters: zero, or the instruction would still wait
            name, interval = unit(one, architecture)
            turn = issue
            if name == "memory":
                if len(turns) == _QUEUE and turns[0] + _QUEUE_RELEASE > issue:
                    issue, cause = turns[0] + _QUEUE_RELEASE, "queue of the memory unit"
                turn = max(issue, turns[-1] + MEMORY_INTERVAL if turns else 0)
                turns = [*turns[1 - _QUEUE :], turn]
            elif free[name] > issue:
                issue, cause = free[name], f"unit {name}"
                turn = issue
            free[name] = issue + interval
            read, result = latency(one, load_latency)
            if one.write != NONE:
                boards[one.write].append((turn + result, one.opcode))
            if one.read != NONE:
                boards[one.read].append((turn + read, f"operands of {one.opcode}"))
            lost[cause] += issue - clock
            trace.append((issue - begins[-1], one, cause))
            clock = issue + max(one.stall, 1)
            if one.base == "BRA":
                following = instructions[(position + 1) % len(instructions)]
                if following.address != one.address + 16:
                    clock = max(clock, issue + TAKEN)
                else:
                    split = True
            elif one.base == "BSYNC" and split:
                lost["reconvergence"] += max(0, issue + RECONVERGE - clock)
                clock, split = max(clock, issue + RECONVERGE), False
    return Steady((clock - begins[-3]) / 3, +lost, trace)


def latency(one: Instruction, load_latency: int) -> tuple[int, int]:
    """Return cycles until an instruction with a scoreboard has read its operands, and until its result can be used."""
    wide = f"{one.base}.{32 * one.words}"
    read, result = _LATENCY.get(wide) or _LATENCY.get(one.base) or _OTHER
    return read, load_latency if one.base == "LDG" else result


def chain(instructions: Sequence[Instruction], rounds: int = 5) -> tuple[int, int, list[Instruction]]:
    """Return cycles and length of a round's longest chain of dependent instructions, and the chain itself.

    What a round would take if nothing but its own results were waited for. A load from shared memory depends on every
    store before the last barrier, and on one to the same place.
    """
    ready: dict[str, tuple[int, int, int]] = {}  # a name's cycle, length of its chain, number of its instruction
    ends: list[tuple[int, int, int]] = []
    before: list[int] = []
    stored: tuple[int, int, int] | None = None
    for number in range(rounds * len(instructions)):
        one = instructions[number % len(instructions)]
        place = "".join(re.findall(r"\[.*\]", one.text))
        needs = [*one.reads, *(("shared", place) if one.base == "LDS" else ())]
        cycle, length, came = max((ready[name] for name in needs if name in ready), default=(0, 0, -1))
        if one.base == "STS":
            delay = MEMORY_INTERVAL  # one queue for stores and loads keeps their order
        elif one.write != NONE or one.base == "SHFL":
            delay = latency(one, LOAD_LATENCY["hidden"])[1]
        else:
            delay = _FIXED.get(".".join(one.opcode.split(".")[:2]), _FIXED.get(one.base, 4))
        end = (cycle + delay, length + 1, number)
        ends.append(end)
        before.append(came)
        for name in one.writes:
            ready[name] = max(end, ready.get(name, end)) if one.predicate else end
        if one.base == "STS":
            ready[place] = end
            stored = max(end, stored or end)
        elif one.base in BARRIERS and stored:
            ready["shared"], stored = max(stored, ready.get("shared", stored)), None
    size = len(instructions)
    last = max(ends[-size:])
    cycles, length = (max(ends[-size:])[i] - max(ends[-2 * size : -size])[i] for i in (0, 1))
    path, at = [], last[2]
    while at >= len(ends) - size:
        path.append(instructions[at % size])
        at = before[at]
    return cycles, length, path[::-1]


def busy(instructions: Sequence[Instruction], architecture: int) -> Counter[str]:
    """Return for how many cycles a round takes each unit of a scheduler, and as "issue" the scheduler itself."""
    taken: Counter[str] = Counter(issue=len(instructions))
    for one in instructions:
        name, interval = unit(one, architecture)
        taken[name] += interval
    return taken


def wavefronts(instructions: Sequence[Instruction], wide: bool = False) -> int:
    """Return passes through shared memory, of which a multiprocessor has one a cycle: one for 32 words of the lanes.

    A place without a lane's own register is the same for all lanes: one pass; with `wide`, one for each of its words.
    Nobody has published which of the two it is for LDS.128. Conflicts and broadcasts to a part of the lanes are not
    known here: every word of a lane counts.
    """
    shared = [one for one in instructions if one.base in ("LDS", "STS")]
    own = [wide or one.base == "STS" or re.search(r"\[R\d", one.text) for one in shared]
    return sum(one.words if each else 1 for one, each in zip(shared, own, strict=True))


def with_warps(
    cycles: float, instructions: Sequence[Instruction], architecture: int, warps: int, wide: bool = False
) -> float:
    """Return the cycles of a round when a multiprocessor has `warps` of these: what one takes, or what they share."""
    each_scheduler = -(-warps // 4) * max(busy(instructions, architecture).values())
    return max(cycles, each_scheduler, warps * wavefronts(instructions, wide))
