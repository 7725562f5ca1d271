"""The documentation: where it points there is something, and every page can be found."""

from __future__ import annotations

import re

import pytest
from pages import DOCS, HERE, pages


@pytest.mark.parametrize("page", pages(), ids=lambda path: path.relative_to(HERE).as_posix())
def test_links_lead_somewhere(page):
    """Files that are there, and headings that the page has."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
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
    listed = set(re.findall(r": (\S+\.(?:md|ipynb))$", text[text.index("nav:") :], re.M))
    found = [*DOCS.rglob("*.md"), *DOCS.rglob("*.ipynb")]
    found = {path.relative_to(DOCS).as_posix() for path in found if "results" not in path.parts}
    assert found == listed, found ^ listed


def test_printed_results_are_whole_and_small():
    """Every experiment with a figure has its tidy rows too, and no file outweighs a megabyte."""
    figures = list((DOCS / "results").glob("*/figure.png"))
    folders = {path.parent.name for path in figures}
    assert folders >= {"table1", "figure1", "frontier"}
    for path in figures:
        assert list(path.parent.glob("results.*")) and (path.parent / "RESULT.md").is_file()
    heavy = [p for p in (DOCS / "results").rglob("*") if p.is_file() and p.stat().st_size > 10**6]
    assert heavy == []
