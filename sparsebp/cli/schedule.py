"""``sparsebp schedule``: builds, validates, simulates, draws, lowers and compares schedules of a training step."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from rich.text import Text

from sparsebp.cli.common import (
    REPLACED,
    Group,
    JsonOption,
    choice_option,
    console,
    one_of,
    out_option,
    print_line,
    print_table,
    taking,
    write_json,
)
from sparsebp.core import tables
from sparsebp.core.check import shown
from sparsebp.core.errors import OptionError, SparseBPError
from sparsebp.core.files import read_file, write_atomically, write_figure
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
from sparsebp.schedule.builders import BUILDERS, Fusion, Priority, discover_builders
from sparsebp.schedule.builders import build as build_schedule
from sparsebp.schedule.costs import Durations, parse_durations
from sparsebp.schedule.files import check_communication, from_csv
from sparsebp.schedule.plot import COLOURS, summary
from sparsebp.schedule.schedule import First, Weights

discover_builders()

MOST = 100_000
"""Bound for numbers of stages, micro-batches and so on: larger schedules exceed memory and patience."""


def _count(text: str, default: str | bool = True, least: int = 1, most: int = MOST) -> Any:
    return typer.Option(min=least, max=most, help=text, show_default=default)


Steps = Annotated[int, _count("Repetitions of the step, one after the other.")]


FileArgument = Annotated[
    str, typer.Argument(help="A CSV file: ours, or one that PyTorch dumped; - reads standard input.")
]
FirstOption = Annotated[
    First | None,
    typer.Option(help="How the step begins: with forwards, backwards or updates.", show_default="as in the file"),
]
WeightsOption = Annotated[
    Weights | None, choice_option("The weights that a backward reads", get_args(Weights), show_default="as in the file")
]


def load(file: FileArgument, first: FirstOption = None, weights: WeightsOption = None) -> Schedule:
    """Read a schedule from a file, or from standard input."""
    if file == "-":
        return from_csv(sys.stdin.buffer.read(), first=first, weights=weights, source="standard input")
    return read_csv(file, first=first, weights=weights)


def load_checked(
    file: FileArgument,
    first: FirstOption = None,
    weights: WeightsOption = None,
    one_stream: Annotated[
        bool,
        typer.Option(
            "--one-stream/--any-stream", help="Whether a rank's sends and receives run in one order, as NCCL's do."
        ),
    ] = True,
) -> tuple[Schedule, bool]:
    """Read a schedule, and check its communication; return whether it has any."""
    source = "standard input" if file == "-" else file
    if file == "-":
        content = sys.stdin.buffer.read()
    else:
        content = read_file(Path(file), f"{file} cannot be read", expected="a CSV file", remedy="Pass a path")
    schedule = from_csv(content, first=first, weights=weights, source=source)
    checked = check_communication(content, schedule, one_stream=one_stream, source=source)
    return schedule if schedule.name else replace(schedule, name=Path(file).stem), checked


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
        float | None, typer.Option(help="Bytes per unit of time between two workers.", show_default="unlimited")
    ] = None,
    slowdown: Annotated[
        float | None, typer.Option(min=1, help="Of each of two busy streams of a worker.", show_default="1")
    ] = None,
    blocking_sends: Annotated[
        bool | None,
        typer.Option("--blocking-sends/--no-blocking-sends", help="Whether a worker waits until its data arrive."),
    ] = None,
    barrier: Annotated[
        float | None, typer.Option(min=0, help="Time of a barrier of all workers between steps.", show_default="none")
    ] = None,
) -> Costs:
    """Return the costs of a file, overridden by the options."""
    found = Costs(Durations({})) if costs is None else read_costs(costs)
    entries = found.durations.entries if isinstance(found.durations, Durations) else {}
    link = {key: value for key, value in (("latency", latency), ("bandwidth", bandwidth)) if value is not None}
    return replace(
        found,
        durations=Durations({**entries, **parse_durations(cost or [])}),
        link=replace(found.link, **link),
        slowdown=found.slowdown if slowdown is None else slowdown,
        blocking_sends=found.blocking_sends if blocking_sends is None else blocking_sends,
        barrier=found.barrier if barrier is None else barrier,
    )


def sizes_from(
    stages: Annotated[int, _count("Stages (layers, or groups of them).")] = 8,
    workers: Annotated[int | None, _count("Devices of the pipeline.", "4")] = None,
    microbatches: Annotated[int | None, _count("Micro-batches.", "8 in pipelines, else 1")] = None,
    fusion: Annotated[
        Fusion | None,
        choice_option(
            "Adds updates at the end, before the next forward, after the gradient",
            get_args(Fusion),
            show_default="none",
        ),
    ] = None,
    chunks: Annotated[int | None, _count("Groups of stages per worker (interleaved).")] = None,
    group: Annotated[int | None, _count("Neighbouring stages dealt out together (modulo).")] = None,
    k: Annotated[int | None, _count("First stages whose W come last (out-of-order ones).", least=0)] = None,
    unweighted: Annotated[str | None, typer.Option(help="Stages without weights, such as 1,3.")] = None,
    input_gradient: Annotated[
        bool | None, typer.Option("--input-gradient/--no-input-gradient", help="Whether stage 0 has an I.")
    ] = None,
) -> dict[str, Any]:
    """Return the options of builders that several techniques share."""
    return locals() | {"unweighted": stages_of(unweighted)}


def technique_from(
    streams: Annotated[int | None, typer.Option(min=1, max=2, help="Streams of the worker (conventional).")] = None,
    regions: Annotated[int | None, typer.Option(min=1, max=MOST, help="Regions of the main stream (ooo).")] = None,
    memory_ratio: Annotated[
        float | None, typer.Option(help="Bound for peak memory over the conventional one's (ooo).", show_default="1.1")
    ] = None,
    memory_limit: Annotated[float | None, typer.Option(help="Bound for the memory (reverse-first-k).")] = None,
    priority: Annotated[
        Priority | None,
        choice_option(
            "Which gradient is synchronised next in reverse-first-k", get_args(Priority), show_default="first-stage"
        ),
    ] = None,
    recomputed: Annotated[str | None, typer.Option(help="Stages that recompute activations, such as 0,1.")] = None,
) -> dict[str, Any]:
    """Return the options of builders that one or two techniques have."""
    return locals() | {"recomputed": stages_of(recomputed)}


def stages_of(text: str | None) -> tuple[int, ...] | None:
    """Return the stages that an option lists: ``0,2``."""
    try:
        return None if text is None else tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a list of stages such as 0,2.") from None


# Printed results: tables, and a chart in the colours of the pictures.


_number = "{:.4g}".format
_share = "{:.1%}".format


def _runs(numbers: Iterable[int]) -> str:
    """Write ascending numbers, those without a gap as ``4–7``."""
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return " ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)


COMPARED = (
    tables.Column("builder", "builder", number=False),
    tables.Column("workers", "workers"),
    tables.Column("M", "microbatches"),
    tables.Column("makespan", "makespan", _number),
    tables.Column("per M", "per_microbatch", _number),
    tables.Column("faster", "speedup", tables.times),
    tables.Column("bubble", "bubble", _share),
    tables.Column("memory", "peak_memory", _number),
    tables.Column("stale", "staleness"),
)
_UNITS = (
    "A forward (F) takes 1 unit of time unless --cost says otherwise. memory: the peak, where output, saved "
    "activations and weights of a stage count 1 each unless --costs gives bytes."
)
_COMPARED_LEGEND = (
    f"M: micro-batches. per M: makespan / M. faster: per M, than the first row. stale: updates that weights are behind "
    f"at most. {_UNITS} A forward and a backward at once take the longer of the two times; with --slowdown 2, the sum."
)
_WORKERS = (
    tables.Column("worker", "worker"),
    tables.Column("stages", "stages", _runs, number=False),
    tables.Column("busy", "busy", lambda busy: ", ".join(f"{s} {v:.1%}" for s, v in busy.items()), number=False),
    tables.Column("memory", "peak_memory", _number),
)
_STAGES = (
    tables.Column("stage", "stage"),
    tables.Column("stale F", "staleness", lambda entry: str(entry.get("forward", "–"))),
    tables.Column("stale B", "staleness", lambda entry: str(entry.get("backward", "–"))),
    tables.Column("ahead F", "version_difference", lambda entry: str(entry.get("forward", "–"))),
    tables.Column("ahead B", "version_difference", lambda entry: str(entry.get("backward", "–"))),
)
_STAGES_LEGEND = (
    "stale: updates between the weights that a forward (F) or backward (B) reads and the update by its gradient; "
    "ahead: until the micro-batch's backward reaches stage 0. The largest of the stage."
)


def compared(found: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a summary that a row of the comparison shows."""
    kept = ("name", "workers", "stages", "microbatches", "steps", "makespan", "bubble", "peak_memory")
    each = found["makespan"] / (found["microbatches"] * found["steps"])
    stale = max((max(entry["staleness"].values()) for entry in found["per_stage"]), default=0)
    return {key: found[key] for key in kept} | {"per_microbatch": each, "staleness": stale}


def print_summary(found: dict[str, Any]) -> None:
    """Print a summary: numbers, a table of the workers, and one of the stages if their weights may be stale."""
    out = console()
    path = found["critical_path"]
    shown = " ".join(path if len(path) <= 12 else [*path[:6], "…", *path[-6:]])
    print_line("schedule", found["name"], 14)
    print_line("makespan", _number(found["makespan"]), 14)
    print_line("bubble", f"{_share(found['bubble'])}, {_share(found['span_bubble'])} of a worker's own span", 14)
    print_line("memory", _number(found["peak_memory"]), 14)
    print_line("critical path", f"{len(path)} cells: {shown}", 14)
    out.print()
    print_table(_WORKERS, found["per_worker"], _UNITS)
    if found["per_stage"]:
        out.print()
        print_table(_STAGES, found["per_stage"], _STAGES_LEGEND)


def coloured(chart: str) -> Text:
    """Return a text chart whose boxes have the colours of the pictures, where the terminal has colours."""
    texts = [Text(line) for line in chart.splitlines()]
    for text in texts:
        for kind, colour in COLOURS.items() if text.plain.startswith("worker") else ():
            text.highlight_regex(f"{kind}[0-9/]*─*", f"black on {colour}")
    return Text("\n").join(texts)


@taking("sizes", sizes_from)
@taking("technique", technique_from)
@taking("prices", costs_from)
def build(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(BUILDERS)}.", **one_of(BUILDERS))],
    *,
    sizes: dict[str, Any],
    technique: dict[str, Any],
    prices: Costs,
    torch: Annotated[bool, typer.Option("--torch", help="Only what PyTorch's loader reads: no U, no S.")] = False,
    out: Annotated[Path | None, out_option(f"The file to write. {REPLACED}", show_default="standard output")] = None,
) -> None:
    """Build the schedule of a technique and write it as CSV.

    \b
    Examples:
      sparsebp schedule build gpipe --stages 4 --microbatches 8 --out gpipe.csv
      sparsebp schedule build modulo --stages 16 | sparsebp schedule plot -
      sparsebp schedule build ooo --stages 12 --cost W=1.5 --memory-ratio 1.2
    """
    schedule = build_schedule(name, costs=prices, **sizes, **technique)
    prices.check(schedule.graph)
    if out is None:
        typer.echo(to_csv(schedule, torch=torch).replace("\r\n", "\n"), nl=False)
    else:
        write_csv(schedule, out, torch=torch)


@taking("checked", load_checked)
def validate(*, checked: tuple[Schedule, bool], json: JsonOption = False) -> None:
    """Check that a schedule is complete and can finish.

    And that backwards read the right weights. Of a file with sends and
    receives, that these are complete and finish even if nothing is buffered.

    \b
    Examples:
      sparsebp schedule validate compute_comms.csv
      sparsebp schedule validate gpipe.csv
      sparsebp schedule validate backward-first.csv --first I --json
    """
    schedule, communication = checked
    counts = {
        "workers": schedule.workers,
        "streams": len(schedule.lanes),
        "stages": schedule.graph.stages,
        "microbatches": schedule.graph.microbatches,
        "actions": sum(1 for _ in schedule),
    }
    if json:
        write_json({"event": "result", "name": schedule.name, **counts, "communication": communication})
        return
    listed = ", ".join(f"{count} {name.replace('microb', 'micro-b')}" for name, count in counts.items())
    sent = "; its sends and receives finish" * communication
    print_line("", f"{schedule.name or 'The schedule'} is valid: {listed}{sent}", 0)


@taking("schedule", load)
@taking("prices", costs_from)
def simulate_file(*, schedule: Schedule, prices: Costs, steps: Steps = 1, json: JsonOption = False) -> None:
    """Simulate a schedule: makespan, bubble, memory, staleness.

    F, I and W take one unit of time, B two, S and U none, unless options say otherwise.

    \b
    Examples:
      sparsebp schedule simulate gpipe.csv
      sparsebp schedule simulate gpipe.csv --cost B=1.8 --latency 0.1 --json
      sparsebp schedule simulate pipedream.csv --costs costs.json --steps 3
    """
    found = summary(simulate(schedule, prices, steps=steps))
    if json:
        write_json({"event": "result", **found})
    else:
        print_summary(found)


@taking("schedule", load)
@taking("prices", costs_from)
def plot(
    *,
    schedule: Schedule,
    out: Annotated[
        Path | None,
        out_option(
            f"A picture (.png, .svg, .pdf), a Chrome trace (.json) or text (.txt). {REPLACED}", show_default="text here"
        ),
    ] = None,
    prices: Costs,
    steps: Steps = 1,
    memory: Annotated[bool, typer.Option("--memory/--no-memory", help="The memory of the workers below.")] = True,
    width: Annotated[
        int | None, typer.Option(min=20, max=MOST, help="Characters per line of text.", show_default="the terminal")
    ] = None,
    unit: Annotated[float, typer.Option(help="Microseconds in a unit of time, for the trace.")] = 1e6,
) -> None:
    """Draw a simulated schedule: one row per worker and stream.

    \b
    Examples:
      sparsebp schedule plot gpipe.csv
      sparsebp schedule plot gpipe.csv --out gpipe.png --latency 0.2
      sparsebp schedule plot gpipe.csv --out trace.json --unit 1000
    """
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


@taking("schedule", load)
def lower_file(
    *,
    schedule: Schedule,
    one_stream: Annotated[
        bool, typer.Option("--one-stream", help="Sends and receives of a worker in one order, as NCCL's on a stream.")
    ] = False,
    torch: Annotated[
        bool, typer.Option("--torch", help="Only what PyTorch's loader reads, in one stream: no U; S is REDUCE_GRAD.")
    ] = False,
    sharded: Annotated[
        str | None, typer.Option(help="Stages with sharded weights (FSDP), such as 0,1: UNSHARD and RESHARD in a .csv.")
    ] = None,
    out: Annotated[
        Path | None,
        out_option(f"The file to write: PyTorch's cells (.csv), or text (.txt). {REPLACED}", show_default="text here"),
    ] = None,
) -> None:
    """Place sends, receives and sums: every worker's program.

    One instruction per line. The programs are checked: they finish even if no message is buffered.

    \b
    Examples:
      sparsebp schedule lower gpipe.csv
      sparsebp schedule lower gpipe.csv --one-stream --out programs.csv
      sparsebp schedule lower zb-h1.csv --torch --out compute_comms.csv
      sparsebp schedule lower zb-h1.csv --torch --sharded 0,1 --out fsdp.csv
    """
    programs = lower(for_torch(schedule, sums=True) if torch else schedule, one_stream=one_stream or torch)
    text, shards = "\n".join(map(str, programs)), stages_of(sharded) or ()
    if shards and (out is None or out.suffix != ".csv"):
        raise OptionError("Only files of cells say what is sharded", expected="--out programs.csv", got=shown(sharded))
    if out is None:
        typer.echo(text)
    elif out.suffix == ".txt":
        write_atomically(out, (text + "\n").encode())
    elif out.suffix == ".csv":
        write_programs(programs, out, sharded=shards)
    else:
        raise OptionError("Unknown kind of programs", expected=".csv or .txt", got=repr(out.suffix))


def _side(text: str) -> str:
    """Return what `compare` takes: a builder, or a file."""
    return text if text.endswith(".csv") else str(one_of(BUILDERS)["parser"](text))


@taking("sizes", sizes_from)
@taking("prices", costs_from)
def compare(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="Builders, or CSV files (mine.csv); all builders if left out.", show_default=False, parser=_side
        ),
    ] = None,
    *,
    sizes: dict[str, Any],
    prices: Costs,
    steps: Steps = 1,
    json: JsonOption = False,
) -> None:
    """Build several schedules of one model and simulate them.

    All have the same costs; the result is a table.
    Each builder takes the options that it knows. "faster" is relative to the
    first row's time per micro-batch. If no builder is named, those that cannot
    build the model's schedule are listed with the reason.
    Defaults: 8 micro-batches, and an input gradient.

    \b
    Examples:
      sparsebp schedule compare
      sparsebp schedule compare gpipe 1f1b zb-h1 zb-h2 --stages 4
      sparsebp schedule compare gpipe modulo --stages 16 --no-input-gradient
      sparsebp schedule compare gpipe mine.csv --stages 4
    """
    rows: list[dict[str, Any]] = []
    sizes["microbatches"] = sizes["microbatches"] or 8  # the same in all
    sizes["input_gradient"] = sizes["input_gradient"] is not False
    for name in names or BUILDERS:
        try:
            if name.endswith(".csv"):
                schedule = read_csv(name)
                if schedule.graph.stages != sizes["stages"]:
                    expected, remedy = f"{sizes['stages']} stages", "Pass its number as --stages"
                    raise OptionError(f"{name} is of another model", expected=expected, got=schedule.graph.stages,
                                      remedy=remedy)  # fmt: skip
            else:
                schedule = build_schedule(name, costs=prices, strict=False, **sizes)
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
    print_table(COMPARED, built, _COMPARED_LEGEND)
    for row in rows:
        if "reason" in row:
            print_line("", f"{row['builder']}: {row['reason']}", 0)


schedule_app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Build, check, simulate, draw, lower and compare schedules.",
    epilog="Each command has examples: sparsebp schedule build --help",
)
for _command in (build, validate, simulate_file, plot, lower_file, compare):
    schedule_app.command(_command.__name__.removesuffix("_file"), help=inspect.getdoc(_command))(_command)
