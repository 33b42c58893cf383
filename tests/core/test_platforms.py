"""Systems that no test runs on: what they lack is taken away here, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

WORK = """
def run():
    a = sb.SparsityPattern.dense(120, 120)
    values = np.random.default_rng(0).standard_normal(120 * 120)
    plan = sb.plan_product(a, a)
    return plan(values, values).reshape(120, 120), values.reshape(120, 120) @ values.reshape(120, 120)

def close():
    found, wanted = run()
    return bool(np.allclose(found, wanted, rtol=1e-12, atol=1e-12))
"""
MACOS = """
import os, sys, threading, time
import numba, numpy as np, scipy.sparse.linalg
sys.platform = "darwin"  # whose C library has no unnamed semaphores
import sparsebp as sb
from sparsebp.core import threads
from sparsebp.kernels.host.engine import threads as team
sys.platform = "linux"
assert not team.SEMAPHORES
threads.set_threads(2)
assert close()
(helper,) = [one for one in threading.enumerate() if one.name == "sparsebp helper"]
clock = time.pthread_getcpuclockid(helper.ident)
begin = time.clock_gettime(clock)
while time.clock_gettime(clock) < begin + 1e-3:  # it wakes, and takes parts
    assert close()
"""
WINDOWS = """
import os, sys, time
import numba, numpy as np, scipy.sparse.linalg
sys.modules["fcntl"] = None
for name in ("register_at_fork", "O_CLOEXEC", "O_NOFOLLOW", "O_DIRECTORY", "sched_getaffinity"):
    delattr(os, name)
for name in ("clock_gettime", "CLOCK_MONOTONIC", "CLOCK_THREAD_CPUTIME_ID"):
    delattr(time, name)
import sparsebp as sb
from sparsebp import nn, optim
from sparsebp.core import threads
from sparsebp.train import Trainer
threads.set_threads(2)
assert close()
model = nn.Sequential(nn.Linear(2, 3, rng=0), nn.Tanh(), nn.Linear(3, 2, rng=1))
trainer = Trainer(model, nn.CrossEntropyLoss(), optim.SGD(model.parameters()), rng=0, checkpoint_dir="run")
x, target = np.random.default_rng(0).standard_normal((4, 2)).astype(np.float32), np.arange(4) % 2
trainer.fit((x, target), epochs=2, batch_size=2)
assert trainer.fit((x, target), epochs=3, batch_size=2, resume=True).steps == 6
"""


@pytest.mark.skipif(sys.platform != "linux", reason="names are taken away from Linux")
@pytest.mark.parametrize("system", [MACOS, WINDOWS], ids=["macos", "windows"])
def test_what_other_systems_lack(system, tmp_path):
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "kernels"), "NUMBA_NUM_THREADS": "2"}
    head, _, tail = system.partition("import sparsebp as sb\n")
    script = textwrap.dedent(f"{head}import sparsebp as sb\n{WORK}{tail}")
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
