"""The conda recipe and the workflow for wheels agree with pyproject.toml."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

import sparsebp

ROOT = Path(__file__).parents[1]
yaml = pytest.importorskip("yaml")


def test_the_conda_recipe_has_the_packages_requirements() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    recipe = yaml.safe_load((ROOT / "conda" / "recipe.yaml").read_text(encoding="utf-8"))
    about, wanted = project["project"], recipe["requirements"]
    needed = {f"python {about['requires-python']}", *(one.replace(">=", " >=") for one in about["dependencies"])}
    assert needed == set(wanted["run"])
    assert {one.replace(">=", " >=") for one in project["build-system"]["requires"]} <= set(wanted["host"])
    ((name, entry),) = about["scripts"].items()
    assert recipe["build"]["python"]["entry_points"] == [f"{name} = {entry}"]
    assert recipe["context"]["version"] == sparsebp.__version__
    assert (recipe["about"]["summary"], recipe["about"]["license"]) == (about["description"], about["license"])


def test_wheels_are_built_for_every_python_that_is_named() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "wheels.yml").read_text(encoding="utf-8"))
    named = {
        one.rpartition(" ")[2]
        for one in project["classifiers"]
        if one.startswith("Programming Language") and "." in one
    }
    assert set(workflow["jobs"]["release"]["strategy"]["matrix"]["python"]) == named


def test_types_are_checked_without_optional_packages() -> None:
    """Whoever lacks them sees the same: the type checker is told of every import beyond what the package requires."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["mypy"]
    told = {name.removesuffix(".*") for override in settings["overrides"] for name in override["module"]}
    known = {*told, *settings["packages"], *sys.stdlib_module_names, "numpy", "rich", "typer"}  # which have types
    for source in (source for package in settings["packages"] for source in (ROOT / package).rglob("*.py")):
        text = source.read_text(encoding="utf-8")
        if set(re.findall(r"^ *(?:import|from) (\w+)", text, re.MULTILINE)) <= known:
            continue
        for node in ast.walk(ast.parse(text)):  # which are imports, and not lines of a text
            names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) and not node.level else []
            assert {name.partition(".")[0] for name in names} <= known, f"{source}:{node.lineno}"
