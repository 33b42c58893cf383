"""Eleven synthetic instruments: what stands in for recordings that cannot be shipped. **None of it is real audio.**

A clip is a melody of one instrument, chords among it, over noise and a quieter second instrument, as in IRMAS (the
predominant instrument is the class; Bosch et al., 2012). A tone is a sum of harmonic partials under envelopes, with
vibrato, tremolo and the noise of breath or bow. Level, pitch, tempo, panning and every parameter of an instrument are
drawn anew for every clip or tone, and the ranges of neighbours overlap.
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
    tones, chord
        Tones a second, and how many at once.
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
    chord: tuple[int, int]


_HELD = (np.inf, np.inf)
INSTRUMENTS: dict[str, Instrument] = {
    "cel": Instrument((36, 69), (5, 9), 1.0, (0.1, 0.2), _HELD, (1, 3), (4.5, 5.5), (20, 45), (0, 0.1), (0.02, 0.06),
                      (0.9, 1.6), (1, 1)),
    "cla": Instrument((50, 84), (6, 10), 0.1, (0.02, 0.05), _HELD, (0.5, 2), (4, 6), (0, 4), (0, 0.05), (0.01, 0.03),
                      (2.5, 4), (1, 1)),
    "flu": Instrument((60, 91), (10, 16), 0.8, (0.03, 0.08), _HELD, (0, 1), (4.5, 6), (5, 15), (0.3, 0.55),
                      (0.06, 0.15), (1.5, 3), (1, 1)),
    "gac": Instrument((40, 76), (5, 9), 0.9, (0.002, 0.006), (0.15, 0.35), (3, 6), (4, 6), (0, 3), (0, 0.02),
                      (0.0, 0.01), (3.5, 6), (1, 3)),
    "gel": Instrument((40, 79), (3, 7), 0.9, (0.002, 0.01), (1.2, 3.0), (0.3, 1), (4.5, 6.5), (0, 10), (0, 0.05),
                      (0.0, 0.02), (0.9, 1.8), (1, 2)),
    "org": Instrument((36, 84), (2, 6), 1.0, (0.004, 0.02), _HELD, (0, 0.5), (6.5, 7.5), (0, 5), (0.15, 0.35),
                      (0.0, 0.02), (0.7, 1.4), (3, 4)),
    "pia": Instrument((33, 90), (6, 11), 1.0, (0.002, 0.008), (0.5, 0.9), (1.5, 3.5), (4, 6), (0, 0), (0, 0.0),
                      (0.0, 0.01), (1.8, 3), (1, 3)),
    "sax": Instrument((46, 80), (3, 7), 1.0, (0.02, 0.05), _HELD, (1, 3), (4.5, 5.5), (15, 35), (0.1, 0.2),
                      (0.12, 0.3), (2, 3.5), (1, 1)),
    "tru": Instrument((54, 84), (2, 6), 1.0, (0.03, 0.07), _HELD, (6, 12), (4.5, 6), (0, 8), (0, 0.05), (0.01, 0.03),
                      (1.8, 3), (1, 1)),
    "vio": Instrument((55, 93), (3, 8), 1.0, (0.04, 0.1), _HELD, (0.5, 2), (6, 7.5), (45, 80), (0, 0.12), (0.02, 0.06),
                      (1.5, 2.5), (1, 1)),
    "voi": Instrument((45, 79), (6, 11), 1.0, (0.05, 0.15), _HELD, (0.5, 2), (4.5, 5.5), (90, 170), (0.05, 0.2),
                      (0.03, 0.1), (1, 2), (1, 1)),
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
    quieter = 10 ** (-generator.uniform(20, 32) / 20)
    pans = generator.uniform(0.2, 0.8, size=2)
    clip = np.outer(_norm(mono), (pans[0], 1 - pans[0])) + quieter * np.outer(_norm(other), (pans[1], 1 - pans[1]))
    clip += 10 ** (-generator.uniform(40, 60) / 20) * generator.standard_normal(clip.shape, dtype=np.float32)
    return (clip * (10 ** (-generator.uniform(3, 25) / 20) / max(np.abs(clip).max(), 1e-9))).astype(np.float32)


def _norm(tone: np.ndarray) -> np.ndarray:
    return tone / max(float(np.sqrt(np.mean(tone**2))), 1e-9)


def _melody(instrument: Instrument, generator: np.random.Generator) -> np.ndarray:
    """Return tones one after another, (FRAMES,), float32."""
    out = np.zeros(FRAMES, np.float32)
    pace = generator.uniform(*instrument.tones)
    slope = generator.uniform(*instrument.slope)
    at = -int(generator.uniform(0, RATE / pace))  # the clip begins anywhere in a tone
    while at < FRAMES:
        length = int(RATE / pace * generator.uniform(0.5, 1.8))
        base = generator.uniform(*instrument.pitch)
        for voice in range(generator.integers(instrument.chord[0], instrument.chord[1] + 1)):
            pitch = base + (0, 4, 7, 12)[voice] + generator.uniform(-0.1, 0.1)
            tone = _tone(instrument, generator, pitch, slope, int(length * generator.uniform(0.9, 1.1)))
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
    frequency = 440 * 2 ** ((pitch - 69) / 12) * np.exp2(draw(instrument.depth) / 1200 * sway)
    phase = np.cumsum(2 * np.pi / RATE * frequency, dtype=np.float64)
    phase = np.mod(phase, 2 * np.pi).astype(np.float32)
    rise = 1 - np.exp(-time * (2.5 / attack))
    fall = np.exp(-time / np.float32(decay)) if np.isfinite(decay) else None
    partials = _partials(instrument, phase, slope, bright, rise, fall, frequency.max())
    partials *= 1 + draw(instrument.tremolo) * sway
    level = 10 ** (-generator.uniform(0, 8) / 20)
    shape = rise if fall is None else rise * fall
    tone = partials + noise * shape * generator.standard_normal(len(time), dtype=np.float32)
    ends = min(int(_FADE * RATE), len(tone))
    tone[-ends:] *= np.linspace(1, 0, ends, dtype=np.float32)
    return level * tone


def _partials(
    instrument: Instrument, phase: np.ndarray, slope: float, bright: float, rise: np.ndarray,
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
    for k in range(1, count + 1):
        strength = 10 ** (-slope * np.log2(k) / 20) * (1.0 if k % 2 else instrument.even)
        out += np.float32(strength) * envelope * current
        previous, current = current, twice * current - previous
        envelope = envelope * step
    return out
