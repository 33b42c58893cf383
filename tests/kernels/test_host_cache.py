"""Machine code older than any host source is dropped; newer is kept."""

import os
from pathlib import Path

from numba import config

from sparsebp.kernels.host.engine.compile import caches, drop_stale
from sparsebp.kernels.host.sparse.csr import _csr_matvec


def test_indices_older_than_the_newest_source_are_dropped(tmp_path):
    cache = tmp_path / "__pycache__"
    cache.mkdir()
    for name, seconds in (("a.py", 100), ("b.py", 200), ("__pycache__/a.f.nbi", 150), ("__pycache__/b.f.nbi", 250)):
        (tmp_path / name).write_text("")
        os.utime(tmp_path / name, (seconds, seconds))
    (cache / "a.f.1.nbc").write_text("")

    assert drop_stale(tmp_path) == 1
    assert sorted(path.name for path in cache.iterdir()) == ["a.f.1.nbc", "b.f.nbi"]
    assert drop_stale(tmp_path) == 0


def test_a_folder_without_a_cache_has_nothing_to_drop(tmp_path):
    (tmp_path / "a.py").write_text("")
    assert drop_stale(tmp_path) == 0


def test_so_are_those_that_numba_keeps_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path / "elsewhere"))
    source = tmp_path / "sources" / "a.py"
    *_, elsewhere = caches(source.parent)
    for folder in (source.parent, elsewhere):
        folder.mkdir(parents=True)
    for path, seconds in ((source, 200), (elsewhere / "a.f.nbi", 100), (elsewhere / "a.g.nbi", 300)):
        path.write_text("")
        os.utime(path, (seconds, seconds))
    assert drop_stale(source.parent) == 1
    assert [path.name for path in elsewhere.iterdir()] == ["a.g.nbi"]


def test_kernels_are_kept_where_it_looks():
    assert Path(_csr_matvec.stats.cache_path) in caches(Path(_csr_matvec.py_func.__code__.co_filename).parent)
