"""The options of a training run in a file, TOML or JSON by its suffix."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sparsebp.core.arguments import shown
from sparsebp.core.errors import FileFormatError, OptionError
from sparsebp.core.files import check_path, parse_json, read_file, write_atomically

_FORM = 'a flat table such as model = "lenet5"'
_REMEDY = "Write one with sparsebp tune"


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
    path = check_path("path", path)
    parse = _parser(path)
    content = read_file(path, f"{path} has no options of a run", expected=_FORM, remedy=_REMEDY)
    try:
        options = parse(content.decode())
    except ValueError as error:  # TOML, JSON or UTF-8
        raise _refused(path, str(error)) from error
    if not isinstance(options, dict):
        raise _refused(path, type(options).__name__)
    for name, value in options.items():
        if not isinstance(value, str | int | float | bool):
            raise _refused(path, f"{name[:40]} = {shown(value)}")
    return options


def write_config(options: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write options, without those that are None.

    Raises
    ------
    OptionError
        The suffix is unknown, or a value is no text, finite number or truth value.
    OutputError
        The file cannot be written.
    """
    path = check_path("path", path)
    parse = _parser(path)
    kept = {name: value for name, value in options.items() if value is not None}
    try:
        if parse is parse_json:
            text = json.dumps(kept, indent=1) + "\n"
        else:  # JSON's texts, numbers and truth values are TOML's, but for DEL
            lines = (f"{name} = {json.dumps(value, ensure_ascii=False)}\n" for name, value in kept.items())
            text = "".join(lines).replace("\x7f", "\\u007f")
        content = text.encode()
        if parse(text) != kept or not all(isinstance(value, str | int | float | bool) for value in kept.values()):
            raise ValueError("a file that would not be read as the same options")
    except (TypeError, ValueError, RecursionError) as error:
        raise OptionError("These options cannot be kept in a file", expected="texts, finite numbers and truth values",
                          got=str(error), remedy="Leave the others out") from error  # fmt: skip
    write_atomically(path, content)


def _parser(path: Path) -> Callable[[str], Any]:
    parsers: dict[str, Callable[[str], Any]] = {".toml": _parse_toml, ".json": parse_json}
    if path.suffix not in parsers:
        raise OptionError("The format of the file is unknown", expected=".toml or .json", got=path.suffix or "none",
                          remedy="Give the file one of these suffixes")  # fmt: skip
    return parsers[path.suffix]


def _parse_toml(text: str) -> Any:
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _refused(path: Path, got: str) -> FileFormatError:
    return FileFormatError(f"{path} has no options of a run", expected=_FORM, got=got, remedy=_REMEDY)
