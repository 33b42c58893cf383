"""The options of a training run in a file, TOML or JSON by its suffix."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparsebp.errors import FileFormatError, OptionError
from sparsebp.files import write_atomically


def read_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the options in a file that `write_config` wrote, or in one of that form.

    One flat table: names as `config_for` takes them, ``task`` and ``threads`` among them, with texts, numbers or truth
    values. What they may be is checked by who uses them.

    Raises
    ------
    FileFormatError
        There is no such file, or it holds something else.
    OptionError
        The suffix is unknown.
    """
    path = Path(path)
    toml = _is_toml(path)
    try:
        text = path.read_text(encoding="utf-8")
        content = tomllib.loads(text) if toml else json.loads(text)
    except OSError as error:
        raise _refused(path, error.strerror or str(error)) from error
    except ValueError as error:  # TOML, JSON or UTF-8
        raise _refused(path, str(error)) from error
    if not isinstance(content, dict):
        raise _refused(path, type(content).__name__)
    for name, value in content.items():
        if not isinstance(value, str | int | float | bool):
            raise _refused(path, f"{name} = {value!r}"[:80])
    return content


def write_config(options: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write options, without those that are None.

    Raises
    ------
    OptionError
        The suffix is unknown.
    OutputError
        The file cannot be written.
    """
    path = Path(path)
    kept = {name: value for name, value in options.items() if value is not None}
    if _is_toml(path):  # JSON's texts, numbers and truth values are TOML's
        content = "".join(f"{name} = {json.dumps(value)}\n" for name, value in kept.items())
    else:
        content = json.dumps(kept, indent=1) + "\n"
    write_atomically(path, content.encode())


def _is_toml(path: Path) -> bool:
    if path.suffix not in (".toml", ".json"):
        raise OptionError("The format of the file is unknown", expected=".toml or .json", got=path.suffix or "none",
                          remedy="Give the file one of these suffixes")  # fmt: skip
    return path.suffix == ".toml"


def _refused(path: Path, got: str) -> FileFormatError:
    return FileFormatError(f"{path} has no options of a run", expected='a flat table such as model = "lenet5"', got=got,
                           remedy="Write one with sparsebp tune")  # fmt: skip
