"""Costs from text: durations by kind, stage or action, and a JSON file of all costs."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from sparsebp.core.arguments import shown
from sparsebp.core.errors import FileFormatError, OptionError
from sparsebp.core.files import check_path, parse_json, read_file, write_atomically
from sparsebp.schedule.actions import Action, parts_of
from sparsebp.schedule.costs import DURATIONS, Costs, Link, StageBytes, check_cost
from sparsebp.schedule.network import Network

_KEY = re.compile(r"[0-9]{0,9}[FIWBSU]|[0-9]{1,9}[FIWBSU][0-9]{1,9}")
_FORM = 'a JSON object such as {"durations": {"F": 1, "2W": 0.5}, "latency": 0.1}'
_REMEDY = "See sparsebp.schedule.read_costs"


@dataclass(frozen=True)
class _Entries:
    entries: Mapping[str, float]

    def __post_init__(self) -> None:
        what = type(self).__name__.lower()[:-1]
        for key, value in self.entries.items():
            if _KEY.fullmatch(key) is None:
                raise OptionError(f"A {what} is of no action", expected="F, I, W, B, S or U, 2F for stage 2, or 2F0",
                                  got=shown(key), remedy="Name a kind, a stage and kind, or an action")  # fmt: skip
            check_cost(f"The {what} of {key}", value)

    def most_specific(self, action: Action) -> float | None:
        """Return the entry that counts for an action, None if there is none."""
        keys = (str(action), f"{action.stage}{action.kind}", action.kind)
        return next((self.entries[key] for key in keys if key in self.entries), None)


@dataclass(frozen=True)
class Durations(_Entries):
    """Durations by kind (``"F"``), by stage (``"2F"``), by action (``"2F0"``); the most specific entry counts.

    Takes an action and returns its duration, as `Costs` wants it. A B without an entry takes the sum of its I and W;
    everything else without one takes what `Costs` takes by default.

    Parameters
    ----------
    entries
        The durations.

    Raises
    ------
    OptionError
        A key is none of these, or a duration is negative or not finite.
    """

    def __call__(self, action: Action) -> float:
        """Return the duration of an action."""
        found = self.most_specific(action)
        if found is None and action.kind == "B":
            return sum(map(self, parts_of(action)))
        return DURATIONS[action.kind] if found is None else found


@dataclass(frozen=True)
class Slowdowns(_Entries):
    """Slowdowns by kind, by stage, by action, as `Durations`; what has no entry is not slowed down.

    Takes an action and returns its slowdown, as `Costs` wants it. (`Costs` refuses one below 1 when it is used.)
    """

    def __call__(self, action: Action) -> float:
        """Return the slowdown of an action."""
        found = self.most_specific(action)
        return 1.0 if found is None else found


def parse_durations(texts: Iterator[str] | list[str]) -> dict[str, float]:
    """Return the durations that texts such as ``F=1`` and ``2W=0.5`` say.

    Raises
    ------
    OptionError
        One of them is no such text.
    """
    found = {}
    for text in texts:
        key, equals, value = text.partition("=")
        try:
            found[key.strip()] = float(value)
        except ValueError:
            equals = ""
        if not equals:
            raise OptionError("This is no duration", expected="F=1, 2W=0.5 or 2W0=0.5", got=shown(text),
                              remedy="Write what it is of, '=', and a number")  # fmt: skip
    return found


def read_costs(path: str | os.PathLike[str]) -> Costs:
    """Read costs from a JSON file.

    The file is an object, all of its keys optional: ``"durations"`` (see `Durations`), ``"stages"`` (the fields of
    `StageBytes`, once for all stages or in a list of one for each), ``"latency"``, ``"bandwidth"``, ``"slowdown"`` (a
    number, or an object by kind, stage or action, see `Slowdowns`); ``"network"`` (the fields of `Network`) in place of
    latency and bandwidth::

        {"durations": {"F": 1, "I": 1, "W": 1, "2W": 1.5}, "stages": {"saved": 4096}, "latency": 0.1}

    Raises
    ------
    FileFormatError
        There is no such file, or it holds something else.
    OptionError
        A cost is out of its range.
    """
    path = check_path("path", path)
    text = read_file(path, f"{path} has no costs", expected=_FORM, remedy=_REMEDY)
    try:
        content = parse_json(text)
    except ValueError as error:  # JSON or UTF-8
        raise _refused(path, str(error)) from error
    return costs_of(content, path)


def costs_of(content: Any, source: object = "costs") -> Costs:
    """Return the costs of a parsed JSON file; see `read_costs`. `source` is what messages call it."""
    known = ("durations", "stages", "latency", "bandwidth", "network", "slowdown")
    _check_keys(content, known, source)
    durations = content.get("durations", {})
    if not isinstance(durations, dict):
        raise _refused(source, f"durations {shown(durations)}")
    slowdown = content.get("slowdown", 1.0)
    stages = content.get("stages", {})
    pair = {key: check_cost(key, content[key]) for key in ("latency", "bandwidth") if key in content}
    link = Link(**pair)
    if "network" in content:
        _check_keys(content["network"], [f.name for f in fields(Network)], source)
        if pair:
            raise _refused(source, f"a network beside {' and '.join(pair)}")
        link = Network(**content["network"])
    each = [_stage_bytes(entry, source) for entry in (stages if isinstance(stages, list) else [stages])]
    return Costs(
        Durations(durations),
        tuple(each) if isinstance(stages, list) else each[0],
        link,
        Slowdowns(slowdown) if isinstance(slowdown, dict) else check_cost("slowdown", slowdown),
    )


def write_costs(costs: Costs, actions: Iterable[Action], path: str | os.PathLike[str]) -> None:
    """Write costs to a JSON file that `read_costs` reads: first under a temporary name, then renamed.

    Parameters
    ----------
    costs
        Any; what their durations, and slowdowns that are a function, say of `actions` is written, action by action. S
        and U are the stage's, whatever the micro-batch.
    actions
        Those of the schedules that the costs are for, a `Schedule` say.
    path
        The file.

    Raises
    ------
    OptionError
        There is no duration of an action.
    OutputError
        The file cannot be written.
    """
    actions = tuple(actions)
    content: dict[str, Any] = {
        "durations": {str(action): costs.duration(action) for action in actions},
        "stages": [asdict(entry) for entry in costs.stages]
        if isinstance(costs.stages, tuple)
        else asdict(costs.stages),
        **_link_entries(costs.link),
        "slowdown": {str(action): costs.slowdown_of(action) for action in actions}
        if callable(costs.slowdown)
        else costs.slowdown,
    }
    write_atomically(path, json.dumps(content, indent=1).encode())


def _link_entries(link: Link) -> dict[str, Any]:
    """Return what a file says of a link; JSON has no infinity, which is what a file without a bandwidth means."""
    entries = {key: value for key, value in asdict(link).items() if value is not None and value != math.inf}
    return {"network": entries} if isinstance(link, Network) else entries


def _stage_bytes(entry: Any, source: object) -> StageBytes:
    _check_keys(entry, [f.name for f in fields(StageBytes)], source)
    return StageBytes(**{key: check_cost(f"The bytes of {key}", value) for key, value in entry.items()})


def _check_keys(entry: Any, known: tuple[str, ...] | list[str], source: object) -> None:
    if not isinstance(entry, dict):
        raise _refused(source, f"{type(entry).__name__} {shown(entry)}")
    unknown = sorted(entry.keys() - set(known))
    if unknown:
        raise FileFormatError(f"{source} has unknown keys", expected=", ".join(known), got=", ".join(unknown),
                              remedy="Remove them")  # fmt: skip


def _refused(source: object, got: str) -> FileFormatError:
    return FileFormatError(f"{source} has no costs", expected=_FORM, got=got, remedy=_REMEDY)
