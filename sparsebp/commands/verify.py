"""``sparsebp verify``: does this installation compute right?"""

from __future__ import annotations

import enum
from typing import Annotated

import typer

from sparsebp.commands.common import JsonOption, ThreadsOption, use_threads


class Device(enum.StrEnum):
    """Where to compute."""

    cpu = "cpu"
    cuda = "cuda"


def verify(
    device: Annotated[Device, typer.Option(help="Where to compute.")] = Device.cpu,
    threads: ThreadsOption = None,
    json: JsonOption = False,
) -> None:
    """Check the scans' gradients against sequential back-propagation and finite differences. Takes some seconds.

    \b
    Examples:
      sparsebp verify
      sparsebp verify --device cuda --json
    """
    from sparsebp import backend

    backend.device_namespace(device.value)
    use_threads(threads)
