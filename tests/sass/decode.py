"""Instructions of Volta and later, from nvdisasm's listing: operands, what they read and write, and control bits.

An instruction has 128 bits. ptxas schedules, and says how in the upper word:

====== ==================================================================================================
41-44  stall: how many cycles later the next instruction may issue
45     a hint to switch warps; without a meaning for one warp alone
46-48  a scoreboard released when the result is there (7: none)
49-51  a scoreboard released when the operands have been read (7: none)
52-57  mask of the scoreboards that must be zero before this one issues
58-61  operands kept for the next instruction
====== ==================================================================================================

Found by Jia et al. 2018 (arXiv 1804.06826, "Dissecting the NVIDIA Volta GPU architecture") and by the open assemblers
TuringAs and CuAssembler; the same from sm_70 to sm_100. A scoreboard counts: two loads on one are waited for together.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

NONE = 7
"""No scoreboard."""

DOUBLE = ("DFMA", "DADD", "DMUL", "DSETP", "DMNMX")
_STORES = ("STS", "STG", "ST", "STL")
_NO_RESULT = (
    *_STORES,
    "RED",
    "BRA",
    "EXIT",
    "BSSY",
    "BSYNC",
    "WARPSYNC",
    "BAR",
    "NOP",
    "CALL",
    "RET",
    "BREAK",
    "DEPBAR",
)
_CARRY_OUT = ("IADD3", "UIADD3", "LEA", "ULEA", "IMAD", "SHFL", "LOP3", "IADD")

_SECTION = re.compile(r"\.text\.(\w+):")
_LABEL = re.compile(r"(\.L_\w+):")
_LOWER = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(.*?);?\s*/\* 0x([0-9a-f]{16}) \*/")
_UPPER = re.compile(r"^\s*/\* 0x([0-9a-f]{16}) \*/")
_TEXT = re.compile(r"(@!?U?P\w+ )?([\w.]+)\s*(.*)")
_TARGET = re.compile(r"`\((\.L_\w+)\)")
_REGISTER = re.compile(r"(?<!\w)(UR|UP|R|P)(\d+)")
PREDICATE = re.compile(r"!?U?P(\d|T)")


@dataclass(eq=False)
class Instruction:
    """One instruction: ``@predicate opcode operands``, its control bits, and where it branches to."""

    address: int
    text: str
    predicate: str
    opcode: str
    operands: list[str]
    stall: int
    write: int
    read: int
    wait: int
    target: int | None = None

    @cached_property
    def base(self) -> str:
        """The opcode without its modifiers."""
        return self.opcode.split(".")[0]

    @cached_property
    def words(self) -> int:
        """32-bit words of a lane that it moves."""
        return 4 if ".128" in self.opcode else 2 if ".64" in self.opcode else 1

    @cached_property
    def writes(self) -> tuple[str, ...]:
        """Registers and predicates that it sets, wide ones spelled out."""
        return self._dataflow[0]

    @cached_property
    def reads(self) -> tuple[str, ...]:
        """Registers and predicates that it needs."""
        return self._dataflow[1]

    @cached_property
    def _dataflow(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        reads, writes = _names(self.predicate, 1), []
        sets_predicates = self.base.endswith("SETP") or self.base in ("PLOP3", "UPLOP3", "VOTE", "R2P")
        carries, pair = self.base in _CARRY_OUT, 2 if self.base in DOUBLE else 1
        result = 2 if ".WIDE" in self.opcode else self.words if self.base[0] == "L" or self.base == "CS2R" else pair
        last = len(self.operands) - 1
        for i, operand in enumerate(self.operands):
            if i == 0 and self.base not in _NO_RESULT:
                writes += _names(operand, result)
            elif (i == 1 and sets_predicates) or (i in (1, 2) and carries and PREDICATE.fullmatch(operand)):
                writes += _names(operand, 1)
            elif i == last and (self.base in _STORES or ".WIDE" in self.opcode):
                reads += _names(operand, max(self.words, 2 if ".WIDE" in self.opcode else 1))
            else:
                reads += _names(operand, pair)
        return tuple(writes), tuple(reads)


def functions(listing: str) -> dict[str, list[Instruction]]:
    """Take a listing with encodings apart: kernel name to instructions."""
    found: dict[str, list[Instruction]] = {}
    labels: dict[str, int] = {}
    waiting: list[str] = []
    code: list[Instruction] = []
    lower: re.Match[str] | None = None
    for line in listing.splitlines():
        if section := _SECTION.match(line):
            code = found.setdefault(section[1], [])
        elif label := _LABEL.match(line):
            waiting.append(label[1])
        elif match := _LOWER.search(line):
            lower = match
            labels |= dict.fromkeys(waiting, int(match[1], 16))
            waiting = []
        elif lower and (upper := _UPPER.match(line)):
            code.append(_decode(int(lower[1], 16), " ".join(lower[2].split()), int(upper[1], 16)))
            lower = None
    for instruction in (one for every in found.values() for one in every):
        if target := _TARGET.search(instruction.text):
            instruction.target = labels.get(target[1])
    return found


def _decode(address: int, text: str, upper: int) -> Instruction:
    match = _TEXT.match(text)
    assert match, text
    operands = [operand.strip() for operand in match[3].split(",")] if match[3] else []
    stall, write, read, wait = upper >> 41 & 15, upper >> 46 & 7, upper >> 49 & 7, upper >> 52 & 63
    return Instruction(address, text, (match[1] or "").strip(), match[2], operands, stall, write, read, wait)


def _names(operand: str, words: int) -> list[str]:
    """Return the registers in an operand; addresses are 64 bits wide where they say so."""
    found = []
    for kind, number in _REGISTER.findall(operand):
        wide = 1 if kind.endswith("P") else max(words, 2 if ".64" in operand else 1)
        found += [f"{kind}{int(number) + i}" for i in range(wide)]
    return found
