"""Threads of kernels and BLAS: settings persist, nothing leaks, results do not depend on the thread."""

from __future__ import annotations

import linecache
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import threadpoolctl

import sparsebp as sb
from sparsebp.core import threads
from sparsebp.core.errors import OptionError
from sparsebp.nn import GRU, CrossEntropyLoss, Linear, SequenceClassifier

needs_two = pytest.mark.skipif(threads.most_threads() < 2, reason="needs two threads")


def blas() -> set[int]:
    """The numbers of threads of NumPy's and SciPy's BLAS."""
    everywhere, here = threads._numpy_blas()
    return {int(library.get_num_threads()) for library in (*everywhere, *here)}


def told() -> set[int]:
    """The same as `thread_counts` tells them; a BLAS loaded later, as a benchmark's MKL, follows on its own thread."""
    counts = threads.thread_counts()
    return {counts[os.path.basename(each.filepath)] for libraries in threads._numpy_blas() for each in libraries}


def in_thread(work: Callable[[], Any]) -> Any:
    """Run something in a thread of its own; return what it returns, raise what it raises."""
    result: list[Any] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            result.append(work())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return result[0]


# ---- numbers -------------------------------------------------------------------------------------------------------


def test_threads_are_set_for_the_whole_process() -> None:
    for count in {1, threads.most_threads()}:
        assert set(threads.set_threads(count).values()) == {count}
        assert set(threads.thread_counts().values()) == {count}
        assert in_thread(threads.get_threads) == in_thread(threads.count) == threads.get_threads() == count
        assert blas() == {count}


@pytest.mark.parametrize("bad", [0, -1, 10_000, 1.5, "2", None, True])
def test_numbers_that_cannot_be_had_are_refused(bad: Any) -> None:
    before = threads.thread_counts()
    with pytest.raises(OptionError) as caught:
        threads.set_threads(bad)
    assert caught.value.remedy
    assert threads.thread_counts() == before


def test_the_most_threads_are_numbas() -> None:
    import numba

    assert threads.most_threads() == numba.config.NUMBA_NUM_THREADS


# ---- BLAS ----------------------------------------------------------------------------------------------------------


@needs_two
@pytest.mark.parametrize("where", [lambda work: work(), in_thread], ids=["main", "worker"])
def test_one_blas_thread_holds_inside_and_ends_outside(where: Callable[[Callable[[], Any]], Any]) -> None:
    threads.set_threads(2)  # by the main thread, which threadpoolctl 3.8 then lets alone change it

    def work() -> None:
        with threads.one_blas_thread():
            assert blas() == {1}
            with threads.one_blas_thread():
                assert blas() == {1}
            assert blas() == {1}
        assert blas() == {2}
        with pytest.raises(ZeroDivisionError), threads.one_core():
            assert blas() == {1} and threads.count() == 1
            _ = 1 / 0

    where(work)
    assert blas() == {2} and threads.count() == 2


@needs_two
def test_threads_set_by_a_worker_hold() -> None:
    threads.set_threads(2)
    in_thread(lambda: threads.set_threads(1))
    assert told() == {threads.count()} == {1} == blas()


@needs_two
def test_blocks_of_two_threads_end_in_any_order() -> None:
    threads.set_threads(2)
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with threads.one_blas_thread():
            entered.set()
            leave.wait(60)

    thread = threading.Thread(target=other)
    with threads.one_blas_thread():
        thread.start()
        assert entered.wait(60)
    everywhere, _ = threads._numpy_blas()
    assert {int(library.get_num_threads()) for library in everywhere} <= {1}  # the other one is still inside
    leave.set()
    thread.join()
    assert blas() == {2}


@needs_two
def test_what_is_set_inside_comes_after() -> None:
    threads.set_threads(2)
    with threads.one_blas_thread():
        threads.set_threads(1)
        threads.set_threads(2)
        assert blas() == {1}
    assert blas() == {2}
    with threads.one_blas_thread():
        threads.set_threads(1)
    assert blas() == {1}


def test_a_kernel_keeps_one_blas_thread_whatever_another_thread_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    most, setting, numbers = threads.most_threads(), threads._set, []
    with threads.one_blas_thread():

        def noting(library: Any, number: int) -> None:
            if not library.by_thread:
                numbers.append(number)
            setting(library, number)

        monkeypatch.setattr(threads, "_set", noting)
        for count in (most, 1, most):
            in_thread(lambda count=count: threads.set_threads(count))
        assert set(numbers) <= {1} and set(threads._process.wanted) <= {most}
        everywhere, _ = threads._numpy_blas()
        assert {library.get_num_threads() for library in everywhere} <= {1}
    assert blas() == {most}


@needs_two
def test_what_a_program_sets_itself_comes_back() -> None:
    threads.set_threads(2)
    everywhere, here = threads._numpy_blas()
    for library in (*everywhere, *here):
        threads._set(library, 1)
    with threads.one_blas_thread():
        pass
    assert blas() == {1}


def at_every_line(work: Callable[[], None], act: Callable[[], None], check: Callable[[], None]) -> None:
    """Run something again and again; each time do something before another one of its lines in `threads`.

    Not before the lines of ``with lock:``: Python looks for signals behind calls and at the beginning of functions.
    The libraries of the process are found once, which takes threadpoolctl some milliseconds each time.
    """
    threads._numpy_blas()
    with pytest.MonkeyPatch.context() as patch:
        found = threadpoolctl.ThreadpoolController()
        patch.setattr(threadpoolctl, "ThreadpoolController", lambda: found)
        lines = _at_every_line(work, act, check)
    assert lines > 10


def _at_every_line(work: Callable[[], None], act: Callable[[], None], check: Callable[[], None]) -> int:
    lines, before = 0, sys.gettrace()
    while True:
        left = lines

        def trace(frame: Any, event: str, _: Any) -> Any:
            nonlocal left
            if frame.f_code.co_filename != threads.__file__:
                return None
            line = linecache.getline(threads.__file__, frame.f_lineno).strip()
            if event in {"call", "line"} and not line.startswith("with "):
                left -= 1
                if left == -1:
                    act()
            return trace

        sys.settrace(trace)
        try:
            work()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        check()
        if left >= 0:
            return lines
        lines += 1


def enter_and_leave() -> None:
    with threads.one_blas_thread(), threads.serial_kernels():
        assert blas() == {1}


@needs_two
@pytest.mark.parametrize("counts", [(), (2, 1, 2)])
def test_an_interrupt_leaves_nothing_behind(counts: tuple[int, ...]) -> None:
    threads.set_threads(2)

    def work() -> None:
        enter_and_leave()
        for count in counts:
            threads.set_threads(count)

    def interrupt() -> None:
        raise KeyboardInterrupt

    def check() -> None:
        assert not threads._process.inside
        assert threads.count() == threads.get_threads()
        enter_and_leave()
        assert blas() == {threads._process.wanted[0]} == told()

    at_every_line(work, interrupt, check)


@needs_two
def test_thread_counts_mend_what_an_interrupt_left() -> None:
    threads.set_threads(2)

    def interrupt() -> None:
        raise KeyboardInterrupt

    def check() -> None:
        assert set(threads.thread_counts().values()) == {2} == blas()

    at_every_line(enter_and_leave, interrupt, check)


@needs_two
def test_a_signal_handler_may_run_kernels_anywhere() -> None:
    run_alone(
        """
        import importlib.util
        spec = importlib.util.spec_from_file_location("tests_of_threads", sys.argv[1])
        tests = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(tests)
        def check():
            assert tests.blas() == {2} and not threads._process.inside and threads.count() == 2
        tests.at_every_line(tests.enter_and_leave, tests.enter_and_leave, check)
        wanted = forward()
        with threads.lock:
            assert forward() == wanted
        """,
        arguments=(__file__,),
    )


def test_serial_kernels_end_in_any_order() -> None:
    before = threads.count()
    first, second = threads.serial_kernels(), threads.serial_kernels()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert threads.serial() and threads.count() == 1 and in_thread(threads.count) == before
    second.__exit__(None, None, None)
    assert not threads.serial() and threads.count() == before


# ---- results -------------------------------------------------------------------------------------------------------

STEPS, LENGTH, BATCH, FEATURES, HIDDEN = 3, 50, 128, 33, 20


def train(dtype: type = np.float32) -> list[np.ndarray]:
    """Return the parameters after a few steps whose products and kernels are large enough for several threads."""
    rng = np.random.default_rng(3)
    model = SequenceClassifier(GRU(FEATURES, HIDDEN, dtype=dtype, rng=rng), Linear(HIDDEN, 10, dtype=dtype, rng=rng))
    loss, optimizer = CrossEntropyLoss(), sb.optim.Adam(model.parameters(), lr=1e-2)
    x, target = rng.standard_normal((LENGTH, BATCH, FEATURES)).astype(dtype), rng.integers(0, 10, BATCH)
    for _ in range(STEPS):
        optimizer.step(sb.value_and_grad(model, loss)(x, target)[1])
    return [array.copy() for array in model.parameters().values()]


def equal(ours: list[np.ndarray], theirs: list[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_training_is_the_same_in_any_thread_and_for_any_number(dtype: type) -> None:
    results = []
    for count in {1, threads.most_threads()}:
        threads.set_threads(count)
        results += [train(dtype), in_thread(lambda: train(dtype))]
    with threads.one_core():
        results.append(train(dtype))
    for other in results[1:]:
        assert equal(results[0], other)


@needs_two
def test_two_trainings_at_once_are_what_one_is() -> None:
    threads.set_threads(2)
    wanted, found = train(), []
    workers = [threading.Thread(target=lambda: found.append(train())) for _ in range(2)]
    for worker in workers:
        worker.start()
    for _ in range(3):
        with threads.one_blas_thread():  # comes and goes meanwhile
            pass
    for worker in workers:
        worker.join()
    assert len(found) == 2 and all(equal(wanted, result) for result in found)
    assert blas() == {2}


# ---- processes -----------------------------------------------------------------------------------------------------

PREAMBLE = """
import os, sys, threading
import numpy as np
from sparsebp import kernels
from sparsebp.core import threads

def forward():
    rng = np.random.default_rng(0)
    steps, batch, hidden = 40, 64, 32
    gx = rng.standard_normal((steps, batch, 3 * hidden), np.float32)
    w = rng.standard_normal((3 * hidden, hidden), np.float32) * np.float32(0.1)
    h = np.empty((steps, batch, hidden), np.float32)
    gates = np.empty((steps, batch, 4 * hidden), np.float32)
    kernels.get(np).gru_forward(gx, w, w[:hidden, 0].copy(), np.zeros_like(h[0]), h, gates)
    large = rng.standard_normal((600, 600), np.float32)
    product = np.empty((600, 600), np.float32)
    kernels.on_host().matmul(large, large, product)
    return h.sum(), product.sum()

threads.set_threads(2)
"""


def run_alone(body: str, program: Path | None = None, arguments: tuple[str, ...] = (), **variables: str) -> None:
    """Run a program in a process of its own, which must end well and soon; from a file if its children read it."""
    source = PREAMBLE + textwrap.dedent(body)
    if program is not None:
        program.write_text(source)
    package = str(Path(sb.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, *([str(program)] if program else ["-c", source]), *arguments],
        env=os.environ | {"NUMBA_NUM_THREADS": "2", "PYTHONPATH": package} | variables,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("layer", ["workqueue", "omp"])
def test_threads_may_run_kernels_at_once_under_any_layer_of_numbas(layer: str) -> None:
    run_alone(
        """
        wanted, found = forward(), []
        workers = [threading.Thread(target=lambda: found.extend(forward() for _ in range(20))) for _ in range(3)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert found == [wanted] * 60, len(found)
        """,
        NUMBA_THREADING_LAYER=layer,
    )


def test_numbas_own_threads_are_never_started() -> None:
    run_alone(
        """
        import numba
        forward()
        try:
            numba.threading_layer()
        except ValueError:
            sys.exit(0)
        sys.exit("Numba has started its threads")
        """
    )


def test_a_child_after_a_fork_computes_the_same() -> None:
    run_alone(
        """
        wanted = forward()
        inside = threads.one_blas_thread()
        holder, hold = threading.Event(), threading.Event()
        def other():
            with inside:
                holder.set()
                hold.wait()
        thread = threading.Thread(target=other)
        thread.start()
        holder.wait()
        for _ in range(3):
            child = os.fork()
            if not child:
                same = forward() == wanted and threads.count() == 2
                alone = {library.get_num_threads() for library in threads._numpy_blas()[0]}
                grandchild = os.fork()
                if not grandchild:
                    os._exit(0 if forward() == wanted else 3)
                died = os.waitpid(grandchild, 0)[1]
                os._exit(0 if same and not died and alone <= {2} else 4)
            assert os.waitpid(child, 0)[1] == 0
        assert forward() == wanted
        hold.set()
        thread.join()
        """
    )


def test_a_child_after_a_fork_hires_helpers_of_its_own() -> None:
    run_alone(
        """
        from sparsebp.kernels.host.engine import threads as team
        team.team()
        child = os.fork()
        if not child:
            os._exit(3 if team._team is not None else 0)
        assert os.waitpid(child, 0)[1] == 0 and team._team is not None
        """
    )


def test_a_fork_waits_until_the_numbers_of_threads_are_set() -> None:
    run_alone(
        """
        import time
        with threads.one_blas_thread():
            pass
        setting, begun = threads._set, threading.Event()
        def slowly(library, number):
            setting(library, number)
            if threading.current_thread() is not threading.main_thread():
                begun.set()
                time.sleep(0.3)
        threads._set = slowly
        def other():
            with threads.one_blas_thread():
                pass
        thread = threading.Thread(target=other)
        thread.start()
        begun.wait()
        child = os.fork()
        if not child:
            os._exit(0 if set(threads.thread_counts().values()) == {2} else 3)
        assert os.waitpid(child, 0)[1] == 0
        thread.join()
        """
    )


def test_helpers_neither_compile_nor_import() -> None:
    """So a fork never finds a lock of the compiler, or of an import, in the hands of a helper."""
    run_alone(
        """
        import builtins, time
        from numba.core.dispatcher import Dispatcher
        who = set()
        def noted(function):
            def call(*args, **options):
                who.add(threading.current_thread().name)
                return function(*args, **options)
            return call
        Dispatcher.compile = noted(Dispatcher.compile)
        builtins.__import__ = noted(builtins.__import__)
        forward()
        from sparsebp.kernels.host.engine import threads as team
        while team._team._room[team.SLEEPERS // 8] == 0:  # until it has reached its loop
            time.sleep(0.01)
        assert who == {"MainThread"}, who
        """
    )


def test_a_program_may_close_all_files_and_open_others() -> None:
    run_alone(
        """
        import tempfile, time
        wanted = forward()
        time.sleep(0.2)
        os.closerange(3, 256)
        files = [tempfile.TemporaryFile(buffering=0) for _ in range(8)]
        for _ in range(20):
            assert forward() == wanted
            time.sleep(0.01)
        assert {os.fstat(file.fileno()).st_size for file in files} == {0}
        """
    )


def test_kernels_run_where_no_file_can_be_opened() -> None:
    run_alone(
        """
        import resource
        threads.set_threads(1)
        wanted = forward()
        threads.set_threads(2)
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        files = []
        try:
            while True:
                files.append(os.open(os.devnull, os.O_RDONLY))
        except OSError:
            pass
        for _ in range(2):
            assert forward() == wanted
        for file in files:
            os.close(file)
        assert forward() == wanted
        from sparsebp.kernels.host.engine import threads as team
        assert team.team() != team.ALONE
        """
    )


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes_of_multiprocessing(method: str, tmp_path: Path) -> None:
    run_alone(
        f"""
        import multiprocessing
        def work(_):
            return forward()
        if __name__ == "__main__":
            wanted = forward()
            with multiprocessing.get_context({method!r}).Pool(2) as pool:
                assert pool.map(work, range(4)) == [wanted] * 4
        """,
        tmp_path / "program.py",
    )


def test_workers_of_a_data_loader_call_kernels() -> None:
    pytest.importorskip("torch")
    run_alone(
        """
        import torch
        wanted = forward()
        class Data(torch.utils.data.Dataset):
            def __len__(self):
                return 8
            def __getitem__(self, i):
                return torch.tensor(forward())
        torch.ones(600, 600) @ torch.ones(600, 600)  # PyTorch's own threads, too
        for epoch in range(2):
            batches = list(torch.utils.data.DataLoader(Data(), batch_size=2, num_workers=2, timeout=120))
            assert len(batches) == 4
            for batch in batches:
                assert (batch == torch.tensor(wanted)).all()
        """
    )
