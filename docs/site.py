"""A hook of MkDocs: notebooks become pages, formulas become MathML, commands list their options.

The site loads nothing from elsewhere: notebook cells are written as Markdown, figures as data, and
formulas as MathML, which browsers draw by themselves.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

#: What marks a link to the notebook itself.
DOWNLOAD = "{ download }"
#: A formula, in the syntax that GitHub draws too: a fence of ``math``, or $`…`$ within a line.
FORMULA = re.compile(
    r"^```math\n(?P<block>.*?)^```$|\$`(?P<inline>[^`]*)`\$(?P<after>[.,;:)]?)", re.M | re.S
)
#: A symbol with an index, such as R_i; what comes first is left as it is: code, formulas, links.
SYMBOL = re.compile(
    r"^[ \t]*```.*?^[ \t]*```|\$?`[^`]*`\$?|\]\([^)]*\)|<[^>]*>"
    r"|(?<![A-Za-z]{3})(?P<letter>[A-Za-zα-ω])_(?P<index>[a-z])(?!\w)",
    re.M | re.S,
)
#: Where the options of all commands are listed.
OPTIONS = "<!-- options -->"


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
    """Formulas are drawn, links to notebooks lead to their pages, and a result's page shows its
    figure."""
    if page.file.src_uri.endswith("/RESULT.md"):
        title, _, rest = markdown.partition("\n")
        return f"{title}\n\n![{title.lstrip('# ')}](figure.png)\n{rest}"
    if not page.file.src_uri.startswith("notebooks/"):
        markdown = SYMBOL.sub(_symbol, markdown)
    markdown = FORMULA.sub(_formula, markdown)
    if OPTIONS in markdown:
        markdown = markdown.replace(OPTIONS, "\n\n".join(options()))
    return markdown.replace(".ipynb)", ".md)").replace(f".md){DOWNLOAD}", f".ipynb){DOWNLOAD}")


def _symbol(match: re.Match[str]) -> str:
    return f"{match['letter']}<sub>{match['index']}</sub>" if match["index"] else match[0]


def _formula(match: re.Match[str]) -> str:
    from latex2mathml.converter import convert

    block = match["block"]
    shown = convert((block or match["inline"]).strip(), display="block" if block else "inline")
    if block:
        return f'<div class="formula">{shown}</div>'
    return f'<span class="formula">{shown}{match["after"]}</span>'


def options() -> Iterator[str]:
    """The help of every command, as Markdown."""
    import click
    from typer.main import get_command

    from dpscaffold.cli import app

    yield "## Options of every command"
    top = get_command(app)
    assert isinstance(top, click.Group)
    for name, command, parent in _commands(top, click.Context(top, info_name="dpscaffold")):
        with click.Context(command, info_name=name, parent=parent, max_content_width=90) as context:
            yield f"### {context.command_path}\n\n```text\n{command.get_help(context)}\n```"


def _commands(group: Any, parent: Any) -> Iterator[tuple[str, Any, Any]]:
    import click

    for name in group.list_commands(parent):
        command = group.get_command(parent, name)
        if isinstance(command, click.Group):
            yield from _commands(command, click.Context(command, info_name=name, parent=parent))
        else:
            yield name, command, parent


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
