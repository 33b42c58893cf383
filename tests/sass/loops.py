"""The loops of a kernel, and the instructions of one round in the order in which a warp runs them.

Constants are followed through integer moves, additions and comparisons, so an inner loop of fixed length turns as often
as it does. A branch that hangs on data falls through: the guarded code runs, which is right for a loop in its steady
state (values ahead are fetched, results stored) and on the safe side elsewhere; but where taking it brings more
multiply-adds into the round, as where warps have roles, it is taken. What was decided so is in `notes`.
"""

from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Container
from dataclasses import dataclass, field

from sass.decode import PREDICATE, Instruction

_LONGEST = 200_000
_ADDITIONS = ("IADD3", "UIADD3", "VIADD", "IADD", "UIADD")
_COMPARE = {
    "GE": lambda a, b: a >= b,
    "GT": lambda a, b: a > b,
    "LE": lambda a, b: a <= b,
    "LT": lambda a, b: a < b,
    "EQ": lambda a, b: a == b,
    "NE": lambda a, b: a != b,
}

Known = dict[str, int]
"""Registers and predicates that hold a constant."""


@dataclass
class Loop:
    """An outermost loop: addresses of its first and last instruction, one round, what was assumed about branches."""

    head: int
    back: int
    round: list[Instruction] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    open_branches: list[int] = field(default_factory=list)
    taken: set[int] = field(default_factory=set)

    @property
    def work(self) -> int:
        """Multiply-adds of a round."""
        return self.count("FFMA", "FMUL", "FADD", "DFMA", "DMUL", "DADD")

    def count(self, *bases: str) -> int:
        """Return how many instructions of a round have one of these opcodes."""
        return sum(one.base in bases for one in self.round)


def loops(code: list[Instruction], trips: int = 1, taken: Container[int] = ()) -> list[Loop]:
    """Return the outermost loops of a kernel.

    Parameters
    ----------
    code
        All instructions of the kernel.
    trips
        Rounds of an inner loop whose length is no constant.
    taken
        Addresses of forward branches on data that are taken.
    """
    spans: dict[int, int] = {}
    for one in code:
        if one.base == "BRA" and one.target is not None and one.target < one.address:
            spans[one.target] = max(spans.get(one.target, 0), one.address)
    outer = [
        Loop(head, back)
        for head, back in sorted(spans.items())
        if not any(h <= head and back <= b and (h, b) != (head, back) for h, b in spans.items())
    ]
    for loop in outer:
        _walk(code, loop, trips, taken)
        for branch in loop.open_branches:
            other = Loop(loop.head, loop.back)
            _walk(code, other, trips, {*taken, *loop.taken, branch})
            if other.work > loop.work:
                loop.__dict__ |= other.__dict__ | {"taken": {*loop.taken, branch}}
    return outer


def busiest(found: list[Loop]) -> Loop:
    """Return the loop with most multiply-adds a round."""
    return max(found, key=lambda loop: loop.work)


def _walk(code: list[Instruction], loop: Loop, trips: int, taken: Container[int]) -> None:
    index = {one.address: i for i, one in enumerate(code)}
    known: Known = {}
    for _ in range(2):  # the first round shows what is constant from round to round
        notes: dict[str, None] = {}
        turns: Counter[int] = Counter()
        loop.round = []
        i = index[loop.head]
        loop.open_branches = []
        while len(loop.round) < _LONGEST and i < len(code) and (code[i].base, code[i].predicate) != ("EXIT", ""):
            one = code[i]
            loop.round.append(one)
            i += 1
            if one.base != "BRA" or one.target is None:
                _follow(one, known)
                continue
            holds = _taken(one, known)
            if one.target == loop.head and holds is not False:
                break
            if holds is None and one.target < one.address:
                turns[one.address] += 1
                holds = turns[one.address] % trips != 0
                notes[f"inner loop at {one.address:#x}: {trips} turn(s) assumed"] = None
            elif holds is None:
                holds = one.address in taken
                loop.open_branches.append(one.address)
                notes[f"branch at {one.address:#x} {one.text}: {'taken' if holds else 'falls through'}"] = None
            if holds:
                i = index[one.target]
        else:
            notes["a round leaves the loop before its end"] = None
        loop.notes = list(notes)


def _taken(one: Instruction, known: Known) -> bool | None:
    """Return whether a branch is taken, None where that hangs on data; one for lanes that went apart is not."""
    if ".DIV" in one.opcode:
        return False
    tests = [one.predicate, *(o for o in one.operands if PREDICATE.fullmatch(o))]
    values = [_truth(test, known) for test in tests if test]
    return False if False in values else None if None in values else True


def _follow(one: Instruction, known: Known) -> None:
    """Note what constants an instruction leaves."""
    holds = _truth(one.predicate, known) if one.predicate else True
    if holds is False:
        return
    value = _comparison(one, known) if one.base in ("ISETP", "UISETP") else _arithmetic(one, known)
    for name in one.writes:
        known.pop(name, None)
    if holds and value is not None and one.writes:
        known[one.writes[0]] = value
        if one.base == "CS2R":
            known |= dict.fromkeys(one.writes, 0)


def _arithmetic(one: Instruction, known: Known) -> int | None:
    operands = one.operands
    if one.base in ("MOV", "UMOV"):
        return _number(operands[1], known)
    if one.opcode.startswith("IMAD.MOV"):
        return _number(operands[3], known)
    if one.base in _ADDITIONS and ".X" not in one.opcode and not any(PREDICATE.fullmatch(o) for o in operands):
        parts = [_number(o, known) for o in operands[1:]]
        return None if None in parts else sum(part for part in parts if part is not None)
    if one.base == "HFMA2" and len(operands) == 5 and operands[1].endswith("RZ") and operands[2].endswith("RZ"):
        try:  # a constant made of two half-precision numbers
            high, low = (struct.unpack("<H", struct.pack("<e", float(o)))[0] for o in operands[3:])
        except (ValueError, OverflowError):
            return None
        return low | high << 16
    return 0 if one.base == "CS2R" and operands[1] == "SRZ" else None


def _comparison(one: Instruction, known: Known) -> int | None:
    a, b, third = _number(one.operands[2], known), _number(one.operands[3], known), _truth(one.operands[4], known)
    _, relation, *modifiers = one.opcode.split(".")
    if a is None or b is None or third is None or "EX" in modifiers or relation not in _COMPARE:
        return None
    if "U32" in modifiers:
        a, b = a % 2**32, b % 2**32
    holds = _COMPARE[relation](a, b)
    return int(holds and third if "AND" in modifiers else holds or third)


def _number(operand: str, known: Known) -> int | None:
    name = operand.lstrip("-~!").replace(".reuse", "")
    value = 0 if name in ("RZ", "URZ") else int(name, 0) if re.fullmatch(r"0x[0-9a-f]+|\d+", name) else known.get(name)
    if value is None or operand.startswith("~"):
        return None
    return ((-value if operand.startswith("-") else value) + 2**31) % 2**32 - 2**31


def _truth(operand: str, known: Known) -> bool | None:
    name = operand.lstrip("@!")
    value = 1 if name in ("PT", "UPT") else known.get(name)
    return None if value is None else bool(value) != ("!" in operand)
