"""A griffe extension: grouped entries of a docstring (``lr, eps``) become entries of their own, each with its own type.

griffe gives all names of a group the type and the default of the first one that is in the signature.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

from sparsebp.kernels.spec import Kernels

_HEADING = re.compile(r"^([A-Z][\w ]*\n-+\n)", re.MULTILINE)
_GROUP = re.compile(r"^(\*{0,2}\w+(?:, \*{0,2}\w+)+)( : .+)?\n((?:(?: .*)?(?:\n|\Z))+?)(?=\S|\Z)", re.MULTILINE)
_SPLIT = ("Parameters", "Other Parameters", "Attributes")


class SplitGroups(griffe.Extension):
    """Rewrites every docstring as it is found, before anything parses it."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Split the groups of one module's, class's or function's docstring; a kernel's is that of its row."""
        if obj.is_attribute and str(obj.value).startswith("kernel("):
            obj.docstring = griffe.Docstring(getattr(Kernels, obj.name).__doc__, parent=obj)
        if obj.docstring is not None:
            obj.docstring.value = split_groups(obj.docstring.value)


def split_groups(docstring: str) -> str:
    """Return `docstring` with one entry a name in its sections of parameters and attributes."""
    text, *sections = _HEADING.split(docstring)
    for heading, body in zip(sections[::2], sections[1::2], strict=True):
        text += heading + (_GROUP.sub(_entries, body) if heading.startswith(_SPLIT) else body)
    return text


def _entries(group: re.Match[str]) -> str:
    names, kind, text = group[1].split(", "), group[2] or "", group[3].rstrip()
    blank = "\n" if group[3].endswith("\n\n") else ""  # before the next section
    return "".join(f"{name}{kind}\n{text}\n" for name in names) + blank
