"""Runs commands in the process of the tests, and stands in for the functions that they call."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("typer", exc_type=ImportError)
pytest.importorskip("rich", exc_type=ImportError)

from typer.testing import CliRunner


def run(app: Any, *arguments: Any, **options: Any) -> Any:
    """Run a command of `app`; return its exit code, output and errors."""
    return CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False, **options)


def one_message(result: Any, code: int = 1) -> str:
    """Return the error message of a command that ended with it, and printed nothing else."""
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("Error: ")
    assert "Traceback" not in result.stderr
    assert result.stderr.count("\n") == 1
    return result.stderr


class Calls(list[Any]):
    """Stands for a function: records its arguments, and returns one thing."""

    def __init__(self, result: Any = None) -> None:
        super().__init__()
        self.result = result

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self.append((arguments, options))
        return self.result
