"""Out-of-Order BackProp (Oh et al., EuroSys 2022)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from benchmarks.schedule import SIDES
from benchmarks.tools import pictures
from benchmarks.tools.benchmark import Result
from papers import ooo_here, ooo_stated
from papers.figure import Claim, Context, Figure, Found, at_least, claim, elsewhere, faster, median
from papers.simulated import draw_ranges, drawn_timelines, speed_ups
from sparsebp.schedule import Costs, Kind, simulate
from sparsebp.schedule.builders import fast_forward, gpipe, modulo, reverse_first_k

_DURATIONS: dict[Kind, float] = {"F": 1, "I": 1, "W": 1, "U": 0}
_UNITS = Costs(_DURATIONS)
"""By kind, so that a backward in one takes what its two parts do."""


def first_k(context: Context) -> Found:
    """Fig. 4 and §5.1: five layers, sums over a network."""
    network = [4, 1, 4, 4, 4]  # the text gives no durations; with these all of its statements hold
    costs = Costs(lambda action: network[action.stage] if action.kind == "S" else {"F": 2, "I": 1, "W": 2}[action.kind])
    settings: list[tuple[int, Any]] = [(0, "first-ready"), (0, "first-stage"), (3, "first-stage")]
    a, b, c = [
        simulate(reverse_first_k(stages=5, k=k, costs=costs, priority=priority), costs).makespan
        for k, priority in settings
    ]
    stated = (
        ("units saved by prioritised sums", "1", a - b), ("and by reversing three layers", "3", b - c),
        ("conventional over reverse first-k", "1.16", a / c), ("prioritised over reverse first-k", "1.12", b / c),
    )  # fmt: skip
    return Found(tuple(Claim(what, paper, f"{ours:.3g}", None, _CHOSEN) for what, paper, ours in stated))


_CHOSEN = "The paper gives no durations: these were chosen so that its statements hold together, so nothing is decided"
_FIG_5: dict[str, Any] = {"workers": 2, "stages": 8}
_FIG_12: dict[str, Any] = {"workers": 4, "stages": 16, "microbatches": 4}


def eight_layers(context: Context) -> Found:
    """Fig. 5, and with two micro-batches Fig. 6."""
    found = [simulate(schedule, _UNITS).makespan for schedule in _eight_layers()]
    names = ("conventional", "fast-forward", "modulo")
    two = [round(simulate(schedule, _UNITS).makespan) for schedule in _eight_layers(2)]
    return Found((
        *(claim(f"8 layers on 2 devices, {name}: units", paper, round(ours))
          for name, paper, ours in zip(names, (23, 19, 16), found, strict=True)),
        Claim(f"with two micro-batches (Fig. 6): units, {', '.join(names)}", "each shorter than the one before",
              ", ".join(map(str, two)), two[0] > two[1] > two[2]),
    ))  # fmt: skip


def _eight_layers(microbatches: int = 1) -> list[Any]:
    size = _FIG_5 | {"microbatches": microbatches}
    return [gpipe(**size, input_gradient=False), fast_forward(**size), modulo(**size)]


def sixteen_layers(context: Context) -> Found:
    """Fig. 12 and §8.4.1; the paper draws 8 layers, and states the ratios of 16."""
    a, b, c = [simulate(schedule, _UNITS).makespan for schedule in _sixteen_layers()]
    return Found((
        claim("16 layers on 4 devices: fast-forward over GPipe", 1.22, round(a / b, 2)),
        claim("16 layers on 4 devices: modulo over GPipe", 1.62, round(a / c, 2),
              why=f"{a:g} / {c:g} units are {a / c:.3f}, which is 1.62 cut off and 1.63 rounded"),
        *(Claim(f"16 layers on 4 devices, {name}: units", "not stated", f"{ours:g}", None, "The paper states ratios")
          for name, ours in (("GPipe", a), ("fast-forward", b), ("modulo", c))),
    ))  # fmt: skip


def _sixteen_layers() -> list[Any]:
    return [gpipe(**_FIG_12, input_gradient=False), fast_forward(**_FIG_12), modulo(**_FIG_12)]


_REORDERED = ("joint", "list")
_NO_GAIN = "Kernels in a row use both cores already, and issuing one costs little: there is nothing to hide"
_NOT_HERE = "Kernels issued to a V100 by TensorFlow, XLA or Nimble"


def single_device(result: Result) -> Found:
    """Fig. 7 on the CPU: the fastest order that moves weight gradients, over the conventional one."""
    rows, claims = [], []
    for row in result["rows"]:
        best = min(_REORDERED, key=lambda name: median(row, name))
        rows.append({"network": row["network"], "gain": median(row, "conventional") / median(row, best)})
        claims.append(faster(
            f"{row['network']}: out of order over conventional", "1.03–1.58×", 1.03, row["conventional"], row[best],
            ran=f"{SIDES[best]}; conventional: {SIDES['conventional']}", why=_NO_GAIN))  # fmt: skip
    return Found(tuple(claims), {"rows": rows})


def statements(result: Result) -> Found:
    """§8.2: streams without reordering, and with it."""
    claims = []
    for row in result["rows"]:
        if not row["network"].startswith("DenseNet"):
            continue
        best = min(_REORDERED, key=lambda name: median(row, name))
        ran = f"{SIDES['two']}, each weight gradient as soon as it is ready"
        claims += [
            faster(f"{row['network']}: two streams, not reordered, over conventional", "1.39×", 1.39,
                   row["conventional"], row["two"], ran=ran, why=_NO_GAIN),
            faster(f"{row['network']}: out of order over two streams, not reordered", "1.11× (1.54 / 1.39)", 1.11,
                   row["two"], row[best], ran=f"{SIDES[best]}; {ran}", why=_NO_GAIN),
        ]  # fmt: skip
    return Found((
        *claims,
        elsewhere("pre-compiled kernel issue (Opt1) and multi-stream (Opt2) by themselves", "Opt2: 1.01–1.15×",
                  f"{_NOT_HERE}; our answer to Opt1, CUDA graphs, is python -m benchmarks gpu-graphs"),
        elsewhere("over Nimble, mean", "1.28×", _NOT_HERE),
    ) if claims else ())  # fmt: skip


_QUEUE = "Not the paper's baseline, which lets sums overtake each other"


def data_parallel(result: Result) -> Found:
    """Fig. 10: over BytePS on clusters, simulated; of sums in the order of their readiness nothing is claimed."""
    found = speed_ups(result, lambda row: row["source"].startswith("Oh") and row["compared"].startswith("reverse"))
    claims = (replace(one, met=None, why=_QUEUE) if "first ready" in one.what else one for one in found.claims)
    return Found(tuple(claims), found.data)


def data_parallel_here(result: Result) -> Found:
    """§8.3 on two ranks of this machine, and with a stated network between them."""
    claims = []
    for row in result["rows"]:
        where = f"{row['network']}, {row['batch']} samples"
        claims.append(faster(f"{where}: reverse first-k over prioritised sums", "1.10–1.27× (16 to 48 GPUs)", 1.1,
                             row["priority"], row["reverse"], ran=f"reverse first-{row['k']}; first stage first",
                             why="Two ranks share two cores, and the same cores move the bytes"))  # fmt: skip
        hidden = row["reverse_hidden"]
        share = float(hidden["median"] if isinstance(hidden, Mapping) else hidden)
        claims.append(Claim(f"{where}: share of the sums hidden", "not stated", f"{share:.0%}", None,
                            "Not the paper's measure", f"reverse first-{row['k']}"))  # fmt: skip
    return Found(tuple(claims))


def pipelines(result: Result) -> Found:
    """Fig. 11 and 13: over GPipe, simulated."""
    return speed_ups(result, lambda row: row["source"].startswith("Oh") and not row["compared"].startswith("reverse"))


def executed_pipelines(result: Result) -> Found:
    """§8.4 executed on two ranks: over GPipe as measured, and every step beside the simulated one."""
    rows = {row["schedule"]: row for row in result["rows"]}
    claims = []
    for name, paper in (("fast-forward", 1.18), ("modulo", 1.5)):
        if "gpipe" in rows and name in rows:
            claims.append(at_least(
                f"MLP of {result['settings']['depth']} layers on {rows[name]['ranks']} ranks: {name} over GPipe",
                paper, rows["gpipe"]["measured"] / rows[name]["measured"], ran=name,
                why="The paper's FFNN has 16 layers on four V100, GPipe's bubble here is only "
                    f"{rows['gpipe']['bubble']:.0%}"))  # fmt: skip
    claims += [
        Claim(f"{row['schedule']} on {row['ranks']} ranks: step simulated beside measured", "not stated",
              f"{row['difference']:+.0%}", None, "Says how far the simulator is to be trusted", row["schedule"])
        for row in result["rows"]
    ]  # fmt: skip
    return Found(tuple(claims))


def draw_gains(data: Mapping[str, Any]) -> Any:
    """Draw the speed-ups by network."""
    rows = data["rows"]
    drawing, ax = pictures.bar_chart([row["network"] for row in rows], [("", "#1e40af", [row["gain"] for row in rows])],
                                     "times faster than the conventional order", each=0.4)  # fmt: skip
    ax.axvline(1.0, color="#6b7280", linewidth=0.8, linestyle="--")
    return drawing


_ISSUE = (
    "How long TensorFlow takes to issue kernels to a V100; our answer, CUDA graphs, is python -m benchmarks gpu-graphs"
)
FIGURES = (
    Figure(
        name="ooo-fig1",
        paper="OOO",
        source="Fig. 1, 2 and 8",
        kind="elsewhere",
        gpu=True,
        why=_ISSUE,
        states="kernel issue overhead and timeline of DenseNet-121",
    ),
    Figure(
        name="ooo-fig4",
        paper="OOO",
        source="Fig. 3 and 4, Alg. 2",
        kind="simulated",
        run=first_k,
        states="reverse first-k: 16 % and 12 % of a step of five layers",
    ),
    Figure(
        name="ooo-fig5",
        paper="OOO",
        source="Fig. 5 and 6",
        kind="exact",
        run=eight_layers,
        draw=lambda data: drawn_timelines(_eight_layers(), _UNITS),
        states="8 layers, 2 devices: 23, 19 and 16 units",
    ),
    Figure(
        name="ooo-fig5-here",
        paper="OOO",
        source="Fig. 5 and §5.2.1",
        kind="measured",
        seconds=17,
        run=ooo_here.cross_layer,
        needs=("mpi",),
        states="one micro-batch on two ranks of this machine: 1.21× and 1.44× conventional cross-layer parallelism",
    ),
    Figure(
        name="ooo-table1",
        paper="OOO",
        source="Table 1 and 2",
        kind="elsewhere",
        gpu=True,
        why="Titan XP, P100 and V100 in four clusters; ooo-fig10 and ooo-fig11 simulate them from their data sheets",
        states="the paper's networks, data and clusters",
    ),
    Figure(
        name="ooo-fig7",
        rests_on="schedule",
        paper="OOO",
        source="Fig. 7",
        kind="measured",
        seconds=240,
        shows=single_device,
        draw=draw_gains,
        gpu=True,
        needs=("torch", "data"),
        states="one device: 1.03–1.58× over XLA",
    ),
    Figure(
        name="ooo-fig7-here",
        paper="OOO",
        source="Fig. 7 and §8.2",
        kind="measured",
        seconds=90,
        run=ooo_here.where_it_gains,
        draw=draw_gains,
        states="one device: networks in which an order out of order could gain here, and gradients of a layer side by "
        "side with a barrier",
    ),
    Figure(
        name="ooo-s82",
        rests_on="schedule",
        paper="OOO",
        source="§8.2",
        kind="measured",
        seconds=240,
        shows=statements,
        gpu=True,
        needs=("torch", "data"),
        states="two streams without reordering 1.39×, with it 1.54×; over Nimble 1.28×",
    ),
    Figure(
        name="ooo-fig9",
        paper="OOO",
        source="Fig. 9 and §8.2",
        kind="executed",
        seconds=40,
        run=ooo_here.memory,
        states="memory of the reordered step: at most 1.1 times the conventional peak, and below 0.1 % more in fact",
    ),
    Figure(
        name="ooo-fig10",
        rests_on="scaling-papers",
        paper="OOO",
        source="Fig. 10",
        kind="simulated",
        seconds=30,
        shows=data_parallel,
        draw=draw_ranges,
        gpu=True,
        states="data-parallel over BytePS: 1.10–1.27×",
    ),
    Figure(
        name="ooo-fig10-here",
        rests_on="data-parallel",
        paper="OOO",
        source="Fig. 10",
        kind="measured",
        seconds=120,
        shows=data_parallel_here,
        needs=("torch", "mpi"),
        states="reverse first-k on two ranks of this machine",
    ),
    Figure(
        name="ooo-s83",
        paper="OOO",
        source="§8.3",
        kind="simulated",
        seconds=2,
        run=ooo_stated.sums,
        gpu=True,
        states="ResNet-50 on 16 V100: 350 ms of sums become 265 and then 200, k = 45",
    ),
    Figure(
        name="ooo-fig11",
        rests_on="scaling-papers",
        paper="OOO",
        source="Fig. 11 and 13",
        kind="simulated",
        seconds=30,
        shows=pipelines,
        draw=draw_ranges,
        gpu=True,
        states="pipelines over GPipe: 1.41–1.99×",
    ),
    Figure(
        name="ooo-fig11-here",
        rests_on="scaling-measured",
        paper="OOO",
        source="Fig. 11",
        kind="executed",
        seconds=120,
        shows=executed_pipelines,
        needs=("mpi",),
        states="pipelines on two ranks of this machine, over GPipe and beside the simulator",
    ),
    Figure(
        name="ooo-s84",
        paper="OOO",
        source="§8.4",
        kind="simulated",
        seconds=3,
        run=ooo_stated.pipelines,
        gpu=True,
        states="beside PipeDream, DAPPLE and Megatron 2; communication and memory",
    ),
    Figure(
        name="ooo-fig12",
        paper="OOO",
        source="Fig. 12 and §8.4.1",
        kind="exact",
        run=sixteen_layers,
        draw=lambda data: drawn_timelines(_sixteen_layers(), _UNITS),
        states="16 layers, 4 devices, 4 micro-batches: 1.22× and 1.62× over GPipe",
    ),
)
