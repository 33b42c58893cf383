"""An MkDocs hook: notebooks and the gallery's examples become pages, with their pictures, and can be downloaded."""

from __future__ import annotations

import ast
import base64
import json
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page


class SourcePage(File):
    """A page whose source is a notebook or a program: other pages and the navigation link to that."""

    def is_documentation_page(self) -> bool:
        """Return True: MkDocs takes files of its own suffixes alone."""
        return True


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace every notebook and example by its page, its pictures and a file to download."""
    for file in [file for file in files if file.src_uri.endswith(".ipynb") or file.src_uri.startswith("gallery/")]:
        path, pictures = PurePosixPath(file.src_uri), {}
        if path.suffix == ".ipynb":
            download = "notebook.ipynb"
            text, pictures = as_markdown(json.loads(file.content_string), path.stem)
        elif path.suffix == ".py":
            download, text = path.name, example_as_markdown(file.content_string, path.stem)
        else:
            continue
        files.remove(file)
        files.append(SourcePage.generated(config, file.src_uri, content=text))
        files.append(File.generated(config, f"{path.with_suffix('')}/{download}", content=file.content_bytes))
        for name, content in pictures.items():
            files.append(File.generated(config, f"{path.with_suffix('')}/{name}", content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the changelog with links from this folder; other pages as they are."""
    if page.file.src_uri != "changelog.md":
        return markdown
    return (Path(config.docs_dir).parent / "CHANGELOG.md").read_text(encoding="utf-8").replace("](docs/", "](")


def as_markdown(notebook: dict[str, Any], folder: str) -> tuple[str, dict[str, bytes]]:
    """Return a notebook's page, and its pictures by name; both lie under `folder`, which the page is beside."""
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            if output["output_type"] == "stream":
                parts.append(f"```text\n{''.join(output['text']).rstrip()}\n```")
            else:
                name = f"{len(pictures) + 1}.png"
                pictures[name] = base64.b64decode("".join(output["data"]["image/png"]))
                parts.append(f"![Output of the cell above]({folder}/{name})")
    parts.insert(1, f"<small>This page is a notebook that you can [download]({folder}/notebook.ipynb) and run.</small>")
    return "\n\n".join(parts) + "\n", pictures


def example_as_markdown(source: str, name: str) -> str:
    """Return the page of a gallery's example: its docstring's title and text, its picture, its code."""
    (first, *_), text = ast.parse(source).body, ast.get_docstring(ast.parse(source))
    title, _, description = str(text).partition("\n\n")
    code = "\n".join(source.splitlines()[first.end_lineno :]).strip()
    return f"""# {title}

{description}

![What the example draws]({name}.png)

```python
{code}
```

<small>[Download]({name}/{name}.py) this example and run it; add `plt.show()` to see the picture.</small>
"""
