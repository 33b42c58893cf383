"""The complete diffs of the how-to guides still apply to the files that they name."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("write-a-strategy.md", "write-a-kernel.md")  # the second one's diff is made on top of the first one's
FILE = re.compile(r"^--- a/\S+\n\+\+\+ b/(\S+)\n", re.MULTILINE)
HUNK = re.compile(r"^@@ .*\n", re.MULTILINE)


def test_the_diffs_apply() -> None:
    files: dict[str, str] = {}
    for page in PAGES:
        text = (ROOT / "docs" / "how-to" / page).read_text(encoding="utf-8")
        (diff,) = re.findall(r"^```diff\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        _, *parts = FILE.split(diff)
        for name, hunks in zip(parts[::2], parts[1::2], strict=True):
            content = files.get(name) or (ROOT / name).read_text(encoding="utf-8")
            for hunk in HUNK.split(hunks)[1:]:
                lines = hunk.splitlines(keepends=True)
                old, new = ("".join(line[1:] for line in lines if line[0] in kinds) for kinds in (" -", " +"))
                assert content.count(old) == 1, f"{page}: {name} has changed around\n{old}"
                content = content.replace(old, new)
            if name.endswith(".py"):
                compile(content, name, "exec")
            files[name] = content
    assert len(files) > 8
