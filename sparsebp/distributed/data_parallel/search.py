"""Reverse first-k scheduling whose k is searched with costs measured while training."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from sparsebp import backend
from sparsebp.core.errors import OptionError
from sparsebp.distributed.data_parallel.executor import Indices, ReplicaExecutor
from sparsebp.distributed.transport import Transport
from sparsebp.runtime.candidates import REPEATED
from sparsebp.runtime.measure import TimedExecutor, measured_costs
from sparsebp.runtime.stages import Stages, trained_parameters
from sparsebp.runtime.step import Batch, Step, Watch
from sparsebp.schedule import Action, Costs, Kind, Schedule, StageBytes, simulate
from sparsebp.schedule.builders import place_updates, reverse_first_k, search_k
from sparsebp.schedule.files.cost_file import Durations

MEASURED = 5
"""Steps that are measured; one before them is not."""


class TimedReplica(TimedExecutor, ReplicaExecutor):
    """A `ReplicaExecutor` that notes when every action ran, on a clock that stands still while it waits for sums."""

    def _stamp(self) -> Any:
        stamp = super()._stamp()
        return stamp - self.buckets.waited if isinstance(stamp, float) else stamp

    def _bytes_of(self, action: Action, step: Step) -> StageBytes:
        if len(step.batches[action.microbatch or 0][1]):
            return super()._bytes_of(action, step)
        return StageBytes(0, 0, 0)  # another rank has the samples, and rank 0 decides

    def costs(self, sums: Mapping[int, float]) -> Costs:
        """Return the costs of all actions noted, and of sums of every stage that take so many seconds."""
        noted = measured_costs(self.spans(), self.bytes)
        kinds: tuple[Kind, ...] = ("F", "I", "W", "U")
        if not backend.is_host(self._xp):  # whose clock does not stand still; no k changes what updates take
            kinds = kinds[:3]
        entries = {f"{stage}S": seconds for stage, seconds in sums.items()}
        for kind in kinds:
            entries |= {f"{stage}{kind}": noted.duration(Action(stage, kind, 0)) for stage in sums}
        return replace(noted, durations=Durations(entries))

    def sum_seconds(self, repeated: int = 3) -> dict[int, float]:
        """Return how long the sums of every stage take while nothing else is done; all ranks call this."""
        transport = self.transport
        found = dict.fromkeys(range(len(self.stages)), 0.0)
        stage_of = {name: number for number, stage in enumerate(self.stages.all) for name in stage.parameters.values()}
        for bucket in self.buckets.all:
            scratch, seconds = backend.namespace(bucket.flat).zeros_like(bucket.flat), []
            for _ in range(repeated):
                transport.barrier()
                began = time.perf_counter()
                transport.allreduce(scratch).wait()
                backend.synchronize(backend.namespace(scratch))  # synchronize!
                seconds.append(time.perf_counter() - began)
            for name, size in bucket.sizes.items():
                found[stage_of[name]] += median(seconds) * size / max(1, bucket.flat.size)
        return found


class ReverseFirstKExecutor:
    """Replicas that measure their first steps, search the k of reverse first-k scheduling, and go on with that.

    Offers what `ReplicaExecutor` does. Rank 0 decides, from the durations of its own actions and of the sums, and tells
    the others; the results are those of any other schedule. Updates come right before the next forwards.

    Parameters
    ----------
    model, loss, optimizer, transport, clip_norm, watch, sharded
        As `ReplicaExecutor` takes them.
    steps
        How many are measured.

    Attributes
    ----------
    k
        How many stages' weight gradients come last, in the order of the next forwards; None until it is known.
    costs
        The measured ones, on all ranks those of rank 0; None until then.

    Notes
    -----
    Oh et al., "Out-of-order backprop", EuroSys 2022, §5.1 and Algorithm 2; `sparsebp.schedule.builders.search_k`.
    """

    def __init__(
        self, model: Any, loss: Any, optimizer: Any, transport: Transport, *, clip_norm: float | None = None,
        watch: Watch | None = None, sharded: bool = False, steps: int = MEASURED,
    ) -> None:  # fmt: skip
        self._parts = model, loss, optimizer
        self._options: dict[str, Any] = {
            "transport": transport, "clip_norm": clip_norm, "watch": watch, "sharded": sharded,
        }  # fmt: skip
        self.transport, self._wanted, self._left = transport, steps, steps + 1
        self.k: int | None = None
        self.costs: Costs | None = None
        self.stages = Stages(model, trained_parameters(model, optimizer))
        self._executor: ReplicaExecutor = TimedReplica(*self._parts, self._schedule(0), **self._options)

    def _schedule(self, k: int) -> Schedule:
        size: dict[str, Any] = {"stages": len(self.stages), "unweighted": self.stages.unweighted}
        return place_updates(reverse_first_k(**size, k=k, costs=self.costs), "forward")

    def step(self, batches: Sequence[Batch], tag: Any = None) -> list[Step]:
        """Run one step; see `ReplicaExecutor.step`.

        Raises
        ------
        OptionError
            It has several micro-batches.
        """
        if len(batches) != 1:
            raise OptionError("Reverse first-k scheduling is for one micro-batch a step", expected="accumulate=1",
                              got=len(batches), remedy="Use another schedule, or a smaller batch")  # fmt: skip
        timed = self._executor if isinstance(self._executor, TimedReplica) else None
        if timed is not None:
            timed.counts = self._left <= self._wanted
        done = self._executor.step(batches, tag)
        if timed is not None:
            self._left -= 1
            if self._left == 0:
                done += timed.flush()
                self._search(timed)
        return done

    def _search(self, timed: TimedReplica) -> None:
        sums, found = timed.sum_seconds(), None
        if self.transport.rank == 0:
            self.costs = timed.costs(sums)
            found = self._best(), self.costs
        self.k, self.costs = self.transport.broadcast(found)
        timed.close()
        self._executor = ReplicaExecutor(*self._parts, self._schedule(self.k), **self._options)

    def _best(self) -> int:
        """Return the k of the shortest simulated steps; of several, since sums go on into the next one."""
        return search_k(lambda k: -simulate(self._schedule(k), self.costs, steps=REPEATED).makespan, len(self.stages))

    @property
    def schedule(self) -> Schedule:
        """The schedule of the steps by now."""
        return self._executor.schedule

    @property
    def pending(self) -> bool:
        """Whether parameters are still to be updated."""
        return self._executor.pending

    @property
    def uncaptured(self) -> tuple[str, ...]:
        """As `Executor` has it."""
        return self._executor.uncaptured

    @property
    def state_bytes(self) -> int:
        """The bytes of optimizer state that this rank needs for its steps."""
        return self._executor.state_bytes

    def own(self, indices: Indices) -> Indices:
        """Return which of a micro-batch's samples this rank computes; see `ReplicaExecutor.own`."""
        return self._executor.own(indices)

    def gather_state(self, *, everywhere: bool = False) -> None:
        """Make the optimizer's state whole; see `ReplicaExecutor.gather_state`."""
        self._executor.gather_state(everywhere=everywhere)

    def flush(self, *, wait: bool = True) -> list[Step]:
        """Do what the last step has left over; see `ReplicaExecutor.flush`."""
        return self._executor.flush(wait=wait)

    def close(self) -> None:
        """Give up what `flush` has not done; see `ReplicaExecutor.close`."""
        self._executor.close()
