"""What ``asv`` times over the history of commits, on one thread and without peers; configured by ``asv.conf.json``.

``asv run NEW`` measures commits without a result, ``asv continuous A B`` compares two, ``asv publish`` makes pages. The
workloads are those of the other benchmarks, from the checkout; sparsebp is of the commit that asv has installed. asv
puts the parent of this folder first on the path, and that must not be the checkout, which has a sparsebp, too.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))  # last, so that sparsebp is found where it is installed
