"""Eleven synthetic instruments: what stands in for recordings that cannot be shipped. **None of it is real audio.**

A clip is a melody of one instrument, chords and rests among it, over noise and a quieter second instrument, as in IRMAS
(the predominant instrument is the class; Bosch et al., 2012). A tone is a sum of harmonic partials under envelopes and
a formant, with vibrato, tremolo and the noise of breath or bow. Level, pitch, tempo, panning and every parameter of an
instrument but its formant are drawn anew for every clip or tone, and the ranges of neighbours overlap. Clips begin
anywhere in a tone, and features have zero mean and unit variance over a clip: what tells instruments apart is how their
sound changes, and no place in time.
"""

from __future__ import annotations

import dataclasses
from typing import TypeAlias

import numpy as np

from sparsebp.core.arguments import check_generator
from sparsebp.core.errors import OptionError
from sparsebp.core.types import Seed

RATE = 44_100
"""Samples a second."""
FRAMES = 3 * RATE
"""Samples of a clip, each for two channels."""
_PARTIALS = 14
_FADE = 0.004
_SPREAD = 5
"""Semitones that a melody goes up and down from its middle."""
_Range: TypeAlias = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Instrument:
    """The ranges that an instrument's parameters are drawn from.

    Attributes
    ----------
    pitch
        Of its tones, as MIDI numbers.
    slope
        How steeply the partials fall, in dB an octave.
    even
        Strength of the even partials (a clarinet has hardly any).
    attack, decay
        Seconds until a tone is whole, and until it has fallen to 1/e; infinite: it is held.
    bright
        How much sooner high partials decay, or, of held tones, how much later they come.
    vibrato, depth
        Rate in Hz and depth in cents.
    tremolo
        Depth, with the vibrato's rate.
    noise
        Breath or bow beside the tone.
    tones, rest, chord
        Tones a second, the share of them that is silence, and how many at once.
    formant
        The frequency in Hz about which the body is loudest, and by how many dB.
    """

    pitch: _Range
    slope: _Range
    even: float
    attack: _Range
    decay: _Range
    bright: _Range
    vibrato: _Range
    depth: _Range
    tremolo: _Range
    noise: _Range
    tones: _Range
    rest: _Range
    formant: tuple[float, float]
    chord: tuple[int, int]


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
        A `numpy.random.Generator` or a seed: the clip is a function of it.

    Raises
    ------
    OptionError
        There is no such instrument, or `rng` is no seed.
    """
    if instrument not in INSTRUMENTS:
        raise OptionError("There is no such instrument", expected=", ".join(CLASSES), got=repr(instrument),
                          remedy="Choose one of these")  # fmt: skip
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
    """Return the sum of the partials: high ones decay sooner, or come later.

    ``sin(k φ)`` is ``2 cos φ sin((k-1) φ) - sin((k-2) φ)``, and every partial's envelope a factor times the one before.
    """
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
