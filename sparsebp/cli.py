"""The command line: makes sure that typer and rich are there and hands over to `sparsebp.commands`."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line on `arguments` (``sys.argv`` if None) and exit.

    Exit codes: 0 done; 1 an error of sparsebp's own, printed as one message; 2 wrong usage; 130 interrupted.
    """
    missing = [name for name in ("typer", "rich") if not _installed(name)]
    if missing:
        print(
            f"Error: The command line needs {' and '.join(missing)}, not installed here. "
            "Install the extra `cli`: pip install 'sparsebp[cli]'.",
            file=sys.stderr,
        )
        raise SystemExit(1)
    from sparsebp.commands import app

    app(args=None if arguments is None else list(arguments), prog_name="sparsebp")


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:  # a module in sys.modules without a spec
        return False
