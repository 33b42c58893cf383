"""Mel-frequency cepstral coefficients of a clip, as BPPSA §5.2 and Table 3 take them, computed by librosa."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, TypeAlias

import numpy as np

from sparsebp.core.arguments import check_choice
from sparsebp.core.errors import MissingDependencyError, ShapeError
from sparsebp.data.instruments.synthetic import FRAMES, RATE

FeatureSet: TypeAlias = Literal["S", "M", "L"]


@dataclasses.dataclass(frozen=True)
class Setting:
    """A row of BPPSA Table 3: coefficients, FFT window and hop, the last two in samples."""

    coefficients: int
    window: int
    hop: int

    @property
    def shape(self) -> tuple[int, int]:
        """Steps and features of a clip: the first coefficient is dropped, and both channels count."""
        return 1 + FRAMES // self.hop, 2 * (self.coefficients - 1)


SETTINGS: dict[FeatureSet, Setting] = {
    "S": Setting(20, 4096, 512),
    "M": Setting(13, 2048, 256),
    "L": Setting(7, 1024, 128),
}


def mfcc(clip: np.ndarray, features: FeatureSet) -> np.ndarray:
    """Return the coefficients of a clip over time: 259×38 (S), 517×24 (M) or 1034×12 (L), float32.

    The first coefficient, the level, is dropped, and each of the others is brought to zero mean and unit variance over
    the clip (BPPSA §5.2); one that does not change becomes 0.

    Parameters
    ----------
    clip
        Both channels (132 300, 2): 3 s at 44.1 kHz.
    features
        ``"S"``, ``"M"`` or ``"L"``.

    Raises
    ------
    ShapeError
        The clip has another shape.
    OptionError
        There is no such set.
    MissingDependencyError
        librosa is not installed.
    """
    setting = SETTINGS[check_choice("features", features, SETTINGS)]
    clip = np.asarray(clip, np.float32)
    if clip.shape != (FRAMES, 2):
        raise ShapeError("The clip has the wrong shape", expected=f"({FRAMES}, 2): 3 s at 44.1 kHz, stereo",
                         got=clip.shape, remedy="Cut or resample it")  # fmt: skip
    found = import_librosa().feature.mfcc(
        y=np.ascontiguousarray(clip.T), sr=RATE, n_mfcc=setting.coefficients, n_fft=setting.window,
        hop_length=setting.hop,
    )  # fmt: skip
    table = found[:, 1:].reshape(-1, found.shape[-1]).T  # channel by channel
    table = table - table.mean(0)
    spread = table.std(0)
    return np.ascontiguousarray(table / np.where(spread > 1e-6, spread, 1), np.float32)


def import_librosa() -> Any:
    """Import and return librosa.

    Raises
    ------
    MissingDependencyError
        It is not installed.
    """
    try:
        import librosa
    except ImportError as error:
        raise MissingDependencyError(
            "Features of audio are computed by librosa, which is not installed",
            remedy="Install the extra `audio`: pip install 'sparsebp[audio]'",
        ) from error
    return librosa
