"""``sparsebp demo``: one training that shows the whole idea, in four lines and a picture."""

from __future__ import annotations

import copy
import importlib.util
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Annotated, Any, get_args

import numpy as np
import typer

from sparsebp import analysis, optim
from sparsebp.cli.common import (
    JsonOption,
    OverwriteOption,
    ThreadsOption,
    choice_option,
    out_option,
    print_line,
    use_threads,
)
from sparsebp.cli.train import batch_of_test_set, draw, run_session
from sparsebp.core.files import write_figure
from sparsebp.core.threads import get_threads
from sparsebp.nn import value_and_grad
from sparsebp.train.config import Run, SequenceModel, config_for, layer_name
from sparsebp.train.history import plot_history

_ROUNDS = 7  # of the comparison of steps, the first to warm up
_SECONDS = 4.0  # after which no further round begins
_SHOWN_STEPS = 12  # of the picture's Jacobian


def demo(
    out: Annotated[Path, out_option("Folder for checkpoint and picture.")] = Path("runs", "demo"),
    model: Annotated[SequenceModel, choice_option("Recurrent layer", get_args(SequenceModel))] = "gru",
    epochs: Annotated[int | None, typer.Option(min=1, help="Epochs.", show_default="as train seqmnist")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed.")] = 0,
    threads: ThreadsOption = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the checkpoint in the folder.")] = False,
    overwrite: OverwriteOption = False,
    json: JsonOption = False,
) -> None:
    """Train a recurrent layer on digits, pixel by pixel.

    5 000 real MNIST images, 784 time steps each. Ends with four lines: the
    test accuracy; the time of a step, next to PyTorch's if it is installed;
    how far a scan's gradient is from plain back-propagation; and a picture of
    the loss curve and of the Jacobians that the scan multiplies. The folder
    also gets a checkpoint. With a GRU it takes less than a minute. To run it
    again, add --overwrite.

    \b
    Examples:
      sparsebp demo
      sparsebp demo --epochs 2 --out runs/short
      sparsebp demo --model mingru
    """
    config = config_for("seqmnist", model=model, epochs=epochs, seed=seed)
    each = ", on two cores about two seconds each" if model == "gru" else ""
    typer.echo(
        f"Training a {layer_name(model)} on MNIST digits, pixel by pixel. Epochs: {config.epochs}{each}.\n"
        "The first time, some 20 seconds more to compile kernels.", err=True
    )  # fmt: skip
    use_threads(threads)
    run_session(
        config, out, resume=resume, overwrite=overwrite, agreement=True, as_json=json,
        ending=None if json else _four_lines,
    )  # fmt: skip


def _four_lines(session: Run, result: dict[str, Any]) -> None:
    """Print what the demo has shown, and draw its picture in the place of the loss curve."""
    seconds, peer = _step_seconds(session)
    steps = f"{result['steps']} steps in {result['training_seconds']:.1f} s"
    print_line("accuracy", f"{result['test_accuracy']:.1%} of digits that were not trained on, after {steps}", 10)
    against = "torch.nn is not installed, or has no such layer"
    if peer is not None:
        against = f"torch.nn on the same threads {1e3 * peer:.3g} ms, {peer / seconds:.2g} times as long"
    print_line("step", f"{1e3 * seconds:.3g} ms; {against}", 10)
    scans = {entry["algorithm"]: entry["relative_difference"] for entry in result["agreement"]}
    told = ", ".join(f"{algorithm} {difference:.0e}" for algorithm, difference in scans.items())
    print_line("gradient", f"by a scan over Jacobians as step by step, up to rounding: {told}", 10)
    picture = "not drawn: matplotlib is not installed (extra: plot)"
    if result["picture"] is not None:
        picture = f"{result['picture']}, the loss and the Jacobians; {result['checkpoint']}"
        draw("The picture", _save_picture, session, result["picture"])
    print_line("files", picture, 10)


def _step_seconds(session: Run) -> tuple[float, float | None]:
    """Return the median seconds of a whole step, and of the same in PyTorch in turn; None without its like there."""
    x, target = batch_of_test_set(session, session.config.batch_size)
    model = copy.deepcopy(session.trainer.model).train()
    gradients, adam = value_and_grad(model, session.trainer.loss), optim.Adam(model.parameters())
    sides: list[Callable[[], Any]] = [lambda: adam.step(gradients(x, target)[1])]
    twin = _in_torch(session, x, target)
    sides += [] if twin is None else [twin]
    seconds: list[list[float]] = [[] for _ in sides]
    start = time.perf_counter()
    for number in range(_ROUNDS):
        if number > 1 and time.perf_counter() - start > _SECONDS:
            break
        for step, found in zip(sides, seconds, strict=True):
            begin = time.perf_counter()
            step()
            found.append(time.perf_counter() - begin)
    ours, *theirs = (median(found[1:]) for found in seconds)
    return ours, theirs[0] if theirs else None


def _in_torch(session: Run, x: np.ndarray, target: np.ndarray) -> Callable[[], None] | None:
    """Return a training step of the same network in PyTorch; None where there is none."""
    model, kind = session.trainer.model, session.config.model.upper()
    if importlib.util.find_spec("torch") is None or kind not in ("RNN", "GRU", "LSTM"):
        return None
    import torch

    torch.set_num_threads(get_threads())
    rnn = getattr(torch.nn, kind)(model.rnn.input_size, model.rnn.hidden_size, model.rnn.num_layers)
    head = torch.nn.Linear(model.rnn.hidden_size, model.head.out_features)
    for theirs, ours in ((rnn, model.rnn), (head, model.head)):
        theirs.load_state_dict({name: torch.from_numpy(array.copy()) for name, array in ours.state_dict().items()})
    adam = torch.optim.Adam([*rnn.parameters(), *head.parameters()])
    inputs, labels = torch.from_numpy(x), torch.from_numpy(target)

    def step() -> None:
        adam.zero_grad()
        torch.nn.functional.cross_entropy(head(rnn(inputs)[0][-1]), labels).backward()
        adam.step()

    return step


def _save_picture(session: Run, path: str) -> None:
    """Draw the loss curve, and the Jacobians of some steps as the block matrix whose inverse is back-propagation."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[3, 2])
    plot_history(session.trainer.history, left)
    left.set_title(session.config.title, fontsize=9)
    x, _ = batch_of_test_set(session, 1)
    steps = slice(len(x) // 2, len(x) // 2 + _SHOWN_STEPS)  # in the middle of the image, where there is ink
    jacobians = analysis.hidden_jacobians(session.trainer.model.rnn, np.ascontiguousarray(x[steps]))[:, 0]
    size = jacobians.shape[-1]
    whole = np.eye(size * _SHOWN_STEPS)
    for t in range(1, _SHOWN_STEPS):
        whole[(t - 1) * size : t * size, t * size : (t + 1) * size] = -jacobians[t].T
    right.spy(whole, markersize=0.4, color="tab:blue")
    share = np.count_nonzero(whole) / whole.size
    right.set_title(
        f"I minus the transposed Jacobians of {_SHOWN_STEPS} steps:\n{share:.0%} of {whole.shape}", fontsize=9
    )
    right.set(xticks=[], yticks=[])
    write_figure(figure, path, dpi=150)
