"""Options that the commands of ``sparsebp schedule`` share, and what they make of them."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from sparsebp.cli.commands.common import choice_option
from sparsebp.schedule import Costs, Schedule, read_costs, read_csv
from sparsebp.schedule.builders import BUILDERS
from sparsebp.schedule.files.action_csv import from_csv
from sparsebp.schedule.files.cost_file import Durations, parse_durations

MOST = 100_000
"""Bound for numbers of stages, micro-batches and so on: beyond it a schedule takes more than memory and patience."""


def _known(names: str | list[str] | None) -> str | list[str] | None:
    for name in [names] if isinstance(names, str) else names or []:
        if name not in BUILDERS:
            raise typer.BadParameter(f"{name!r} is none of {', '.join(BUILDERS)}.")
    return names


FileArgument = Annotated[
    str, typer.Argument(help="A CSV file: ours, or one that PyTorch dumped; - reads standard input.")
]
NameArgument = Annotated[str, typer.Argument(callback=_known, help=f"One of {', '.join(BUILDERS)}.")]
NamesArgument = Annotated[
    list[str] | None, typer.Argument(callback=_known, help="The builders; all if left out.", show_default=False)
]
FirstOption = Annotated[
    Literal["F", "I", "U"] | None,
    typer.Option(help="What the step begins with: forwards, backwards or updates.", show_default="what the file says"),
]
WeightsOption = Annotated[
    Literal["current", "stashed", "latest"] | None,
    choice_option(
        "The weights that a backward reads", ("current", "stashed", "latest"), show_default="what the file says"
    ),
]
WorkersOption = Annotated[int | None, typer.Option(min=1, max=MOST, help="Devices of the pipeline.", show_default="4")]
StagesOption = Annotated[int, typer.Option(min=1, max=MOST, help="Stages (layers, or groups of them).")]
MicrobatchesOption = Annotated[
    int | None, typer.Option(min=1, max=MOST, help="Micro-batches.", show_default="8 in pipelines, else 1")
]
StepsOption = Annotated[int, typer.Option(min=1, max=MOST, help="Repetitions of the step, one after the other.")]


def load(file: str, first: Any = None, weights: Any = None) -> Schedule:
    """Read a schedule from a file, or from standard input."""
    if file == "-":
        return from_csv(sys.stdin.buffer.read(), first=first, weights=weights, source="standard input")
    return read_csv(file, first=first, weights=weights)


def costs_from(
    cost: Annotated[
        list[str] | None,
        typer.Option("--cost", metavar="ACTION=TIME", help="A duration: F=1, 2W=0.5 of stage 2, 2W0=0.5; repeatable."),
    ] = None,
    costs: Annotated[Path | None, typer.Option(help="A JSON file of durations, bytes and the link.")] = None,
    latency: Annotated[
        float | None, typer.Option(min=0, help="Of a transfer between workers.", show_default="0")
    ] = None,
    bandwidth: Annotated[
        float | None, typer.Option(help="Bytes a unit of time between two workers.", show_default="unlimited")
    ] = None,
    slowdown: Annotated[
        float | None, typer.Option(min=1, help="Of each of two busy streams of a worker.", show_default="1")
    ] = None,
) -> Costs:
    """Return the costs of a file, with what the options say instead of it."""
    found = Costs(Durations({})) if costs is None else read_costs(costs)
    entries = found.durations.entries if isinstance(found.durations, Durations) else {}
    link = replace(
        found.link,
        latency=found.link.latency if latency is None else latency,
        bandwidth=found.link.bandwidth if bandwidth is None else bandwidth,
    )
    return replace(
        found,
        durations=Durations({**entries, **parse_durations(cost or [])}),
        link=link,
        slowdown=found.slowdown if slowdown is None else slowdown,
    )


def stages_of(text: str | None) -> tuple[int, ...] | None:
    """Return the stages that an option lists: ``0,2``."""
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no list of stages such as 0,2.") from None
