"""Checkpoint files: exact, atomic, and refused when damaged or foreign."""

import json
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.numpy import save

from sparsebp.core.errors import FileFormatError, OutputError
from sparsebp.core.files import prepare_folder
from sparsebp.train import Checkpoint, checkpoint, load_checkpoint, save_checkpoint

arrays = hnp.arrays(
    st.sampled_from([np.float32, np.float64, np.int64, np.uint8]), hnp.array_shapes(min_dims=0, max_dims=3, min_side=0)
)
floats = st.floats(allow_nan=False)


@given(
    tensors=st.dictionaries(st.text("abc.", min_size=1), arrays, max_size=4),
    state=st.dictionaries(st.text(max_size=5), floats | st.integers() | st.none() | st.lists(floats), max_size=4),
)
def test_round_trip_is_exact(tmp_path_factory, tensors, state):
    path = tmp_path_factory.mktemp("round") / "c.safetensors"
    save_checkpoint(path, Checkpoint(tensors, state))
    back = load_checkpoint(path)
    assert back.state == state
    assert set(back.tensors) == set(tensors)
    for name, array in tensors.items():
        assert back.tensors[name].dtype == array.dtype
        assert back.tensors[name].shape == array.shape
        assert back.tensors[name].tobytes() == array.tobytes()


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "c.safetensors"
    save_checkpoint(path, Checkpoint({"model.w": np.arange(6, dtype=np.float32).reshape(2, 3)}, {"epoch": 1}))
    return path


def assert_refused(path):
    with pytest.raises(FileFormatError) as caught:
        load_checkpoint(path)
    assert caught.value.expected is not None
    assert caught.value.got is not None
    assert caught.value.expected
    return str(caught.value)


def test_part_takes_names_by_prefix(path):
    assert list(load_checkpoint(path).part("model")) == ["w"]
    assert load_checkpoint(path).part("mod") == {}


def test_damage_anywhere_is_noticed(path):
    content = path.read_bytes()
    flipped = (content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :] for at in range(0, len(content), 7))
    for damaged in (*flipped, *(content[:length] for length in range(0, len(content), 11))):
        path.write_bytes(damaged)
        assert_refused(path)


def file_of(state, version="1"):
    """A file without arrays, whose digest is right."""
    metadata = {"format": checkpoint.FORMAT, "state": state, "digest": checkpoint._digest({}, state)}
    return save({}, metadata | {"version": version})


BFLOAT = json.dumps({"a": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}}).encode()


@pytest.mark.parametrize(("content", "said"), [
    *((junk, "no checkpoint at all") for junk in (
        b"", b"hello", b"\x00" * 100, b"PK\x03\x04" + b"a" * 200, b"\xff" * 64,
        len(BFLOAT).to_bytes(8, "little") + BFLOAT + bytes(4),  # a dtype that NumPy does not have
    )),
    (save({"w": np.zeros(3, np.float32)}), "not written by sparsebp"), (file_of("{}", version="3"), "version"),
    *((file_of(text), "no state") for text in ("", "{", "[" * 100_000, "1" * 5000, "[]", "3", "null", '"x"')),
])  # fmt: skip
def test_not_a_checkpoint(path, content, said):
    path.write_bytes(content)
    assert said in assert_refused(path)


@pytest.mark.parametrize(("place", "said"), [
    ("nothing", "No checkpoint"), ("", "No checkpoint"), ("fifo", "that is there"), ("/dev/zero", "that is there"),
])  # fmt: skip
def test_no_file_or_one_that_would_be_read_without_end(tmp_path, place, said):
    if place == "fifo":
        os.mkfifo(tmp_path / place)
    assert said in assert_refused(tmp_path / place)


def test_a_link_to_a_checkpoint_is_read(path):
    link = path.with_name("link")
    link.symlink_to(path)
    assert load_checkpoint(link).state == load_checkpoint(path).state


def test_a_file_that_looks_temporary_is_left_alone(path):
    other = path.with_name(path.name + ".tmp")
    other.write_bytes(b"half")
    save_checkpoint(path, Checkpoint({}, {"epoch": 2}))
    assert load_checkpoint(path).state == {"epoch": 2}
    assert other.read_bytes() == b"half"
    assert len(list(path.parent.iterdir())) == 2


def test_folders_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(OutputError) as caught:
            prepare_folder(folder)
        assert caught.value.expected
    with pytest.raises(OutputError):
        save_checkpoint(tmp_path / "missing" / "c.safetensors", Checkpoint({}, {}))
