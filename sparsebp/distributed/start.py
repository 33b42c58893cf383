"""How processes find each other at the start, and how they end together, with one error message."""

from __future__ import annotations

import atexit
import contextlib
import os
import platform
import signal
import sys
from typing import Any, NoReturn

from sparsebp import backend
from sparsebp.core import threads
from sparsebp.core.arguments import check_choice, check_flag
from sparsebp.core.errors import DeviceError, MissingDependencyError, TransportError
from sparsebp.distributed.transport import Transport
from sparsebp.distributed.transports.mpi import MPITransport, check_timeout, mpi
from sparsebp.distributed.transports.processes.launcher import last_words, launched, speak
from sparsebp.distributed.transports.processes.peers import TIMEOUT_SECONDS, End

ALIKE_SECONDS = 0.5  # between the ends of ranks that leave together; less than others wait for one that has left


def connect(*, device: str = "cpu", progress: bool = False, timeout: float = TIMEOUT_SECONDS) -> Transport:
    """Return the transport between the processes that ``mpiexec`` has started, of which this is one.

    From then on they end together. An error that nobody catches is told to the other ranks, whose calls raise
    `TransportError`; it is printed once, by the rank that has failed, and all processes exit, within seconds, with a
    status other than 0. What a rank had written by then, checkpoints among it, stays. So does a rank end the run that
    leaves early, by ``sys.exit`` or ``os._exit``, once another one waits for it; ranks that leave together have their
    own status.

    Ranks that run on the same cores share them: the threads of the kernels and of the BLAS are lowered to as many as
    there are for each (`sparsebp.threads.set_threads` sets another number).

    Parameters
    ----------
    device
        ``"cpu"``: `MPITransport`. ``"cuda"``: `NCCLTransport`, a GPU for each rank.
    progress, timeout
        As `MPITransport` takes them.

    Raises
    ------
    OptionError
        `device` is another one, `progress` no truth value, or `timeout` no positive number.
    MissingDependencyError
        mpi4py, an MPI library, or on ``"cuda"`` CuPy is not installed.
    TransportError
        This process was not started by ``mpiexec``, or by one of another MPI library.
    DeviceError
        There are fewer GPUs than ranks on a machine.
    """
    check_choice("device", device, ("cpu", "cuda"))
    check_flag("progress", progress)
    check_timeout(timeout)
    ranks = launched()
    MPI = mpi()
    if ranks is None:
        raise TransportError("This process is alone", expected="several, started together", got="no mpiexec",
                             remedy="Start it by mpiexec -n 4, say")  # fmt: skip
    if MPI.COMM_WORLD.size != ranks[1]:
        raise TransportError(
            "MPI knows other processes than the launcher has started", expected=f"{ranks[1]} ranks",
            got=MPI.COMM_WORLD.size, remedy=f"Use the mpiexec of {MPI.Get_library_version().split()[0]}",
        )  # fmt: skip
    for rank, text in enumerate(meet(None)):
        if text is not None:
            raise TransportError(f"Rank {rank} has ended before the start", expected="all ranks to start", got=text,
                                 remedy="Start all ranks with the same command")  # fmt: skip
    transport = MPITransport(progress=progress, timeout=timeout)
    _Ending(transport).install()
    _share_cores(transport)
    if device == "cpu":
        return transport
    from sparsebp.distributed.transports.nccl import NCCLTransport

    number = own_device(transport)

    backend.cupy().cuda.Device(number).use()
    return NCCLTransport(transport)


_met = False


def meet(ending: str | None) -> list[str | None]:
    """Wait for all ranks, each of which says why it is about to end, or None: it goes on.

    MPI's own start waits for all processes, for ever: one that never comes there would leave the others behind.
    """
    global _met  # noqa: PLW0603 (processes start once)
    _met = True
    said: list[str | None] = mpi().COMM_WORLD.allgather(ending)
    return said


def take_leave(status: object) -> None:
    """Tell ranks that wait in `connect` that this process ends without having come there; note the status."""
    if _Ending.current is not None and isinstance(status, int):
        _Ending.current.status = status or 1
    ranks = launched()
    if ranks is None or ranks[1] == 1 or _met:
        return
    with contextlib.suppress(MissingDependencyError):  # then no rank waits
        meet(f"exit status {status}. {last_words()}".strip(" ."))


def _share_cores(transport: MPITransport) -> None:
    """Set the number of threads to this rank's share of its cores: more would wait for those of other ranks."""
    own = set(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else set(range(threads.most_threads()))
    everywhere = transport.share((platform.node(), own))
    sharing = sum(node == platform.node() and bool(own & cores) for node, cores in everywhere)
    threads.set_threads(min(threads.get_threads(), max(1, len(own) // sharing)))


def own_device(transport: MPITransport) -> int:
    """Return the number of the GPU that is this rank's: ranks of one machine take one each.

    Raises
    ------
    DeviceError
        There are too few, on the machine of some rank.
    MissingDependencyError
        CuPy is not installed there.
    """

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
            raise DeviceError(
                "There is no GPU for every rank", expected=f"{wanted} GPUs on the machine of rank {other}", got=found,
                remedy="Start fewer ranks on it, or train on the CPUs",
            )  # fmt: skip
    return rank


class _Ending:
    """Lets the processes of a run end together."""

    current: _Ending | None = None

    def __init__(self, transport: MPITransport) -> None:
        self._transport = transport
        self._failed = False
        self._told = True
        self.status = 1  # with which this process ends the others, should one of them not hear of a failure

    def install(self) -> None:
        _Ending.current = self
        before = sys.excepthook

        def hook(kind: Any, error: BaseException, trace: Any) -> None:
            if not self.failed(error):
                return
            ends = self._transport.peers.ends.values()
            if isinstance(error, TransportError) and any(end.left for end in ends):  # where it waited tells nothing
                error, trace = error.with_traceback(None), None
                error.__suppress_context__ = True
            before(kind, error, trace)

        at_once, own = os._exit, os.getpid()

        def leave_at_once(status: int) -> NoReturn:
            at_once(self.at_once(status) if os.getpid() == own else status)  # children do as they like

        sys.excepthook, os._exit = hook, leave_at_once
        atexit.register(self.leave)  # before MPI's own end, which waits for all, for ever

    def at_once(self, status: int) -> int:
        """Return the status for ``os._exit``, of which neither `leave` nor MPI would hear: not 0 if others still work.

        ``mpiexec`` ends those at once, and reports that status.
        """
        peers = self._transport.peers
        if len(peers.ends) == peers.size:  # all have told their end
            return status
        peers.tell(End(left=f"os._exit({status})"))
        if peers.settle(ALIKE_SECONDS):
            return status
        error = TransportError(
            f"Rank {peers.rank} has left by os._exit({status}) while others work", expected="the end of all ranks",
            got=f"that of {len(peers.ends)} of {peers.size}", remedy="Let all come to their end, or raise an error",
        )  # fmt: skip
        speak()
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return status or 1

    def failed(self, error: BaseException) -> bool:
        """Tell the others, and return whether it is for this rank to print its error; the process is about to end."""
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
        """Tell the others, and wait for them; ends them if one of them cannot hear of a failure."""
        peers = self._transport.peers
        if not self._failed:
            peers.tell(End())
            self._told = peers.settle(None) or peers.settle()
        self._transport.close()
        if not self._told:
            sys.stdout.flush()
            sys.stderr.flush()
            mpi().COMM_WORLD.Abort(self.status)


def speaks(error: BaseException) -> bool:
    """Tell the other ranks of an error that ends this process, and return whether it is for this one to print it.

    It is for the lowest rank that failed by itself; before `connect`, where all ranks fail alike, for rank 0; and of
    course for a process that is alone.
    """
    if _Ending.current is not None:
        return _Ending.current.failed(error)
    ranks = launched()
    return ranks is None or ranks[0] == 0
