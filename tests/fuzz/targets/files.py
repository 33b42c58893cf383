"""Files that are not what they should be: checkpoints (damaged, or signed anew with something else), configurations."""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from fuzz.case import accepted, expect, refused, same
from fuzz.draw import JUNK, chance, one_of, size
from fuzz.mutate import VALUES, mutated_bytes, mutated_json
from sparsebp import nn, optim, train
from sparsebp.core.errors import SparseBPError
from sparsebp.train.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from sparsebp.train.config import config_for, read_config, write_config

OPTIONS: dict[str, tuple[Any, ...]] = {
    "samples": (1, 10),
    "batch_size": (1, 7),
    "epochs": (0, 1),
    "lr": (0.1, 1e-3),
    "optimizer": ("sgd", "adam"),
    "lr_schedule": ("constant", "cosine"),
    "clip_norm": (None, 1.0),
    "backward": ("auto", "linear", "bp"),
    "fusion": ("none", "backward"),
    "accumulate": (1, 2),
    "dtype": ("float32", "float64"),
    "seed": (0, 3),
    "hidden": (3, 5),
    "layers": (1, 2),
    "seq_len": (8, 28),
    "model": ("gru", "rnn", "lenet5", "vgg11"),
    "width": (0.1, 1),
    "prune": (None, 0.5),
    "graph": (False,),
    "device": ("cpu",),
}


def case(rng: np.random.Generator) -> None:
    with tempfile.TemporaryDirectory() as folder:
        one_of(rng, _checkpoint, _resume, _config_file, _config)(rng, Path(folder))


def _checkpoint(rng: np.random.Generator, folder: Path) -> None:
    """There and back; damaged, it is refused; signed anew, what is in it is what was meant."""
    path = folder / "checkpoint.safetensors"
    tensors = {
        f"a.{i}": rng.standard_normal((size(rng, 0, 3), size(rng, 0, 3))).astype(one_of(rng, "f4", "f8", "i4", "?"))
        for i in range(int(rng.integers(0, 3)))
    }
    state = {
        "x": one_of(rng, *(v for v in VALUES if not isinstance(v, float) or math.isfinite(v))),
        "y": [1, {"z": 0.1}],
    }
    with accepted(f"{state}"):
        save_checkpoint(path, Checkpoint(tensors, state))
        back = load_checkpoint(path)
    expect(back.state == state and back.tensors.keys() == tensors.keys(), f"{state} became {back.state}")
    for name, array in tensors.items():
        same(name, back.tensors[name], array, exact=True)
    content = path.read_bytes()
    damaged = mutated_bytes(rng, content)
    path.write_bytes(damaged)
    if damaged != content:
        try:
            again = load_checkpoint(path)
        except SparseBPError:
            return
        expect(
            again.state == state and all(np.array_equal(again.tensors[n], tensors[n]) for n in tensors),
            "damage was not seen",
        )


def _trainer(rng: np.random.Generator, folder: Path | None) -> Any:
    model = nn.Sequential(nn.Linear(2, 3, rng=1), nn.Dropout(0.2, rng=2), nn.Linear(3, 2, rng=3))
    optimizer = one_of(rng, optim.SGD, optim.Adam)(model.parameters(), lr=0.1)
    return train.Trainer(model, nn.CrossEntropyLoss(), optimizer, checkpoint_dir=folder)


def _resume(rng: np.random.Generator, folder: Path) -> None:
    """A run is taken up from a checkpoint of which one place has changed, rightly signed."""
    from sparsebp.data import ArrayDataset

    data = ArrayDataset(rng.standard_normal((4, 2)).astype(np.float32), rng.integers(0, 2, 4))
    state = rng.bit_generator.state
    _trainer(rng, folder).fit(data, epochs=1, batch_size=2)
    path = next(folder.glob("checkpoint.safetensors"))
    good = load_checkpoint(path)
    tensors, kept = dict(good.tensors), dict(good.state)
    if chance(rng, 0.6):
        kept = mutated_json(rng, kept)
    elif tensors:
        name = one_of(rng, *tensors)
        array = tensors.pop(name)
        if chance(rng, 0.7):
            tensors[name] = one_of(
                rng,
                array.astype("f8"),
                array[..., None],
                np.zeros(0, "f4"),
                array.reshape(-1)[:1],
                np.full_like(array, 1),
                array * np.nan if array.dtype.kind == "f" else array,
            )
    save_checkpoint(path, Checkpoint(tensors, kept))
    rng.bit_generator.state = state
    trainer = _trainer(rng, folder)
    before = trainer.model.state_dict()
    try:
        trainer.fit(data, epochs=2, batch_size=2, resume=True)
    except SparseBPError as error:
        if type(error).__name__ == "FileFormatError":
            expect(all(np.array_equal(a, before[n]) for n, a in trainer.model.state_dict().items()), "weights changed")


def _config_file(rng: np.random.Generator, folder: Path) -> None:
    path = folder / f"config.{one_of(rng, 'toml', 'json')}"
    options = {key: one_of(rng, *values) for key, values in OPTIONS.items() if chance(rng, 0.4)} | {
        "text": one_of(rng, "a", 'é\n"\\', "\x7f", "\t", "")
    }
    with accepted(f"{options}"):
        write_config(options, path)
        back = read_config(path)
    expect(back == {key: value for key, value in options.items() if value is not None}, f"{options} became {back}")
    if chance(rng, 0.5):
        path.write_bytes(mutated_bytes(rng, path.read_bytes()))
    elif path.suffix == ".json":
        path.write_text(json.dumps(mutated_json(rng, json.loads(path.read_bytes()))))
    config_for("bitstream", **{name: value for name, value in read_config(path).items() if name.isidentifier()})


def _config(rng: np.random.Generator, folder: Path) -> None:
    options = {key: one_of(rng, *values) for key, values in OPTIONS.items() if chance(rng, 0.2)}
    task = one_of(rng, "bitstream", "seqmnist", "mnist", "digits")
    junk = one_of(rng, *JUNK)
    with_junk = options | {one_of(rng, *OPTIONS): junk} if chance(rng, 0.5) else options
    config = config_for(task, **with_junk)  # our own error, or a configuration
    expect(config.batch_size >= 1 and not isinstance(config.batch_size, (bool, float)), f"{config}")
    refused(f"a task {junk!r}", config_for, junk, **options)
