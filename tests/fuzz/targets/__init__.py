"""The table of targets: one file each."""

from fuzz.targets import arguments, chains, files, layers, patterns, products, recurrent, scans, schedules

TARGETS = {
    "arguments": arguments.case,
    "chains": chains.case,
    "files": files.case,
    "layers": layers.case,
    "patterns": patterns.case,
    "products": products.case,
    "recurrent": recurrent.case,
    "scans": scans.case,
    "schedules": schedules.case,
}
