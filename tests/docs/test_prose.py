"""The prose of README and docs: short, answer first, in the words that people search for."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from pages import DOCS, HERE

README = HERE / "README.md"
#: Pages that a program writes.
GENERATED = {"configuration.md"}
PAGES = [
    README,
    *sorted(
        path
        for path in DOCS.rglob("*.md")
        if "results" not in path.parts and path.name not in GENERATED
    ),
]

#: Pages that are written by commands: their openings are short, and EMNIST has a split "letters".
WRITTEN = [DOCS / "configuration.md", *sorted((DOCS / "results").glob("*/RESULT.md"))]

#: Words of a private dialect, and what to write instead.
INSTEAD = {
    r"gaps?": "missing value, or difference",
    r"letters?": "message",
    r"beside": "next to, or with",
    r"anew": "again",
    r"so many": "a number, or how many",
    r"(?:is|are|was|were|be) told": "receives",
    r"stands? for": "means",
    r"books": "ledgers",
    r"booked|booking": "recorded",
    r"mend(?:s|ed|ing)?": "fix",
    r"slips?": "mistake",
    r"judg(?:e|es|ed|ing)": "evaluate",
    r"deal(?:s|t|ing)? (?:\w+ )?out": "partition",
    r"handed out": "published, or given to others",
    r"reads? (?:\w+ )?off": "computed from",
    r"beaten": "disproved",
}
FORBIDDEN = re.compile(rf"\b(?:{'|'.join(INSTEAD)})\b", re.I)
LONGEST = 90


def prose(text: str) -> str:
    """A page without comments, code blocks and tables."""
    text = re.sub(r"<!--.*?-->", "", text, flags=re.S)
    text = re.sub(r"^([ \t]*)```.*?^\1```[ \t]*$", "", text, flags=re.S | re.M)
    return re.sub(r"^[ \t]*\|.*$", "", text, flags=re.M)


def paragraphs(text: str) -> list[str]:
    """The paragraphs of a page; each item of a list is one."""
    parted = re.sub(r"^[ \t]*(?:[-*]|\d+\.) ", "\n\n", prose(text), flags=re.M)
    found = [" ".join(part.split()) for part in re.split(r"\n\s*\n", parted)]
    return [part for part in found if part and not part.startswith(("#", "![", ":::"))]


def words(text: str) -> int:
    return sum(bool(re.search(r"\w", word)) for word in text.split())


def too_long(text: str) -> list[str]:
    return [part for part in paragraphs(text) if words(part) > LONGEST]


def dialect(text: str) -> list[str]:
    """Forbidden words, tables included; code and the names of files do not count."""
    text = re.sub(r"<!--.*?-->|```.*?```|`[^`]*`|\]\([^)]*\)", " ", text, flags=re.S)
    return FORBIDDEN.findall(text)


def opening(text: str) -> str | None:
    """The first paragraph of a page that starts with a title, or None."""
    title, _, rest = re.sub(r"<!--.*?-->", "", text, flags=re.S).strip().partition("\n")
    first = re.split(r"\n\s*\n", rest.strip(), maxsplit=1)[0]
    other = first.startswith(("#", "|", "```", "!", "- ", "1. ", ":::"))
    return None if not title.startswith("# ") or other or words(first) < 8 else first


def cells(notebook: Path) -> str:
    """The Markdown of a notebook."""
    found = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return "\n\n".join("".join(c["source"]) for c in found if c["cell_type"] == "markdown")


def name(path: Path) -> str:
    return path.relative_to(HERE).as_posix()


def test_a_newcomer_reads_the_readme_in_four_minutes():
    """Everything counts: tables, code, links."""
    assert len(README.read_text(encoding="utf-8").split()) <= 800


def test_a_user_reads_the_changes_of_a_version_in_five_minutes():
    text = (HERE / "CHANGELOG.md").read_text(encoding="utf-8")
    for version in re.split(r"^## ", text, flags=re.M)[1:]:
        assert len(version.split()) <= 1300, version.partition("\n")[0]
        lines = [line for line in version.splitlines() if line.strip()]
        assert len(lines) == len(set(lines)), "a line stands there twice"
    assert FORBIDDEN.search(re.sub(r"`[^`]*`", "", text)) is None


@pytest.mark.parametrize("page", [*PAGES, *WRITTEN], ids=name)
def test_no_paragraph_is_a_wall(page):
    assert too_long(page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_pages_use_common_words(page):
    found = dialect(page.read_text(encoding="utf-8"))
    assert found == [], f"write instead: {INSTEAD}"


@pytest.mark.parametrize("page", WRITTEN, ids=name)
def test_written_pages_use_common_words(page):
    assert {*dialect(page.read_text(encoding="utf-8"))} <= {"letters"}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_page_starts_with_its_answer(page):
    assert opening(page.read_text(encoding="utf-8")) is not None


@pytest.mark.parametrize("notebook", sorted(DOCS.rglob("*.ipynb")), ids=name)
def test_notebooks_are_written_like_pages(notebook):
    text = cells(notebook)
    assert dialect(text) == [] and too_long(text) == [] and opening(text) is not None


def test_the_checks_notice_what_they_look_for():
    wall = "# T\n\nshort\n\n" + "word " * 91
    assert too_long(wall) and not too_long(wall.replace("word " * 46, "word " * 45 + "\n\n", 1))
    assert not too_long("# T\n\n| " + "word " * 91 + "|\n\n```sh\n" + "word " * 91 + "\n```\n")
    assert len(too_long("- a\n- " + "word " * 91)) == 1
    assert dialect("a gap beside it") == ["gap", "beside"]
    assert dialect("| so many | is told |") == ["so many", "is told"]
    assert dialect("`na_values`, recommended, [x](letters.md)") == []
    assert opening("# T\n\nThis answers the question of the page at once.") is not None
    for page in ("no title\n\ntext", "# T\n\n- a list of one two three four five six", "# T\n"):
        assert opening(page) is None
