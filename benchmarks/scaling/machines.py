"""The clusters that are simulated: the rate of a worker, and the network between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.scaling.layers import Layer
from sparsebp.schedule import Action, Costs, Network, StageBytes, parts_of

MOVED = 20
"""Bytes a weight that an update with momentum moves in float32: it reads three values and writes two."""


@dataclass(frozen=True)
class Machine:
    """A worker, and its network. A duration is ``overhead + FLOPs / rate``.

    Attributes
    ----------
    name
        In words.
    rate
        FLOPs a second that its kernels reach: a stated share of the data sheet's.
    memory
        Bytes a second, for updates.
    overhead
        Seconds of an action whatever its size, for launches.
    value
        Bytes of a weight, gradient or activation.
    network
        Between the workers.
    """

    name: str
    rate: float
    memory: float
    network: Network
    overhead: float = 20e-6
    value: int = 4

    def costs(self, stages: Sequence[Layer], samples: float, workers: int = 1, replicas: int = 1,
              slowdown: float = 1.0) -> Costs:  # fmt: skip
        """Return the costs of stages for micro-batches of `samples`, in `replicas` pipelines of `workers`."""
        network = self.network
        if network.node is not None and workers * replicas <= network.node:
            network = replace(network, node=None)  # all in one node: nothing goes through an uplink
        table = [self._durations(stage, samples, network, workers, replicas) for stage in stages]

        def duration(action: Action) -> float:
            return sum(table[part.stage][part.kind] for part in parts_of(action))

        sizes = [StageBytes(self.value * samples * stage.output, self.value * samples * stage.saved,
                            self.value * stage.weights) for stage in stages]  # fmt: skip
        return Costs(duration, tuple(sizes), network, slowdown)

    def _durations(self, stage: Layer, samples: float, network: Network, workers: int, replicas: int
                   ) -> dict[str, float]:  # fmt: skip
        flops = {"F": stage.forward, "I": stage.input_grad, "W": stage.weight_grad}
        found = {kind: self.overhead + samples * number / self.rate for kind, number in flops.items()}
        found["S"] = network.all_reduce(self.value * stage.weights, replicas, workers)
        return found | {"U": self.overhead + MOVED * stage.weights / self.memory}

    def alone(self, layers: Sequence[Layer], samples: float) -> float:
        """Return how long one worker computes for so many samples, without updates, overheads and communication."""
        return samples * sum(layer.flops for layer in layers) / self.rate


GIGABIT = 1e9 / 8

A100 = Machine(
    "A100, 16-bit values at 40 % of 312 TFLOP/s; 8 a node with 250 GB/s ports, 8 × 200 Gb/s between nodes",
    rate=0.4 * 312e12, memory=1.5e12, value=2,
    network=Network(5e-6, 250e9, 8, 10e-6, 8 * 200 * GIGABIT),
)  # fmt: skip
"""Where the scaling of all schedules is simulated."""
