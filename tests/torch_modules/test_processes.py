"""Threads, forked workers of a DataLoader, and DistributedDataParallel on two processes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import sparsebp.torch as st  # noqa: E402
from sparsebp.torch import modules as calls  # noqa: E402


def test_two_threads_at_the_same_time() -> None:
    """Each its own module, forward and backward, many times: as by one thread alone."""
    sizes = (200, 16, 8)  # large enough for helpers of the kernels' own
    modules = [st.GRU(8, 24) for _ in range(2)]
    x = torch.randn(sizes)

    def gradients(module: Any) -> list[Any]:
        return list(torch.autograd.grad(module(x)[0].square().sum(), list(module.parameters())))

    expected = [gradients(module) for module in modules]
    found: list[list[Any]] = [[], []]

    def work(number: int) -> None:
        found[number] = [gradients(modules[number]) for _ in range(5)]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(2):
        for again in found[number]:
            torch.testing.assert_close(again, expected[number], rtol=0, atol=0)


def test_a_kernel_lets_other_threads_run() -> None:
    """One call of seconds' worth of work: while it runs, this thread goes on."""
    module, x = st.RNN(1, 8), torch.randn(400_000, 4, 1)
    module(x[:1000])
    ticks, done = 0, threading.Event()

    def work() -> None:
        try:
            with torch.no_grad():
                calls._run(module, x.reshape(-1, 1), None, 4, None)
        finally:
            done.set()

    thread = threading.Thread(target=work)
    thread.start()
    while not done.wait(0.0005):
        ticks += 1
    thread.join()
    assert ticks > 5


class Encoded(torch.utils.data.Dataset):
    def __init__(self, module: Any, x: Any) -> None:
        self.module, self.x = module, x

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        with torch.no_grad():
            return self.module(self.x[index])[1][0]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_forked_workers_of_a_data_loader() -> None:
    """The kernels have threads when the workers are forked; a worker hires its own."""
    module = st.GRU(4, 24)
    x = torch.randn(4, 300, 16, 4)
    expected = torch.stack([module(one)[1][0] for one in x]).detach()
    loader = torch.utils.data.DataLoader(Encoded(module, x), 2, num_workers=2, multiprocessing_context="fork")
    torch.testing.assert_close(torch.cat(list(loader)), expected, rtol=0, atol=0)


REPLICA = """
import os
import sys
import torch
import torch.distributed as dist
import sparsebp.torch as st

torch.set_num_threads(1)
torch.manual_seed(0)
model = st.accelerate(torch.nn.GRU(3, 4, dtype=torch.float64))
x = torch.randn(5, 4, 3, dtype=torch.float64)
other = os.fork()  # two processes, for one import of PyTorch
rank = int(other > 0)
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)
ddp = torch.nn.parallel.DistributedDataParallel(model)
ddp(x[:, 2 * rank : 2 * rank + 2])[0].square().mean().backward()
found = [p.grad.clone() for p in model.parameters()]
model.zero_grad()
model(x)[0].square().mean().backward()
for got, parameter in zip(found, model.parameters()):
    torch.testing.assert_close(got, parameter.grad)
dist.barrier()  # the other rank may still be reading from this one
del ddp  # it holds the group: gloo's threads must end here, as they cannot while the interpreter does
dist.destroy_process_group()
if other:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]))
"""


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this PyTorch has no torch.distributed")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_distributed_data_parallel_on_two_processes(tmp_path: Any) -> None:
    """Gradients of two halves of a batch, averaged, are those of the whole."""
    command = [sys.executable, "-c", REPLICA, str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
