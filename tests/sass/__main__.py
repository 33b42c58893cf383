"""Prints the figures of one kernel: ``python -m sass scan.cu scan_combine REAL=float HIDDEN=20 --steps LDS.128:5``."""

from __future__ import annotations

import argparse

from sass import machine
from sass.loops import Loop, busiest, loops
from sass.report import Report, Steps, kernel_code, steps_of


def steps(text: str) -> Steps:
    """Take ``8`` or ``LDS.128:5``."""
    opcode, _, each = text.partition(":")
    return (opcode, int(each)) if each else int(text)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m sass", description="Cycles a step of a kernel's loop, from its machine code."
    )
    parser.add_argument("file", help="a source of cuda/, such as rnn.cu")
    parser.add_argument("kernel", help="its __global__ function")
    parser.add_argument("defines", nargs="*", metavar="NAME=VALUE")
    parser.add_argument("--arch", default="sm_90")
    parser.add_argument(
        "--steps", type=steps, default=1, help="time steps of a round, or an opcode and how often one has it"
    )
    parser.add_argument("--loop", type=int, help="which of the loops listed (default: the one with most multiply-adds)")
    parser.add_argument("--trips", type=int, default=1, help="rounds of inner loops whose length is no constant")
    parser.add_argument("--taken", nargs="*", default=[], metavar="ADDRESS", help="forward branches on data to take")
    parser.add_argument("--option", action="append", default=[], help="a further option of NVRTC")
    parser.add_argument("--trace", action="store_true", help="every instruction of a round, with what it waits for")
    args = parser.parse_args()
    defines = dict(define.split("=", 1) for define in args.defines)
    code = kernel_code(args.file, args.kernel, defines, args.arch, *args.option)
    found = loops(code, args.trips, {int(address, 16) for address in args.taken})
    if not found:
        parser.error(f"{args.kernel} has no loop")
    chosen = found[args.loop] if args.loop is not None else busiest(found)
    for number, loop in enumerate(found):
        mark = "*" if loop is chosen else " "
        print(f"{mark} loop {number}: {loop.head:#x} to {loop.back:#x}, {len(loop.round)} instructions a round")
    show(Report(chosen, steps_of(chosen, args.steps), int(args.arch.removeprefix("sm_"))), chosen, args.trace)


def show(report: Report, loop: Loop, trace: bool) -> None:
    """Print the figures of one loop, a step each."""
    for note in loop.notes:
        print(f"    {note}")
    print("a round:" if report.steps == 1 else f"a round makes {report.steps} time steps; each:")
    for memory, load in machine.LOAD_LATENCY.items():
        steady = report.steady(memory)
        lost = ", ".join(
            f"{cause or 'its own order'} {cycles / report.steps:.1f}" for cause, cycles in steady.lost.most_common(6)
        )
        print(f"  {steady.cycles / report.steps:7.1f} cycles with loads of {load} ({memory}); of them lost: {lost}")
    cycles, length = report.chain
    print(f"  longest chain: {cycles:.1f} cycles, {length:.1f} instructions of {report.issued:.1f}")
    kinds = ("FFMA", "FADD", "FMUL", "DFMA", "MUFU", "LDS", "STS", "LDG", "STG", "SHFL", "IMAD", "IADD", "LDC", "BRA")
    print("  " + ", ".join(f"{kind} {report.count(kind):g}" for kind in kinds if report.count(kind)))
    print("  units taken: " + ", ".join(f"{name} {taken:.1f}" for name, taken in report.busy.most_common()))
    print(f"  shared memory: {report.wavefronts:g} passes, bank conflicts not counted")
    if trace:
        for cycle, one, cause in report.steady("L2").trace:
            board = "".join(str(b) if one.wait >> b & 1 else "-" for b in range(6))
            bits = f"waits {board} sets {one.write},{one.read} stall {one.stall:2d}"
            print(f"{cycle:6d}  {bits}  {one.address:#06x} {one.text}  {cause}")


if __name__ == "__main__":
    main()
