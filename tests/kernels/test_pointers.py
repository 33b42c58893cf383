"""Pointers of the host kernels never outlive their arrays."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import sparsebp

PACKAGE = Path(sparsebp.__file__).parent
TAKERS = {"pointer", "aligned_pointer"}


def _called(node: ast.AST) -> str | None:
    """The last part of the name of what is called."""
    if not isinstance(node, ast.Call):
        return None
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)


def _root(node: ast.AST) -> str | None:
    """The name of the variable that an expression like ``v.b[0]`` begins with."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def _own(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """What stands in a function, without the functions that it defines."""
    queue: list[ast.AST] = list(function.body)
    while queue:
        node = queue.pop()
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield node
            queue += ast.iter_child_nodes(node)


def _dangling(function: ast.FunctionDef) -> Iterator[str]:
    """Arrays of which a pointer is taken, and which neither the caller holds nor the function's last lines do."""
    nodes = list(_own(function))
    stored = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    every = (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
    arguments = {argument.arg for argument in every} - stored
    kept = set()
    for statement in reversed(function.body):
        if not (isinstance(statement, ast.Expr) and _called(statement.value) == "keep_alive"):
            break
        kept |= {_root(argument) for argument in statement.value.args}  # type: ignore[attr-defined]
    early = any(isinstance(node, ast.Return) for node in nodes)
    for node in nodes:
        if _called(node) in TAKERS:
            name = _root(node.args[0])  # type: ignore[attr-defined]
            if name not in arguments and (name not in kept or early):
                yield f"{function.name}, line {node.lineno}: {ast.unparse(node)}"  # type: ignore[attr-defined]


def _of(source: str) -> list[str]:
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    return [found for function in functions for found in _dangling(function)]


@pytest.mark.parametrize("path", sorted((PACKAGE / "kernels" / "host").rglob("*.py")), ids=lambda path: path.stem)
def test_pointers_are_of_arguments_or_of_arrays_kept_to_the_end(path: Path) -> None:
    assert _of(path.read_text()) == []


@pytest.mark.parametrize(
    "body",
    [
        "room = np.empty(n)\n    p = pointer(room)\n    use(p)",
        "room = np.empty(n)\n    p = simd.aligned_pointer(room)\n    keep_alive(room)\n    use(p)",
        "room = np.empty(n)\n    p = pointer(room)\n    if n:\n        return\n    keep_alive(room)",
        "x = x.copy()\n    use(pointer(x))",
        "use(pointer(np.empty(n)))",
    ],
)
def test_others_are_found(body: str) -> None:
    assert len(_of(f"def kernel(n, x):\n    {body}\n")) == 1
    assert not _of(
        "def kernel(n, x):\n    room = np.empty(n)\n    use(pointer(room), pointer(x.y))\n    keep_alive(room)\n"
    )
