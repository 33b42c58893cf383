"""The page on expected GPU performance shows the figures of the machine code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from docs_scripts import script
from gpu_model.kernels import COMPILER, figures
from sass import nvrtc

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_page_shows_its_figures() -> None:
    command = [sys.executable, str(DOCS / "make_gpu_expectations.py"), "--check"]
    assert subprocess.run(command, check=False).returncode == 0, "run docs/make_gpu_expectations.py"


def test_times_are_ranges_and_have_the_start_of_every_kernel() -> None:
    page = script("make_gpu_expectations")
    names = ("rnn_reduce", "scan_combine", "rnn_backward")
    phases = [{"kernel": name, "steps": 10, "cycles": 100, "cycles, four passes": 300} for name in names]
    begin, low, high = 1500 + 700 + 800, 3 * 10 * 100, 3 * 10 * 300
    expected = [(begin + cycles) / page.CLOCK + 2 * page.NODE for cycles in (low, high)]
    assert page.seconds(phases) == pytest.approx((expected[0], page.ERROR * expected[1]))
    assert page.over((80.0, 110.0), (2.0, 4.0)) == "20–55×"


@pytest.mark.skipif(
    nvrtc.disassembler() is None, reason="needs nvdisasm: pip install nvidia-cuda-nvdisasm (extra 'dev')"
)
@pytest.mark.parametrize("kernel", ["rnn_forward", "rnn_backward with sums", "gru_forward", "gru_backward"])
def test_the_figures_are_those_of_the_machine_code(kernel: str) -> None:
    if nvrtc.version() != COMPILER:
        pytest.skip(f"the page is made with NVRTC {COMPILER}")
    cell, part = kernel.split(maxsplit=1)[0].split("_")
    kept = json.loads((DOCS / "explanation" / "gpu-figures.json").read_text(encoding="utf-8"))
    for length in ("1000", "30000"):
        of_length = kept["runs"][cell][length]
        phase = of_length["forward" if part == "forward" else "1"][0]
        memory = "L2" if part == "forward" else of_length["memory"]  # where the forward has asked for its input
        now = figures(kernel).cycles(memory)
        assert phase["cycles"] == pytest.approx(now, rel=0.02), "run docs/make_gpu_expectations.py --read"
