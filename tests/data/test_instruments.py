"""Instruments by their sound: features by librosa, IRMAS-like folders that the test writes, and synthetic clips."""

import os
import sys

import numpy as np
import pytest

from sparsebp.core.errors import FileFormatError, MissingDependencyError, OptionError, ShapeError, SparseBPError
from sparsebp.data import instruments, load_instruments, synthetic_instruments
from sparsebp.data.instruments import CLASSES, mfcc, read_clip, synthesise
from sparsebp.train.config import build, config_for

librosa = pytest.importorskip("librosa")
soundfile = pytest.importorskip("soundfile")
SHAPES = {"S": (259, 38), "M": (517, 24), "L": (1034, 12)}


def write(path, clip=None, rate=44_100, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    clip = synthesise("pia", rng=3) if clip is None else clip
    soundfile.write(path, clip, rate, **options)
    return path


@pytest.fixture(scope="module")
def recordings(tmp_path_factory):
    """Two classes: one of three recordings, two clips of one of them, one of two."""
    root = tmp_path_factory.mktemp("irmas")
    for number, name in enumerate(("cel/0001__1", "cel/0001__2", "cel/0002__1", "cel/0003__1", "pia/7__1", "pia/8__1")):
        write(root / f"{name}.wav", synthesise(name[:3], rng=number))
    (root / "README.txt").write_text("not audio")
    return root


@pytest.mark.parametrize("features", SHAPES)
def test_bppsa_table_3_shapes_and_normalised_coefficients(features):
    table = mfcc(synthesise("vio", rng=1), features)
    assert table.shape == SHAPES[features] and table.dtype == np.float32
    assert np.abs(table.mean(0)).max() < 1e-4 and np.abs(table.std(0) - 1).max() < 1e-3


def test_features_are_librosas_channel_by_channel_without_the_level():
    """What is 80 dB below the louder channel is cut in both, as librosa does for several channels at once."""
    clip = synthesise("tru", rng=2)
    whole = librosa.feature.mfcc(y=clip.T.copy(), sr=44_100, n_mfcc=13, n_fft=2048, hop_length=256)[1, 1:].T
    expected = (whole - whole.mean(0)) / whole.std(0)
    assert np.allclose(
        mfcc(clip, "M")[:, 12:], expected, atol=5e-3
    )  # decibels in float32, and both channels share their floor


def test_silence_has_features_of_zero_and_other_lengths_are_refused():
    assert not mfcc(np.zeros((132_300, 2)), "S").any()
    with pytest.raises(ShapeError, match="132300"):
        mfcc(np.zeros((132_300,)), "S")
    with pytest.raises(OptionError, match="features"):
        mfcc(np.zeros((132_300, 2)), "XL")


@pytest.mark.parametrize("instrument", CLASSES)
def test_a_synthetic_clip_is_a_function_of_the_seed(instrument):
    clip = synthesise(instrument, rng=5)
    assert clip.shape == (132_300, 2) and clip.dtype == np.float32
    assert 0 < np.abs(clip).max() < 1
    assert np.array_equal(clip, synthesise(instrument, rng=5))
    assert not np.array_equal(clip, synthesise(instrument, rng=6))


def test_an_unknown_instrument_is_refused():
    with pytest.raises(OptionError, match="cel, cla"):
        synthesise("kazoo")


def test_a_folder_becomes_two_sets_with_recordings_kept_together(recordings):
    train, test = load_instruments(recordings, "S")
    assert len(train) + len(test) == 6
    for part in (train, test):
        assert set(part.targets.tolist()) == {0, 1}
    first, second = (mfcc(read_clip(recordings / "cel" / f"0001__{n}.wav"), "S") for n in (1, 2))

    def holds(part, table):
        return any(np.array_equal(row, table) for row in part.inputs)

    assert holds(train, first) == holds(train, second) != holds(test, first) == holds(test, second)
    x, y = train.batch(np.arange(2))
    assert x.shape == (259, 2, 38) and y.dtype == np.int64


def test_features_are_kept_and_a_changed_file_is_read_anew(recordings, monkeypatch):
    load_instruments(recordings, "L")
    read = []
    monkeypatch.setattr(instruments, "read_clip", lambda path: read.append(path.name) or read_clip(path))
    before = load_instruments(recordings, "L")
    assert not read
    changed = recordings / "pia" / "8__1.wav"
    old = changed.stat()
    write(changed, synthesise("pia", rng=99))
    os.utime(changed, ns=(old.st_atime_ns, old.st_mtime_ns))  # the same size, the same time
    after = load_instruments(recordings, "L")
    assert read == ["8__1.wav"]
    assert any(not np.array_equal(a.inputs, b.inputs) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("garbage", [b"", b"PK\x03\x04 no archive", b"\x93NUMPY\x01\x00"])
def test_a_damaged_cache_is_computed_again(recordings, garbage):
    expected = load_instruments(recordings, "L")
    (recordings / ".sparsebp-mfcc-L.npz").write_bytes(garbage)
    for a, b in zip(expected, load_instruments(recordings, "L"), strict=True):
        assert np.array_equal(a.inputs, b.inputs)


@pytest.mark.parametrize(
    ("clip", "rate", "got"),
    [
        (np.zeros((132_300, 1)), 44_100, "1 channels"),
        (np.zeros((132_300, 2)), 48_000, "48000 Hz"),
        (np.zeros((66_150, 2)), 44_100, "1.500 s"),
        (np.zeros((0, 2)), 44_100, "0.000 s"),
    ],
)
def test_another_kind_of_clip_is_refused(tmp_path, clip, rate, got):
    with pytest.raises(FileFormatError, match=got):
        read_clip(write(tmp_path / "x.wav", clip, rate))


def test_a_clip_that_lacks_a_sample_is_filled_up(tmp_path):
    clip = read_clip(write(tmp_path / "x.wav", synthesise("org")[:-1]))
    assert clip.shape == (132_300, 2) and not clip[-1].any()


def test_what_is_no_audio_is_refused(tmp_path):
    (tmp_path / "x.wav").write_bytes(b"RIFF garbage")
    with pytest.raises(FileFormatError, match="cannot be read"):
        read_clip(tmp_path / "x.wav")
    with pytest.raises(FileFormatError, match="cannot be read"):
        read_clip(tmp_path / "absent.wav")
    write(tmp_path / "nan.wav", np.full((132_300, 2), np.nan), subtype="FLOAT")
    with pytest.raises(FileFormatError, match="NaN"):
        read_clip(tmp_path / "nan.wav")


def test_folders_that_cannot_be_used_are_refused(tmp_path):
    with pytest.raises(FileFormatError, match="no such folder"):
        load_instruments(tmp_path / "absent")
    write(tmp_path / "cel" / "1__1.wav")
    with pytest.raises(FileFormatError, match="1 such folders"):
        load_instruments(tmp_path)
    write(tmp_path / "pia" / "1__1.wav")
    with pytest.raises(FileFormatError, match="cannot be split"):
        load_instruments(tmp_path)
    with pytest.raises(OptionError, match="test"):
        load_instruments(tmp_path, test=2)


def test_synthetic_sets_are_kept_under_a_name_that_says_all(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    train, test = synthetic_instruments("L", each=2, seed=4)
    assert len(train) == len(test) == 11 and sorted(train.targets) == list(range(11))
    monkeypatch.setattr(instruments, "synthesise", lambda *a, **o: pytest.fail("computed again"))
    again, _ = synthetic_instruments("L", each=2, seed=4)
    assert np.array_equal(train.inputs, again.inputs)
    with pytest.raises(BaseException, match="computed again"):
        synthetic_instruments("L", each=2, seed=5)


def test_a_recipe_trains_and_says_that_it_is_synthetic(tmp_path, monkeypatch, recordings):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = config_for("instruments", features="L", epochs=1, data=str(recordings))
    assert config.title == "instruments: GRU(12, 20), T = 1034"
    history = build(config).fit()
    assert np.isfinite(history.loss).all()
    assert "synthetic" in config_for("instruments").title


@pytest.mark.parametrize("source", ["recordings", "synthetic"])
def test_features_that_were_broken_off_leave_no_cache(source, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    small(tmp_path / "clips")
    calls = []

    def broken_off(clip, features):
        calls.append(features)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return np.zeros((1034, 12), np.float32)

    monkeypatch.setattr(instruments, "mfcc", broken_off)
    with pytest.raises(KeyboardInterrupt):
        load_instruments(tmp_path / "clips", "L") if source == "recordings" else synthetic_instruments("L", each=2)
    assert {path.suffix for path in tmp_path.rglob("*") if path.is_file()} == {".wav"}


@pytest.mark.parametrize("name", ["librosa", "soundfile"])
def test_what_is_not_installed_is_named_with_its_extra(name, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    small(tmp_path / "clips")
    monkeypatch.setitem(sys.modules, name, None)
    for load in (lambda: load_instruments(tmp_path / "clips", "L"), lambda: synthetic_instruments("L", each=2)):
        with pytest.raises(MissingDependencyError, match=r"sparsebp\[audio\]"):
            load()


def test_a_run_is_not_resumed_with_other_classes(tmp_path):
    small(tmp_path / "clips")
    options = {"features": "L", "epochs": 1, "data": str(tmp_path / "clips")}
    build(config_for("instruments", **options), checkpoint_dir=tmp_path / "run").fit()
    (tmp_path / "clips" / "b").rename(tmp_path / "clips" / "A")  # as many classes, in another order
    with pytest.raises(FileFormatError, match=r"data differs.*classes A, a.*classes a, b"):
        build(config_for("instruments", **options), checkpoint_dir=tmp_path / "run").fit(resume=True)


def small(root):
    """Two classes of two recordings."""
    for name in ("a/1", "a/2", "b/1", "b/2"):
        write(root / f"{name}.wav")
    return root


@pytest.mark.parametrize("kind", ["link to nothing", "pipe", "folder", "too loud"])
def test_what_cannot_be_heard_is_refused(kind, tmp_path):
    path = small(tmp_path) / "a" / "x.WAV"
    if kind == "link to nothing":
        path.symlink_to(tmp_path / "absent.wav")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        write(path, np.full((132_300, 2), 1e30), format="WAV", subtype="FLOAT")
    with pytest.raises(FileFormatError, match=r"x\.WAV"), np.errstate(all="ignore"):
        load_instruments(tmp_path, "L")


@pytest.mark.parametrize("field", ["values", "names", "version"])
def test_a_cache_with_other_contents_is_left_aside(field, tmp_path):
    small(tmp_path)
    first = load_instruments(tmp_path, "L")[0].batch(np.arange(2))[0]
    cache = tmp_path / ".sparsebp-mfcc-L.npz"
    with np.load(cache) as kept:
        fields = dict(kept)
    other = {"values": fields["values"] * np.float32(np.nan), "names": np.array("x"), "version": np.array(["a", "b"])}
    np.savez(cache, **(fields | {field: other[field]}))
    np.testing.assert_array_equal(load_instruments(tmp_path, "L")[0].batch(np.arange(2))[0], first)
    with cache.open("wb") as file:
        np.save(file, first)
    np.testing.assert_array_equal(load_instruments(tmp_path, "L")[0].batch(np.arange(2))[0], first)


@pytest.mark.parametrize("clip", [np.full((132_300, 2), np.nan), np.full((132_300, 2), 1j), ["a"], [[1], [1, 2]]])
def test_what_is_no_clip_is_refused(clip):
    with pytest.raises(SparseBPError):
        mfcc(clip, "L")
