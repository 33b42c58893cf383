"""Processes end together, soon, and with one error message from the rank that failed."""

from __future__ import annotations

import math
import re
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from mpi.launch import apart, command, completed, environment, run
from sparsebp.comm.launcher import LAUNCHERS
from sparsebp.core.errors import MissingDependencyError, OptionError, TransportError
from sparsebp.runtime.launch import connect

SOON = 30.0  # seconds that a busy machine may take for what takes two; the programs would wait for minutes
TRAIN = ("train", "digits", "--model", "lenet5", "--schedule", "1f1b")


def ended(program: str, size: int = 3) -> subprocess.CompletedProcess[str]:
    return run(size, "-m", "mpi.programs", program, seconds=SOON)


def tracebacks(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Return the last line of each traceback."""
    return re.findall(r"^Traceback(?:.*\n)(?:[ ].*\n)*(\S.*)$", done.stderr, re.MULTILINE)


@pytest.mark.parametrize(("program", "printed"), [("fine", "sum 6.0\n"), ("late", "received\n"), ("closes", "")])
def test_a_good_end(program: str, printed: str) -> None:
    done = ended(program)
    assert (done.returncode, done.stdout, done.stderr) == (0, printed, "")


@pytest.mark.parametrize(
    "program", ["one_raises", "one_raises_while_others_compute", "all_raise", "messages_are_left", "closes_first"]
)
def test_an_error_is_printed_once(program: str) -> None:
    done = ended(program)
    assert done.returncode != 0
    assert tracebacks(done) == ["ValueError: out of paper"], done.stderr
    assert "TransportError" not in done.stderr


def test_a_rank_that_is_killed_ends_the_run() -> None:
    done = ended("one_is_killed")
    assert done.returncode != 0
    assert tracebacks(done) == []
    assert "Killed" in done.stdout + done.stderr  # mpiexec's words


def test_a_rank_that_ends_early_is_named() -> None:
    done = ended("one_ends_early")
    assert done.returncode != 0
    (line,) = tracebacks(done)
    assert "Rank 1 has ended, and rank" in line


@pytest.mark.parametrize(
    ("program", "said"),
    [("one_leaves_training", "Rank 0 has ended, and rank 1 waits for it.*sys.exit(0)"),
     ("one_leaves_at_once", "Rank 1 has left by os._exit(0) while others work")],
)  # fmt: skip
def test_a_rank_that_leaves_ends_the_run_with_a_word(program: str, said: str) -> None:
    done = ended(program, 2)
    assert done.returncode != 0
    (line,) = re.findall(r"^.*TransportError: .*$", done.stderr, re.MULTILINE)
    assert re.search(said.replace("(0)", r"\(0\)"), line) and tracebacks(done) == []


def test_ranks_that_leave_together_have_their_own_status() -> None:
    done = ended("all_leave_training", 2)
    assert done.returncode == 7
    assert "Error" not in done.stderr


def test_a_rank_whose_command_is_refused_does_not_leave_the_others_waiting() -> None:
    done = completed(apart(["-m", "sparsebp", *TRAIN], ["-m", "sparsebp", *TRAIN, "--bogus"]), SOON)
    assert done.returncode != 0 and done.stdout == ""
    assert "Rank 1 has ended before the start" in done.stderr and "No such option: --bogus" in done.stderr
    assert done.stderr.count("Error: ") == 1


@pytest.mark.parametrize("module", ["sparsebp.cli.app", "numpy.linalg", "sparsebp.train"])
def test_a_signal_while_modules_are_imported_does_not_leave_the_others_waiting(module: str) -> None:
    interrupted = f"""
import os, signal, sys
from sparsebp.cli.main import main
class Finder:
    def find_spec(name, *rest):
        if name == {module!r}:
            sys.meta_path.remove(Finder)
            os.kill(os.getpid(), signal.SIGTERM)
sys.meta_path.insert(0, Finder)
main(sys.argv[1:])
"""
    done = completed(apart(["-m", "sparsebp", *TRAIN], ["-c", interrupted, *TRAIN]), SOON)
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    assert "Got exit status 143. Interrupted. " in done.stderr or "Terminated" in done.stdout + done.stderr


def test_the_status_is_that_of_the_interruption_where_another_rank_does_not_hear_of_it() -> None:
    assert ended("interrupted_unheard", 2).returncode == 143


def test_no_gpu_is_said_once() -> None:
    done = ended("no_gpu", 2)
    assert done.returncode != 0
    errors = re.findall(r"^sparsebp.*(?:CuPy is not installed|No GPU|GPU for every rank)", done.stderr, re.MULTILINE)
    assert len(errors) == 1, done.stderr


def test_ctrl_c_ends_all() -> None:
    with subprocess.Popen(
        command(3, "-m", "mpi.programs", "interrupted"), env=environment(), stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL, start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        began = time.monotonic()
        out, err = process.communicate(timeout=SOON)
        assert time.monotonic() - began < SOON
    assert process.returncode != 0
    assert err.count("KeyboardInterrupt") <= 1, out + err


def test_a_rank_that_does_not_answer_is_named_once() -> None:
    """By the lowest of those that wait, whomever that one waits for."""
    done = ended("one_is_stopped")
    assert done.returncode == 0, done.stderr
    said = done.stderr.splitlines()
    assert "Warning: Rank 1 did not answer for 2 s" in said[0]
    assert all("Rank 1 did not answer" in line for line in said[:-1])
    assert re.fullmatch(r"Rank 0 goes on after \d s\.", said[-1])


def test_a_rank_that_never_answers_ends_the_run() -> None:
    done = ended("one_stands_still", 2)
    assert done.returncode != 0
    (line,) = tracebacks(done)
    assert re.search(r"TransportError: Rank 1 did not answer for \d s\. Expected an answer within 2 s", line)


@pytest.mark.parametrize("options", [{"timeout": 0}, {"timeout": "1"}, {"timeout": math.nan}, {"progress": "yes"}])
def test_options_of_connect(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        connect(**options)


def test_a_process_alone_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for names in LAUNCHERS:
        for name in names:
            monkeypatch.delenv(name, raising=False)
    pytest.importorskip("mpi4py")
    with pytest.raises(TransportError, match=r"This process is alone.*mpiexec -n 4"):
        connect()


def test_a_missing_mpi4py_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(MissingDependencyError, match=r"sparsebp\[mpi\]"):
        connect()
