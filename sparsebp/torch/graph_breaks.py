"""Functions at which compiled graphs break."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch._C._dynamo import eval_frame

F = TypeVar("F", bound=Callable[..., Any])


def breaks_graphs(function: F, reason: str | None = None) -> F:
    """Make `torch.compile` break its graph at a function, and compile neither it nor its callees.

    `torch.compiler.disable` does so too, but imports torch._dynamo (more than a second), and its wrapper sets the
    compiler aside at every call. Here the code object says it, which costs a call nothing.
    """
    if not hasattr(eval_frame, "set_code_exec_strategy"):  # an older PyTorch, whose disable takes no reason
        return cast(F, torch.compiler.disable(function))
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    # for a graph that would inline the function
    vars(function).update(_torchdynamo_disable=True, _torchdynamo_disable_msg=reason)
    return function
