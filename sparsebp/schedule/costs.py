"""Costs of a schedule's actions: time, bytes, transfers over a link or a network with contention."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple

from sparsebp.core.check import check_flag, check_integer, check_number, check_positive, shown
from sparsebp.core.errors import FileFormatError, OptionError
from sparsebp.core.files import check_path, parse_json, read_file, write_atomically
from sparsebp.schedule.schedule import KINDS, Action, Cell, Kind, Overlap, StepGraph, parts_of

DURATIONS: Mapping[Kind, float] = {"F": 1, "I": 1, "W": 1, "S": 0, "U": 0}
"""Defaults; a B takes as long as its I and W."""


@dataclass(frozen=True)
class StageBytes:
    """Memory of one stage: bytes, or any unit; finite numbers, 0 or more.

    Attributes
    ----------
    output
        One micro-batch's output. The gradient with respect to it has the same size.
    saved
        Everything that a forward keeps for the backward of one micro-batch, its input included.
    weights
        The weights as forward and backward read them.
    gradients
        The gradients of the weights. None: as many as `weights`.
    optimizer
        The state of the optimizer, and its copy of the weights in a higher precision if there is one. With 16-bit
        weights and Adam, n parameters have 2 n bytes of weights, 4 n of gradients summed in float32, 12 n of this.
    saved_for_weights
        The part of `saved` that W reads: I frees the rest. None: all of it.

    Raises
    ------
    OptionError
        An entry is negative or not finite, or W reads more than is saved.
    """

    output: float = 1
    saved: float = 1
    weights: float = 1
    gradients: float | None = None
    optimizer: float = 0
    saved_for_weights: float | None = None

    def __post_init__(self) -> None:
        for entry in fields(self):
            if getattr(self, entry.name) is not None or entry.default is not None:
                check_number(f"The bytes of {entry.name}", getattr(self, entry.name), 0)
        if self.saved_for_weights is not None and self.saved_for_weights > self.saved:
            raise OptionError("W reads more than a forward saves", expected=f"saved_for_weights up to {self.saved:g}",
                              got=self.saved_for_weights)  # fmt: skip

    @property
    def weight_gradients(self) -> float:
        """The bytes of the weights' gradients."""
        return self.weights if self.gradients is None else self.gradients

    @property
    def freed_by_input_gradient(self) -> float:
        """The part of `saved` that I frees, although W is yet to run."""
        return 0 if self.saved_for_weights is None else self.saved - self.saved_for_weights


class Side(NamedTuple):
    """One direction of a connection: it serves one transfer after the other."""

    key: tuple[str, int, int]
    bandwidth: float


class Route(NamedTuple):
    """The path of a transfer: it begins when all sides are free and arrives `latency` after passing the slowest."""

    sides: tuple[Side, ...]
    latency: float


def carry(route: Route, size: float, now: float, held: dict[Any, tuple[float, Any]],
          holder: Any) -> tuple[float, float, Any]:  # fmt: skip
    """Let a transfer that is ready at `now` take its path; return when it begins, when it arrives, whom it waited for.

    `held` says until when, and by what, every side is occupied; the transfer is entered as `holder`.
    """
    begin, held_by = now, None
    for key, _ in route.sides:
        if key in held and held[key][0] > begin:
            begin, held_by = held[key]
    passed = begin
    for key, bandwidth in route.sides:
        until = begin + size / bandwidth
        held[key] = until, holder
        passed = max(passed, until)
    return begin, passed + route.latency, held_by


@dataclass(frozen=True)
class Link:
    """The connection between any two workers, one for each direction.

    A transfer occupies it for ``bytes / bandwidth``, first come, first served, and arrives `latency` later. The latency
    is finite, 0 or more; the bandwidth is positive.
    """

    latency: float = 0
    bandwidth: float = math.inf

    def __post_init__(self) -> None:
        check_number("The latency of the link", self.latency, 0)
        check_positive("The bandwidth of the link", self.bandwidth, finite=False)

    def route(self, sender: int, receiver: int) -> Route:
        """Return the path of a transfer between two workers."""
        return Route((Side(("pair", sender, receiver), self.bandwidth),), self.latency)

    def shares(self, worker: int) -> dict[tuple[str, int, int], float]:
        """Return the share of its duration for which a worker's S occupies each side that transfers need."""
        return {}


@dataclass(frozen=True)
class Costs:
    """Costs of all actions.

    Attributes
    ----------
    durations
        Seconds, or any unit: a mapping by kind, by action, or both (an action's own entry takes precedence), or a
        function of the action. A mapping without an entry for a B takes the sum of its I and W. By default F, I and W
        take 1, S and U take 0.
    stages
        Bytes of every stage, or one for all.
    link
        Between workers: the outputs of F and I travel over it.
    slowdown
        How much slower each of two streams of a worker runs while the other is busy: 1 if they do not disturb each
        other, 2 if they share the device evenly; a number, or a function of the action that is slowed down. Of n busy
        streams each runs ``1 + (n - 1) (slowdown - 1)`` times slower. The stream "link" is the network and slows none
        down.
    collectives
        Time of the collective calls inside actions that cannot overlap with their computation: all-reduces of tensor
        parallelism, all-gathers of sharded weights. In the form of `durations`; actions without an entry have none. It
        is added to the duration of the action, and on a `Network` it occupies the worker's port first, as S does.
    blocking_sends
        Whether a worker's next cell waits until the data that it sends have arrived.
    barrier
        Time of a barrier between two steps, at which all workers wait for each other. None: there is none.

    Raises
    ------
    OptionError
        The durations are neither a mapping nor a function, one is of no kind or action, negative or not finite, or the
        slowdown is below 1.
    """

    durations: Mapping[Kind, float] | Mapping[Action, float] | Callable[[Action], float] = field(
        default_factory=lambda: dict(DURATIONS)
    )
    stages: tuple[StageBytes, ...] | StageBytes = StageBytes()
    link: Link = Link()
    slowdown: float | Callable[[Action], float] = 1.0
    collectives: Mapping[Kind, float] | Mapping[Action, float] | Callable[[Action], float] = field(default_factory=dict)
    blocking_sends: bool = False
    barrier: float | None = None

    def __post_init__(self) -> None:
        for name in ("durations", "collectives"):
            times = getattr(self, name)
            if isinstance(times, Mapping):
                for key, value in times.items():
                    if key not in KINDS and not isinstance(key, tuple):  # a text such as "2W" would never be looked up
                        raise OptionError("A duration is of no action", expected=f"{', '.join(KINDS)}, or an Action",
                                          got=shown(key), remedy='Durations({"2W": 1}) takes texts')  # fmt: skip
                    check_number(f"The duration of {key}", value, 0)
            elif not callable(times):
                raise OptionError(f"{name} cannot be looked up", expected="a mapping or a function", got=shown(times))
        check_flag("blocking_sends", self.blocking_sends)
        if self.barrier is not None:
            check_number("The time of the barrier", self.barrier, 0)
        if not callable(self.slowdown):
            check_number("slowdown", self.slowdown, 1)
        each = self.stages if isinstance(self.stages, tuple) else (self.stages,)
        if not all(isinstance(entry, StageBytes) for entry in each):
            expected = "StageBytes, or a tuple of them"
            raise OptionError("stages have no bytes", expected=expected, got=shown(self.stages))
        if not isinstance(self.link, Link):
            raise OptionError("link is not a Link", expected="Link(latency), say", got=shown(self.link))

    def check(self, graph: StepGraph) -> None:
        """Refuse costs of stages that a step does not have, and bytes of another number of stages."""
        if isinstance(self.stages, tuple) and len(self.stages) != graph.stages:
            raise OptionError("The bytes are of another model", expected=f"StageBytes of {graph.stages} stages",
                              got=len(self.stages))  # fmt: skip
        for name in ("durations", "collectives", "slowdown"):
            times = getattr(self, name)
            entries = times.entries if isinstance(times, _Entries) else times if isinstance(times, Mapping) else ()
            for key in entries:
                stage = key[0] if isinstance(key, tuple) else int(_KEY.fullmatch(key)[1] or 0)  # type: ignore[index]
                if stage >= graph.stages:
                    raise OptionError(f"{name} are of a stage that the schedule does not have", got=str(key),
                                      expected=f"stages 0 to {graph.stages - 1}")  # fmt: skip

    def duration(self, action: Action) -> float:
        """Return how long an action takes by itself, its collective calls included."""
        return self.computation(action) + (self.collective(action) if self.has_collectives else 0.0)

    def computation(self, action: Action) -> float:
        """Return how long an action takes by itself, without its collective calls."""
        value = _looked_up(self.durations, action, self.computation)
        if value is None:
            expected = f"an entry for {action} or {action.kind!r}"
            raise OptionError(f"There is no duration of {action}", expected=expected, got=None)
        return check_number(f"The duration of {action}", value, 0)

    @property
    def has_collectives(self) -> bool:
        """Whether any action may have collective calls."""
        return self.collectives != {} and self.collectives != Collectives({})

    def collective(self, action: Action) -> float:
        """Return the time of the collective calls of an action."""
        value = _looked_up(self.collectives, action, self.collective)
        return 0.0 if value is None else check_number(f"The collective calls of {action}", value, 0)

    def durations_of(self, cells: Sequence[Cell], graph: StepGraph) -> list[float]:
        """Return how long each of many cells takes by itself."""
        by_stage: dict[tuple[int, Kind], float] = {}  # used where no entry is for a single action
        general = any(
            not isinstance(times, Mapping) or any(isinstance(key, Action) for key in times)
            for times in (self.durations, self.collectives)
        )
        durations = []
        for cell in cells:
            if isinstance(cell, Overlap):
                durations.append(self.overlapped(cell, graph))
            elif general:
                durations.append(self.duration(cell))
            else:
                key = cell[0], cell[1]
                if key not in by_stage:
                    by_stage[key] = self.duration(cell)
                durations.append(by_stage[key])
        return durations

    def slowdown_of(self, action: Action) -> float:
        """Return how much slower an action runs while another stream is busy."""
        if not callable(self.slowdown):
            return self.slowdown
        return check_number("slowdown", self.slowdown(action), 1)

    def overlapped(self, overlap: Overlap, graph: StepGraph) -> float:
        """Return how long a forward and a backward take that start at the same time on one worker."""
        # While both run, each is slowed down; then the longer one runs by itself. If the backward needs the forward,
        # they run one after the other.
        forward, backward = self.duration(overlap.forward), self.duration(overlap.backward)
        if overlap.forward in graph.predecessors(Action(overlap.backward.stage, "I", overlap.backward.microbatch)):
            return forward + backward
        first, second = self.slowdown_of(overlap.forward), self.slowdown_of(overlap.backward)
        both = min(forward * first, backward * second)
        return both + max(forward - both / first, backward - both / second)

    def bytes_of(self, stage: int) -> StageBytes:
        """Return the bytes of a stage."""
        return self.stages if isinstance(self.stages, StageBytes) else self.stages[stage]


def _looked_up(times: Mapping[Any, float] | Callable[[Action], float], action: Action,
               of: Callable[[Action], float]) -> float | None:  # fmt: skip
    """Return an action's entry in a mapping or function; of a B without one the sum of its parts."""
    if not isinstance(times, Mapping):
        return times(action)
    value = times.get(action, times.get(action.kind))
    return sum(map(of, parts_of(action))) if value is None and action.kind == "B" else value


# A network with contention: workers in nodes, a port for each worker, an uplink for each node.

_Key = tuple[str, int, int]


@dataclass(frozen=True)
class Network(Link):
    """Workers in nodes: transfers share the ports of their workers and the uplinks of their nodes.

    Every worker has a port that sends and receives at the same time; worker w is in node ``w // node``, and every node
    has an uplink for data to other nodes, and one for data from them. A transfer begins when all sides that it needs
    are free, first come, first served; it occupies each for its own bytes / bandwidth and arrives `latency` after it
    has passed the slowest. So an uplink four times as fast as a port carries four transfers at a time. A transfer that
    waits for a busy receiver holds up its sender's next ones.

    An S occupies both directions of its worker's port, and of its node's uplink if there are nodes, in the same way:
    the slowest of them for its whole duration.

    Parameters
    ----------
    latency, bandwidth
        Within a node; the bandwidth is a worker's port's, in each direction.
    node
        Workers of a node. None: all workers are in one, and there are no uplinks.
    uplink_latency, uplink_bandwidth
        Between nodes; the latency covers the whole path, the bandwidth is a node's, in each direction.

    Notes
    -----
    The occupation of ports is LogGP's gap per byte (Alexandrov et al., "LogGP: incorporating long messages into the
    LogP model", SPAA 1995).
    """

    node: int | None = None
    uplink_latency: float = 0
    uplink_bandwidth: float = math.inf

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.node is not None:
            object.__setattr__(self, "node", check_integer("node", self.node, 1))
        check_number("The latency of the uplink", self.uplink_latency, 0)
        check_positive("The bandwidth of the uplink", self.uplink_bandwidth, finite=False)

    def route(self, sender: int, receiver: int) -> Route:
        """Return the path of a transfer between two workers."""
        sides = (Side(("send", sender, 0), self.bandwidth), Side(("receive", receiver, 0), self.bandwidth))
        if self.node is None or sender // self.node == receiver // self.node:
            return Route(sides, self.latency)
        out, into = sender // self.node, receiver // self.node
        uplinks = Side(("out", out, 0), self.uplink_bandwidth), Side(("in", into, 0), self.uplink_bandwidth)
        return Route(sides + uplinks, self.uplink_latency)

    def shares(self, worker: int) -> dict[_Key, float]:
        """Return the share of its duration for which a worker's S occupies each port and uplink."""
        ports: dict[_Key, float] = {("send", worker, 0): 1.0, ("receive", worker, 0): 1.0}
        if self.node is None:
            return ports
        share = 1.0
        if self.uplink_bandwidth > self.bandwidth:
            share = 0.0 if math.isinf(self.uplink_bandwidth) else self.bandwidth / self.uplink_bandwidth
        node = worker // self.node
        return ports | {("out", node, 0): share, ("in", node, 0): share}

    def all_reduce(self, size: float, replicas: int, workers: int = 1) -> float:
        """Return how long it takes to sum `size` bytes over data-parallel replicas: the duration of an S.

        Replica d of a schedule of several workers has the workers ``d * workers`` to ``(d + 1) * workers - 1``; each of
        them sums with the workers at its place in the other replicas.

        Within a node it is a ring: a reduce-scatter and an all-gather of ``n - 1`` messages of ``size / n`` bytes each.
        Over several nodes it is hierarchical: reduce-scatter within the node, sums of the parts between the nodes, all
        parts of a node at the same time over its uplink, all-gather within the node. Between the nodes (and for a
        single node, or one replica per node) the cheaper of a ring, 2 (n − 1) (latency + bytes / (n bandwidth)),
        and a pipelined tree, 2 ⌈log₂ n⌉ latency + 2 bytes / bandwidth.

        Parameters
        ----------
        size
            Bytes of a stage's gradient.
        replicas
            Number of replicas.
        workers
            Workers of one replica; a divisor or a multiple of the workers of a node.

        Notes
        -----
        Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009 (ring);
        Sanders, Speck, Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", 2009.
        """
        size = check_number("The size", size, 0)
        replicas, workers = check_integer("replicas", replicas, 1), check_integer("workers", workers, 1)
        if self.node is None:
            return _sum(size, replicas, self.latency, self.bandwidth)
        if self.node % workers and workers % self.node:
            got, expected = f"{workers} workers, nodes of {self.node}", "workers that divide a node, or fill several"
            raise OptionError("Replicas and nodes do not fit together", expected=expected, got=got)
        inside = min(replicas, max(1, self.node // workers))
        nodes = math.ceil(replicas / inside)
        if nodes == 1:
            return _sum(size, inside, self.latency, self.bandwidth)
        within = 2 * (inside - 1) * (self.latency + size / inside / self.bandwidth)
        return within + _sum(size, nodes, self.uplink_latency, min(self.uplink_bandwidth, inside * self.bandwidth))


def _sum(size: float, count: int, latency: float, bandwidth: float) -> float:
    """Return how long an all-reduce takes, by a ring or by a tree, whichever is faster."""
    if count == 1:
        return 0.0
    ring = 2 * (count - 1) * (latency + size / count / bandwidth)
    tree = 2 * math.ceil(math.log2(count)) * latency + 2 * size / bandwidth
    return min(ring, tree)


# Costs from text: durations by kind, stage or action, and a JSON file of all costs.

_KEY = re.compile(r"(?=([0-9]*))(?:[0-9]{0,9}[FIWBSU]|[0-9]{1,9}[FIWBSU][0-9]{1,9})")
_FORM = 'a JSON object such as {"durations": {"F": 1, "2W": 0.5}, "latency": 0.1}'
_REMEDY = "See sparsebp.schedule.read_costs"


@dataclass(frozen=True)
class _Entries:
    entries: Mapping[str, float]

    def __post_init__(self) -> None:
        name = type(self).__name__.lower()[:-1]
        for key, value in self.entries.items():
            if _KEY.fullmatch(key) is None:
                raise OptionError(f"A {name} is of no action", expected="F (or I, W, B, S, U), 2F, 2F0", got=shown(key),
                                  remedy="Name a kind, a stage and kind, or an action")  # fmt: skip
            check_number(f"The {name} of {key}", value, 0)

    def most_specific(self, action: Action) -> float | None:
        """Return the entry that counts for an action, None if there is none."""
        keys = (str(action), f"{action.stage}{action.kind}", action.kind)
        return next((self.entries[key] for key in keys if key in self.entries), None)


@dataclass(frozen=True)
class Durations(_Entries):
    """Durations by kind (``"F"``), by stage (``"2F"``), by action (``"2F0"``); the most specific entry counts.

    Takes an action and returns its duration, as `Costs` wants it. A B without an entry takes the sum of its I and W;
    any other action without one has the default duration of `Costs`. Another key, or a duration that is negative or not
    finite, raises `OptionError`.
    """

    def __call__(self, action: Action) -> float:
        """Return the duration of an action."""
        found = self.most_specific(action)
        if found is None and action.kind == "B":
            return sum(map(self, parts_of(action)))
        return DURATIONS[action.kind] if found is None else found


@dataclass(frozen=True)
class Collectives(_Entries):
    """Times of collective calls by kind, by stage, by action, as `Durations`; actions without an entry have none."""

    def __call__(self, action: Action) -> float:
        """Return the time of the collective calls of an action."""
        found = self.most_specific(action)
        if found is None:
            return sum(map(self, parts_of(action))) if action.kind == "B" else 0.0
        return found


@dataclass(frozen=True)
class Slowdowns(_Entries):
    """Slowdowns by kind, by stage, by action, as `Durations`; actions without an entry are not slowed down."""

    def __call__(self, action: Action) -> float:
        """Return the slowdown of an action."""
        found = self.most_specific(action)
        return 1.0 if found is None else found


def parse_durations(texts: Iterable[str]) -> dict[str, float]:
    """Return the durations of texts such as ``F=1`` and ``2W=0.5``."""
    found = {}
    for text in texts:
        key, equals, value = text.partition("=")
        try:
            found[key.strip()] = float(value)
        except ValueError:
            equals = ""
        if not equals:
            raise OptionError("Not a duration", expected="F=1, 2W=0.5 or 2W0=0.5", got=shown(text))
    return found


def read_costs(path: str | os.PathLike[str]) -> Costs:
    """Read costs from a JSON file.

    The file is an object, all of its keys optional: ``"durations"`` (see `Durations`), ``"stages"`` (the fields of
    `StageBytes`, once for all stages or in a list of one for each), ``"latency"``, ``"bandwidth"``, ``"slowdown"`` (a
    number, or an object by kind, stage or action, see `Slowdowns`); ``"network"`` (the fields of `Network`) in place of
    latency and bandwidth; ``"collectives"`` (an object as the durations), ``"blocking_sends"`` and ``"barrier"``, see
    `Costs`::

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
    """Return the costs of a parsed JSON file; see `read_costs`. `source` is its name in messages."""
    known = ("durations", "stages", "latency", "bandwidth", "network", "slowdown", "collectives", "blocking_sends",
             "barrier")  # fmt: skip
    _check_keys(content, known, source)
    durations, collectives = content.get("durations", {}), content.get("collectives", {})
    for name, times in (("durations", durations), ("collectives", collectives)):
        if not isinstance(times, dict):
            raise _refused(source, f"{name} {shown(times)}")
    slowdown = content.get("slowdown", 1.0)
    stages = content.get("stages", {})
    pair = {key: content[key] for key in ("latency", "bandwidth") if key in content}
    link = Link(**pair)
    if "network" in content:
        _check_keys(content["network"], [f.name for f in fields(Network)], source)
        if pair:
            raise _refused(source, f"a network and {' and '.join(pair)}")
        link = Network(**content["network"])
    each = stages if isinstance(stages, list) else [stages]
    for entry in each:
        _check_keys(entry, [f.name for f in fields(StageBytes)], source)
    each = [StageBytes(**entry) for entry in each]
    return Costs(
        Durations(durations),
        tuple(each) if isinstance(stages, list) else each[0],
        link,
        Slowdowns(slowdown) if isinstance(slowdown, dict) else slowdown,
        Collectives(collectives),
        content.get("blocking_sends", False),
        content.get("barrier"),
    )


def write_costs(costs: Costs, actions: Iterable[Action], path: str | os.PathLike[str]) -> None:
    """Write costs to a JSON file that `read_costs` reads: first under a temporary name, then renamed.

    Durations, and slowdowns that are a function, are written action by action for `actions`, for example a `Schedule`.
    S and U belong to the stage, whatever the micro-batch.

    Raises
    ------
    OptionError
        An action has no duration.
    OutputError
        The file cannot be written.
    """
    actions = tuple(actions)
    # JSON has no infinity: a file without a bandwidth means that.
    link = {key: value for key, value in asdict(costs.link).items() if value is not None and value != math.inf}
    content: dict[str, Any] = {
        "durations": {str(action): costs.computation(action) for action in actions},
        "collectives": {str(action): time for action in actions if (time := costs.collective(action))},
        "blocking_sends": costs.blocking_sends,
        "barrier": costs.barrier,
        "stages": [asdict(entry) for entry in costs.stages]
        if isinstance(costs.stages, tuple)
        else asdict(costs.stages),
        **({"network": link} if isinstance(costs.link, Network) else link),
        "slowdown": {str(action): costs.slowdown_of(action) for action in actions}
        if callable(costs.slowdown)
        else costs.slowdown,
    }
    write_atomically(path, json.dumps(content, indent=1).encode())


def _check_keys(entry: Any, known: tuple[str, ...] | list[str], source: object) -> None:
    if not isinstance(entry, dict):
        raise _refused(source, f"{type(entry).__name__} {shown(entry)}")
    unknown = sorted(entry.keys() - set(known))
    if unknown:
        raise FileFormatError(f"{source} has unknown keys", expected=", ".join(known), got=", ".join(unknown))


def _refused(source: object, got: str) -> FileFormatError:
    return FileFormatError(f"{source} has no costs", expected=_FORM, got=got, remedy=_REMEDY)
