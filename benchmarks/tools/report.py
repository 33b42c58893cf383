"""What a benchmark leaves behind, as text: a JSON file, and tables for documents and terminals.

A result is a plain dict that JSON can hold::

    {"benchmark": "recurrent", "title": …, "leaves_out": …, "quick": false,
     "complete": true, "environment": {…}, "settings": {…}, "rows": [{…}, …], "notes": ["…"]}

A row is a flat dict; a duration is the dict of `Timing.to_dict` (seconds), a ratio the dict of `timing.ratio`. A row
that could not be measured has an ``error``. ``complete`` is false while rows are measured, so in what a run leaves that
was killed; files of before that have none are complete.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sparsebp.core.errors import FileFormatError
from sparsebp.core.files import parse_json, prepare_folder, read_file, write_atomically

DEFAULT_FOLDER = Path("runs/bench")
_KEYS = {"benchmark": str, "title": str, "leaves_out": str, "quick": bool, "environment": dict, "settings": dict,
         "rows": list, "notes": list}  # fmt: skip


def outcome(missed: Sequence[str]) -> str:
    """Say whether a row reaches what it is to reach, given what it misses."""
    return f"missed: {', '.join(missed)}" if missed else "met"


def measured(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of a result but those that could not be measured."""
    return [row for row in result["rows"] if "error" not in row]


def where(result: Mapping[str, Any]) -> str:
    """Return one line that says on what and when a result was measured."""
    env = result["environment"]
    gpu = f"{env['gpu']['name']}, " if "gpu" in env and result["benchmark"].startswith("gpu-") else ""
    packages = ", ".join(f"{name} {version}" for name, version in env["packages"].items() if name in _NAMED)
    return (
        f"{gpu}{env['cpu']}, {env['cores']} cores, Python {env['python']}, {packages}, "
        f"commit {env['commit']}, {env['date'][:10]}"
    )


_NAMED = ("numpy", "numba", "torch", "jax", "onnxruntime", "scipy", "cupy-cuda12x", "cupy-cuda13x")


def save(result: Mapping[str, Any], folder: Path | None, stem: str | None = None) -> Path:
    """Write the result as ``<folder>/<stem>.json`` in one atomic step and return the path.

    Raises
    ------
    OutputError
        The folder cannot be written.
    """
    path = prepare_folder(DEFAULT_FOLDER if folder is None else folder) / f"{stem or result['benchmark']}.json"
    write_atomically(path, (json.dumps(result, indent=1, ensure_ascii=False) + "\n").encode())
    return path


def load(path: Path) -> dict[str, Any]:
    """Read a result that `save` wrote.

    Raises
    ------
    FileFormatError
        The file is no benchmark result.
    """
    problem, remedy = f"{path} cannot be read as a benchmark result", "Run the benchmark again"
    content = read_file(path, problem, expected="a JSON file written by python -m benchmarks", remedy=remedy)
    try:
        result = parse_json(content)
    except ValueError as error:
        raise FileFormatError(problem, expected="JSON", got=str(error), remedy=remedy) from error
    missing = sorted(_KEYS.keys() - result.keys()) if isinstance(result, dict) else list(_KEYS)
    wrong = missing or [key for key, kind in _KEYS.items() if not isinstance(result[key], kind)]
    if wrong:
        raise FileFormatError(f"{path} is no benchmark result", expected=f"a JSON object with {', '.join(_KEYS)}",
                              got=f"missing or of another type: {', '.join(wrong)}", remedy=remedy)  # fmt: skip
    return result
