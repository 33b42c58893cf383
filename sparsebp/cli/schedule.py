"""``sparsebp schedule``: builds, validates, simulates, draws, lowers and compares schedules of a training step."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.text import Text

from sparsebp.cli.common import (
    Group,
    JsonOption,
    choice_option,
    console,
    out_option,
    print_line,
    print_table,
    taking,
    write_json,
)
from sparsebp.core import tables
from sparsebp.core.errors import OptionError, SparseBPError
from sparsebp.core.files import write_atomically, write_figure
from sparsebp.schedule import (
    Costs,
    Schedule,
    for_torch,
    gantt,
    lower,
    read_costs,
    read_csv,
    simulate,
    text_chart,
    to_csv,
    write_csv,
    write_programs,
    write_trace,
)
from sparsebp.schedule.builders import BUILDERS
from sparsebp.schedule.builders import build as build_schedule
from sparsebp.schedule.files import Durations, from_csv, parse_durations
from sparsebp.schedule.plot import COLOURS, most_stale, summary

# Options that the commands of ``sparsebp schedule`` share, and what they make of them.

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


# What ``sparsebp schedule`` prints: tables, and a chart in the colours of the pictures.


def _number(value: float) -> str:
    return f"{value:.4g}"


def _share(value: float) -> str:
    return f"{value:.1%}"


def _runs(numbers: Iterable[int]) -> str:
    """Write ascending numbers, those without a gap as ``4–7``."""
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return " ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)


COMPARED = (
    tables.Column("builder", "builder", number=False),
    tables.Column("workers", "workers"),
    tables.Column("micro-batches", "microbatches"),
    tables.Column("makespan", "makespan", _number),
    tables.Column("per micro-batch", "per_microbatch", _number),
    tables.Column("faster", "speedup", tables.times),
    tables.Column("bubble", "bubble", _share),
    tables.Column("peak memory", "peak_memory", _number),
    tables.Column("staleness", "staleness"),
)
_WORKERS = (
    tables.Column("worker", "worker"),
    tables.Column("stages", "stages", _runs, number=False),
    tables.Column("busy", "busy", lambda busy: ", ".join(f"{s} {v:.1%}" for s, v in busy.items()), number=False),
    tables.Column("peak memory", "peak_memory", _number),
)
_STAGES = (
    tables.Column("stage", "stage"),
    tables.Column("staleness F", "staleness", lambda entry: str(entry.get("forward", "–"))),
    tables.Column("staleness B", "staleness", lambda entry: str(entry.get("backward", "–"))),
    tables.Column("version difference F", "version_difference", lambda entry: str(entry.get("forward", "–"))),
    tables.Column("version difference B", "version_difference", lambda entry: str(entry.get("backward", "–"))),
)


def compared(found: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a summary that a row of the comparison shows."""
    kept = ("name", "workers", "stages", "microbatches", "steps", "makespan", "bubble", "peak_memory")
    each = found["makespan"] / (found["microbatches"] * found["steps"])
    return {key: found[key] for key in kept} | {"per_microbatch": each, "staleness": most_stale(found)}


def print_summary(found: dict[str, Any]) -> None:
    """Print a summary: numbers, and a table of the workers; of the stages too if their weights may be stale."""
    out = console()
    path = found["critical_path"]
    shown = " ".join(path if len(path) <= 12 else [*path[:6], "…", *path[-6:]])
    lines = {
        "schedule": found["name"],
        "makespan": _number(found["makespan"]),
        "bubble": _share(found["bubble"]),
        "peak memory": _number(found["peak_memory"]),
        "critical path": f"{len(path)} cells: {shown}",
    }
    for name, text in lines.items():
        print_line(name, text, 14)
    out.print()
    print_table(_WORKERS, found["per_worker"])
    if found["per_stage"]:
        out.print()
        print_table(_STAGES, found["per_stage"])


def coloured(chart: str) -> Text:
    """Return a text chart whose boxes have the colours of the pictures, where the terminal has colours."""
    lines = chart.splitlines()
    texts = [Text(line) for line in lines]
    for line, text in zip(lines, texts, strict=True):
        for kind, colour in COLOURS.items() if line.startswith("worker") else ():
            text.highlight_regex(f"{kind}[0-9/]*─*", f"black on {colour}")
    return Text("\n").join(texts)


FusionOption = Annotated[
    Literal["none", "forward", "backward"] | None,
    choice_option(
        "Adds updates at the end, before the next forward, after the gradient",
        ("none", "forward", "backward"),
        show_default="none",
    ),
]
ChunksOption = Annotated[int | None, typer.Option(min=1, max=MOST, help="Groups of stages a worker (interleaved).")]
GroupOption = Annotated[
    int | None, typer.Option("--group", min=1, max=MOST, help="Neighbouring stages dealt out together (modulo).")
]
KOption = Annotated[
    int | None, typer.Option("--k", min=0, max=MOST, help="First stages whose W come last (out-of-order ones).")
]
InputGradientOption = Annotated[
    bool | None, typer.Option("--input-gradient/--no-input-gradient", help="Whether stage 0 has an I.")
]
UnweightedOption = Annotated[str | None, typer.Option(help="Stages without weights, as in 1,3.")]
MemoryRatioOption = Annotated[
    float | None, typer.Option(help="Bound for the peak of memory, in conventional ones (ooo).", show_default="1.1")
]


@taking("prices", costs_from)
def build(
    name: NameArgument,
    *,
    stages: StagesOption = 8,
    workers: WorkersOption = None,
    microbatches: MicrobatchesOption = None,
    fusion: FusionOption = None,
    chunks: ChunksOption = None,
    group: GroupOption = None,
    k: KOption = None,
    streams: Annotated[int | None, typer.Option(min=1, max=2, help="Streams of the worker (conventional).")] = None,
    regions: Annotated[int | None, typer.Option(min=1, max=MOST, help="Regions of the main stream (ooo).")] = None,
    memory_ratio: MemoryRatioOption = None,
    memory_limit: Annotated[float | None, typer.Option(help="Bound for the memory (reverse-first-k).")] = None,
    priority: Annotated[
        Literal["first-ready", "first-stage"] | None,
        choice_option(
            "Which gradient is synchronised next in reverse-first-k",
            ("first-ready", "first-stage"),
            show_default="first-stage",
        ),
    ] = None,
    unweighted: UnweightedOption = None,
    recomputed: Annotated[str | None, typer.Option(help="Stages that recompute their activations, as in 0,1.")] = None,
    input_gradient: InputGradientOption = None,
    prices: Costs,
    torch: Annotated[bool, typer.Option("--torch", help="Only what PyTorch's loader reads: no U, no S.")] = False,
    out: Annotated[Path | None, out_option("The file to write.", show_default="standard output")] = None,
) -> None:
    """Build the schedule of a technique and write it as CSV.

    \b
    Examples:
      sparsebp schedule build gpipe --stages 4 --microbatches 8 --out gpipe.csv
      sparsebp schedule build modulo --stages 16 | sparsebp schedule plot -
      sparsebp schedule build ooo --stages 12 --cost W=1.5 --memory-ratio 1.2
    """
    schedule = build_schedule(
        name, costs=prices, fusion=fusion, stages=stages,
        workers=workers, microbatches=microbatches, chunks=chunks, group=group, k=k, streams=streams, regions=regions,
        memory_ratio=memory_ratio, memory_limit=memory_limit, priority=priority, unweighted=stages_of(unweighted),
        recomputed=stages_of(recomputed), input_gradient=input_gradient,
    )  # fmt: skip
    if out is None:
        typer.echo(to_csv(schedule, torch=torch).replace("\r\n", "\n"), nl=False)
    else:
        write_csv(schedule, out, torch=torch)


def validate(
    file: FileArgument, first: FirstOption = None, weights: WeightsOption = None, json: JsonOption = False
) -> None:
    """Check that a schedule is complete, comes to an end and reads the right weights.

    \b
    Examples:
      sparsebp schedule validate gpipe.csv
      sparsebp schedule validate backward-first.csv --first I --json
    """
    schedule = load(file, first, weights)
    counts = {
        "workers": schedule.workers,
        "streams": len(schedule.lanes),
        "stages": schedule.graph.stages,
        "microbatches": schedule.graph.microbatches,
        "actions": sum(1 for _ in schedule),
    }
    if json:
        write_json({"event": "result", "name": schedule.name, **counts})
        return
    listed = ", ".join(f"{count} {name.replace('microb', 'micro-b')}" for name, count in counts.items())
    print_line("", f"{schedule.name or 'The schedule'} is valid: {listed}", 0)


@taking("prices", costs_from)
def simulate_file(
    file: FileArgument,
    *,
    prices: Costs,
    steps: StepsOption = 1,
    first: FirstOption = None,
    weights: WeightsOption = None,
    json: JsonOption = False,
) -> None:
    """Simulate a schedule: makespan, bubble, memory, staleness.

    F, I and W take one unit of time, B two, S and U none, unless options say otherwise.

    \b
    Examples:
      sparsebp schedule simulate gpipe.csv
      sparsebp schedule simulate gpipe.csv --cost B=1.8 --latency 0.1 --json
      sparsebp schedule simulate pipedream.csv --costs costs.json --steps 3
    """
    schedule = load(file, first, weights)
    found = summary(simulate(schedule, prices, steps=steps))
    if json:
        write_json({"event": "result", **found})
    else:
        print_summary(found)


@taking("prices", costs_from)
def plot(
    file: FileArgument,
    *,
    out: Annotated[
        Path | None,
        out_option("A picture (.png, .svg, .pdf), a Chrome trace (.json) or text (.txt).", show_default="text here"),
    ] = None,
    prices: Costs,
    steps: StepsOption = 1,
    first: FirstOption = None,
    weights: WeightsOption = None,
    memory: Annotated[bool, typer.Option("--memory/--no-memory", help="The memory of the workers below.")] = True,
    width: Annotated[
        int | None, typer.Option(min=20, max=MOST, help="Letters a line of text.", show_default="the terminal")
    ] = None,
    unit: Annotated[float, typer.Option(help="Microseconds in a unit of time, for the trace.")] = 1e6,
) -> None:
    """Draw a simulated schedule: one row a worker and stream.

    \b
    Examples:
      sparsebp schedule plot gpipe.csv
      sparsebp schedule plot gpipe.csv --out gpipe.png --latency 0.2
      sparsebp schedule plot gpipe.csv --out trace.json --unit 1000
    """
    schedule = load(file, first, weights)
    simulation = simulate(schedule, prices, steps=steps)
    if out is None:
        console().print(coloured(text_chart(simulation, width, memory=memory)))
    elif out.suffix == ".txt":
        write_atomically(out, (text_chart(simulation, width, memory=memory) + "\n").encode())
    elif out.suffix == ".json":
        write_trace(simulation, out, unit=unit)
    elif out.suffix in (".png", ".svg", ".pdf"):
        write_figure(gantt(simulation, memory=memory).figure, out, dpi=150, bbox_inches="tight")
    else:
        raise OptionError("Unknown kind of picture", expected=".png, .svg, .pdf, .json or .txt", got=repr(out.suffix))


def lower_file(
    file: FileArgument,
    *,
    one_stream: Annotated[
        bool, typer.Option("--one-stream", help="Sends and receives of a worker in one order, as NCCL's on a stream.")
    ] = False,
    torch: Annotated[
        bool, typer.Option("--torch", help="Only what PyTorch's loader reads, in one stream: no U; S is REDUCE_GRAD.")
    ] = False,
    first: FirstOption = None,
    weights: WeightsOption = None,
    out: Annotated[
        Path | None, out_option("The file to write: PyTorch's cells (.csv), or text (.txt).", show_default="text here")
    ] = None,
) -> None:
    """Place sends, receives and sums: what each worker does, one instruction a line.

    The programs are checked: they come to their end though nothing is buffered.

    \b
    Examples:
      sparsebp schedule lower gpipe.csv
      sparsebp schedule lower gpipe.csv --one-stream --out programs.csv
      sparsebp schedule lower zb-h1.csv --torch --out compute_comms.csv
    """
    schedule = load(file, first, weights)
    programs = lower(for_torch(schedule, sums=True) if torch else schedule, one_stream=one_stream or torch)
    text = "\n".join(map(str, programs))
    if out is None:
        typer.echo(text)
    elif out.suffix == ".txt":
        write_atomically(out, (text + "\n").encode())
    elif out.suffix == ".csv":
        write_programs(programs, out)
    else:
        raise OptionError("Unknown kind of programs", expected=".csv or .txt", got=repr(out.suffix))


@taking("prices", costs_from)
def compare(
    names: NamesArgument = None,
    *,
    stages: StagesOption = 8,
    workers: WorkersOption = None,
    microbatches: Annotated[int, typer.Option(min=1, max=MOST, help="Micro-batches.")] = 8,
    fusion: FusionOption = None,
    chunks: ChunksOption = None,
    group: GroupOption = None,
    k: KOption = None,
    unweighted: UnweightedOption = None,
    input_gradient: InputGradientOption = True,
    prices: Costs,
    steps: StepsOption = 1,
    json: JsonOption = False,
) -> None:
    """Build several schedules of one model, simulate them at the same costs, and print a table.

    A builder takes of the options those that it has; what is said to be faster is the time of a
    micro-batch, beside the first row. Where no builder is named, those that cannot serve the
    model are listed with the reason.

    \b
    Examples:
      sparsebp schedule compare
      sparsebp schedule compare gpipe 1f1b zb-h1 zb-h2 --stages 4
      sparsebp schedule compare gpipe modulo --stages 16 --no-input-gradient
    """
    rows: list[dict[str, Any]] = []
    for name in names or BUILDERS:
        try:
            schedule = build_schedule(
                name, costs=prices, fusion=fusion, strict=False, stages=stages, workers=workers,
                microbatches=microbatches, chunks=chunks, group=group, k=k, unweighted=stages_of(unweighted),
                input_gradient=input_gradient,
            )  # fmt: skip
            rows.append({"builder": name, **compared(summary(simulate(schedule, prices, steps=steps)))})
        except SparseBPError as error:
            if names:
                raise
            rows.append({"builder": name, "reason": str(error)})
    built = [row for row in rows if "reason" not in row]
    for row in built:
        row["speedup"] = built[0]["per_microbatch"] / row["per_microbatch"] if row["per_microbatch"] else 1.0
    if json:
        for row in rows:
            write_json({"event": "builder", **row})
        return
    print_table(COMPARED, built)
    for row in rows:
        if "reason" in row:
            print_line("", f"{row['builder']}: {row['reason']}", 0)


schedule_app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Build, validate, simulate, draw, lower and compare schedules of a training step.",
    epilog="Each command has examples: sparsebp schedule build --help",
)
for _command in (build, validate, simulate_file, plot, lower_file, compare):
    schedule_app.command(_command.__name__.removesuffix("_file"), help=inspect.getdoc(_command))(_command)
