"""A hook of MkDocs: notebooks become pages, with the outputs that they keep.

It needs nothing beyond MkDocs: cells are written as Markdown, figures as data, so that the site
asks for nothing from elsewhere.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

#: What marks a link to the notebook itself.
DOWNLOAD = "{ download }"


def on_files(files: Files, *, config: Any) -> Files:
    """Every ``name.ipynb`` of the navigation becomes the page ``name.html``; the file stays, to be
    downloaded."""
    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        text = page(json.loads(Path(str(file.abs_src_path)).read_text(encoding="utf-8")), file.name)
        files.append(
            File.generated(config, f"{file.src_uri.removesuffix('.ipynb')}.md", content=text)
        )
    return files


def on_config(config: Any) -> Any:
    """The navigation names notebooks; their pages are Markdown."""
    config["nav"] = _renamed(config["nav"])
    return config


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Links to notebooks lead to their pages, and a result's page shows its figure."""
    if page.file.src_uri.endswith("/RESULT.md"):
        title, _, rest = markdown.partition("\n")
        return f"{title}\n\n![{title.lstrip('# ')}](figure.png)\n{rest}"
    return markdown.replace(".ipynb)", ".md)").replace(f".md){DOWNLOAD}", f".ipynb){DOWNLOAD}")


def _renamed(nav: Any) -> Any:
    if isinstance(nav, str):
        return nav.replace(".ipynb", ".md")
    if isinstance(nav, dict):
        return {name: _renamed(inner) for name, inner in nav.items()}
    return [_renamed(inner) for inner in nav]


def page(notebook: dict[str, Any], name: str) -> str:
    """A notebook as Markdown."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
        elif cell["cell_type"] == "code":
            parts.append(f"```python\n{source}\n```")
            parts += [shown for output in cell["outputs"] if (shown := _output(output))]
    parts.insert(1, f"[Download this notebook]({name}.ipynb){DOWNLOAD}")
    return "\n\n".join(parts) + "\n"


def _output(output: dict[str, Any]) -> str:
    data = output.get("data", {})
    if "image/png" in data:
        image = "".join(data["image/png"]).replace("\n", "")
        said = "the figure that the cell above draws"
        return f'<img class="nb-output" alt="{said}" src="data:image/png;base64,{image}">'
    if "text/html" in data:
        return f'<div class="nb-output">{"".join(data["text/html"])}</div>'
    text = "".join(output.get("text") or data.get("text/plain", ""))
    return f"```text\n{text.rstrip()}\n```" if text.strip() else ""
