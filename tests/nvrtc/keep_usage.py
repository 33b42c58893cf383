"""Writes ``usage.json``: what ptxas says of every kernel, for every set of defines that the tests compile.

Compiled is what is kept of no source, options and compiler as they are now.
"""

from __future__ import annotations

import json

from device.test_nvrtc import cases
from nvrtc.compile import USAGE, usage_key, usage_of


def main() -> None:
    found = {usage_key(*case): [list(kernel) for kernel in usage_of(*case)] for case in cases()}
    lines = (f"{json.dumps(key)}: {json.dumps(found[key])}" for key in sorted(found))
    USAGE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    print(f"{len(found)} sets of defines: {USAGE}")


if __name__ == "__main__":
    main()
