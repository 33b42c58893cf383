"""Text for terminals whose encoding lacks letters of ours: the nearest letter of ASCII in the place of each."""

from __future__ import annotations

import codecs
import unicodedata
from typing import Any

_NAME = "sparsebp.nearest"
_NEAREST = str.maketrans("×–−—…·≥≤µμ‖→±√§δΔΣΘ◇─│“”‘’∞▁▂▃▄▅▆▇█", "x---..><uu|>~vSdDSO*-|\"\"''i._-=+*%#")


def _nearest(error: UnicodeError) -> tuple[str, int]:
    """Return as many letters as there were, so that tables stay aligned; ``?`` for what has none that is near."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    found = ""
    for letter in error.object[error.start : error.end]:
        plain = unicodedata.normalize("NFKD", letter.translate(_NEAREST))[:1]
        found += plain if plain.isascii() and plain else "?"
    return found, error.end


codecs.register_error(_NAME, _nearest)


def write_nearest(stream: Any) -> None:
    """Let a stream write what its encoding does not have by the nearest letters; one that has all is left as it is."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    if hasattr(stream, "reconfigure") and not codecs.lookup(encoding).name.startswith("utf"):
        stream.reconfigure(errors=_NAME)
