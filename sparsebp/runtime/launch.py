"""Starting and ending ranks together, comparing and exchanging their data, and when their actions ran."""

from __future__ import annotations

import atexit
import contextlib
import os
import platform
import signal
import sys
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NoReturn, TypeVar, cast

import numpy as np

from sparsebp.comm.launcher import last_words, launched, speak
from sparsebp.comm.mpi import TIMEOUT_SECONDS, End, MPITransport, mpi
from sparsebp.comm.nccl import NCCLTransport
from sparsebp.comm.transport import Transport
from sparsebp.core import backend, errors, threads
from sparsebp.core.check import Array, check_choice, check_flag, check_positive, shown
from sparsebp.core.errors import DeviceError, MissingDependencyError, OptionError, SparseBPError, TransportError
from sparsebp.core.files import write_figure
from sparsebp.schedule import Action, Costs, Overlap, Schedule, simulate
from sparsebp.schedule.plot import gantt
from sparsebp.schedule.simulation import Event, Simulation

_TAG = 0  # messages of one pair and tag arrive in their order, and all of a step's have been waited for


# Comparing the ranks' options and data before they begin.

T = TypeVar("T")


def check_same(transport: Transport, facts: Mapping[str, Any], own: Any = None) -> list[Any]:
    """Compare `facts` over all ranks, and return each rank's `own`, in their order: a collective call."""
    everyone = _shared(transport, "a comparison", (dict(facts), own))
    first = everyone[0][0]
    for rank, (other, _) in enumerate(everyone):
        for name in {**first, **other}:
            if first.get(name) != other.get(name):
                error = OptionError(
                    f"Ranks differ in {name}", expected=f"{shown(first.get(name))}, as on rank 0",
                    got=f"{shown(other.get(name))} on rank {rank}",
                    remedy="Start all ranks with the same options, seeds and data",
                )  # fmt: skip
                error.raised_on_all_ranks = True
                raise error
    return [value for _, value in everyone]


def collective_call(transport: Transport | None, prepare: Callable[[], T]) -> T:
    """Return ``prepare()`` once no rank has raised an error: a collective call."""
    # An error of sparsebp in `prepare` is raised on all ranks, which can go on, on the same transport. `prepare` talks
    # to other ranks by `check_same` at most; without a transport it is just called.
    if transport is None:
        return prepare()
    found: Any = None
    refusal: SparseBPError | None = None
    try:
        found = prepare()
    except TransportError:
        raise
    except SparseBPError as error:
        if error.raised_on_all_ranks:
            raise
        refusal = error
    said = None
    if refusal is not None:
        parts = refusal.problem, refusal.expected, refusal.got, refusal.remedy
        said = type(refusal).__name__, *(None if part is None else str(part) for part in parts)
    everyone = _shared(transport, "a refusal, or none", said)
    if refusal is not None:
        refusal.raised_on_all_ranks = True
        raise refusal
    for rank, other in enumerate(everyone):
        if other is not None:
            kind, problem, expected, got, remedy = other
            make: type[SparseBPError] = getattr(errors, kind, SparseBPError)
            told = make(f"Rank {rank}: {problem}", expected=expected, got=got, remedy=remedy)
            told.raised_on_all_ranks = True
            raise told
    result: T = found
    return result


def _shared(transport: Transport, what: str, value: Any) -> list[Any]:
    """Return the values of all ranks; one that shares something else is elsewhere in the program."""
    everyone = transport.share((what, value))
    for rank, other in enumerate(everyone):
        if not isinstance(other, tuple) or other[:1] != (what,):
            raise TransportError(f"Rank {rank} is at another place of the program than rank {transport.rank}",
                                 expected=what, got=shown(other),
                                 remedy="Let all ranks run the same program, with the same options")  # fmt: skip
    return [own for _, own in everyone]


def options_of(optimizer: Any) -> list[dict[str, Any]]:
    """Return the options of every group of parameters."""
    groups = getattr(optimizer, "param_groups", None)
    if groups is None:
        return [{"lr": float(optimizer.lr)}]
    return [{key: value for key, value in group.items() if key != "params"} for group in groups]


def names_of_groups(optimizer: Any) -> list[list[str]]:
    """Return the names of the parameters of every group."""
    return [list(group["params"]) for group in getattr(optimizer, "param_groups", ())]


def mark_of(options: list[dict[str, Any]]) -> float:
    """Return a checksum of an optimizer's options, to compare at every step."""
    return float(zlib.crc32(repr(options).encode()))


def check_marks(marks: Sequence[float]) -> None:
    """Compare the ranks' `mark_of`, in their order."""
    for rank, mark in enumerate(marks):
        if mark != marks[0]:
            raise TransportError(f"The optimizer of rank {rank} has other options than rank 0's",
                                 expected="the same on all ranks", got="another learning rate, or another option",
                                 remedy="Change rates on all ranks alike: by the same learning-rate schedule, or by a "
                                 "callback that reads the model")  # fmt: skip


def checksum(array: Array) -> str:
    """Return dtype, shape and a checksum of an array's values as text."""
    values = np.ascontiguousarray(backend.to_host(array))
    return f"{values.dtype} {values.shape}, checksum {zlib.crc32(values.tobytes()):08x}"


def checksums(arrays: Mapping[str, Array], what: str = "the parameter") -> dict[str, str]:
    """Return every array's `checksum` by `what` it is and its name."""
    return {f"{what} {name}": checksum(array) for name, array in arrays.items()}


# Arrays whose correct values one rank has, sent to all others.


def exchange(transport: Transport, arrays: Mapping[str, tuple[int, Array]]) -> None:
    """Write the values of each array's owner, a rank, to it on all ranks."""
    # All ranks call it together, with arrays of the same names, in the same order, of the same shapes and dtypes.
    rank, size = transport.rank, transport.size
    under_way = []
    others: dict[str, Array] = {}
    for name, (owner, array) in arrays.items():
        xp = backend.namespace(array)
        between = getattr(transport, "host", transport) if backend.is_host(xp) else transport  # NCCL's are devices
        if array.dtype.kind != "f" or array.size == 0:
            others[name] = array
            continue
        carrier = xp if between.on_device else np
        if owner == rank:
            given = carrier.ascontiguousarray(backend.as_namespace(array, carrier))
            under_way += [(between.isend(given, to, _TAG), given, None) for to in range(size) if to != rank]
        else:
            room = carrier.empty(array.shape, array.dtype)
            under_way.append((between.irecv(room, owner, _TAG), room, array))
    for handle, carried, target in under_way:
        handle.wait()
        if target is not None:
            target[...] = backend.as_namespace(carried, backend.namespace(target))
    mine = {name: backend.to_host(array).copy() for name, array in others.items() if arrays[name][0] == rank}
    for values in transport.share(mine):
        for name, value in values.items():
            others[name][...] = backend.as_namespace(value, backend.namespace(others[name]))


FORWARD_SECONDS = 0.5  # for `mpiexec` to forward an error: on a busy machine it drops what it has not read at an abort
TOGETHER_SECONDS = 0.5  # between the ends of ranks that leave together; less than others wait for a rank that left


def connect(*, device: str = "cpu", progress: bool = False, timeout: float = TIMEOUT_SECONDS) -> Transport:
    """Return the transport between the processes that ``mpiexec`` has started, of which this is one.

    From then on they end together. An uncaught error is reported to the other ranks, whose calls then raise
    `TransportError`; the rank that failed prints it, once, and all processes exit, within seconds, with a status other
    than 0. Files written by then, checkpoints among them, stay. A rank that leaves early, by ``sys.exit`` or
    ``os._exit``, also ends the run once another one waits for it; ranks that leave together keep their status.

    Ranks that run on the same cores share them: the threads of the kernels and of the BLAS are divided among the ranks
    (`sparsebp.threads.set_threads` sets another number).

    Parameters
    ----------
    device
        ``"cpu"``: `MPITransport`. ``"cuda"``: `NCCLTransport`, a GPU for each rank.
    progress, timeout
        As for `MPITransport`.

    Raises
    ------
    OptionError
        An option is invalid.
    MissingDependencyError
        mpi4py, an MPI library, or on ``"cuda"`` CuPy is not installed.
    TransportError
        This process was not started by ``mpiexec``, or by one of another MPI library.
    DeviceError
        There are fewer GPUs than ranks on a machine.
    """
    check_choice("device", device, ("cpu", "cuda"))
    check_flag("progress", progress)
    check_positive("timeout", timeout)
    ranks = launched()
    MPI = mpi()
    if ranks is None:
        raise TransportError("This process is alone", expected="several, started together", got="no mpiexec",
                             remedy="Start it by mpiexec -n 4, say")  # fmt: skip
    if MPI.COMM_WORLD.size != ranks[1]:
        raise TransportError("MPI knows other processes than the launcher has started", expected=f"{ranks[1]} ranks",
                             got=MPI.COMM_WORLD.size,
                             remedy=f"Use the mpiexec of {MPI.Get_library_version().split()[0]}")  # fmt: skip
    for rank, text in enumerate(meet(None)):
        if text is not None:
            raise TransportError(f"Rank {rank} has ended before the start", expected="all ranks to start", got=text,
                                 remedy="Start all ranks with the same command")  # fmt: skip
    transport = MPITransport(progress=progress, timeout=timeout)
    _Ending(transport).install()
    _share_cores(transport)
    if device == "cpu":
        return transport
    number = own_device(transport)
    backend.cupy().cuda.Device(number).use()
    return NCCLTransport(transport)


_met = False


def meet(ending: str | None) -> list[str | None]:
    """Wait for all ranks, and return why each is about to end; None: it goes on."""
    # MPI's start waits for all processes, forever: a process that never gets there would leave the others behind.
    global _met  # noqa: PLW0603 (processes start once)
    _met = True
    said: list[str | None] = mpi().COMM_WORLD.allgather(ending)
    return said


def take_leave(status: object) -> None:
    """Tell ranks that wait in `connect` that this process ends before it; record the status."""
    if _Ending.current is not None and isinstance(status, int):
        _Ending.current.status = status or 1
    ranks = launched()
    if ranks is None or ranks[1] == 1 or _met:
        return
    with contextlib.suppress(MissingDependencyError):  # then no rank waits
        meet(f"exit status {status}. {last_words()}".strip(" ."))


def _share_cores(transport: MPITransport) -> None:
    """Set the number of threads to this rank's share of its cores, so that ranks do not wait for each other's."""
    own = set(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else set(range(threads.most_threads()))
    everywhere = transport.share((platform.node(), own))
    sharing = sum(node == platform.node() and bool(own & cores) for node, cores in everywhere)
    threads.set_threads(min(threads.get_threads(), max(1, len(own) // sharing)))


def own_device(transport: MPITransport) -> int:
    """Return the number of this rank's GPU: ranks of one machine take one each."""
    # NCCL has a stream for every peer and direction, and from four ranks on more than CUDA's eight hardware queues,
    # where streams would wait for each other. CUDA reads it when a process first uses a device.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    MPI = mpi()
    local = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    try:
        problem, count = None, backend.cupy().cuda.runtime.getDeviceCount()
    except Exception as error:  # told below to all
        problem, count = error, 0
    rank, size = local.rank, local.size
    local.Free()
    for other, (text, found, wanted) in enumerate(transport.share((problem and str(problem), count, size))):
        if text is not None:
            raise problem or DeviceError(f"Rank {other} has no GPU", got=text)
        if found < wanted:
            raise DeviceError("There is no GPU for every rank",
                              expected=f"{wanted} GPUs on the machine of rank {other}", got=found,
                              remedy="Start fewer ranks on it, or train on the CPUs")  # fmt: skip
    return rank


class _Ending:
    """Makes the processes of a run end together."""

    current: _Ending | None = None

    def __init__(self, transport: MPITransport) -> None:
        self._transport = transport
        self._failed = False
        self._told = True
        self.status = 1  # in case one of the others does not hear of a failure

    def install(self) -> None:
        _Ending.current = self
        before = sys.excepthook

        def hook(kind: Any, error: BaseException, trace: Any) -> None:
            if not self.failed(error):
                return
            ends = self._transport.peers.ends.values()
            if isinstance(error, TransportError) and any(end.left for end in ends):  # where it waited is no help
                error, trace = error.with_traceback(None), None
                error.__suppress_context__ = True
            before(kind, error, trace)

        at_once, own = os._exit, os.getpid()

        def leave_at_once(status: int) -> NoReturn:
            at_once(self.at_once(status) if os.getpid() == own else status)  # children are not affected

        sys.excepthook, os._exit = hook, leave_at_once
        atexit.register(self.leave)  # before MPI's own end, which waits for all ranks forever

    def at_once(self, status: int) -> int:
        """Return the status for ``os._exit``, which `leave` and MPI do not see: not 0 if others still work."""
        # `mpiexec` ends those at once, and reports that status.
        peers = self._transport.peers
        if len(peers.ends) == peers.size:  # all have told their end
            return status
        peers.tell(End(left=f"os._exit({status})"))
        if peers.settle(TOGETHER_SECONDS):
            return status
        error = TransportError(f"Rank {peers.rank} has left by os._exit({status}) while others work",
                               expected="the end of all ranks",
                               got=f"the end of {len(peers.ends)} of {peers.size}",
                               remedy="Let all come to their end, or raise an error")  # fmt: skip
        speak()
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return status or 1

    def failed(self, error: BaseException) -> bool:
        """Tell the others, and return whether this rank prints its error; the process is about to end."""
        with contextlib.suppress(ValueError):  # not the main thread
            # A Ctrl-C, or a scheduler's SIGTERM, reaches every rank: of this one perhaps only now, after another's end.
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)
        self._transport.abort(error)
        self._failed = True
        self._told = self._transport.peers.settle()
        speaks = self._transport.peers.speaker() == self._transport.rank
        if speaks:
            speak()
        return speaks

    def leave(self) -> None:
        """Tell the others, and wait for them; end them if one of them cannot hear of a failure."""
        peers = self._transport.peers
        if not self._failed:
            peers.tell(End())
            self._told = peers.settle(None) or peers.settle()
        self._transport.close()
        if not self._told:
            sys.stdout.flush()
            sys.stderr.flush()
            time.sleep(FORWARD_SECONDS)
            mpi().COMM_WORLD.Abort(self.status)


def speaks(error: BaseException) -> bool:
    """Tell the other ranks of an error that ends this process, and return whether this rank prints it."""
    # The lowest rank that failed by itself prints; before `connect`, where all ranks fail alike, rank 0.
    if _Ending.current is not None:
        return _Ending.current.failed(error)
    ranks = launched()
    return ranks is None or ranks[0] == 0


# When the actions of a step ran, on all ranks, compared with the simulation of the same durations.

Times = Mapping[Action, tuple[float, float]]
"""When actions began and ended, in seconds of ``time.perf_counter()`` of the rank that ran them."""
_ROUNDS = 20


@dataclass(frozen=True)
class Timeline:
    """A measured step, with the attributes of a `Simulation` that `sparsebp.schedule.plot` draws.

    Attributes
    ----------
    schedule
        The schedule that ran.
    events
        All actions, sorted by start; the first begins at 0. Seconds.
    uncertainty
        Seconds by which a rank's clock may differ from rank 0's after correction.
    """

    schedule: Schedule
    events: tuple[Event, ...]
    uncertainty: float
    steps: int = 1
    transfers: tuple[Any, ...] = ()

    @property
    def makespan(self) -> float:
        """The time from the start of the first action to the end of the last."""
        return max((event.end for event in self.events), default=0.0)

    @property
    def bubble(self) -> float:
        """The share of the time in which ranks compute nothing, from 0 to 1."""
        busy = sum(event.end - event.start for event in self.events)
        return max(0.0, 1 - busy / (self.schedule.workers * self.makespan)) if self.makespan > 0 else 0.0

    def simulated(self) -> Simulation:
        """Return the simulation with these durations, means over micro-batches, and messages that take no time."""
        found: dict[tuple[str, int], list[float]] = defaultdict(list)
        for event in self.events:
            action = cast(Action, event.cell)
            found[action.kind, action.stage].append(event.end - event.start)
        means = {key: fmean(times) for key, times in found.items()}
        overlaps = any(isinstance(cell, Overlap) for lane in self.schedule.lanes for cell in lane.cells)
        return simulate(self.schedule, Costs(
            lambda action: means.get((action.kind, action.stage), 0.0),
            slowdown=2.0 if overlaps else 1.0,  # a rank runs F, then B
        ))  # fmt: skip


def clock_offset(transport: Transport) -> tuple[float, float]:
    """Return the offset of rank 0's ``time.perf_counter()`` from this rank's, and its uncertainty; all ranks call it.

    Each asks rank 0 for the time, and takes the fastest answer: it was written between question and answer.
    """
    question, answer = np.zeros(1), np.zeros(1)
    best = (0.0, 0.0 if transport.rank == 0 else np.inf)
    for rank in range(1, transport.size):
        for _ in range(_ROUNDS):
            if transport.rank == 0:
                transport.irecv(question, rank, _TAG).wait()
                transport.isend(np.array([time.perf_counter()]), rank, _TAG).wait()
            elif transport.rank == rank:
                begun = time.perf_counter()
                transport.isend(question, 0, _TAG).wait()
                transport.irecv(answer, 0, _TAG).wait()
                ended = time.perf_counter()
                best = min(best, (float(answer[0]) - (begun + ended) / 2, (ended - begun) / 2), key=lambda one: one[1])
    return best


def measured(transport: Transport, schedule: Schedule, times: Times) -> Timeline | None:
    """Return the timeline of a step on all ranks, which all call this; None where no rank has run a step."""
    transport = getattr(transport, "host", transport)  # messages of a few bytes go from host to host
    offset, uncertainty = clock_offset(transport)
    own = [(*action, begin + offset, end + offset) for action, (begin, end) in times.items()]
    events, worst = [], 0.0
    lanes = {lane.worker: number for number, lane in reversed(list(enumerate(schedule.lanes)))}
    for rank, (rows, error) in enumerate(transport.share((own, uncertainty))):
        worst = max(worst, error)
        for stage, kind, microbatch, begin, end in rows:
            events.append(Event(Action(stage, kind, microbatch), lanes[rank], begin, end, (None,), 0))
    if not events:
        return None
    first = min(event.start for event in events)
    events = [event._replace(start=event.start - first, end=event.end - first) for event in events]
    return Timeline(schedule, tuple(sorted(events, key=lambda event: event.start)), worst)


def save_timeline(timeline: Timeline, path: Path) -> None:
    """Write a picture of a timeline, and of the simulation with the same durations below it, on one scale of seconds.

    Raises
    ------
    MissingDependencyError
        matplotlib is not installed.
    OutputError
        The file cannot be written.
    """
    simulated = timeline.simulated()
    height = 1.6 + 0.5 * timeline.schedule.workers
    ax = gantt(cast(Simulation, timeline), memory=False)
    figure = ax.figure
    figure.set_size_inches(figure.get_size_inches()[0], 2 * height)
    figure.delaxes(ax)
    above, below = figure.subplots(2, 1, sharex=True, gridspec_kw={"hspace": 0.55})
    gantt(cast(Simulation, timeline), above, memory=False)
    gantt(simulated, below, memory=False)
    for name, one, run in (("measured", above, timeline), ("simulated, messages at once", below, simulated)):
        title = f"{timeline.schedule.name}: ".removeprefix(": ")
        one.set_title(f"{title}{name}, {1e3 * run.makespan:.3g} ms, idle {run.bubble:.1%}", loc="left", fontsize=10,
                      pad=18)  # fmt: skip
    below.set_xlim(0, max(timeline.makespan, simulated.makespan))
    above.set_xlabel("")
    below.set_xlabel("seconds")
    write_figure(figure, path)
