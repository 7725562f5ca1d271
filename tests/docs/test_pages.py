"""The documentation: what it shows runs, and where it points there is something."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parents[2]
DOCS = HERE / "docs"
TUTORIALS = sorted((DOCS / "tutorials").glob("*.md"))
BLOCK = re.compile(r"^```(python|sh)\n(.*?)^```$", re.M | re.S)


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_runs_from_top_to_bottom(page, tmp_path, monkeypatch):
    """Python blocks share their names; shell lines are run one by one."""
    monkeypatch.chdir(tmp_path)
    blocks = BLOCK.findall(page.read_text(encoding="utf-8"))
    assert blocks
    names: dict[str, object] = {}
    for kind, code in blocks:
        if kind == "python":
            exec(compile(code, str(page), "exec"), names)
            continue
        for line in code.strip().splitlines():
            words = shlex.split(line)
            assert words[0] == "dpscaffold"
            command = [sys.executable, "-m", *words]
            done = subprocess.run(command, capture_output=True, text=True, timeout=120)
            assert done.returncode == 0, (line, done.stderr)


def pages():
    return [*DOCS.glob("*.md"), *TUTORIALS, HERE / "README.md", HERE / "CONTRIBUTING.md"]


@pytest.mark.parametrize("page", pages(), ids=lambda path: path.stem)
def test_links_lead_somewhere(page):
    """Files that are there, and headings that the page has."""
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        place, _, anchor = target.partition("#")
        file = (page.parent / place).resolve() if place else page
        assert file.exists(), f"{page.name} points at {target}"
        if anchor and file.suffix == ".md":
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.M)
            assert anchor in {slug(heading) for heading in headings}, f"{page.name}: {target}"


def slug(heading: str) -> str:
    """A heading as the site's anchors spell it."""
    kept = re.sub(r"[^\w\s-]", "", heading).strip().lower()
    return re.sub(r"\s", "-", kept)


def test_every_page_is_in_the_navigation():
    text = (HERE / "mkdocs.yml").read_text(encoding="utf-8")
    listed = set(re.findall(r": (\S+\.md)$", text[text.index("nav:") :], re.M))
    found = {path.relative_to(DOCS).as_posix() for path in [*DOCS.glob("*.md"), *TUTORIALS]}
    assert found <= listed, found - listed
