"""``python -m papers`` from the command line."""

import json
import sys
from functools import partial

import pytest

from commands import run
from papers import FIGURES
from papers.command import app

invoke = partial(run, app)


def test_the_list_names_every_figure():
    result = invoke("list")
    assert result.exit_code == 0
    assert all(name in result.stdout for name in FIGURES)


def test_the_list_as_json():
    found = json.loads(invoke("list", "--json").stdout)["figures"]
    assert [figure["name"] for figure in found] == list(FIGURES)


def test_figures_leave_files_and_say_what_came_out(tmp_path):
    result = invoke("ooo-fig12", "ooo-fig1", "--quick", "--out", tmp_path)
    assert result.exit_code == 0
    assert "1 missed, 1 met" in " ".join(result.stdout.split())
    assert {path.name for path in tmp_path.iterdir()} == {"ooo-fig12.json", "ooo-fig12.png", "ooo-fig1.json"}


def test_json_on_standard_output(tmp_path):
    result = json.loads(invoke("ooo-fig5", "--json", "--out", tmp_path).stdout)
    assert result["figure"] == "ooo-fig5" and len(result["claims"]) == 5


def test_json_of_all_is_json_where_figures_are_left_out(tmp_path, monkeypatch):
    import papers as reproduce

    command = sys.modules["papers.command"]
    monkeypatch.setattr(reproduce, "FIGURES", {name: FIGURES[name] for name in ("ooo-fig4", "bppsa-fig13")})
    monkeypatch.setattr(command, "_PACKAGES", {"torch": "torch", "audio": "no_such_package"})
    result = invoke("all", "--quick", "--json", "--out", tmp_path)
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert [entry["event"] for entry in found] == ["result", "left out"] and "audio" in found[1]["why"]


@pytest.mark.parametrize(
    ("hidden", "extra", "figure"), [("torch", "torch", "bppsa-fig7"), ("librosa", "audio", "bppsa-table3")]
)
def test_all_leaves_out_what_is_not_installed(hidden, extra, figure, tmp_path, monkeypatch):
    import papers as reproduce

    monkeypatch.setitem(sys.modules, hidden, None)  # as find_spec and import see it
    monkeypatch.setattr(reproduce, "FIGURES", {name: FIGURES[name] for name in ("ooo-fig4", figure)})
    result = invoke("all", "--quick", "--out", tmp_path)
    assert result.exit_code == 0 and f"left out: it needs pip install 'sparsebp[{extra}]'" in result.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"ooo-fig4.json"}
    by_name = invoke(figure, "--quick", "--out", tmp_path)
    assert by_name.exit_code == 1 and f"sparsebp[{extra}]" in by_name.stderr


def test_all_in_a_small_form(tmp_path, monkeypatch):
    """One figure of every kind that takes a second or so; ``reproduce all --quick`` takes minutes."""
    import papers as reproduce

    for package in ("librosa", "matplotlib"):
        pytest.importorskip(package)
    names = ("bppsa-fig1", "bppsa-table2", "bppsa-instruments", "ooo-fig12", "fusion-depth")
    monkeypatch.setattr(reproduce, "FIGURES", {name: FIGURES[name] for name in names})
    result = invoke("all", "--quick", "--out", tmp_path)
    assert result.exit_code == 0 and all(name in result.stdout for name in names)
    assert {path.stem for path in tmp_path.glob("*.json")} == set(names)
    assert {path.stem for path in tmp_path.glob("*.png")} == {
        name for name in names if FIGURES[name].run and FIGURES[name].run.draw
    }


def test_an_interruption_says_at_which_figure(tmp_path, monkeypatch):
    from papers.claims import Figure

    reproduce = Figure.reproduce

    def interrupted(figure, context, out):
        if figure.name == "ooo-fig5":
            raise KeyboardInterrupt
        return reproduce(figure, context, out)

    monkeypatch.setattr(Figure, "reproduce", interrupted)
    result = invoke("ooo-fig4", "ooo-fig5", "ooo-fig12", "--out", tmp_path)
    assert result.exit_code == 130 and "at figure 2 of 3, ooo-fig5" in result.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"ooo-fig4.json"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothing"], "python -m papers list prints them"), (["ooo-fig55"], "ooo-fig5"),
        (["ooo-fig5", "--measured", "absent"], "Leave --measured out"), (["all", "ooo-fig5"], "stand alone"),
        (["ooo-fig5", "list"], "stand alone"),
    ],
)  # fmt: skip
def test_wrong_usage_is_one_message(arguments, said):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert said in result.stderr and "Traceback" not in result.stderr


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_run(tmp_path, monkeypatch):
    from papers.claims import Figure

    monkeypatch.setattr(Figure, "reproduce", lambda *_: pytest.fail("it was run"))
    (tmp_path / "file").touch()
    result = invoke("ooo-fig5", "--out", tmp_path / "file")
    assert result.exit_code == 1 and "cannot be written" in result.stderr
