"""The conda recipe and the workflow for wheels agree with pyproject.toml."""

from __future__ import annotations

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
