"""On a terminal: bars are drawn, and no line that is left on it is longer than the terminal is wide."""

import fcntl
import io
import os
import re
import struct
import subprocess
import sys
import termios

import pytest

pytest.importorskip("typer", exc_type=ImportError)
pytest.importorskip("rich", exc_type=ImportError)

from sparsebp.cli.main import write_nearest

TINY = ["bitstream", "--hidden", "4", "--seq-len", "12", "--samples", "16", "--batch-size", "8"]
TRAIN = ["train", *TINY, "--epochs", "2", "--threads", "1", "--out", "run"]
TUNE = ["tune", *TINY, "--steps", "1", "--rounds", "1", "--threads", "1", "--backward", "bp"]


def on_terminal(columns, folder, *arguments):
    """Run a command on a terminal of its own, and return all that it wrote."""
    terminal, end = os.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "CI", "NO_COLOR")}
    process = subprocess.Popen(
        [sys.executable, "-m", "sparsebp", *arguments], stdin=end, stdout=end, stderr=end, cwd=folder,
        env=environment | {"PYTHONPATH": os.getcwd(), "TERM": "xterm"},
    )  # fmt: skip
    os.close(end)
    written = b""
    while True:
        try:
            part = os.read(terminal, 65536)
        except OSError:  # Linux: nobody has the other end any more
            part = b""
        if not part:
            break
        written += part
    os.close(terminal)
    assert process.wait() == 0, written.decode()
    return written.decode()


def lines_of(written):
    """Return the lines as they are left: without codes, and without what has been written over."""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.replace("\r\n", "\n"))
    return [line.rpartition("\r")[2] for line in plain.splitlines()]


@pytest.mark.parametrize(
    ("command", "columns"),
    [("schedule compare", 60), ("schedule compare", 80), ("info", 60), ("schedule plot s.csv", 60),
     ("schedule simulate s.csv", 60)],
)  # fmt: skip
def test_no_line_is_longer_than_the_terminal(tmp_path, command, columns):
    (tmp_path / "s.csv").write_text(
        "schedule=a name\n0F0,0F1,0F2,0B0,0U0,0B1,0U1,0B2,0U2\n1F0,1F1,1F2,1B0,1U0,1B1,1U1,1B2,1U2\n"
    )
    lines = lines_of(on_terminal(columns, tmp_path, *command.split()))
    assert max(map(len, lines)) <= columns
    if "compare" in command:
        from sparsebp.schedule.builders import BUILDERS

        assert len([line for line in lines if line.split()[:1] == ["gpipe"]]) == (2 if columns == 60 else 1)
        assert {line.split()[0] for line in lines if line.split()} >= set(BUILDERS)
        if columns == 80:
            piped = subprocess.run([sys.executable, "-m", "sparsebp", *command.split()], text=True, capture_output=True,
                                   check=True)  # fmt: skip
            assert lines == piped.stdout.splitlines()


def test_training_on_a_narrow_terminal(tmp_path):
    written = on_terminal(60, tmp_path, *TRAIN)
    assert "starting" in written  # the bar
    lines = lines_of(written)
    assert max(map(len, lines)) <= 60
    epochs = [line for line in lines if re.match(r"epoch   [12]  loss [0-9.]+ \(test [0-9.]+\)", line)]
    assert len(epochs) == 2 and not any(line.endswith(" s") for line in epochs)  # the rest is on a second line


def test_verify_shows_how_far_it_is(tmp_path):
    written = on_terminal(80, tmp_path, "verify")
    lines = lines_of(written)
    assert max(map(len, lines)) <= 80
    whole = re.fullmatch(r"(\d+) of (\d+) models: gradients agree within their tolerances", lines[-1])
    assert whole and whole[1] == whole[2] and int(whole[2]) >= 18
    count = int(whole[2])
    assert f"{count}/{count}" in written or f"{count - 1}/{count}" in written


def test_the_table_of_tune(tmp_path):
    lines = lines_of(on_terminal(80, tmp_path, *TUNE, "--out", "t.toml"))
    assert max(map(len, lines)) <= 80
    assert any(line.startswith("none ") and "×" in line for line in lines)
    assert lines[-1] == "written  t.toml: sparsebp train --config t.toml"


def test_letters_that_the_terminal_lacks(tmp_path):
    """Every command writes the nearest letters in their place."""
    environment = os.environ | {"PYTHONPATH": os.getcwd(), "PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    written = {}
    for command in ("schedule compare", "train --help", "info"):
        done = subprocess.run([sys.executable, "-m", "sparsebp", *command.split()], cwd=tmp_path, env=environment,
                              capture_output=True, check=False)  # fmt: skip
        written[command] = done.stdout.decode("ascii")
        assert (done.returncode, done.stderr) == (0, b""), done.stderr.decode()
    assert re.search(r"^pipedream .* 2\.91x", written["schedule compare"], re.MULTILINE)


@pytest.mark.parametrize(
    ("encoding", "left"), [("ascii", "1.2 us x 3-4... S ?"), ("latin-1", "1.2 µs × 3-4... § ?"), ("utf-8", None)]
)
def test_as_many_letters_of_what_an_encoding_lacks(encoding, left):
    text, stream = "1.2 µs × 3–4... § ᚠ", io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    write_nearest(stream)
    stream.write(text)
    stream.flush()
    assert stream.buffer.getvalue().decode(encoding) == (text if left is None else left)
    write_nearest(io.StringIO())  # has no encoding
