"""History, callbacks, pictures, comparison, threads."""

import dataclasses
import io
import json
import math

import numpy as np
import pytest

from sparsebp.core.errors import OutputError, ShapeError
from sparsebp.train import History, JsonLines, plot_history, save_loss_curve
from sparsebp.train.callbacks import EpochRecord, epoch_line
from sparsebp.train.compare import compare_histories
from train import tiny


def history_of(losses, accuracy=0.5, samples=None):
    history = History()
    for i, loss in enumerate(losses):
        history.add_step(
            loss=loss, accuracy=accuracy, grad_norm=1.0, lr=0.1, seconds=0.5, samples=samples[i] if samples else 4
        )
    return history


def test_epochs_are_means_over_samples():
    history = history_of([1.0, 2.0, 4.0], samples=[4, 4, 2])
    record = history.end_epoch(3, (0.25, None))
    assert record.train_loss == pytest.approx((4 * 1 + 4 * 2 + 2 * 4) / 10)
    assert record.train_accuracy == 0.5
    assert (record.validation_loss, record.validation_accuracy, record.seconds, record.step) == (0.25, None, 1.5, 3)
    assert history_of([1.0], accuracy=math.nan).end_epoch(1, None).train_accuracy is None


def test_history_survives_its_arrays():
    history = history_of([0.1, 1 / 3, 1e-30])
    history.end_epoch(3, (1.0, 0.5))
    back = History.from_arrays(history.to_arrays(), [record.to_json() for record in history.epochs])
    assert vars(back) == vars(history)
    assert history.epochs[0].epoch == 1
    earlier = [record.to_json() | {"epoch": record.epoch - 1} for record in history.epochs]  # of version 0.2
    assert History.from_arrays(history.to_arrays(), earlier).epochs == history.epochs
    empty = History.from_arrays(History().to_arrays(), [])
    assert vars(empty) == vars(History())


def test_json_lines_parse():
    stream = io.StringIO()
    tiny.trainer(callbacks=[JsonLines(stream)]).fit(tiny.dataset(), epochs=2, batch_size=10, validation=tiny.dataset(5))
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["event"] for line in lines] == ["start", "epoch", "epoch", "end"]
    assert lines[0] == {"event": "start", "epochs": 2, "steps_per_epoch": 3, "first_step": 0, "resumed": False}
    assert [line["epoch"] for line in lines[1:3]] == [1, 2]
    assert lines[2]["step"] == lines[3]["steps"] == 6


def test_json_lines_have_null_for_what_is_not_finite():
    stream = io.StringIO()
    JsonLines(stream).write({"a": math.nan, "b": [math.inf, 1.5], "c": {"d": -math.inf}})
    assert json.loads(stream.getvalue()) == {"a": None, "b": [None, 1.5], "c": {"d": None}}


def test_plots_take_and_return_axes(tmp_path):
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    history = history_of(np.linspace(2, 1, 30).tolist())
    history.end_epoch(30, (1.0, 0.75))
    ax = Figure().subplots()
    assert plot_history(history, ax) is ax
    assert ax.get_xlabel() == "step"
    assert [len(one.lines) for one in ax.figure.axes] == [3, 1]  # losses; accuracy
    path = save_loss_curve(history, tmp_path / "loss.png", title="a run")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert plot_history(history_of([0.5])).get_ylim()[0] == 0
    with pytest.raises(OutputError) as caught:
        save_loss_curve(history, tmp_path / "missing" / "loss.png")
    assert caught.value.expected


def test_comparison_of_two_runs():
    runs = {"chunked": history_of([1.0, 2.0, 3.5]), "bp": history_of([1.0, 2.25, 3.25])}
    runs["bp"].seconds = [9.0, 2.0, 2.0]
    result = compare_histories(runs["chunked"], runs["bp"], "chunked", "bp")
    assert result.max_loss_difference == 0.25
    assert result.step_of_max == 2
    assert result.early_loss_difference == 0.25
    assert result.final_losses == (3.5, 3.25)
    assert result.seconds == (0.5, 2.0)
    assert result.time_ratio == 4.0
    short = {name: history_of([1.0, 2.0]) for name in runs}
    short["chunked"].seconds, short["bp"].seconds = [9.0, 0.25], [7.0, 0.5]  # the first steps compile
    assert compare_histories(short["chunked"], short["bp"], "chunked", "bp").seconds == (0.25, 0.5)
    assert json.loads(json.dumps(result.to_json()))["time_ratio"] == 4.0
    assert "chunked against bp" in result.describe()
    late = [1.0] * 100 + [2.0]
    result = compare_histories(history_of(late), history_of([1.0] * 101), "chunked", "bp")
    assert (result.max_loss_difference, result.early_loss_difference) == (1.0, 0.0)
    for other in ([1.0], []):
        with pytest.raises(ShapeError):
            compare_histories(history_of(other), history_of([]), "chunked", "bp")


@pytest.mark.parametrize(
    ("width", "lines"),
    [(80, ["epoch  12  loss 2.4473 (test 12.4190)  accuracy 0.050 (test 0.075)  1234.5 s"]),
     (60, ["epoch  12  loss 2.4473 (test 12.4190)", "           accuracy 0.050 (test 0.075)  1234.5 s"])],
)  # fmt: skip
def test_an_epoch_is_a_line_of_80_letters(width, lines):
    record = EpochRecord(12, 60, 2.4473, 0.05, 12.419, 0.075, 1234.5)
    assert epoch_line(record, width).splitlines() == lines
    assert epoch_line(dataclasses.replace(record, train_accuracy=None, validation_loss=None)) == (
        "epoch  12  loss 2.4473  1234.5 s"
    )
