"""What a reader of a run's results sees first: what passed, what failed, what was missing, and the worst numbers.

``python3 tests/gpu_runs/digest.py ARCHIVE`` prints it for an archive or a folder that came back.
"""

from __future__ import annotations

import json
import sys
import tarfile
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

if __name__ == "__main__":
    TESTS = Path(__file__).resolve().parents[1]
    sys.path[0:1] = [str(TESTS), str(TESTS.parent)]

from gpu_runs import carried
from gpu_runs.runs import rows_of

WORST = 10
"""Numbers that are shown."""
NAMES = ("what", "network", "model", "cell", "kind", "product", "dtype", "length", "batch", "hidden", "features")
"""Fields that name a row."""


def of(out: Path, benchmarks: Path | None = None) -> list[str]:
    """Return the lines for the results in a folder, benchmarks' in another one if they are not there."""
    said = []
    for path in sorted(out.glob("*-tests.jsonl")):
        rows = rows_of(path)
        counts = Counter(row["outcome"] for row in rows)
        said.append(f"{path.stem}: {', '.join(f'{count} {word}' for word, count in sorted(counts.items()))}")
    launched = rows_of(out / "check-launches.jsonl")
    if launched:
        said.append(f"launches: {len(launched)}, {sum('error' in row for row in launched)} wrong")
    lacking = carried.missing()
    said += [f"machine code lacks {len(lacking)} sets of defines: {'; '.join(lacking[:3])}"] if lacking else []
    numbers = sorted(_ratios(benchmarks or out), key=lambda number: number[0])
    said += [f"the {min(WORST, len(numbers))} worst of {len(numbers)} ratios to peers:"] if numbers else []
    return said + [f"  {ratio:6.3f} {what}" for ratio, what in numbers[:WORST]]


def _ratios(folder: Path) -> Iterator[tuple[float, str]]:
    """Yield how many times as fast as a peer we were, and at what."""
    for path in sorted(folder.glob("gpu-*.json")):
        if ".partial" in path.suffixes:
            continue
        result = json.loads(path.read_text(encoding="utf-8"))
        for row in result.get("rows", ()):
            named = " ".join(str(row[name]) for name in NAMES if row.get(name) not in (None, ""))
            for key, value in row.items():
                if key.endswith("ratio") and "copy" not in key and isinstance(value, dict):  # a copy is a floor
                    yield value["median"], f"{result['benchmark']} {named}: {key}"


def main(given: Path) -> None:
    """Print the lines for an archive or a folder, after the summaries that it has."""
    with tempfile.TemporaryDirectory() as folder:
        if not given.is_dir():
            with tarfile.open(given) as packed:
                packed.extractall(folder, filter="data")
            given = Path(folder)
        for path in sorted(given.glob("summary-*.txt")):
            print(path.read_text(encoding="utf-8"))
        if not [*given.glob("summary-*.txt")]:
            print("\n".join(of(given)))


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except (IndexError, OSError, EOFError, zlib.error, tarfile.TarError, ValueError) as error:
        sys.exit(f"Expected an archive of a run, or the folder of its results. Got {sys.argv[1:]}: {error}")
