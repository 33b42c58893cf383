"""Hypothesis strategies shared by all tests: awkward sizes first, everything small. Append only."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

AWKWARD = (0, 1, 2, 3, 5, 7, 13, 17, 31, 32, 33)
REALS = (np.float32, np.float64)
INDICES = (np.int32, np.int64)

reals = st.sampled_from([np.dtype(d) for d in REALS])
index_dtypes = st.sampled_from([np.dtype(d) for d in INDICES])
seeds = st.integers(0, 2**32 - 1)


def sizes(low: int = 0, high: int = 33) -> st.SearchStrategy[int]:
    """Sizes in [low, high]: zero, one, primes and the neighbours of powers of two, or anything between."""
    awkward = [n for n in AWKWARD if low <= n <= high]
    between = st.integers(low, high)
    return st.one_of(st.sampled_from(awkward), between) if awkward else between


@st.composite
def csr_patterns(
    draw: st.DrawFn, rows: st.SearchStrategy[int] | None = None, columns: st.SearchStrategy[int] | None = None
) -> tuple[np.ndarray, np.ndarray, tuple[int, int]]:
    """A canonical CSR pattern ``(indptr, indices, shape)``, int32; empty or full rows and empty matrices too."""
    m = draw(sizes(0, 17) if rows is None else rows)
    n = draw(sizes(0, 17) if columns is None else columns)
    density = draw(st.sampled_from([0.0, 0.1, 0.3, 0.7, 1.0]))
    present = np.random.default_rng(draw(seeds)).random((m, n)) < density
    indptr = np.concatenate([[0], np.cumsum(present.sum(axis=1))]).astype(np.int32)
    return indptr, np.nonzero(present)[1].astype(np.int32), (m, n)


def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype, scale: float = 1.0) -> np.ndarray:
    """Return normally distributed values of `dtype`."""
    return (scale * rng.standard_normal(shape)).astype(dtype)


def tolerance(dtype: np.dtype, factor: float = 1.0) -> dict[str, float]:
    """Return ``rtol`` and ``atol`` for `numpy.testing.assert_allclose`: for sums of some tens of terms of size one."""
    eps = float(np.finfo(dtype).eps)
    return {"rtol": 200 * eps * factor, "atol": 100 * eps * factor}


@st.composite
def optimizers(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """The name of an optimizer and random options, as torch.optim has them."""
    name = draw(st.sampled_from(["SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop"]))
    rate, fraction = st.floats(1e-5, 0.1), st.floats(0.0, 0.99)
    options: dict[str, Any] = {
        "lr": draw(rate), "weight_decay": draw(st.sampled_from([0.0, 0.01, 0.5])), "maximize": draw(st.booleans()),
    }  # fmt: skip
    if name == "SGD":
        nesterov = draw(st.booleans())
        options |= {
            "momentum": draw(st.floats(0.1, 0.95) if nesterov else st.sampled_from([0.0, 0.5, 0.9])),
            "dampening": 0.0 if nesterov else draw(fraction), "nesterov": nesterov,
        }  # fmt: skip
    elif name in ("Adam", "AdamW"):
        options |= {
            "betas": (draw(fraction), draw(fraction)),
            "eps": draw(st.floats(1e-8, 0.1)),
            "amsgrad": draw(st.booleans()),
        }
    elif name in ("NAdam", "RAdam", "Adamax"):
        options |= {"betas": (draw(fraction), draw(fraction)), "eps": draw(st.floats(1e-8, 0.1))}
        if name != "Adamax":
            options["decoupled_weight_decay"] = draw(st.booleans())
        if name == "NAdam":
            options["momentum_decay"] = draw(st.sampled_from([0.0, 4e-3, 0.3, 50.0]))
    elif name == "Adagrad":
        options |= {
            "lr_decay": draw(fraction), "initial_accumulator_value": draw(st.sampled_from([0.0, 0.1])),
            "eps": draw(st.floats(1e-10, 0.1)),
        }  # fmt: skip
    elif name == "Adadelta":
        options |= {
            "lr": draw(st.sampled_from([options["lr"], 1.0])),
            "rho": draw(fraction),
            "eps": draw(st.floats(1e-6, 0.1)),
        }
    else:
        options |= {
            "alpha": draw(st.floats(0.5, 0.99)), "eps": draw(st.floats(1e-4, 0.1)),
            "momentum": draw(st.sampled_from([0.0, 0.9])), "centered": draw(st.booleans()),
        }  # fmt: skip
    return name, options
