"""Data sets of the synthetic instruments, computed on first use and kept in the user's cache folder."""

from __future__ import annotations

import hashlib
import io
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from sparsebp.core.arguments import check_choice, check_integer
from sparsebp.core.errors import OutputError
from sparsebp.core.files import cache_folder, prepare_folder, write_atomically
from sparsebp.core.threads import get_threads
from sparsebp.data.dataset import ArrayDataset
from sparsebp.data.instruments import features as _features
from sparsebp.data.instruments import synthetic as _synthetic
from sparsebp.data.instruments.features import SETTINGS, FeatureSet, import_librosa, mfcc
from sparsebp.data.instruments.synthetic import CLASSES, synthesise

EACH = 120
"""Clips of every instrument, for training and testing together."""
_HELD_OUT = 5
"""Of so many clips one is for testing."""


def synthetic_instruments(
    features: FeatureSet = "S", *, each: int = EACH, seed: int = 0, dtype: Any = np.float32
) -> tuple[ArrayDataset, ArrayDataset]:
    """Return a training and a test set of **synthetic** clips of eleven instruments; see `synthesise`.

    Computing takes some 0.1 s a clip and thread; the features are kept in the user's cache folder (where there is
    one), under a name that depends on all that they depend on.

    Parameters
    ----------
    features
        ``"S"``, ``"M"`` or ``"L"`` of BPPSA Table 3.
    each
        Clips of every instrument, 2 or more; a fifth of them, at least one, is for testing.
    seed
        The clips are a function of it: clip for clip the same for all three sets of features.
    dtype
        float32 or float64: the dtype of the batches.

    Returns
    -------
    train, test : ArrayDataset
        Inputs (T, B, I) of batches, with T×I as `mfcc` says; classes (B,), int64: places in `CLASSES`.

    Raises
    ------
    OptionError
        There is no such set of features, or `each` or `seed` is out of range.
    MissingDependencyError
        librosa is not installed.
    """
    check_choice("features", features, SETTINGS)
    each, seed = check_integer("each", each, 2), check_integer("seed", seed, 0)
    cache = _cache(features, each, seed)
    inputs = _read(cache, (each * len(CLASSES), *SETTINGS[features].shape))
    if inputs is None:
        inputs = _compute(features, each, seed)
        _write(cache, inputs)
    labels = np.tile(np.arange(len(CLASSES)), each)
    training = np.arange(len(labels)) >= max(1, each // _HELD_OUT) * len(CLASSES)
    return (
        ArrayDataset(inputs[training], labels[training], dtype=dtype),
        ArrayDataset(inputs[~training], labels[~training], dtype=dtype),
    )


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
    sources = b"".join(Path(str(module.__file__)).read_bytes() for module in (_synthetic, _features))
    versions = f"{np.__version__} {import_librosa().__version__} {features} {each} {seed}"
    digest = hashlib.sha256(sources + versions.encode()).hexdigest()[:16]
    return folder / f"instruments-synthetic-{features}-{digest}.npy"


def _read(cache: Path | None, shape: tuple[int, ...]) -> np.ndarray | None:
    if cache is None:
        return None
    try:
        kept = np.load(cache, allow_pickle=False)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile):
        return None
    whole = isinstance(kept, np.ndarray) and kept.shape == shape and kept.dtype == np.float32
    return kept if whole and np.isfinite(kept).all() else None


def _write(cache: Path | None, inputs: np.ndarray) -> None:
    if cache is None:
        return
    content = io.BytesIO()
    np.save(content, inputs)
    try:
        prepare_folder(cache.parent)
        write_atomically(cache, content.getvalue())
    except OutputError:  # nothing is kept where nothing can be written
        return
