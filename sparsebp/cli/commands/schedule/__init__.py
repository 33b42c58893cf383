"""``sparsebp schedule``: builds, validates, simulates, draws, lowers and compares schedules of a training step."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from sparsebp.cli.commands.common import (
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
from sparsebp.cli.commands.schedule.options import (
    MOST,
    FileArgument,
    FirstOption,
    MicrobatchesOption,
    NameArgument,
    NamesArgument,
    StagesOption,
    StepsOption,
    WeightsOption,
    WorkersOption,
    costs_from,
    load,
    stages_of,
)
from sparsebp.cli.commands.schedule.tables import COMPARED, coloured, compared, print_summary
from sparsebp.core.errors import OptionError, SparseBPError
from sparsebp.core.files import write_atomically, write_figure
from sparsebp.schedule import (
    Costs,
    for_torch,
    gantt,
    lower,
    simulate,
    text_chart,
    to_csv,
    write_csv,
    write_programs,
    write_trace,
)
from sparsebp.schedule.builders import BUILDERS
from sparsebp.schedule.by_name import build as build_schedule
from sparsebp.schedule.pictures.summary import summary

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
        raise OptionError("Unknown kind of picture", expected=".png, .svg, .pdf, .json or .txt", got=repr(out.suffix),
                          remedy="Choose another ending of --out")  # fmt: skip


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
        raise OptionError("Unknown kind of programs", expected=".csv or .txt", got=repr(out.suffix),
                          remedy="Choose another ending of --out")  # fmt: skip


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
