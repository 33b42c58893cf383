"""Programs that end in their own ways: ``mpiexec -n 3 python -m mpi.programs NAME``. See ``test_ends.py``."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from typing import Any

import numpy as np

from sparsebp.comm import mpi
from sparsebp.comm.transport import Transport
from sparsebp.runtime.launch import connect

sys.modules["pandas"] = None  # type: ignore[assignment]  # scikit-learn imports it where it is, which takes a second


def fine(transport: Transport) -> None:
    array = np.full(1000, 1.0 + transport.rank)
    transport.allreduce(array).wait()
    if transport.rank == 0:
        print("sum", array[0])


def late(transport: Transport) -> None:
    """A rank has nothing to do any more while the others still work."""
    if transport.rank == 0:
        time.sleep(1.5)
        transport.isend(np.ones(3), 1, 0).wait()
    if transport.rank == 1:
        transport.irecv(np.ones(3), 0, 0).wait()
        print("received")


def one_raises(transport: Transport) -> None:
    if transport.rank == 1:
        raise ValueError("out of paper")
    transport.allreduce(np.ones(10)).wait()


def one_raises_while_others_compute(transport: Transport) -> None:
    if transport.rank == 1:
        raise ValueError("out of paper")
    time.sleep(300)


def all_raise(transport: Transport) -> None:
    transport.barrier()
    raise ValueError("out of paper")


def messages_are_left(transport: Transport) -> None:
    """A failure among messages that nobody receives, and receives that nothing comes for."""
    kept = [transport.isend(np.ones(1_000_000), rank, 7) for rank in range(transport.size) if rank != transport.rank]
    kept += [transport.irecv(np.ones(1_000_000), rank, 8) for rank in range(transport.size) if rank != transport.rank]
    one_raises(transport)


def closes_first(transport: Transport) -> None:
    """As users write it: ``try: … finally: transport.close()``."""
    try:
        one_raises(transport)
    finally:
        transport.close()


def closes(transport: Transport) -> None:
    transport.barrier()
    transport.close()


def one_is_killed(transport: Transport) -> None:
    if transport.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    transport.allreduce(np.ones(10)).wait()


def one_ends_early(transport: Transport) -> None:
    if transport.rank != 1:
        transport.allreduce(np.ones(10)).wait()


def one_leaves_training(transport: Transport) -> None:
    from mpi.cases_pipeline import Leaves, fit

    fit(transport, callbacks=[Leaves()])


def one_leaves_at_once(transport: Transport) -> None:
    if transport.rank == 1:
        os._exit(0)
    transport.allreduce(np.ones(10)).wait()


def all_leave_training(transport: Transport) -> None:
    """Every rank finds that there is no more data, and leaves."""
    from mpi.cases_pipeline import NoData, fit

    fit(transport, data=NoData(np.ones((20, 7)), np.zeros(20, np.int64)))


def interrupted(transport: Transport) -> None:
    transport.barrier()
    if transport.rank == 0:
        print("ready", flush=True)
    if transport.rank == 1:
        time.sleep(300)
    transport.barrier()


def one_is_stopped(transport: Transport) -> None:
    """Rank 1 of 3 stands still for a while; rank 2 waits for rank 0, which waits for rank 1."""
    mpi.SILENT_SECONDS = 1.5
    if transport.rank == 1:
        subprocess.Popen(["sh", "-c", f"sleep 4; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
        transport.isend(np.ones(3), 0, 0).wait()
    elif transport.rank == 0:
        transport.irecv(np.ones(3), 1, 0).wait()
        transport.isend(np.ones(3), 2, 0).wait()
    else:
        transport.irecv(np.ones(3), 0, 0).wait()
    transport.barrier()


def one_stands_still(transport: Transport) -> None:
    """Rank 1 answers no more."""
    mpi.SILENT_SECONDS = 1.5
    if transport.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    transport.barrier()


def no_gpu(transport: Transport) -> None:
    connect(device="cuda")


def command_line(transport: Transport | None) -> None:
    """What ``sparsebp`` does, with the further arguments."""
    from sparsebp.cli.main import main

    main(sys.argv[2:])


def signalled(transport: Transport | None) -> None:
    """What ``sparsebp`` does; the third step of one rank gets a signal. The next arguments: its name, the rank."""
    from sparsebp.cli.main import main
    from sparsebp.train.runner import Runner

    step, calls = Runner.step, itertools.count(1)

    def signals(self: Runner, *given: Any) -> None:
        if next(calls) == 3 and self.run.transport.rank == int(sys.argv[3]):
            signal.raise_signal(getattr(signal, sys.argv[2]))
        step(self, *given)

    Runner.step = signals  # type: ignore[method-assign]
    main(sys.argv[4:])


def interrupted_unheard(transport: Transport) -> None:
    """Rank 0 ends by a status of its own, as ``sparsebp`` does, while rank 1 hears nothing for a minute."""
    from sparsebp.runtime.launch import announce_exit, reports_error

    transport.barrier()
    if transport.rank:
        time.sleep(60)
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt as error:
        reports_error(error)
        announce_exit(143)
        raise SystemExit(143) from None


def fails_in_training(transport: Transport) -> None:
    """The rank of the loss fails in the second epoch; the folder is the next argument."""
    from sparsebp.train.config import build, config_for

    config = config_for("digits", samples=64, epochs=3, schedule="gpipe", accumulate=2)
    run = build(config, transport=transport, checkpoint_dir=sys.argv[2])
    forward, calls = run.trainer.loss.forward, itertools.count()

    def fails(*given: Any) -> Any:
        if transport.rank == transport.size - 1 and run.trainer.history.epochs and next(calls) == 3:
            raise ValueError("out of paper")
        return forward(*given)

    run.trainer.loss.forward = fails
    run.fit()


if __name__ == "__main__" and sys.argv[1] in ("command_line", "signalled"):
    globals()[sys.argv[1]](None)
elif __name__ == "__main__":
    globals()[sys.argv[1]](connect(**({"timeout": 2.0} if sys.argv[1] == "one_stands_still" else {})))
