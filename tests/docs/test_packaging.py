"""What a package index shows, and the files that people look for in a repository."""

from __future__ import annotations

import re
import runpy
import tomllib

import pytest
from pages import HERE

PROJECT = tomllib.loads((HERE / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_the_description_has_absolute_links_alone():
    """Every link of the README, made absolute, and nothing else changed."""
    described = runpy.run_path(str(HERE / "setup.py"), run_name="setup")["description"]
    text = (HERE / "README.md").read_text(encoding="utf-8")
    shown = described(text, PROJECT["urls"]["Repository"], PROJECT["version"])
    links = re.findall(r"(!?)\[[^\]]*\]\(([^)\s]+)\)", shown)
    assert links and all(target.startswith("https://") for _, target in links)
    tag = f"v{PROJECT['version']}"
    images = [target for image, target in links if image]
    assert images and all(f"/raw/{tag}/docs/" in target for target in images)
    base = PROJECT["urls"]["Repository"]
    assert re.sub(rf"{re.escape(base)}/(?:raw|blob)/{re.escape(tag)}/", "", shown) == text


def test_the_version_is_the_same_everywhere():
    version = PROJECT["version"]
    assert f"version: {version}\n" in (HERE / "CITATION.cff").read_text(encoding="utf-8")
    import dpscaffold

    assert dpscaffold.__version__ == version


@pytest.mark.parametrize(
    "name", ["LICENSE", "SECURITY.md", "CODE_OF_CONDUCT.md", "CITATION.cff", "CONTRIBUTING.md"]
)
def test_what_people_look_for_is_there_and_in_the_sdist(name):
    assert (HERE / name).is_file()
    manifest = (HERE / "MANIFEST.in").read_text(encoding="utf-8")
    assert name in manifest or name in PROJECT["license-files"]


def test_the_supported_pythons_are_said_alike():
    said = {line.rpartition(" ")[2] for line in PROJECT["classifiers"] if ":: 3." in line}
    assert said == {"3.11", "3.12", "3.13"} and PROJECT["requires-python"] == ">=3.11,<3.14"
    assert "Python 3.11 to 3.13" in (HERE / "README.md").read_text(encoding="utf-8")
