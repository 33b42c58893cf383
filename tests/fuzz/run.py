"""Run many cases: ``python tests/fuzz/run.py --cases 100000 --seed 0 --workers 2``; one: ``… --seed 0 --number 17``."""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from fuzz.case import BAD, GOOD, Outcome, target_of  # noqa: E402
from fuzz.harness import load, run_cases, summary  # noqa: E402

TARGETS = "fuzz.targets:TARGETS"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--limit", type=float, default=120.0, help="seconds that a case may take")
    parser.add_argument("--target", help="of this target alone")
    parser.add_argument("--number", type=int, help="replay one case here, without a child process")
    options = parser.parse_args()
    table = load(TARGETS)
    if options.number is not None:
        return replay(table, options.seed, options.number)
    numbers: range = range(options.first, options.first + options.cases)
    if options.target:
        numbers = range(list(table).index(options.target), options.cases * len(table), len(table))
    begin = last = time.monotonic()
    done = bad = 0

    def each(outcome: Outcome) -> None:
        nonlocal last, done, bad
        done += 1
        if outcome.kind in BAD:
            bad += 1
            print(
                f"\n{outcome.kind.upper()} in {outcome.target}: python tests/fuzz/run.py --seed {options.seed} "
                f"--number {outcome.number}\n{outcome.detail}",
                flush=True,
            )
        if time.monotonic() - last > 10:
            last = time.monotonic()
            print(f"{done} of {len(numbers)} cases, {bad} bad, {(last - begin) * 1e3 / done:.2f} ms a case", flush=True)

    counts = summary(run_cases(TARGETS, options.seed, numbers, options.workers, options.limit), each)
    kinds = (*GOOD, *BAD)
    print(f"\n{'':14}" + "".join(f"{kind:>9}" for kind in kinds))
    for name in (*table, "all"):
        row = [sum(n for (target, k), n in counts.items() if k == kind and name in (target, "all")) for kind in kinds]
        if sum(row):
            print(f"{name:14}" + "".join(f"{n:9}" for n in row))
    print(f"{done} cases of seed {options.seed} in {time.monotonic() - begin:.0f} s")
    return 1 if bad else 0


def replay(table: dict, seed: int, number: int) -> int:
    """Run one case here, with the whole traceback of what it raises."""
    import numpy as np

    name = target_of(table, number)
    print(f"case {number} of seed {seed}: {name}")
    try:
        table[name](np.random.default_rng([seed, number]))
    except Exception:
        traceback.print_exc()
        return 1
    print("no error")
    return 0


if __name__ == "__main__":
    sys.exit(main())
