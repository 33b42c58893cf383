"""Links and pictures of the documents exist, the navigation is whole, and commands in the pages exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(
    (ROOT / "docs").rglob("*.md")
)
LINK = re.compile(r"\]\((?!https?://|#)([^)#\s]+)")
EXAMPLES = sorted((ROOT / "docs" / "gallery").glob("*.py"))
PROSE = re.compile(r"```.*?```|`[^`]*`", re.DOTALL)


@pytest.mark.parametrize("document", DOCUMENTS + EXAMPLES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    text = PROSE.sub("", text if document.suffix == ".md" else text.split('"""')[1])
    missing = [link for link in LINK.findall(text) if not (document.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_tables_fit_a_page(document: Path) -> None:
    """Eight columns, whose longest words fit beside each other; and no two columns of one name."""
    for table in re.findall(r"(?:^\|.*\|\n)+", document.read_text(encoding="utf-8"), re.MULTILINE):
        shown = re.sub(r"\]\([^)]*\)", "", table)  # of a link, its text
        rows = [line[1:-1].split("|") for line in shown.splitlines()]
        heading = [name.strip() for name in rows.pop(0)]
        names = [name for name in heading if name]
        assert len(heading) <= 8 and len(set(names)) == len(names), heading
        cells = [row for row in [heading, *rows[1:]] if len(row) == len(heading)]  # others have a bar within code
        words = (
            max(len(word) for cell in column for word in cell.split() or [""]) for column in zip(*cells, strict=True)
        )
        assert sum(words) <= 84, heading


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    sources = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "docs").rglob("*.ipynb"), *EXAMPLES]
    pages = [source.relative_to(ROOT / "docs").as_posix() for source in sources]
    assert [page for page in pages if page not in navigation] == []


def test_options_in_the_pages_exist() -> None:
    """Every option of a `sparsebp` command line in a document is one that the command has."""
    pytest.importorskip("typer")
    import typer.main

    from sparsebp.cli.app import app

    commands = dict(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    for group, command in list(commands.items()):
        commands.update({f"{group} {name}": inner for name, inner in getattr(command, "commands", {}).items()})
    options = {
        name: {o for p in command.params for o in (*p.opts, *p.secondary_opts)} for name, command in commands.items()
    }
    for document in DOCUMENTS:
        blocks = re.findall(r"^```bash\n(.*?)^```", document.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
        for line in re.findall(r"^sparsebp ([^#\n|]+)", "\n".join(blocks), re.MULTILINE):
            name, *words = line.split()
            if words and f"{name} {words[0]}" in options:
                name = f"{name} {words.pop(0)}"
            assert name in options, f"{document.name}: sparsebp {line}"
            unknown = {word for word in words if word.startswith("--")} - options[name]
            assert not unknown, f"{document.name}: sparsebp {line}"


def test_make_targets_in_the_pages_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for document in DOCUMENTS:
        named = set(re.findall(r"(?:^|`)make ([a-z-]+)", document.read_text(encoding="utf-8"), re.MULTILINE))
        assert named <= targets, document.name
