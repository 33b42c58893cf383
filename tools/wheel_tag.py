"""A wheel with machine code says for which Python and platform; without, it is one for all."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class WheelTag(BuildHookInterface):
    """Tag the wheel by what ``tools/ship_kernels.py`` has left in the package."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Set the tag; `version` is "standard" or "editable"."""
        if version == "standard" and (Path(self.root) / "sparsebp/kernels/host/shipped").exists():
            python = "cp{}{}".format(*sys.version_info[:2])
            build_data |= {"pure_python": False, "tag": f"{python}-{python}-manylinux_2_17_x86_64"}
