"""A network with contention: workers in nodes, a port for each worker, an uplink for each node."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sparsebp.core.arguments import check_integer, check_number
from sparsebp.core.errors import OptionError
from sparsebp.schedule.costs import Link, Route, Side, check_cost

_Key = tuple[str, int, int]


@dataclass(frozen=True)
class Network(Link):
    """Workers in nodes: transfers share the ports of their workers and the uplinks of their nodes.

    Every worker has a port that sends and receives at the same time; worker w is in node ``w // node``, and every node
    has an uplink for what its workers send to those of other nodes, and one for what they receive. A transfer begins
    when all that it needs is free, first come, first served; it occupies each for bytes / bandwidth of that one and is
    there when the slowest has passed it, and the latency. So an uplink four times as fast as a port carries four
    transfers at a time. What waits for a busy receiver holds up what its sender sends after it.

    An S occupies both directions of its worker's port, and of its node's uplink if there are nodes, in the same way:
    the slowest of them for its whole duration.

    Parameters
    ----------
    latency, bandwidth
        Within a node; the bandwidth is that of a worker's port, in each direction.
    node
        Workers of a node. None: all workers are in one, and there are no uplinks.
    uplink_latency, uplink_bandwidth
        Between nodes; the latency is that of the whole way, the bandwidth that of a node, in each direction.

    Raises
    ------
    OptionError
        A latency is negative or not finite; a bandwidth is not positive; a node has no workers.

    Notes
    -----
    The occupation of ports is the gap a byte of LogGP (Alexandrov et al., "LogGP: incorporating long messages into the
    LogP model", SPAA 1995).
    """

    node: int | None = None
    uplink_latency: float = 0
    uplink_bandwidth: float = math.inf

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.node is not None:
            object.__setattr__(self, "node", check_integer("node", self.node, 1))
        check_cost("The latency of the uplink", self.uplink_latency)
        if check_number("The bandwidth of the uplink", self.uplink_bandwidth, finite=False) <= 0:
            raise OptionError("The bandwidth of the uplink is not positive", expected="a positive number, or inf",
                              got=self.uplink_bandwidth, remedy="Pass bytes a second")  # fmt: skip

    def route(self, sender: int, receiver: int) -> Route:
        """Return what a transfer between two workers takes."""
        sides = (Side(("send", sender, 0), self.bandwidth), Side(("receive", receiver, 0), self.bandwidth))
        if self.node is None or sender // self.node == receiver // self.node:
            return Route(sides, self.latency)
        out, into = sender // self.node, receiver // self.node
        uplinks = Side(("out", out, 0), self.uplink_bandwidth), Side(("in", into, 0), self.uplink_bandwidth)
        return Route(sides + uplinks, self.uplink_latency)

    def shares(self, worker: int) -> dict[_Key, float]:
        """Return for which share of its duration a worker's S occupies ports and uplinks, by their keys."""
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
        them sums with those of its place in the other replicas.

        Within a node the sum is a ring's: a reduce-scatter and an all-gather of ``n - 1`` messages of ``size / n``
        bytes each. Over several nodes it is hierarchical: reduce-scatter within the node, sums of the parts between
        the nodes, all parts of a node at the same time over its uplink, all-gather within the node. Between the nodes
        (and where there is one node alone, or one replica a node) it takes the cheaper one of a ring, 2 (n − 1)
        (latency + bytes / (n bandwidth)), and a pipelined tree, 2 ⌈log₂ n⌉ latency + 2 bytes / bandwidth.

        Parameters
        ----------
        size
            Bytes of a stage's gradient.
        replicas
            How many there are.
        workers
            Workers of one replica; a divisor or a multiple of the workers of a node.

        Raises
        ------
        OptionError
            A number is below 1, the size is negative, or replicas and nodes do not fit together.

        Notes
        -----
        Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009 (ring);
        Sanders, Speck, Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", 2009.
        """
        size = check_cost("The size", size)
        replicas, workers = check_integer("replicas", replicas, 1), check_integer("workers", workers, 1)
        if self.node is None:
            return _sum(size, replicas, self.latency, self.bandwidth)
        if self.node % workers and workers % self.node:
            raise OptionError("Replicas and nodes do not fit together", got=f"{workers} workers, nodes of {self.node}",
                              expected="as many workers as a part of a node, or as several nodes",
                              remedy="Use another number of workers")  # fmt: skip
        inside = min(replicas, max(1, self.node // workers))
        nodes = math.ceil(replicas / inside)
        if nodes == 1:
            return _sum(size, inside, self.latency, self.bandwidth)
        within = 2 * (inside - 1) * (self.latency + size / inside / self.bandwidth)
        return within + _sum(size, nodes, self.uplink_latency, min(self.uplink_bandwidth, inside * self.bandwidth))


def _sum(size: float, count: int, latency: float, bandwidth: float) -> float:
    """Return what an all-reduce among equals takes: by a ring or by a tree."""
    if count == 1:
        return 0.0
    ring = 2 * (count - 1) * (latency + size / count / bandwidth)
    tree = 2 * math.ceil(math.log2(count)) * latency + 2 * size / bandwidth
    return min(ring, tree)
