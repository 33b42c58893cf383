"""A trainer's relative paths refer to the folder in which it was made."""

from __future__ import annotations

import io
import os
import sys

import pytest

import orders
from sparsebp import nn, optim
from sparsebp.core.errors import FileFormatError, OptionError
from sparsebp.schedule import write_csv
from sparsebp.train import Callback, JsonLines, Trainer, load_checkpoint


class Moves(Callback):
    """Changes the current folder in the first step."""

    reads_model = False

    def __init__(self, folder):
        self.folder = folder

    def on_step(self, history):
        os.chdir(self.folder)


def trainer(**options):
    model = orders.mlp()
    return Trainer(model, nn.CrossEntropyLoss(), optim.SGD(model.parameters()), rng=0, **options)


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Return two folders, of which the first is the current one."""
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here", tmp_path / "there"


def test_checkpoints_stay_in_the_folder_of_the_run(folders):
    """Another run's folder of the same name, where the callback goes to, is left alone."""
    here, there = folders
    os.chdir(there)
    trainer(checkpoint_dir="run").fit(orders.images(), epochs=1, batch_size=5)
    before = (there / "run" / "checkpoint.safetensors").read_bytes()
    os.chdir(here)
    moved = trainer(checkpoint_dir="run", callbacks=[Moves(there)])
    moved.fit(orders.images(), epochs=2, batch_size=5)
    assert (there / "run" / "checkpoint.safetensors").read_bytes() == before
    assert len(load_checkpoint(here / "run").state["epochs"]) == 2
    moved.fit(orders.images(), epochs=3, batch_size=5, resume=True)
    assert len(load_checkpoint(here / "run").state["epochs"]) == 3


def test_a_schedules_file_is_read_from_there_too(folders):
    here, there = folders
    write_csv(orders.order_for(orders.mlp()), here / "order.csv")
    made = trainer(schedule="order.csv")
    os.chdir(there)
    made.fit(orders.images(), epochs=1, batch_size=5)
    assert trainer(schedule="ooo").schedule == "ooo"


def test_a_folder_that_is_gone(folders):
    here, _ = folders
    here.rmdir()
    with pytest.raises(FileFormatError, match="relative to a folder that is gone"):
        trainer(checkpoint_dir="run")


@pytest.mark.parametrize("stream", ["log.jsonl", None, 3, io.BytesIO(), io.StringIO])
def test_json_lines_take_a_stream_alone(stream):
    with pytest.raises(OptionError, match="open"):
        JsonLines(stream)
    assert JsonLines(sys.stderr).stream is sys.stderr


def test_json_lines_into_a_file(folders):
    with open("log.jsonl", "a", encoding="utf-8") as file:
        trainer(callbacks=[JsonLines(file)]).fit(orders.images(), epochs=1, batch_size=5)
    assert (folders[0] / "log.jsonl").read_text().count("\n") == 3
