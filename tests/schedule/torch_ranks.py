"""Two processes of PyTorch's pipeline runtime: ``python torch_ranks.py STORE SCHEDULE.csv …``, with communication.

Runs each schedule of four stages and four micro-batches, and prints the largest difference of its gradients from those
of the whole model in one process. In files called bare… the first stage has no weights.
"""

from __future__ import annotations

import csv
import multiprocessing
import os
import re
import sys

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime


def run(rank: int, store: str, files: list[str]) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    for file in files:
        torch.manual_seed(0)
        layers = [torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh()).double() for _ in range(4)]
        if "bare" in os.path.basename(file):
            layers[0] = torch.nn.Tanh()
        x, y = torch.randn(8, 6, dtype=torch.float64), torch.randn(8, 6, dtype=torch.float64)
        with open(file, newline="") as text:
            cells = list(csv.reader(text))[rank]
        own = sorted({int(cell[0]) for cell in cells if re.fullmatch("[0-3]F0", cell)})
        stages = [PipelineStage(layers[stage], stage, 4, torch.device("cpu")) for stage in own]
        runtime = _PipelineScheduleRuntime(stages, 4, loss_fn=torch.nn.functional.mse_loss)
        runtime._load_csv(file, format="compute_comms")
        runtime.step(*([x] if 0 in own else []), **({"target": y} if 3 in own else {}))
        found = {stage: [p.grad.clone() for p in layers[stage].parameters()] for stage in own}
        for layer in layers:
            layer.zero_grad(set_to_none=True)
        torch.nn.functional.mse_loss(torch.nn.Sequential(*layers)(x), y).backward()
        apart = max([
            (grad - p.grad).abs().max().item()
            for stage in own for grad, p in zip(found[stage], layers[stage].parameters(), strict=True)
        ], default=0)  # fmt: skip
        os.write(1, f"{apart:g}\n".encode())  # in one piece, beside the other process
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=run, args=(rank, sys.argv[1], sys.argv[2:])) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    sys.exit(max(abs(process.exitcode or 0) for process in ranks))
