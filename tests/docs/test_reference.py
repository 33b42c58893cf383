"""The reference pages show every parameter's own type and default."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

griffe = pytest.importorskip("griffe")
yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def package() -> Any:
    """The package as the pages see it, read with the options of mkdocs.yml."""
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    (handlers,) = (p["mkdocstrings"]["handlers"] for p in settings["plugins"] if "mkdocstrings" in p)
    options = handlers["python"]["options"]
    return griffe.load(
        "sparsebp", search_paths=[ROOT], docstring_parser=options["docstring_style"],
        docstring_options=options["docstring_options"],
        extensions=griffe.load_extensions(*(ROOT / path for path in options["extensions"])),
    )  # fmt: skip


def functions_and_classes(package: Any) -> Iterator[Any]:
    for member in package.members.values():
        if member.is_alias:
            continue
        if member.is_function or member.is_class:
            yield member
        if member.is_module or member.is_class:
            yield from functions_and_classes(member)


def test_every_parameter_has_its_own_type_and_default(package: Any) -> None:
    seen, wrong = 0, []
    for documented in filter(lambda found: found.docstring, functions_and_classes(package)):
        for section in documented.docstring.parsed:
            if section.kind.value not in ("parameters", "other parameters"):
                continue
            for shown in section.value:
                seen += 1
                if shown.name in documented.parameters:
                    own = documented.parameters[shown.name]
                    right = str(shown.annotation) == str(own.annotation) and str(shown.value) == str(own.default)
                else:
                    right = shown.annotation is not None  # of a __new__, which the pages do not look into
                if not right:
                    wrong.append(f"{documented.path}({shown.name}: {shown.annotation} = {shown.value})")
    assert seen > 700
    assert wrong == []


DIRECTIVE = re.compile(r"^::: sparsebp\.(\S+)\n(?:    options:\n      heading: sparsebp\.(\S+)\n)?", re.MULTILINE)


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "reference").glob("*.md")), ids=lambda page: page.stem)
def test_a_heading_is_what_users_import(package: Any, page: Path) -> None:
    """A function in a module of its own name is hidden by that module, unless the page names both and has a heading."""
    for path, heading in DIRECTIVE.findall(page.read_text(encoding="utf-8")):
        parent, _, name = f"sparsebp.{heading or path}".rpartition(".")
        imported = getattr(import_module(parent), name, None) or import_module(f"{parent}.{name}")
        assert package[path].is_module == isinstance(imported, ModuleType), path
        assert path.split(".")[-1] == name


def test_a_group_is_split_in_its_sections_only() -> None:
    module = griffe.visit("example", filepath=Path("example.py"), code=EXAMPLE)
    extensions = griffe.load_extensions(ROOT / "docs" / "griffe_groups.py")
    extensions.call("on_object", obj=module["update"], loader=None)
    parameters, raises = module["update"].docstring.parse("numpy")[1:]
    assert [(p.name, str(p.annotation), p.value, p.description) for p in parameters.value] == [
        ("lr", "float", "0.1", "Two\n\nparagraphs."), ("name", "str", "'a'", "Two\n\nparagraphs."),
        ("*args", "int", "()", "The rest."),
    ]  # fmt: skip
    assert len(raises.value) == 1


EXAMPLE = '''
def update(lr: float = 0.1, name: str = "a", *args: int) -> None:
    """Update, with

    Parameters
    ----------
    lr, name
        Two

        paragraphs.
    *args
        The rest.

    Raises
    ------
    ValueError, TypeError
        Never.
    """
'''
