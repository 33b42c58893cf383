"""Where to cut a model into parts that take equally long."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sparsebp.core.check import check_integer, check_number, check_sequence
from sparsebp.core.errors import OptionError
from sparsebp.schedule.costs import Costs
from sparsebp.schedule.schedule import trusted


def partition(costs: Costs | Sequence[float], workers: int, *, stages: int | None = None) -> list[range]:
    """Cut stages into consecutive parts, one for each worker, so that the longest part is as short as can be.

    Parameters
    ----------
    costs
        The costs of the stages, whose F, I and W of one micro-batch count; measured ones, say. Or a number for each.
    workers
        How many parts; each has at least one stage.
    stages
        How many stages there are; needed for `Costs` that do not say the bytes of each.

    Returns
    -------
    list of range
        The stages of every part, in their order. ``nn.Sequential(*(nn.Stage(*layers[part.start : part.stop]) for part
        in parts))`` makes each part one stage, for any builder.

    Raises
    ------
    OptionError
        There are fewer stages than workers, a cost is negative or not finite, or the number of stages is not known.

    Examples
    --------
    >>> from sparsebp.schedule import partition
    >>> partition([1, 1, 1, 5, 1, 3], 3)
    [range(0, 3), range(3, 4), range(4, 6)]
    """
    each = _of_stages(costs, stages) if isinstance(costs, Costs) else list(check_sequence("costs", costs, "numbers"))
    each = [check_number(f"The cost of stage {number}", cost, 0) for number, cost in enumerate(each)]
    workers = check_integer("workers", workers, 1)
    if workers > len(each):
        raise OptionError("There are fewer stages than workers", expected=f"at least {workers} stages", got=len(each))
    low, high = max(each), math.fsum(each) * (1 + 1e-9)  # sums of parts are rounded
    while low < (middle := (low + high) / 2) < high:
        low, high = (low, middle) if len(_filled(each, workers, middle)) <= workers else (middle, high)
    ends = _filled(each, workers, low if len(_filled(each, workers, low)) <= workers else high)
    return [range(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]


def _filled(each: Sequence[float], workers: int, limit: float) -> list[int]:
    """Return the ends of parts that are filled up to a limit, with at least one stage left for each further worker."""
    ends: list[int] = []
    total = 0.0
    for number, cost in enumerate(each):
        begins = number and (total + cost > limit or len(each) - number <= workers - len(ends) - 1)
        if begins:
            ends.append(number)
        total = cost if begins else total + cost
    return [*ends, len(each)]


def _of_stages(costs: Costs, stages: int | None) -> list[float]:
    if stages is None:
        if not isinstance(costs.stages, tuple):
            raise OptionError("The number of stages is not known", expected="stages=", got=None)
        stages = len(costs.stages)
    count = check_integer("stages", stages, 1)
    return [math.fsum(costs.duration(trusted(stage, kind, 0)) for kind in ("F", "I", "W")) for stage in range(count)]
