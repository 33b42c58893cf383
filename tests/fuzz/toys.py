"""Targets that end in every way, for the test of the harness; its child processes import nothing large with them."""

from __future__ import annotations

import os
import time

import numpy as np

from fuzz.case import same
from sparsebp.core.errors import OptionError


def right(rng):
    assert rng.random() < 1


def refuses(rng):
    raise OptionError("no", remedy="Pass yes")


def raw(rng):
    raise KeyError("raw")


def wrong(rng):
    same("one", np.zeros(2), np.ones(2))


def memory(rng):
    np.zeros(2**46)


def crash(rng):
    os.abort()


def hang(rng):
    time.sleep(60)


TOYS = {"right": right, "refused": refuses, "raw": raw, "wrong": wrong, "memory": memory, "crash": crash, "hang": hang}
