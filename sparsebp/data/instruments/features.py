"""Mel-frequency cepstral coefficients of a clip, as BPPSA §5.2 and Table 3 take them, computed by librosa."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, TypeAlias

import numpy as np

from sparsebp.core.arguments import check_choice
from sparsebp.core.errors import DTypeError, MissingDependencyError, NonFiniteError, ShapeError
from sparsebp.core.threads import one_blas_thread
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
    DTypeError
        It holds no real numbers.
    NonFiniteError
        A sample is not finite, or so large that the coefficients are not.
    OptionError
        There is no such set.
    MissingDependencyError
        librosa is not installed.
    """
    setting = SETTINGS[check_choice("features", features, SETTINGS)]
    try:
        clip = np.asarray(clip)
    except ValueError as error:  # rows of several lengths
        raise DTypeError("The clip is no array", expected="an array of real numbers", got=str(error),
                         remedy="Pass both channels as columns") from error  # fmt: skip
    if clip.dtype.kind not in "fiu":
        raise DTypeError("The clip holds no real numbers", expected="float32", got=clip.dtype,
                         remedy="Convert with .astype(np.float32)")  # fmt: skip
    if clip.shape != (FRAMES, 2):
        raise ShapeError("The clip has the wrong shape", expected=f"({FRAMES}, 2): 3 s at 44.1 kHz, stereo",
                         got=clip.shape, remedy="Cut or resample it")  # fmt: skip
    clip = clip.astype(np.float32)
    if not np.isfinite(clip).all():
        raise NonFiniteError("The clip holds values that are not finite", expected="audio, below 1 in size",
                             got="NaN or infinity", remedy="Leave it out")  # fmt: skip
    librosa = import_librosa()
    with one_blas_thread():  # with several, its products round otherwise
        found = librosa.feature.mfcc(
            y=np.ascontiguousarray(clip.T), sr=RATE, n_mfcc=setting.coefficients, n_fft=setting.window,
            hop_length=setting.hop,
        )  # fmt: skip
    table = found[:, 1:].reshape(-1, found.shape[-1]).T  # channel by channel
    if not np.isfinite(table).all():
        most = np.abs(clip).max()
        raise NonFiniteError("The clip is too loud for float32", expected="audio, below 1 in size",
                             got=f"up to {most:.3g}", remedy="Divide it by its largest sample")  # fmt: skip
    table = table - table.mean(0)
    spread = table.std(0)
    return np.ascontiguousarray(table / np.where(spread > 1e-6, spread, 1), np.float32)


def import_librosa() -> Any:
    """Import and return librosa, with soundfile, which reads its files.

    Raises
    ------
    MissingDependencyError
        One of them is not installed.
    """
    try:
        import librosa
        import soundfile  # noqa: F401
    except (ImportError, OSError) as error:  # soundfile lacks its library
        raise MissingDependencyError(
            "Features of audio are computed by librosa with soundfile, which are not both installed",
            remedy="Install the extra `audio`: pip install 'sparsebp[audio]'",
        ) from error
    return librosa
