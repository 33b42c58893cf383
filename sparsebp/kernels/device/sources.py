"""Every source file with representative sets of defines: what a test compiles to be sure that all of it compiles."""

from __future__ import annotations

from itertools import product

from sparsebp.kernels.api.recurrent import HELD_INPUTS, room_for_sums
from sparsebp.kernels.device.base import WARP, Defines
from sparsebp.kernels.device.recurrent_cycles import ROW_REGISTERS
from sparsebp.kernels.device.recurrent_launches import SUM_REGISTERS

_REALS = ("float", "double")
_INDICES = ("int", "long long")
_HIDDEN = (1, 7, 20, 32)


def _csr() -> list[Defines]:
    return [{"REAL": real, "INDEX": index} for real, index in product(_REALS, _INDICES)]


def _spgemm() -> list[Defines]:
    return [one | {"POSITION": position} for one in _csr() for position in ("unsigned short", "unsigned int")]


def _plain() -> list[Defines]:
    return [{"REAL": real} for real in _REALS]


def _units(largest: dict[str, int]) -> list[Defines]:
    """Sizes of one warp, the largest with weights in registers, and the streamed form."""
    sets: list[Defines] = []
    for real in _REALS:
        sets += [{"REAL": real, "HIDDEN": hidden} for hidden in (*_HIDDEN, largest[real]) if hidden <= largest[real]]
        sets += [{"REAL": real, "STAGED": staged} for staged in (0, 1)]
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
    for real in _REALS:
        for hidden in _HIDDEN:
            for count in rows[real][hidden]:
                size = min(hidden, largest[real])
                if count * size * (2 if real == "double" else 1) <= registers:
                    sets.append({"REAL": real, "HIDDEN": size, "ROWS": count})
    return sets + _block_reductions()


def _block_reductions() -> list[Defines]:
    return [{"REAL": real, "ROWS": count} for real in _REALS for count in (1, 2, 4)]


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
    return sets + _block_reductions()


def _combinations() -> list[Defines]:
    """Sizes of a state: hidden sizes, and twice as much, an LSTM's."""
    sizes = {"float": (*_HIDDEN, 40, 64), "double": (*_HIDDEN, 36)}
    sets: list[Defines] = [{"REAL": real, "HIDDEN": size} for real in _REALS for size in sizes[real]]
    return sets + _plain()


def _elman(sets: list[Defines]) -> list[Defines]:
    """tanh for all, relu for one size and one block form: it differs in a line."""
    relu = [one for one in sets if one.get("HIDDEN") == 20 or one.get("ROWS", one.get("STAGED")) == 1]
    return [one | {"RELU": 0} for one in sets] + [one | {"RELU": 1} for one in relu if one["REAL"] == "float"]


def _forward(sets: list[Defines], left_out: Defines | None = None) -> list[Defines]:
    """The projected input for all; the input itself in three sizes, in the largest alone where weights are streamed."""
    sized = [one | {"INPUTS": inputs} for one in sets for inputs in (1, 4, 8) if inputs == 8 or one.get("HIDDEN") == 20]
    return sets + [one for one in sized if one != left_out]


def _windows() -> list[Defines]:
    return [one | {"WINNER": winner} for one in _plain() for winner in ("unsigned char", "int")]


def _pool() -> list[Defines]:
    return [one | {"WINNER": winner} for one in _csr() for winner in ("unsigned char", "int")]


SOURCES: dict[str, list[Defines]] = {
    "csr.cu": _csr(),
    "spgemm.cu": _spgemm(),
    "spgemm_blocks.cu": _spgemm(),
    "slopes.cu": _plain(),
    "pool.cu": _pool(),
    "spgemm_pairs.cu": [one | {"WORD": word} for one in _plain() for word in ("unsigned int", "unsigned long long")],
    "spgemm_rows.cu": _csr(),
    "windows.cu": _windows(),
    "channels.cu": _plain(),
    "clamp.cu": _plain(),
    "gelu.cu": _plain(),
    "dense.cu": _plain(),
    "training.cu": _plain(),
    "optimizers.cu": _plain(),
    "rnn_forward.cu": _elman(_forward(_units({"float": 128, "double": 72}))),
    "gru_forward.cu": _forward(_units({"float": 48, "double": 24}), {"REAL": "double", "HIDDEN": 24, "INPUTS": 8}),
    "rnn.cu": _elman(
        _units({"float": 128, "double": 72}) + _reductions({"float": 32, "double": 32}, ROW_REGISTERS["rnn"]) + _sums(1)
    ),
    "gru.cu": _units({"float": 48, "double": 24})
    + _reductions({"float": 32, "double": 24}, ROW_REGISTERS["gru"])
    + _sums(3),
    "lstm_forward.cu": [
        *_forward(_units({"float": 36, "double": 18}), {"REAL": "double", "HIDDEN": 18, "INPUTS": 8}),
        {"REAL": "double", "HIDDEN": 18, "INPUTS": 4},
    ],
    "lstm.cu": _units({"float": 36, "double": 18}) + _lstm_reductions() + _sums(4),
    "scan.cu": _combinations(),
    "weight_sums.cu": _plain(),
}
"""File name to the list of define sets, each ``{name: value}``."""
