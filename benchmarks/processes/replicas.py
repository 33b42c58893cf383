"""What a rank of the benchmark of data-parallel training runs, see `benchmarks.processes.ranks`."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.tools.benchmark import refuse_difference
from benchmarks.tools.images import torch_twin
from benchmarks.tools.peers import import_torch
from sparsebp import nn, optim
from sparsebp.comm.transport import Handle, Transport
from sparsebp.core.threads import set_threads
from sparsebp.runtime.replicas import ReplicaExecutor, ReverseFirstKExecutor
from sparsebp.schedule import Schedule
from sparsebp.schedule.builders import data_parallel, place_updates, reverse_first_k

SGD: dict[str, Any] = {"lr": 1e-3, "momentum": 0.9}
_FEW = 64  # bytes


class Network:
    """A transport with a network of a stated bandwidth behind it, which takes no core: sums come that much later.

    Parameters
    ----------
    inner
        Carries the bytes.
    bandwidth
        Bytes a second and direction, of one sum at a time, which sends ``2 (n - 1) / n`` of its bytes; None adds no
        time. 0 carries no gradients: their sums are those of one rank. Counts of samples and losses, by which ranks
        stay in step, go as they are.
    """

    def __init__(self, inner: Transport, bandwidth: float | None) -> None:
        self.inner, self.rank, self.size, self.on_device = inner, inner.rank, inner.size, inner.on_device
        self.share, self.barrier, self.broadcast = inner.share, inner.barrier, inner.broadcast
        self.bandwidth, self.free = bandwidth, 0.0

    def allreduce(self, array: Any) -> Handle:
        """Begin to sum."""
        if self.bandwidth is None or array.nbytes <= _FEW:
            return self.inner.allreduce(array)
        if self.bandwidth == 0:
            return _Later(None, 0.0)
        seconds = 2 * (self.size - 1) / self.size * array.nbytes / self.bandwidth
        self.free = max(self.free, time.perf_counter()) + seconds
        return _Later(self.inner.allreduce(array), self.free)


class _Later:
    def __init__(self, inner: Handle | None, due: float) -> None:
        self.inner, self.due = inner, due

    def wait(self) -> None:
        if self.inner is not None:
            self.inner.wait()
        time.sleep(max(0.0, self.due - time.perf_counter()))

    def done(self) -> bool:
        return (self.inner is None or self.inner.done()) and time.perf_counter() >= self.due


def mlp(width: int, depth: int) -> nn.Sequential:
    """Return so many fully connected layers with ReLU between them."""
    rng = np.random.default_rng(0)
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width, rng=rng), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def waiting(schedule: Schedule) -> Schedule:
    """Return `schedule` with its synchronisations behind the gradients, on the stream that computes."""
    main, link = schedule.lanes
    last = max(place for place, cell in enumerate(main.cells) if str(cell).strip("0123456789") == "W")
    cells = main.cells[: last + 1] + link.cells + main.cells[last + 1 :]
    return replace(schedule, lanes=(replace(main, cells=cells),), name="conventional")


class Sides:
    """All sides: our schedules on one model and one optimizer's state, and PyTorch's replicas.

    Attributes
    ----------
    runs
        By name, what runs so many steps to their end.
    k
        The one that was found for reverse first-k.
    """

    def __init__(self, transport: Transport, given: Mapping[str, Any]) -> None:
        self.transport = transport
        rng = np.random.default_rng([1, transport.rank])
        x = rng.standard_normal((given["batch"], given["width"]), np.float32)
        self.batches = [(x, rng.integers(given["width"], size=given["batch"]))]
        model = mlp(given["width"], given["depth"])
        self.runs: dict[str, Callable[[int], object]] = {}
        if given["peer"]:
            self.runs["torch"] = self._torch(model)
        optimizer = optim.SGD(model.parameters(), **SGD)
        parts: tuple[Any, Any, Any] = (model, nn.CrossEntropyLoss(), optimizer)
        network: Any = Network(transport, given["bandwidth"])
        first = ReverseFirstKExecutor(*parts, network)
        first.step(self.batches)
        first.flush()
        if given["peer"]:
            self.runs["torch"](1)
            self._compare(model)
        while first.k is None:
            first.step(self.batches)
        first.flush()
        size: dict[str, Any] = {"stages": len(first.stages), "unweighted": first.stages.unweighted}
        self.k, costs = first.k, first.costs
        schedules = {
            "waits": waiting(data_parallel(**size, fusion="none")),
            "overlap": data_parallel(**size),
            "priority": place_updates(reverse_first_k(**size, k=0, costs=costs), "forward"),
            "reverse": first.schedule,
        }
        silent: Any = Network(transport, 0)
        for name, schedule in schedules.items():
            for kind, carrier in (("", network), (", alone", silent)):
                executor = ReplicaExecutor(*parts, schedule, carrier)
                self.runs[name + kind] = self._steps(executor)
        buckets = ReplicaExecutor(*parts, schedules["overlap"], network).buckets
        self.bytes = sum(bucket.flat.nbytes for bucket in buckets.all)

        def sums(count: int) -> None:
            for _ in range(count):
                for bucket in buckets.all:
                    bucket.summed = False  # zeros, which they stay
                    buckets.begin(bucket)
                buckets.wait_all()

        self.runs["sums"] = sums

    def _steps(self, executor: ReplicaExecutor) -> Callable[[int], object]:
        def run(count: int) -> None:
            for _ in range(count):
                executor.step(self.batches)
            executor.flush()

        return run

    def _torch(self, model: nn.Sequential) -> Callable[[int], object]:
        torch = import_torch()
        torch.set_num_threads(1)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = self.transport.broadcast(free.getsockname()[1])
        torch.distributed.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=self.transport.rank, world_size=self.transport.size
        )
        self.twin = torch_twin(model)
        replica = torch.nn.parallel.DistributedDataParallel(self.twin)
        optimizer, loss = torch.optim.SGD(replica.parameters(), **SGD), torch.nn.CrossEntropyLoss()
        x, target = map(torch.from_numpy, self.batches[0])

        def run(count: int) -> None:
            for _ in range(count):
                optimizer.zero_grad()
                loss(replica(x), target).backward()
                optimizer.step()

        return run

    def _compare(self, model: nn.Sequential) -> None:
        theirs = {name: array.numpy() for name, array in self.twin.state_dict().items()}
        difference = max(float(abs(array - theirs[name]).max()) for name, array in model.parameters().items())
        refuse_difference("A step of replicas", "PyTorch", difference)

    def seconds(self, name: str, count: int) -> float:
        """Return the seconds of a step of the slowest rank; all ranks call this."""
        self.transport.barrier()
        began = time.perf_counter()
        self.runs[name](count)
        return max(self.transport.share((time.perf_counter() - began) / count))


def work(transport: Transport, given: Mapping[str, Any]) -> dict[str, Any]:
    """Measure all sides in turn; return the seconds of every round, the k that was found, and the bytes summed."""
    set_threads(1)
    sides = Sides(transport, given)
    seconds: dict[str, list[float]] = {name: [] for name in sides.runs}
    names = list(seconds)
    for name in names:
        sides.seconds(name, 1)
    for number in range(given["rounds"]):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            seconds[name].append(sides.seconds(name, given["steps"]))
    if given["peer"]:
        import_torch().distributed.destroy_process_group()
    return {"seconds": seconds, "k": sides.k, "bytes": sides.bytes}
