"""IRMAS-like folders: a folder a class, in it WAV files of 3 s, 44.1 kHz, stereo. Features are kept beside them."""

from __future__ import annotations

import io
import os
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sparsebp.core.arguments import check_choice, check_number
from sparsebp.core.errors import FileFormatError, NonFiniteError, OutputError
from sparsebp.core.files import check_path, write_atomically
from sparsebp.data.dataset import ArrayDataset
from sparsebp.data.instruments.features import SETTINGS, FeatureSet, import_librosa, mfcc
from sparsebp.data.instruments.synthetic import FRAMES, RATE

_VERSION = 1  # of the cache: to be raised when features change
_TOLERANCE = RATE // 100
"""Samples that a clip may be shorter or longer: some files of IRMAS lack one."""


def load_instruments(
    folder: str | os.PathLike[str], features: FeatureSet = "S", *, test: float = 0.2, dtype: Any = np.float32
) -> tuple[ArrayDataset, ArrayDataset]:
    """Return the training and the test set of a folder of recordings such as IRMAS's training data.

    Features are computed once and kept in ``.sparsebp-mfcc-S.npz`` (M, L) in the folder; a file whose size or time has
    changed is read anew. Where the folder cannot be written nothing is kept.

    Parameters
    ----------
    folder
        A folder a class, in alphabetical order of their names, and in each WAV files of 3 s, 44.1 kHz, stereo.
    features
        ``"S"``, ``"M"`` or ``"L"`` of BPPSA Table 3.
    test
        Share of every class that is held out. The files of a recording, whose names are alike before ``__`` (IRMAS
        cuts several clips from one), stay together. The choice depends on the names alone.
    dtype
        float32 or float64: the dtype of the batches.

    Returns
    -------
    train, test : ArrayDataset
        Inputs (T, B, I) of batches, with T×I as `mfcc` says; classes (B,), int64, by the folders' order.

    Raises
    ------
    FileFormatError
        The folder is not there or has less than two classes, a class has less than two recordings, or a file is no
        WAV file, or another length, rate or number of channels.
    OptionError
        There is no such set of features, or `test` is not between 0 and 1.
    MissingDependencyError
        librosa is not installed.
    """
    check_choice("features", features, SETTINGS)
    share = check_number("test", test, least=0.0, most=1.0)
    path = check_path("folder", folder)
    files = _files(path)
    inputs = _features(path, [file for found in files.values() for file in found], features)
    labels = np.repeat(np.arange(len(files)), [len(found) for found in files.values()])
    chosen = np.concatenate([_held_out(name, found, share) for name, found in files.items()])
    return (
        ArrayDataset(inputs[~chosen], labels[~chosen], dtype=dtype),
        ArrayDataset(inputs[chosen], labels[chosen], dtype=dtype),
    )


def class_names(folder: str | os.PathLike[str]) -> tuple[str, ...]:
    """Return the classes of a folder of recordings, in the order of their numbers.

    Raises
    ------
    FileFormatError
        The folder is not there or has less than two classes.
    """
    return tuple(_files(check_path("folder", folder)))


def _files(path: Path) -> dict[str, list[Path]]:
    """Return the WAV files of every class, sorted by name."""
    classes: dict[str, list[Path]] = {}
    if path.is_dir():
        for entry in sorted(path.iterdir()):
            found = sorted(file for file in entry.glob("*") if file.suffix.lower() == ".wav") if entry.is_dir() else []
            if found:
                classes[entry.name] = found
    if len(classes) < 2:
        raise FileFormatError(
            f"{path} holds no classes of recordings", expected="a folder a class with WAV files in it, two or more",
            got=f"{len(classes)} such folders" if path.is_dir() else "no such folder",
            remedy="Pass the folder around cel, cla, flu, … of IRMAS's training data",
        )  # fmt: skip
    return classes


def _held_out(name: str, files: Sequence[Path], share: float) -> np.ndarray:
    """Return which files of a class are for testing, bool: whole recordings, about `share` of the files."""
    recordings = [file.stem.split("__")[0] for file in files]
    names = sorted(set(recordings))
    if len(names) < 2:
        raise FileFormatError(
            f"The class {name} cannot be split", expected="two recordings or more", got=f"{len(names)}: {names[0]}",
            remedy="Add recordings (the files of one are alike before '__'), or take the class out",
        )  # fmt: skip
    order = np.random.default_rng(1998).permutation(len(names))
    held: set[str] = set()
    for number in order[: len(names) - 1]:
        if held and sum(recording in held for recording in recordings) >= share * len(files):
            break
        held.add(names[number])
    return np.array([recording in held for recording in recordings])


def _features(folder: Path, files: Sequence[Path], features: FeatureSet) -> np.ndarray:
    """Return the features (N, T, I) of the files, from the cache those that have not changed since."""
    cache = folder / f".sparsebp-mfcc-{features}.npz"
    stamps = np.array([_stamp(file) for file in files], np.int64)
    names = [file.relative_to(folder).as_posix() for file in files]
    known = _read_cache(cache, SETTINGS[features].shape)
    out = np.empty((len(files), *SETTINGS[features].shape), np.float32)
    missing = []
    for number, name in enumerate(names):
        stamp, kept = known.get(name, (None, None))
        if kept is not None and stamp == tuple(stamps[number].tolist()):
            out[number] = kept
        else:
            missing.append(number)
    for number in missing:
        try:
            out[number] = mfcc(read_clip(files[number]), features)
        except NonFiniteError as error:
            raise FileFormatError(f"{files[number]} has no features", expected="audio, below 1 in size", got=str(error),
                                  remedy="Take it out of the folder") from error  # fmt: skip
    if missing:
        _write_cache(cache, names, stamps, out)
    return out


def _stamp(file: Path) -> tuple[int, int, int]:
    try:
        status = file.stat()
    except OSError as error:  # a link to nothing
        raise FileFormatError(f"{file} cannot be read", expected="a WAV file", got=str(error),
                              remedy="Take it out of the folder") from error  # fmt: skip
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _read_cache(cache: Path, shape: tuple[int, int]) -> dict[str, tuple[tuple[int, ...], np.ndarray]]:
    """Return stamp and features by name; nothing where the cache is missing, damaged or of another version."""
    try:
        kept = np.load(cache, allow_pickle=False)
        if not isinstance(kept, np.lib.npyio.NpzFile):
            return {}
        with kept:
            names, stamps, values, version = (kept[key] for key in ("names", "stamps", "values", "version"))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError):
        return {}
    whole = values.shape == (names.size, *shape) and values.dtype == np.float32 and stamps.shape == (names.size, 3)
    if names.ndim != 1 or not whole or version.shape != () or version != _versions() or not np.isfinite(values).all():
        return {}
    return {str(name): (tuple(stamp.tolist()), row) for name, stamp, row in zip(names, stamps, values, strict=True)}


def _write_cache(cache: Path, names: Sequence[str], stamps: np.ndarray, values: np.ndarray) -> None:
    content = io.BytesIO()
    np.savez(content, names=np.array(names), stamps=stamps, values=values, version=np.array(_versions()))
    try:
        write_atomically(cache, content.getvalue())
    except OutputError:  # a read-only folder: the features are computed again the next time
        return


def _versions() -> str:
    return f"{_VERSION} librosa {import_librosa().__version__}"


def read_clip(path: str | os.PathLike[str]) -> np.ndarray:
    """Return both channels of a WAV file of 3 s at 44.1 kHz: (132 300, 2), float32, a missing end filled with zeros.

    Raises
    ------
    FileFormatError
        It cannot be read, is no audio, or has another length (by more than 10 ms), rate or number of channels.
    MissingDependencyError
        librosa, and with it soundfile, is not installed.
    """
    import_librosa()
    import soundfile

    path = check_path("path", path)
    try:
        if path.exists() and not path.is_file():  # to open a pipe would wait for somebody to write
            raise OSError("no regular file")
        with path.open("rb") as file:  # soundfile opens no name that is no text
            clip, rate = soundfile.read(file, dtype="float32", always_2d=True)
    except (OSError, RuntimeError, TypeError, ValueError) as error:  # soundfile's errors are RuntimeErrors
        raise FileFormatError(f"{path} cannot be read", expected="a WAV file", got=str(error),
                              remedy="Convert it, or take it out of the folder") from error  # fmt: skip
    if rate != RATE or clip.shape[1] != 2 or abs(len(clip) - FRAMES) > _TOLERANCE:
        raise FileFormatError(
            f"{path} is another kind of clip", expected="3 s at 44 100 Hz, two channels",
            got=f"{len(clip) / rate:.3f} s at {rate} Hz, {clip.shape[1]} channels",
            remedy="Convert it, or take it out of the folder",
        )  # fmt: skip
    if not np.isfinite(clip).all():
        raise FileFormatError(f"{path} holds values that are not finite", expected="audio", got="NaN or infinity",
                              remedy="Take it out of the folder")  # fmt: skip
    whole = np.zeros((FRAMES, 2), np.float32)
    whole[: len(clip)] = clip[:FRAMES]
    return whole
