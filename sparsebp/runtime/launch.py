"""Ranks start and end together."""

from __future__ import annotations

import atexit
import contextlib
import os
import platform
import signal
import sys
import time
from typing import Any, NoReturn

from sparsebp.comm.launcher import launched, restore_stderr, stderr_tail
from sparsebp.comm.mpi import TIMEOUT_SECONDS, End, MPITransport, mpi
from sparsebp.comm.nccl import NCCLTransport
from sparsebp.comm.transport import Transport
from sparsebp.core import backend, threads
from sparsebp.core.check import check_choice, check_flag, check_positive
from sparsebp.core.errors import DeviceError, MissingDependencyError, TransportError

FORWARD_SECONDS = 0.5  # for `mpiexec` to forward an error: on a busy machine it drops what it has not read at an abort
JOINT_EXIT_SECONDS = 0.5  # between the ends of ranks that leave together; less than others wait for a rank that left


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
    for rank, text in enumerate(gather_exits(None)):
        if text is not None:
            raise TransportError(f"Rank {rank} has ended before the start", expected="all ranks to start", got=text,
                                 remedy="Start all ranks with the same command")  # fmt: skip
    transport = MPITransport(progress=progress, timeout=timeout)
    _RunEnd(transport).install()
    _share_cores(transport)
    if device == "cpu":
        return transport
    number = own_device(transport)
    backend.cupy().cuda.Device(number).use()
    return NCCLTransport(transport)


_gathered = False


def gather_exits(ending: str | None) -> list[str | None]:
    """Wait for all ranks, and return why each is about to end; None: it goes on."""
    # MPI's start waits for all processes, forever: a process that never gets there would leave the others behind.
    global _gathered  # noqa: PLW0603 (processes start once)
    _gathered = True
    said: list[str | None] = mpi().COMM_WORLD.allgather(ending)
    return said


def announce_exit(status: object) -> None:
    """Tell ranks that wait in `connect` that this process ends before it; record the status."""
    if _RunEnd.current is not None and isinstance(status, int):
        _RunEnd.current.status = status or 1
    ranks = launched()
    if ranks is None or ranks[1] == 1 or _gathered:
        return
    with contextlib.suppress(MissingDependencyError):  # then no rank waits
        gather_exits(f"exit status {status}. {stderr_tail()}".strip(" ."))


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


class _RunEnd:
    """Makes the processes of a run end together."""

    current: _RunEnd | None = None

    def __init__(self, transport: MPITransport) -> None:
        self._transport = transport
        self._failed = False
        self._told = True
        self.status = 1  # in case one of the others does not hear of a failure

    def install(self) -> None:
        _RunEnd.current = self
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
            at_once(self.status_at_exit(status) if os.getpid() == own else status)  # children are not affected

        # Python calls nothing at `os._exit`, and MPICH's `mpiexec` then ends the others, in the middle of their work,
        # without a word and with this rank's status: 0 would pass for a success.
        sys.excepthook, os._exit = hook, leave_at_once
        atexit.register(self.leave)  # before MPI's own end, which waits for all ranks forever

    def status_at_exit(self, status: int) -> int:
        """Return the status for ``os._exit``: not 0 if others still work."""
        peers = self._transport.peers
        if len(peers.ends) == peers.size:  # all have told their end
            return status
        peers.tell(End(left=f"os._exit({status})"))
        if peers.settle(JOINT_EXIT_SECONDS):
            return status
        error = TransportError(f"Rank {peers.rank} has left by os._exit({status}) while others work",
                               expected="the end of all ranks",
                               got=f"the end of {len(peers.ends)} of {peers.size}",
                               remedy="Let all come to their end, or raise an error")  # fmt: skip
        restore_stderr()
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
        reports = self._transport.peers.reporting_rank() == self._transport.rank
        if reports:
            restore_stderr()
        return reports

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


def reports_error(error: BaseException) -> bool:
    """Tell the other ranks of an error that ends this process, and return whether this rank prints it."""
    # The lowest rank that failed by itself prints; before `connect`, where all ranks fail alike, rank 0.
    if _RunEnd.current is not None:
        return _RunEnd.current.failed(error)
    ranks = launched()
    return ranks is None or ranks[0] == 0
