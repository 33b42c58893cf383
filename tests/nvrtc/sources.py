"""Every source file with representative sets of defines, all of which a test compiles."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import product

from cuda_on_cpu.executor import SHARED_AT_MOST
from sparsebp.kernels.checks import HELD_INPUTS, room_for_sums
from sparsebp.kernels.device.conv import TILES
from sparsebp.kernels.device.launch import WARP, Defines, source
from sparsebp.kernels.device.rnn import ROW_REGISTERS, SUM_REGISTERS, lane_share

_REALS, _INDICES = ("float", "double"), ("int", "long long")
_WINNERS = ("unsigned char", "int")
_WIDE = {"rnn": (96, 160, 256), "gru": (50, 64, 128), "lstm": (48, 64, 128)}
"""Sizes of the forms in which several lanes share a unit, or weights are in shared memory."""
_HIDDEN = (1, 7, 20, 32)


def _all(**values: Iterable[str | int]) -> list[Defines]:
    """Return every combination of these values of the defines."""
    return [dict(zip(values, each, strict=True)) for each in product(*values.values())]


_PLAIN = _all(REAL=_REALS)


def _units(largest: dict[str, int]) -> list[Defines]:
    """Sizes of one warp, the largest with a unit's weights in a thread's registers, and the streamed form."""
    sets: list[Defines] = []
    for real in _REALS:
        sets += [{"REAL": real, "HIDDEN": hidden} for hidden in (*_HIDDEN, largest[real]) if hidden <= largest[real]]
    return sets + _PLAIN


def _shared(gates: int, sizes: Iterable[int], forward: bool = False) -> list[Defines]:
    """Sizes whose units several lanes share, or whose weights are in shared memory too; forward, with inputs too."""
    sets: list[Defines] = []
    for real, hidden, inputs in product(_REALS, sizes, (0, 4, 8) if forward else (0,)):
        fold, outputs = (1, gates) if forward else (gates, 1)
        split, pieces, kept = lane_share(fold, outputs, hidden, 8 if real == "double" else 4, inputs)
        form: Defines = {"REAL": real, "HIDDEN": hidden} | ({"SPLIT": split} if split > 1 else {})
        form |= {"KEPT": kept // outputs} if kept < pieces else {}
        fits = 16 * (pieces - kept) * hidden * split < SHARED_AT_MOST
        sets += [form | ({"INPUTS": inputs} if inputs else {})] * (len(form) > 2 and fits)
    return sets


def _sums(gates: int) -> list[Defines]:
    """Backward with sums of weight gradients: for each room for inputs the largest size, and size 20."""
    sets: list[Defines] = []
    for inputs in HELD_INPUTS:
        fits = [h for h in range(1, 129) if room_for_sums(SUM_REGISTERS, gates, h, inputs, itemsize=4)]
        for hidden in sorted({min(20, fits[-1]), fits[-1]}):
            form: Defines = {"REAL": "float", "HIDDEN": hidden, "INPUTS": inputs}
            sets += [form, form | {"ROWS": 2}] if hidden <= WARP else [form]
    return sets


def _reductions(largest: dict[str, int], registers: int) -> list[Defines]:
    """The warp form with few and many rows a lane, and the block form."""
    rows = {
        "float": {1: (1,), 7: (1, 2), 20: (1, 2, 4, 5), 32: (1, 3, 4)},
        "double": {1: (1,), 7: (2,), 20: (1, 2, 3), 32: (2,)},
    }
    sets: list[Defines] = []
    for real, hidden in product(_REALS, _HIDDEN):
        size = min(hidden, largest[real])
        fits = [n for n in rows[real][hidden] if n * size * (2 if real == "double" else 1) <= registers]
        sets += [{"REAL": real, "HIDDEN": size, "ROWS": count} for count in fits]
    return sets + _BLOCK_REDUCTIONS


def _lstm_reductions() -> list[Defines]:
    """As `_reductions`, of twice as many rows: they take two lanes a unit, or two rows a lane."""
    rows: dict[str, dict[int, tuple[int, ...]]] = {
        "float": {1: (1,), 7: (1, 4), 16: (1,), 20: (2, 3), 32: (2,)},
        "double": {1: (1,), 7: (2,), 16: (1,), 18: (2,)},
    }
    sets: list[Defines] = []
    for real in _REALS:
        for hidden, counts in rows[real].items():
            sets += [{"REAL": real, "HIDDEN": hidden, "ROWS": count} for count in counts]
    return sets + _BLOCK_REDUCTIONS


def _elman(sets: list[Defines]) -> list[Defines]:
    """tanh for all, relu for one size and one block form: it differs in a line."""
    relu = [one for one in sets if one.get("HIDDEN") == 20 or one.get("ROWS") == 1]
    return [one | {"RELU": 0} for one in sets] + [one | {"RELU": 1} for one in relu if one["REAL"] == "float"]


def _forward(sets: list[Defines], left_out: Defines | None = None) -> list[Defines]:
    """The projected input for all; the input itself in three sizes, in the largest alone where weights are streamed."""
    sized = [one | {"INPUTS": inputs} for one in sets for inputs in (1, 4, 8) if inputs == 8 or one.get("HIDDEN") == 20]
    return sets + [one for one in sized if one != left_out]


_CSR = _all(REAL=_REALS, INDEX=_INDICES)
_BLOCK_REDUCTIONS = _all(REAL=_REALS, ROWS=(1, 2, 4))
_RNN, _GRU, _LSTM = (_units(dict(zip(_REALS, largest, strict=True))) for largest in ((128, 72), (48, 24), (36, 18)))

SOURCES: dict[str, list[Defines]] = {
    "csr.cu": _CSR,
    "spgemm.cu": _all(REAL=_REALS, INDEX=_INDICES, POSITION=("unsigned short", "unsigned int")),
    "spgemm_pairs.cu": _all(REAL=_REALS, WORD=("unsigned int", "unsigned long long")),
    "spgemm_rows.cu": _CSR,
    "windows.cu": _all(REAL=_REALS, WINNER=_WINNERS) + _all(REAL=_REALS, INDEX=_INDICES, WINNER=_WINNERS),
    "bands.cu": _PLAIN,
    "conv.cu": [
        {"REAL": real, "ROWS": rows, "COLUMNS": columns}
        for real, tiles in zip(_REALS, (TILES, TILES[1:]), strict=True) for rows, columns in tiles
    ],
    "pointwise.cu": _PLAIN,
    "dense.cu": _PLAIN,
    "optimizers.cu": _PLAIN,
    "rnn_forward.cu": _elman(_forward(_RNN) + _shared(1, _WIDE["rnn"], forward=True)),
    "gru_forward.cu": [
        *_forward(_GRU, {"REAL": "double", "HIDDEN": 24, "INPUTS": 8}), *_shared(3, _WIDE["gru"], forward=True),
    ],
    "lstm_forward.cu": [
        *_forward(_LSTM, {"REAL": "double", "HIDDEN": 18, "INPUTS": 8}), *_shared(4, _WIDE["lstm"], forward=True),
        {"REAL": "double", "HIDDEN": 18, "INPUTS": 4},
    ],
    "rnn.cu": _elman(
        _RNN + _shared(1, _WIDE["rnn"]) + _reductions({"float": 32, "double": 32}, ROW_REGISTERS["rnn"]) + _sums(1)
    ),
    "gru.cu": [
        *_GRU, *_shared(3, _WIDE["gru"]), *_reductions({"float": 32, "double": 24}, ROW_REGISTERS["gru"]), *_sums(3),
    ],
    "lstm.cu": _LSTM + _shared(4, _WIDE["lstm"]) + _lstm_reductions() + _sums(4),
    # sizes of a state: hidden sizes, and twice as much, an LSTM's
    "scan.cu": [
        *_all(REAL=("float",), HIDDEN=(*_HIDDEN, 40, 64)), *_all(REAL=("double",), HIDDEN=(*_HIDDEN, 36)), *_PLAIN,
    ],
    "weight_sums.cu": _PLAIN,
    "selective_scan.cu": _PLAIN,
    "recurrence.cu": _all(REAL=_REALS, PAIRS=(0, 1)),
}  # fmt: skip
"""File name to the list of define sets, each ``{name: value}``."""


def kernels_of(file: str) -> set[str]:
    """Return the names of the kernels that a file itself defines."""
    heads = re.findall(r"__global__[^{]*", source(file).split(f'#line 1 "{file}"')[1])
    return set(re.findall(r"\bvoid\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\(", "\n".join(heads)))
