"""Which layers of a chain get the lengths of sequences that are padded at the end."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from sparsebp.core.errors import OptionError


def taking_lengths(stages: Sequence[tuple[str, Any]]) -> tuple[list[int], bool]:
    """Return the numbers of the layers whose forward takes lengths, and whether one of them leaves no steps behind it.

    From the one on that makes one vector of all steps (``joins_steps = True``, as `MeanOverSteps`) there are none any
    more. Before it, a layer either takes lengths or works on each step by itself (``stepwise = True``, as `Linear`).

    Parameters
    ----------
    stages
        Names and layers, as `Layer.stages` returns them.

    Raises
    ------
    OptionError
        A layer may mix valid steps with those behind a sample's end.
    """
    found = []
    for number, (name, layer) in enumerate(stages):
        if "lengths" in inspect.signature(layer.forward).parameters:
            found.append(number)
            if getattr(layer, "joins_steps", False):
                return found, True
        elif not getattr(layer, "stepwise", False):
            raise OptionError(
                f"Layer {name or 'of the model'} does not take lengths, and may mix steps with padding",
                expected="forward(x, lengths=...), or stepwise = True in the class, up to a MeanOverSteps",
                got=f"{type(layer).__name__}.forward({', '.join(inspect.signature(layer.forward).parameters)})",
                remedy="Leave lengths out, or use layers that take them",
            )  # fmt: skip
    return found, False
