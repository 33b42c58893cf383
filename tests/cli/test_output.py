"""Standard streams that are full, closed or missing, and interruptions at any time: one message, no traceback."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("typer", exc_type=ImportError)
pytest.importorskip("rich", exc_type=ImportError)

TRAIN = ["train", "bitstream", "--hidden", "4", "--seq-len", "12", "--samples", "16", "--batch-size", "8",
         "--epochs", "1", "--threads", "1"]  # fmt: skip


def shell(script, *arguments, **options):
    command = ["sh", "-c", script, "sh", sys.executable, "-m", "sparsebp", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
@pytest.mark.parametrize(
    ("arguments", "unbuffered"),
    [(["--version"], ""), (["train", "--help"], "1"), (["schedule", "build", "gpipe"], ""),
     (["schedule", "build", "gpipe"], "1"), (["schedule", "compare"], ""), (["schedule", "compare", "--json"], "1"),
     (TRAIN, ""), ([*TRAIN, "--json"], "1")],
    ids=lambda given: " ".join(given[:3] + given[-1:]) if isinstance(given, list) else given,
)  # fmt: skip
def test_output_that_cannot_be_written(tmp_path, arguments, unbuffered):
    environment = os.environ | {"PYTHONPATH": os.getcwd(), "PYTHONUNBUFFERED": unbuffered}
    result = shell('exec "$@" > /dev/full', *arguments, cwd=tmp_path, env=environment)
    assert result.returncode == 1
    assert result.stderr.count("Error: Standard output cannot be written. Got No space left on device.") == 1
    assert "Traceback" not in result.stderr and "Exception ignored" not in result.stderr


@pytest.mark.parametrize(("closed", "json"), [(">&-", ["--json"]), ("2>&-", []), (">&- 2>&-", [])])
def test_streams_that_are_closed(tmp_path, closed, json):
    result = shell(f'exec "$@" {closed}', *TRAIN, *json, "--out", tmp_path)
    assert result.returncode == 0 and result.stderr == ""
    assert (tmp_path / "result.json").exists()


def test_a_reader_that_has_had_enough(tmp_path):
    result = shell('"$@" | :', "schedule", "build", "gpipe", "--microbatches", "300")
    assert result.stderr == ""


@pytest.mark.parametrize("module", ["typer", "rich.console", "numpy", "sparsebp.cli.train", "sparsebp.train"])
def test_an_interruption_while_modules_are_imported(tmp_path, module):
    (tmp_path / "interrupted.py").write_text(f"""
import builtins, sys
from sparsebp.cli.main import main
real = builtins.__import__
def interrupted(name, *rest):
    if name == {module!r}:
        raise KeyboardInterrupt
    return real(name, *rest)
builtins.__import__ = interrupted
main(["schedule", "build", "gpipe"])
""")
    result = subprocess.run([sys.executable, tmp_path / "interrupted.py"], capture_output=True, text=True, check=False,
                            env=os.environ | {"PYTHONPATH": os.getcwd()})  # fmt: skip
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "Interrupted.\n")
