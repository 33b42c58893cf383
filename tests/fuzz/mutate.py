"""Damage: of bytes, and of what JSON holds."""

from __future__ import annotations

from typing import Any

import numpy as np

from fuzz.draw import one_of

VALUES = (
    None,
    True,
    False,
    -1,
    0,
    1.5,
    1e308,
    2**63,
    -(2**70),
    "",
    "a",
    "\0",
    [],
    {},
    [[]],
    {"a": {}},
    float("nan"),
    float("inf"),
    "x" * 300,
    [0] * 50,
)


def mutated_bytes(rng: np.random.Generator, content: bytes) -> bytes:
    """Return bytes with one to three flipped, removed, doubled or replaced pieces."""
    data = bytearray(content)
    for _ in range(int(rng.integers(1, 4))):
        at = int(rng.integers(len(data) + 1))
        way = int(rng.integers(6))
        if way == 0 and at < len(data):
            data[at] ^= 1 << int(rng.integers(8))
        elif way == 1:
            del data[at:]
        elif way == 2:
            del data[at : at + int(rng.integers(1, 9))]
        elif way == 3:
            data[at:at] = rng.bytes(int(rng.integers(1, 9)))
        elif way == 4:
            data[at:at] = data[: int(rng.integers(1, 40))]
        else:
            data[at : at + 1] = one_of(
                rng, b"\0", b"[" * 3000, b"{", b'"', b"9" * 400, b"-", b"\xff", b"\n", b",", b"\xef\xbb\xbf"
            )
    return bytes(data)


def mutated_json(rng: np.random.Generator, value: Any) -> Any:
    """Return a value of JSON with one place changed."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = one_of(rng, *value)
        way = int(rng.integers(8))
        if way == 0:
            return {k: v for k, v in value.items() if k != key}
        if way == 1:
            return value | {one_of(rng, "", "x", key + "x", key.upper()): value[key]}
        return value | {key: mutated_json(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.85:
        at = int(rng.integers(len(value)))
        return [*value[:at], mutated_json(rng, value[at]), *value[at + 1 :]]
    return one_of(rng, *VALUES)
