"""Locks and forks: a child process can compute whatever locks the parent's other threads held."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import sparsebp
from sparsebp.core import locks
from sparsebp.core.errors import StaleError
from sparsebp.core.host_pool import SMALLEST, HostPool
from sparsebp.core.locks import forkable_event, forkable_lock
from sparsebp.runtime.streams import TwoStreams

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

PACKAGE = Path(sparsebp.__file__).parent
PRIMITIVES = {"Lock", "RLock", "Condition", "Event", "Semaphore", "BoundedSemaphore", "Barrier"}


# ---- who makes them --------------------------------------------------------------------------------------------------


def makes_a_lock(node: ast.AST) -> bool:
    """Say whether a node makes a lock of `threading`, or imports one, or a `cached_property`, which has one."""
    if isinstance(node, ast.ImportFrom):
        names = {alias.name for alias in node.names}
        queues = node.module == "queue" and bool(names - {"SimpleQueue", "Empty", "Full"})
        return (
            queues
            or (node.module == "threading" and bool(names & PRIMITIVES))
            or (node.module == "functools" and "cached_property" in names)
        )
    if not (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)):
        return False
    return (
        (node.value.id == "threading" and node.attr in PRIMITIVES)
        or (node.value.id == "functools" and node.attr == "cached_property")
        or (node.value.id == "queue" and node.attr in {"Queue", "LifoQueue", "PriorityQueue"})
    )


def of_a_known_lock(tree: ast.AST) -> set[ast.AST]:
    """Return the nodes of ``threading.Condition(forkable_lock())``, which has no other lock."""
    return {
        node.func
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "Condition"
        and [ast.unparse(argument) for argument in node.args] == ["forkable_lock()"]
    }


def test_every_lock_is_made_in_one_place():
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text()
        if path == Path(locks.__file__) or not any(name in text for name in ("threading", "functools", "queue")):
            continue
        tree = ast.parse(text)
        known = of_a_known_lock(tree)
        found += [f"{path.relative_to(PACKAGE)}:{getattr(node, 'lineno', 0)}"
                  for node in ast.walk(tree) if makes_a_lock(node) and node not in known]  # fmt: skip
    assert not found, "locks that a fork may leave locked for good; make them with sparsebp.core.locks"


@pytest.mark.parametrize("source", [
    "import threading\nlock = threading.Lock()", "from threading import Event", "from functools import cached_property",
    "import threading\nchanged = threading.Condition()", "import queue\njobs = queue.Queue()",
])  # fmt: skip
def test_the_search_finds_them(source):
    assert any(map(makes_a_lock, ast.walk(ast.parse(source))))


# ---- what a child finds ----------------------------------------------------------------------------------------------


def in_child(work) -> None:
    """Run something in a forked child, which must return True, and soon."""
    child = os.fork()
    if not child:
        import signal

        signal.alarm(20)
        os._exit(0 if work() else 3)
    assert os.waitpid(child, 0)[1] == 0


def while_held(lock, work) -> None:
    """Do something while another thread holds a lock."""
    holds, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            holds.set()
            go_on.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    holds.wait()
    try:
        work()
    finally:
        go_on.set()
        thread.join()


def test_a_lock_of_another_thread_is_free_in_a_child_and_what_it_guards_is_dropped():
    dropped = []
    lock, other = forkable_lock(lambda: dropped.append(1)), forkable_lock(lambda: dropped.append(2))
    while_held(lock, lambda: in_child(lambda: lock.acquire(timeout=1) and dropped == [1]))
    assert not dropped
    in_child(lambda: lock.acquire(timeout=1) and other.acquire(timeout=1) and not dropped)


def test_a_fork_waits_for_what_another_thread_imports(tmp_path, monkeypatch):
    begun = threading.Event()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "slow_import_begun", begun, raising=False)
    (tmp_path / "slow_import.py").write_text(
        "import sys, time\nsys.slow_import_begun.set()\ntime.sleep(0.3)\nvalue = 1\n"
    )
    thread = threading.Thread(target=__import__, args=("slow_import",))
    thread.start()
    begun.wait()
    in_child(lambda: __import__("slow_import").value == 1)
    thread.join()


def test_a_fork_waits_for_a_call_of_llvm_in_another_thread():
    """The end of a compiled module calls LLVM without Numba's lock."""
    from llvmlite import binding

    begun = threading.Event()

    def call() -> None:
        with binding.ffi.lib._lock:
            begun.set()
            time.sleep(0.3)

    thread = threading.Thread(target=call)
    thread.start()
    begun.wait()
    in_child(lambda: binding.parse_assembly("") is not None)
    thread.join()


def test_a_module_may_fork_while_it_is_imported(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "forks.py").write_text("import os\nif not os.fork():\n    os._exit(0)\nstatus = os.wait()[1]\n")
    assert __import__("forks").status == 0


def test_a_lock_of_the_forking_thread_stays_held():
    lock = forkable_lock()

    def work() -> bool:
        got = []
        thread = threading.Thread(target=lambda: got.append(lock.acquire(timeout=0.1)))
        thread.start()
        thread.join()
        lock.release()
        return got == [False]

    with lock:
        in_child(work)


def test_an_event_that_another_thread_waits_for_can_be_set():
    event = forkable_event()
    waiting = threading.Thread(target=event.wait)
    waiting.start()

    def work() -> bool:
        event.set()
        return event.wait(1)

    in_child(work)
    event.set()
    waiting.join()


def test_nothing_is_kept_alive():
    before = len(locks._known)
    pool = HostPool()
    made = [forkable_lock() for _ in range(5)]
    assert len(locks._known) == before + 6
    del pool, made
    assert len(locks._known) == before


def test_a_pool_in_the_middle_of_a_change_begins_anew():
    pool = HostPool()
    del (array := [pool.empty((SMALLEST,), np.uint8)])[:]
    assert pool.free_bytes > 0 and not array

    def work() -> bool:
        clean = pool.free_bytes == 0 and not pool._free
        return clean and pool.empty((SMALLEST,), np.uint8).size == SMALLEST

    while_held(pool._lock, lambda: in_child(work))
    assert pool.free_bytes > 0


def test_a_second_stream_is_not_waited_for_in_a_child():
    streams = TwoStreams()
    streams._start()

    class Step:
        events = (False,)

    def work() -> bool:
        try:
            streams._check_thread(Step())
        except StaleError:
            streams._start()
            return streams._thread.is_alive()
        return False

    in_child(work)
    streams.stop()


SCRIPT = """
import os, signal, sys, threading, time
import numpy as np
import scipy.sparse as sparse
import sparsebp as sb
from sparsebp.products import product

rng = np.random.default_rng(0)
def pattern(rng, n=60):
    return sb.SparsityPattern.from_scipy(sparse.csr_array((rng.random((n, n)) < 0.2).astype(float)))

def multiply(rng):
    a, b = pattern(rng), pattern(rng)
    plan = sb.plan_product(a, b)
    found = plan(rng.standard_normal((a.nnz, 16)), rng.standard_normal((b.nnz, 16)))
    assert np.isfinite(found).all()

model = sb.nn.SequenceClassifier(sb.nn.GRU(6, 20, rng=0), sb.nn.Linear(20, 4, rng=0))
value_and_grad = sb.value_and_grad(model, sb.nn.CrossEntropyLoss())
x, target = rng.standard_normal((30, 8, 6), dtype=np.float32), rng.integers(0, 4, 8)

def train(steps=1):
    adam = sb.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(steps):
        adam.step(value_and_grad(x, target)[1])

def take(rng):
    from sparsebp.core import host_pool
    from sparsebp.core import backend
    for size in rng.integers(1 << 18, 1 << 20, 20):
        host_pool.empty(np, (int(size),), np.uint8)

multiply(rng); train(); take(rng)
stop = []
def again(work, seed):
    own = np.random.default_rng(seed)
    def run():
        while not stop:
            work(own)
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread

threads = []
for seed, work in enumerate([multiply, multiply, take, take, lambda rng: train()]):
    threads.append(again(work, seed))
hung = []
for number in range(FORKS):
    time.sleep(0.002 * (number % 7))
    child = os.fork()
    if not child:
        own = np.random.default_rng(100 + number)
        multiply(own); take(own); train()
        os._exit(0)
    end = time.monotonic() + 30
    while (done := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < end:
        time.sleep(0.001)
    if done == (0, 0):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        hung.append(number)
        break
    assert done[1] == 0, done
stop.append(True)
for thread in threads:  # no daemon is left in compiled code while the interpreter ends
    thread.join()
sys.exit(f"child {hung} hangs" if hung else 0)
"""


def test_children_of_a_busy_process_compute():
    source = textwrap.dedent(SCRIPT).replace("FORKS", "20")
    environment = os.environ | {"NUMBA_NUM_THREADS": "2", "PYTHONPATH": str(PACKAGE.parent)}
    done = subprocess.run([sys.executable, "-c", source], env=environment, capture_output=True, text=True, timeout=150,
                          check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
