"""Musical instruments by their sound: folders of recordings, synthetic clips, and MFCC features of both."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import os
import zipfile
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from sparsebp.core.check import Seed, check_choice, check_generator, check_integer, check_number
from sparsebp.core.errors import (
    DTypeError,
    FileFormatError,
    NonFiniteError,
    OptionError,
    OutputError,
    ShapeError,
    needing,
)
from sparsebp.core.files import cache_folder, check_path, prepare_folder, write_atomically
from sparsebp.core.threads import get_threads, one_blas_thread
from sparsebp.data.dataset import ArrayDataset, parted

__all__ = ["CLASSES", "load_instruments", "mfcc", "read_clip", "synthesise", "synthetic_instruments"]


# Eleven synthetic instruments in place of recordings that cannot be shipped. **None of it is real audio.**
#
# A clip is a melody of one instrument, with chords and rests, over noise and a quieter second instrument, as in IRMAS
# (the predominant instrument is the class; Bosch et al., 2012). A tone is a sum of harmonic partials under envelopes
# and a formant, with vibrato, tremolo and the noise of breath or bow. Level, pitch, tempo, panning and every parameter
# except the formant are drawn anew for every clip or tone; the ranges of instruments overlap. Clips begin anywhere in a
# tone, and features are normalised over a clip, so that instruments differ only in how their sound changes.

RATE = 44_100
"""Samples a second."""
FRAMES = 3 * RATE
"""Samples of a clip, each for two channels."""
_PARTIALS = 14
_FADE = 0.004
_SPREAD = 5
"""Semitones of a melody above and below its middle."""
_Range: TypeAlias = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Instrument:
    """The ranges that an instrument's parameters are drawn from."""

    pitch: _Range  # MIDI numbers
    slope: _Range  # fall of the partials, dB an octave
    even: float  # strength of the even partials (a clarinet has hardly any)
    attack: _Range  # seconds
    decay: _Range  # seconds until 1/e; infinite for held tones
    bright: _Range  # how much sooner high partials decay, or, in held tones, how much later they come
    vibrato: _Range  # Hz
    depth: _Range  # of the vibrato, cents
    tremolo: _Range  # depth; the rate is the vibrato's
    noise: _Range  # of breath or bow
    tones: _Range  # a second
    rest: _Range  # share of a tone's time that is silent
    formant: tuple[float, float]  # loudest frequency of the body, Hz, and its gain, dB
    chord: tuple[int, int]  # tones at once


_HELD = (np.inf, np.inf)
INSTRUMENTS: dict[str, Instrument] = {
    "cel": Instrument((36, 64), (5, 9), 1.0, (0.15, 0.3), _HELD, (1, 3), (4.5, 5.5), (20, 45),
                      (0, 0.1), (0.02, 0.06), (0.7, 1.1), (0, 0.05), (300, 9), (1, 1)),
    "cla": Instrument((50, 82), (6, 10), 0.05, (0.03, 0.06), _HELD, (0.5, 2), (4, 6), (0, 4),
                      (0, 0.05), (0.01, 0.03), (2.6, 3.6), (0.15, 0.3), (1500, 6), (1, 1)),
    "flu": Instrument((62, 88), (10, 16), 0.8, (0.03, 0.08), _HELD, (0, 1), (4.5, 6), (5, 15),
                      (0.35, 0.6), (0.06, 0.15), (1.5, 2.2), (0.05, 0.15), (800, 6), (1, 1)),
    "gac": Instrument((40, 72), (5, 9), 0.9, (0.002, 0.006), (0.12, 0.25), (3, 6), (4, 6), (0, 3),
                      (0, 0.02), (0.0, 0.01), (4.5, 6.5), (0, 0.1), (200, 6), (1, 3)),
    "gel": Instrument((40, 76), (3, 7), 0.9, (0.002, 0.01), (1.0, 2.0), (0.3, 1), (4.5, 6.5), (0, 10),
                      (0, 0.05), (0.0, 0.02), (0.9, 1.4), (0.2, 0.4), (2500, 9), (1, 2)),
    "org": Instrument((36, 72), (2, 5), 1.0, (0.004, 0.02), _HELD, (0, 0.5), (6.5, 7.5), (0, 5),
                      (0.2, 0.4), (0.0, 0.02), (0.7, 1.1), (0, 0.05), (1000, 0), (3, 4)),
    "pia": Instrument((33, 84), (6, 11), 1.0, (0.002, 0.008), (0.35, 0.6), (1.5, 3.5), (4, 6), (0, 0),
                      (0, 0.0), (0.0, 0.01), (1.8, 2.6), (0, 0.1), (500, 0), (1, 3)),
    "sax": Instrument((46, 76), (3, 7), 1.0, (0.02, 0.05), _HELD, (1, 3), (4.5, 5.5), (15, 35),
                      (0.1, 0.2), (0.15, 0.35), (2.2, 3.2), (0.1, 0.25), (1400, 9), (1, 1)),
    "tru": Instrument((54, 82), (2, 5), 1.0, (0.05, 0.1), _HELD, (8, 14), (4.5, 6), (0, 8),
                      (0, 0.05), (0.01, 0.03), (1.5, 2.4), (0.3, 0.5), (1200, 6), (1, 1)),
    "vio": Instrument((60, 91), (3, 8), 1.0, (0.04, 0.1), _HELD, (0.5, 2), (6.2, 7.5), (50, 85),
                      (0, 0.12), (0.02, 0.06), (1.2, 1.9), (0, 0.08), (3000, 9), (1, 1)),
    "voi": Instrument((45, 76), (6, 11), 1.0, (0.08, 0.18), _HELD, (0.5, 2), (4.2, 5.2), (110, 190),
                      (0.05, 0.2), (0.03, 0.08), (0.9, 1.5), (0.1, 0.25), (700, 12), (1, 1)),
}  # fmt: skip
"""By the names of IRMAS: cello, clarinet, flute, acoustic and electric guitar, organ, piano, saxophone, trumpet,
violin, voice. Their sounds are made up."""
CLASSES = tuple(INSTRUMENTS)


def synthesise(instrument: str, *, rng: Seed = 0) -> np.ndarray:
    """Return a synthetic clip of 3 s: (132 300, 2), float32, both channels below 1 in size.

    Parameters
    ----------
    instrument
        One of `CLASSES`.
    rng
        A `numpy.random.Generator` or a seed.
    """
    if instrument not in INSTRUMENTS:
        raise OptionError("There is no such instrument", expected=", ".join(CLASSES), got=repr(instrument))
    generator = check_generator("rng", rng)
    mono = _melody(INSTRUMENTS[instrument], generator)
    other = _melody(INSTRUMENTS[CLASSES[generator.integers(len(CLASSES))]], generator)
    quieter = 10 ** (-generator.uniform(30, 40) / 20)
    pans = generator.uniform(0.2, 0.8, size=2)
    clip = np.outer(_norm(mono), (pans[0], 1 - pans[0])) + quieter * np.outer(_norm(other), (pans[1], 1 - pans[1]))
    clip += 10 ** (-generator.uniform(40, 50) / 20) * generator.standard_normal(clip.shape, dtype=np.float32)
    return (clip * (10 ** (-generator.uniform(3, 25) / 20) / max(np.abs(clip).max(), 1e-9))).astype(np.float32)


def _norm(tone: np.ndarray) -> np.ndarray:
    return tone / max(float(np.sqrt(np.mean(tone**2))), 1e-9)


def _melody(instrument: Instrument, generator: np.random.Generator) -> np.ndarray:
    """Return tones one after another, (FRAMES,), float32."""
    out = np.zeros(FRAMES, np.float32)
    pace = generator.uniform(*instrument.tones)
    slope, rest = generator.uniform(*instrument.slope), generator.uniform(*instrument.rest)
    low, high = instrument.pitch
    centre = generator.uniform(low + _SPREAD, high - _SPREAD)
    at = -int(generator.uniform(0, RATE / pace))  # the clip begins anywhere in a tone
    while at < FRAMES:
        length = int(RATE / pace * generator.uniform(0.7, 1.4))
        base = centre + generator.uniform(-_SPREAD, _SPREAD)
        for voice in range(generator.integers(instrument.chord[0], instrument.chord[1] + 1)):
            pitch = base + (0, 4, 7, 12)[voice] + generator.uniform(-0.1, 0.1)
            tone = _tone(instrument, generator, pitch, slope, int(length * (1 - rest)))
            begin, end = max(at, 0), min(at + len(tone), FRAMES)
            if end > begin:
                out[begin:end] += tone[begin - at : end - at]
        at += length
    return out


def _tone(
    instrument: Instrument, generator: np.random.Generator, pitch: float, slope: float, length: int
) -> np.ndarray:
    def draw(interval: _Range) -> float:
        return float(generator.uniform(*interval)) if np.isfinite(interval[0]) else interval[0]

    attack, decay, bright, noise = (
        draw(interval) for interval in (instrument.attack, instrument.decay, instrument.bright, instrument.noise)
    )
    time = np.arange(max(length, 64), dtype=np.float32) / RATE
    sway = np.sin(2 * np.pi * (draw(instrument.vibrato) * time + generator.random()), dtype=np.float32)
    lowest = 440 * 2 ** ((pitch - 69) / 12)
    frequency = lowest * np.exp2(draw(instrument.depth) / 1200 * sway)
    phase = np.cumsum(2 * np.pi / RATE * frequency, dtype=np.float64)
    phase = np.mod(phase, 2 * np.pi).astype(np.float32)
    rise = 1 - np.exp(-time * (2.5 / attack))
    fall = np.exp(-time / np.float32(decay)) if np.isfinite(decay) else None
    partials = _partials(instrument, phase, lowest, slope, bright, rise, fall, frequency.max())
    partials *= 1 + draw(instrument.tremolo) * sway
    level = 10 ** (-generator.uniform(0, 5) / 20)
    shape = rise if fall is None else rise * fall
    tone = partials + noise * shape * generator.standard_normal(len(time), dtype=np.float32)
    ends = min(int(_FADE * RATE), len(tone))
    tone[-ends:] *= np.linspace(1, 0, ends, dtype=np.float32)
    return level * tone


def _partials(
    instrument: Instrument, phase: np.ndarray, lowest: float, slope: float, bright: float, rise: np.ndarray,
    fall: np.ndarray | None, highest: float,
) -> np.ndarray:  # fmt: skip
    """Return the sum of the partials: high ones decay sooner, or come later."""
    # sin(k φ) = 2 cos φ sin((k-1) φ) - sin((k-2) φ), and every partial's envelope is a factor times the previous one.
    count = max(1, min(_PARTIALS, int(0.45 * RATE / highest)))
    step = (fall if fall is not None else rise) ** np.float32(bright / 6)
    envelope = rise if fall is None else rise * fall
    twice, previous, current = 2 * np.cos(phase), np.zeros_like(phase), np.sin(phase)
    out = np.zeros_like(phase)
    loudest, gain = instrument.formant
    for k in range(1, count + 1):
        body = gain * np.exp(-2 * np.log2(k * lowest / loudest) ** 2)
        strength = 10 ** ((body - slope * np.log2(k)) / 20) * (1.0 if k % 2 else instrument.even)
        out += np.float32(strength) * envelope * current
        previous, current = current, twice * current - previous
        envelope = envelope * step
    return out


# Mel-frequency cepstral coefficients of a clip (BPPSA §5.2 and Table 3), computed by librosa.

FeatureSet: TypeAlias = Literal["S", "M", "L"]


@dataclasses.dataclass(frozen=True)
class Setting:
    """A row of BPPSA Table 3: coefficients, FFT window and hop, the last two in samples."""

    coefficients: int
    window: int
    hop: int

    @property
    def shape(self) -> tuple[int, int]:
        """Steps, and features: all coefficients but the first, of both channels."""
        return 1 + FRAMES // self.hop, 2 * (self.coefficients - 1)


SETTINGS: dict[FeatureSet, Setting] = {
    "S": Setting(20, 4096, 512), "M": Setting(13, 2048, 256), "L": Setting(7, 1024, 128),
}  # fmt: skip


def mfcc(clip: np.ndarray, features: FeatureSet) -> np.ndarray:
    """Return the coefficients of a clip over time: 259×38 (S), 517×24 (M) or 1034×12 (L), float32.

    The first coefficient, the level, is dropped; the others get zero mean and unit variance over the clip (BPPSA §5.2),
    and constant ones become 0.

    Parameters
    ----------
    clip
        Both channels (132 300, 2): 3 s at 44.1 kHz.
    features
        ``"S"``, ``"M"`` or ``"L"``.

    Raises
    ------
    ShapeError, DTypeError, OptionError
        The clip or `features` is another one.
    NonFiniteError
        A sample is not finite, or so large that the coefficients are not.
    MissingDependencyError
        librosa is not installed.
    """
    setting = SETTINGS[check_choice("features", features, SETTINGS)]
    try:
        clip = np.asarray(clip)
    except ValueError as error:  # rows of several lengths
        raise DTypeError("The clip is no array", expected="an array of real numbers", got=str(error)) from error
    if clip.dtype.kind not in "fiu":
        raise DTypeError("The clip holds no real numbers", expected="float32", got=clip.dtype)
    if clip.shape != (FRAMES, 2):
        raise ShapeError("The clip has the wrong shape", expected=f"({FRAMES}, 2): 3 s at 44.1 kHz, stereo",
                         got=clip.shape)  # fmt: skip
    clip = clip.astype(np.float32)
    if not np.isfinite(clip).all():
        raise NonFiniteError("The clip holds values that are not finite", expected="audio, below 1 in size",
                             got="NaN or infinity")  # fmt: skip
    librosa = import_librosa()
    with one_blas_thread():  # with several, products round differently
        coefficients = librosa.feature.mfcc(
            y=np.ascontiguousarray(clip.T), sr=RATE, n_mfcc=setting.coefficients, n_fft=setting.window,
            hop_length=setting.hop,
        )  # fmt: skip
    table = coefficients[:, 1:].reshape(-1, coefficients.shape[-1]).T  # channel by channel
    if not np.isfinite(table).all():
        most = np.abs(clip).max()
        raise NonFiniteError("The clip is too loud for float32", expected="audio, below 1 in size",
                             got=f"up to {most:.3g}", remedy="Divide it by its largest sample")  # fmt: skip
    table = table - table.mean(0)
    spread = table.std(0)
    return np.ascontiguousarray(table / np.where(spread > 1e-6, spread, 1), np.float32)


def import_librosa() -> Any:
    """Import and return librosa, with soundfile, which reads its files."""
    with needing("audio", "Features of audio are computed by librosa with soundfile, which are not both installed"):
        import librosa
        import soundfile  # noqa: F401
    return librosa


_VERSION = 1  # of the cache: to be raised when features change
_TOLERANCE = RATE // 100
"""Samples that a clip may be shorter or longer: some files of IRMAS lack one."""


def load_instruments(
    folder: str | os.PathLike[str], features: FeatureSet = "S", *, test: float = 0.2, dtype: Any = np.float32
) -> tuple[ArrayDataset, ArrayDataset]:
    """Return a training and a test `ArrayDataset` of a folder of recordings such as IRMAS's training data.

    Inputs of batches are (T, B, I), with T×I as in `mfcc`; classes (B,), int64, number the folders. Features are cached
    in ``.sparsebp-mfcc-S.npz`` (M, L) in the folder, if it can be written; changed files are read again.

    Parameters
    ----------
    folder
        One folder a class, in alphabetical order, with WAV files of 3 s, 44.1 kHz, stereo.
    features
        ``"S"``, ``"M"`` or ``"L"`` of BPPSA Table 3.
    test
        Share of every class for testing. Files of one recording, with the same name before ``__``, stay together. The
        choice depends on the names alone.
    dtype
        float32 or float64: the dtype of the batches.

    Raises
    ------
    FileFormatError
        The folder has less than two classes, a class less than two recordings, or a file is not such a WAV file.
    OptionError, MissingDependencyError
        `features` or `test` is out of range; librosa is not installed.
    """
    check_choice("features", features, SETTINGS)
    share = check_number("test", test, least=0.0, most=1.0)
    path = check_path("folder", folder)
    files = _files(path)
    inputs = _features(path, [file for found in files.values() for file in found], features)
    labels = np.repeat(np.arange(len(files)), [len(found) for found in files.values()])
    chosen = np.concatenate([_held_out(name, found, share) for name, found in files.items()])
    return parted(inputs, labels, chosen, dtype=dtype)


def class_names(folder: str | os.PathLike[str]) -> tuple[str, ...]:
    """Return the classes of a folder of recordings, in the order of their numbers."""
    return tuple(_files(check_path("folder", folder)))


def _files(path: Path) -> dict[str, list[Path]]:
    """Return the WAV files of every class, sorted by name."""
    classes: dict[str, list[Path]] = {}
    if path.is_dir():
        for entry in sorted(path.iterdir()):
            waves = sorted(file for file in entry.glob("*") if file.suffix.lower() == ".wav") if entry.is_dir() else []
            if waves:
                classes[entry.name] = waves
    if len(classes) < 2:
        raise FileFormatError(f"{path} holds no classes of recordings",
                              expected="a folder a class with WAV files in it, two or more",
                              got=f"{len(classes)} such folders" if path.is_dir() else "no such folder",
                              remedy="Pass the folder around cel, cla, flu, … of IRMAS's training data")  # fmt: skip
    return classes


def _held_out(name: str, files: Sequence[Path], share: float) -> np.ndarray:
    """Return a mask of a class's files for testing: whole recordings, about `share` of the files."""
    recordings = [file.stem.split("__")[0] for file in files]
    names = sorted(set(recordings))
    if len(names) < 2:
        raise FileFormatError(f"The class {name} cannot be split", expected="two recordings or more (names before "
                              "'__')", got=f"{len(names)}: {names[0]}")  # fmt: skip
    order = np.random.default_rng(1998).permutation(len(names))
    held: set[str] = set()
    for number in order[: len(names) - 1]:
        if held and sum(recording in held for recording in recordings) >= share * len(files):
            break
        held.add(names[number])
    return np.array([recording in held for recording in recordings])


def _features(folder: Path, files: Sequence[Path], features: FeatureSet) -> np.ndarray:
    """Return the features (N, T, I) of the files, from the cache for unchanged files."""
    cache = folder / f".sparsebp-mfcc-{features}.npz"
    stamps = np.array([_stamp(file) for file in files], np.int64)
    names = [file.relative_to(folder).as_posix() for file in files]
    known = _known(cache, SETTINGS[features].shape)
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
            raise FileFormatError(f"{files[number]} has no features", expected="audio, below 1 in size",
                                  got=str(error)) from error  # fmt: skip
    if missing:
        _save(cache, names=names, stamps=stamps, values=out, version=_versions())
    return out


def _stamp(file: Path) -> tuple[int, int, int]:
    try:
        status = file.stat()
    except OSError as error:  # a link to nothing
        raise FileFormatError(f"{file} cannot be read", expected="a WAV file", got=str(error)) from error
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _known(cache: Path, shape: tuple[int, int]) -> dict[str, tuple[tuple[int, ...], np.ndarray]]:
    """Return stamps and features by name; none if the cache has other contents or is of another version."""
    kept = _load(cache, "names", "stamps", "values", "version")
    if kept is None:
        return {}
    names, stamps, values, version = kept
    if names.ndim != 1 or stamps.shape != (names.size, 3) or version.shape != () or version != _versions():
        return {}
    if not _whole(values, (names.size, *shape)):
        return {}
    return {str(name): (tuple(stamp.tolist()), row) for name, stamp, row in zip(names, stamps, values, strict=True)}


def _versions() -> str:
    return f"{_VERSION} librosa {import_librosa().__version__}"


def read_clip(path: str | os.PathLike[str]) -> np.ndarray:
    """Return both channels of a WAV file of 3 s at 44.1 kHz: (132 300, 2), float32, a missing end filled with zeros."""
    import_librosa()
    import soundfile

    path = check_path("path", path)
    try:
        if path.exists() and not path.is_file():  # opening a pipe would block
            raise OSError("no regular file")
        with path.open("rb") as file:  # soundfile cannot open names that are not valid text
            clip, rate = soundfile.read(file, dtype="float32", always_2d=True)
    except (OSError, RuntimeError, TypeError, ValueError) as error:  # soundfile's errors are RuntimeErrors
        raise FileFormatError(f"{path} cannot be read", expected="a WAV file", got=str(error),
                              remedy="Convert it, or take it out of the folder") from error  # fmt: skip
    if rate != RATE or clip.shape[1] != 2 or abs(len(clip) - FRAMES) > _TOLERANCE:
        raise FileFormatError(f"{path} is another kind of clip", expected="3 s at 44 100 Hz, two channels",
                              got=f"{len(clip) / rate:.3f} s at {rate} Hz, {clip.shape[1]} channels",
                              remedy="Convert it, or take it out of the folder")  # fmt: skip
    if not np.isfinite(clip).all():
        raise FileFormatError(f"{path} holds values that are not finite", expected="audio", got="NaN or infinity")
    whole = np.zeros((FRAMES, 2), np.float32)
    whole[: len(clip)] = clip[:FRAMES]
    return whole


# Data sets of the synthetic instruments, computed on first use and kept in the user's cache folder.

EACH = 120
"""Clips of every instrument, for training and testing together."""
_HELD_OUT = 5
"""Of so many clips one is for testing."""


def synthetic_instruments(
    features: FeatureSet = "S", *, each: int = EACH, seed: int = 0, dtype: Any = np.float32
) -> tuple[ArrayDataset, ArrayDataset]:
    """Return a training and a test `ArrayDataset` of **synthetic** clips of eleven instruments; see `synthesise`.

    Inputs of batches are (T, B, I), with T×I as in `mfcc`; classes (B,), int64, number `CLASSES`. Computing takes some
    0.1 s a clip and thread; the features are kept in the user's cache folder, if there is one.

    Parameters
    ----------
    features
        ``"S"``, ``"M"`` or ``"L"`` of BPPSA Table 3.
    each
        Clips of every instrument, 2 or more; a fifth of them, at least one, is for testing.
    seed
        Of the clips, which are the same for all three sets of features.
    dtype
        float32 or float64: the dtype of the batches.

    Raises
    ------
    OptionError, MissingDependencyError
        An argument is out of range; librosa is not installed.
    """
    check_choice("features", features, SETTINGS)
    each, seed = check_integer("each", each, 2), check_integer("seed", seed, 0)
    cache = _cache(features, each, seed)
    (inputs,) = _load(cache, "values") or (np.empty(0),)
    if not _whole(inputs, (each * len(CLASSES), *SETTINGS[features].shape)):
        inputs = _compute(features, each, seed)
        _save(cache, values=inputs)
    labels = np.tile(np.arange(len(CLASSES)), each)
    return parted(inputs, labels, np.arange(len(labels)) < max(1, each // _HELD_OUT) * len(CLASSES), dtype=dtype)


def _compute(features: FeatureSet, each: int, seed: int) -> np.ndarray:
    """Return the features (N, T, I), one instrument after another."""

    def one(number: int) -> np.ndarray:
        return mfcc(synthesise(CLASSES[number % len(CLASSES)], rng=np.random.default_rng((seed, number))), features)

    import_librosa()  # once, before the threads
    with ThreadPoolExecutor(get_threads()) as pool:  # NumPy and librosa release the interpreter
        return np.stack(list(pool.map(one, range(each * len(CLASSES)))))


def _cache(features: FeatureSet, each: int, seed: int) -> Path | None:
    folder = cache_folder()
    if folder is None:
        return None
    sources = Path(__file__).read_bytes()
    versions = f"{np.__version__} {import_librosa().__version__} {features} {each} {seed}"
    digest = hashlib.sha256(sources + versions.encode()).hexdigest()[:16]
    return folder / f"instruments-synthetic-{features}-{digest}.npz"


# Both caches of features: files of arrays, which may be missing, damaged or in a folder that cannot be written.


def _load(cache: Path | None, *names: str) -> tuple[np.ndarray, ...] | None:
    """Return some arrays of a cache; None if it has not all of them."""
    if cache is None:
        return None
    try:
        with np.load(cache, allow_pickle=False) as kept:
            return tuple(kept[name] for name in names)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError, TypeError):
        return None  # TypeError: a file of one array


def _whole(values: np.ndarray, shape: tuple[int, ...]) -> bool:
    return values.shape == shape and values.dtype == np.float32 and bool(np.isfinite(values).all())


def _save(cache: Path | None, **arrays: Any) -> None:
    if cache is None:
        return
    content = io.BytesIO()
    np.savez(content, **arrays)
    with contextlib.suppress(OutputError):
        prepare_folder(cache.parent)
        write_atomically(cache, content.getvalue())
