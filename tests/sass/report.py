"""The figures of one kernel's loop."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from sass import machine, nvrtc
from sass.decode import Instruction, functions
from sass.loops import Loop, busiest, loops
from sparsebp.kernels.device.launch import Defines

Steps = tuple[str, int] | int
"""How the time steps of an unrolled round are told, see `report`."""


@dataclass(frozen=True)
class Report:
    """A loop with the steps that a round of it makes; cycles and counts are those of one step."""

    loop: Loop
    steps: int
    architecture: int

    @property
    def issued(self) -> float:
        """Instructions."""
        return len(self.loop.round) / self.steps

    def cycles(self, memory: str = "L2") -> float:
        """Cycles of one warp alone, with what it loads coming from `memory` (a key of `machine.LOAD_LATENCY`)."""
        return self.steady(memory).cycles / self.steps

    def steady(self, memory: str) -> machine.Steady:
        """One round with its waits."""
        return machine.run(self.loop.round, self.architecture, machine.LOAD_LATENCY[memory])

    def with_warps(self, warps: int, memory: str = "L2", wide: bool = False) -> float:
        """Cycles when a multiprocessor has `warps` of these; `wide`: see `machine.wavefronts`."""
        cycles = self.steady(memory).cycles
        return machine.with_warps(cycles, self.loop.round, self.architecture, warps, wide) / self.steps

    @property
    def chain(self) -> tuple[float, float]:
        """Cycles and instructions of the longest chain of dependent instructions."""
        cycles, length, _ = machine.chain(self.loop.round)
        return cycles / self.steps, length / self.steps

    def count(self, *opcodes: str) -> float:
        """Instructions whose opcode begins with one of these."""
        return sum(one.opcode.startswith(opcodes) for one in self.loop.round) / self.steps

    @property
    def busy(self) -> Counter[str]:
        """Cycles that each unit of a scheduler is taken for."""
        taken = machine.busy(self.loop.round, self.architecture)
        return Counter({name: cycles / self.steps for name, cycles in taken.items()})  # type: ignore[misc]

    @property
    def wavefronts(self) -> float:
        """Passes through shared memory."""
        return machine.wavefronts(self.loop.round) / self.steps


def kernel_code(file: str, kernel: str, defines: Defines, architecture: str, *extra: str) -> list[Instruction]:
    """Compile a source and return the instructions of one of its kernels.

    Raises
    ------
    KeyError
        The source has no such kernel.
    FileNotFoundError
        There is no nvdisasm.
    """
    return functions(nvrtc.listing_of(file, defines, architecture, extra))[kernel]


def report(file: str, kernel: str, defines: Defines, architecture: str, steps: Steps, turns: int = 1) -> Report:
    """Return the figures of the kernel's loop with most multiply-adds.

    Parameters
    ----------
    file, kernel, defines, architecture
        What to compile, such as ``"rnn.cu"``, ``"rnn_forward"``, ``{"REAL": "float", …}``, ``"sm_90"``.
    steps
        How many time steps a round of the loop makes, or an opcode and how often a time step has it.
    turns
        Of an inner loop whose length is no constant.

    Raises
    ------
    ValueError
        A round has no multiple of that many of the opcode.
    """
    loop = busiest(loops(kernel_code(file, kernel, defines, architecture), turns))
    return Report(loop, steps_of(loop, steps), int(architecture.removeprefix("sm_")))


def steps_of(loop: Loop, steps: Steps) -> int:
    """Return how many time steps a round makes, see `report`."""
    if isinstance(steps, int):
        return steps
    opcode, each = steps
    found = sum(one.opcode.startswith(opcode) for one in loop.round)
    if found == 0 or found % each:
        raise ValueError(f"a round has {found} {opcode}, which is no multiple of {each} a step")
    return found // each
