"""The documentation as a site: it builds without warnings, its links lead somewhere, and nothing is
fetched from elsewhere."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from pages import DOCS, HERE

import dpscaffold

#: What a browser loads by itself, tag by tag; a link that somebody must follow is not among it.
LOADED = {"img": "src", "script": "src", "iframe": "src", "source": "src", "object": "data"}


class Parts(HTMLParser):
    """The resources, links and anchors of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        found = {name: value or "" for name, value in attrs}
        self.anchors |= {found[name] for name in ("id", "name") if name in found}
        if tag in LOADED and LOADED[tag] in found:
            self.loaded.append(found[LOADED[tag]])
        if tag == "link" and found.get("rel") not in ("canonical", "next", "prev"):
            self.loaded.append(found.get("href", ""))
        if tag == "a" and "href" in found:
            self.links.append(found["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built as ``make docs`` builds it; a warning is an error."""
    if any(find_spec(name) is None for name in ("mkdocs", "mkdocstrings", "latex2mathml")):
        pytest.skip("the site is built with pip install 'dpscaffold[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(folder)]
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return {path: Parts(path.read_text(encoding="utf-8")) for path in folder.rglob("*.html")}


def test_symbols_and_formulas_are_typeset():
    """Indices are set below, also next to other letters; code, links and names stay as they are."""
    pytest.importorskip("mkdocs")
    hook = runpy.run_path(str(DOCS / "site.py"))
    text = "b_i = sR_i, `R_i`, [a](x_i.md), data_dir, σ_g\n\n```sh\nR_i\n```\n"
    shown = hook["SYMBOL"].sub(hook["_symbol"], text)
    index = "<sub>{}</sub>".format
    wanted = text.replace("b_i = sR_i", f"b{index('i')} = sR{index('i')}", 1)
    assert shown == wanted.replace("σ_g", f"σ{index('g')}")
    pytest.importorskip("latex2mathml")
    drawn = hook["FORMULA"].sub(hook["_formula"], "so $`\\sigma_g`$.\n\n```math\nx^2\n```\n")
    assert drawn.count("<math") == 2 and "$" not in drawn and "```" not in drawn
    assert ".</span>" in drawn and '<div class="formula">' in drawn


def test_what_a_browser_would_fetch_is_noticed():
    """A font, a script or an image from elsewhere is found; a link to follow is not one of them."""
    page = (
        '<link rel="stylesheet" href="https://a.example/f.css"><script src="//b.example/x.js">'
        '</script><img src="c.png"><a href="https://d.example/" id="here">d</a>'
    )
    parts = Parts(page)
    assert [urlsplit(target).netloc for target in parts.loaded] == ["a.example", "b.example", ""]
    assert parts.links == ["https://d.example/"] and parts.anchors == {"here"}


@pytest.mark.slow
def test_nothing_is_loaded_from_elsewhere(site):
    for path, parts in site.items():
        for target in parts.loaded:
            assert not urlsplit(target).netloc, f"{path.name} loads {target}"
    folder = min(site, key=lambda path: len(path.parts)).parent
    for style in folder.rglob("*.css"):
        found = re.findall(r"(?:url\(|@import\s+)['\"]?(?:https?:)?//[^)'\"]+", style.read_text())
        assert not found, f"{style.name} loads {found[0]}"


@pytest.mark.slow
def test_links_of_the_site_lead_somewhere(site):
    for path, parts in site.items():
        for link in parts.links:
            target = urlsplit(link)
            if path.name == "404.html" or target.scheme or target.netloc:
                continue
            file = (path.parent / unquote(target.path)).resolve() if target.path else path
            assert file.is_file(), f"{path.name} points at {link}"
            if target.fragment and file in site:
                anchors = site[file].anchors | {"__tabbed", "__skip"}
                assert unquote(target.fragment) in anchors, f"{path.name} points at {link}"


def test_what_the_package_offers_is_in_the_api_reference():
    offered = Path(dpscaffold.__file__).with_suffix(".pyi").read_text(encoding="utf-8")
    names = re.findall(r"import (\w+) as", offered)
    shown = "\n".join(path.read_text(encoding="utf-8") for path in (DOCS / "api").glob("*.md"))
    missing = [
        name for name in names if not re.search(rf"^::: dpscaffold\S*\.{name}$", shown, re.M)
    ]
    assert not missing, missing


def test_the_address_of_the_site_is_the_projects():
    """One place says where the documentation is: pyproject.toml; MkDocs must be told the same."""
    project = (HERE / "pyproject.toml").read_text(encoding="utf-8")
    known = re.search(r'^Documentation = "(.*)"$', project, re.M)[1]
    assert f"site_url: {known}\n" in Path(HERE / "mkdocs.yml").read_text(encoding="utf-8")
