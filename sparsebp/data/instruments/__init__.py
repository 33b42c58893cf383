"""Musical instruments by their sound, BPPSA §5.2: IRMAS-like folders, and synthetic clips where there are none."""

from __future__ import annotations

from sparsebp.data.instruments.features import mfcc
from sparsebp.data.instruments.folder import load_instruments, read_clip
from sparsebp.data.instruments.synthetic import CLASSES, synthesise
from sparsebp.data.instruments.synthetic_set import synthetic_instruments

__all__ = ["CLASSES", "load_instruments", "mfcc", "read_clip", "synthesise", "synthetic_instruments"]
