"""Product plans on disk: npz without pickle, written atomically, checked when read."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import zipfile
import zlib
from os import PathLike
from typing import cast

import numpy as np

from sparsebp.errors import FileFormatError, OutputError
from sparsebp.patterns.plan import ProductPlan, Strategy
from sparsebp.patterns.sparsity import SparsityPattern

FORMAT = "sparsebp.ProductPlan"
VERSION = 1
_PATTERNS = ("a", "b", "c")


def save_plan(plan: ProductPlan, path: str | PathLike[str]) -> None:
    """Write `plan` to `path`: under a temporary name in the same folder first, so that no half file is ever seen.

    Raises
    ------
    OutputError
        The file cannot be written.
    """
    path = os.fspath(path)
    content = _content(plan)
    header = {"format": np.array(FORMAT), "version": np.array(VERSION), "digest": np.array(_digest(content))}
    temporary = None
    try:
        with tempfile.NamedTemporaryFile(dir=os.path.dirname(path) or ".", suffix=".tmp", delete=False) as file:
            temporary = file.name
            np.savez(file, allow_pickle=False, **header, **content)
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        raise OutputError(
            "The plan cannot be written",
            expected="a folder that exists and can be written to",
            got=str(error),
            remedy="Choose another path",
        ) from error


def load_plan(path: str | PathLike[str]) -> ProductPlan:
    """Read a plan that `save_plan` wrote, after checking its format, version and content hash.

    Raises
    ------
    FileFormatError
        There is no such file, or it is corrupt, of another kind or of another version.
    """
    path = os.fspath(path)
    try:
        with np.load(path, allow_pickle=False) as file:
            found = {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, KeyError, AttributeError, zipfile.BadZipFile, zlib.error) as error:
        raise _refused(path, f"{type(error).__name__}: {error}") from error
    header = {name: found.pop(name, None) for name in ("format", "version", "digest")}
    if any(value is None or value.ndim for value in header.values()) or str(header["format"]) != FORMAT:
        raise _refused(path, f"a file of {sorted(found)[:5]} …")
    if str(header["version"]) != str(VERSION):
        raise _refused(path, f"version {header['version']}")
    if str(header["digest"]) != _digest(found):
        raise _refused(path, "content that does not match its hash")
    return _plan(found)


def _content(plan: ProductPlan) -> dict[str, np.ndarray]:
    content = {
        "strategy": np.array(plan.strategy),
        "products": np.array(plan.products, np.int64),
    }
    for name, pattern in zip(_PATTERNS, (plan.a, plan.b, plan.pattern), strict=True):
        content[f"{name}.indptr"], content[f"{name}.indices"] = pattern.indptr, pattern.indices
        content[f"{name}.shape"] = np.array([*pattern.shape, pattern.kind == "identity"], np.int64)
    content.update({f"arrays.{name}": array for name, array in plan.arrays.items()})
    return content


def _plan(content: dict[str, np.ndarray]) -> ProductPlan:
    """Build the plan from content whose hash has been checked."""
    a, b, c = (_pattern(content, name) for name in _PATTERNS)
    kept = {name.removeprefix("arrays."): array for name, array in content.items() if name.startswith("arrays.")}
    strategy, products = str(content["strategy"]), int(content["products"])
    return ProductPlan(a, b, c, cast(Strategy, strategy), products, kept)


def _pattern(content: dict[str, np.ndarray], name: str) -> SparsityPattern:
    rows, columns, identity = content[f"{name}.shape"].tolist()
    indptr, indices = content[f"{name}.indptr"], content[f"{name}.indices"]
    return SparsityPattern._trusted(indptr, indices, (rows, columns), bool(identity))


def _digest(content: dict[str, np.ndarray]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(content):
        array = np.ascontiguousarray(content[name])
        digest.update(f"{name} {array.dtype.str} {array.shape};".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def _refused(path: str, got: str) -> FileFormatError:
    return FileFormatError(
        f"{path!r} is not a product plan that can be read",
        expected=f"a file that ProductPlan.save wrote ({FORMAT}, version {VERSION})",
        got=got,
        remedy="Make the plan anew with plan_product(...) and save it",
    )
