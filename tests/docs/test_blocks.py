"""Every code block of README and docs runs, or stands in the list of those that cannot."""

from __future__ import annotations

import pytest
from pages import HERE, KINDS, MARK, Block, Reader, blocks, pages

#: The blocks that no test runs, and why. A mark in a page that is not here fails, and so does an
#: entry whose block is gone.
NOT_RUN = [
    *[
        (
            "docs/deploy.md",
            "one block for each machine; tests/deploy/test_machines.py runs them in folders apart",
        )
    ]
    * 5,
    ("docs/deploy.md", "a part of a plan; tests/deploy/test_sums_deployed.py reads whole ones"),
    (
        "docs/deploy.md",
        "a part of a site's file; tests/deploy/test_sums_deployed.py reads whole ones",
    ),
    ("docs/index.md", "trains for about a minute; make demo is the same"),
    *[
        (
            "docs/howto/flower.md",
            "a Flower App of four files; tests/deploy/test_flower_app.py runs it",
        )
    ]
    * 5,
    ("docs/howto/gpu.md", "needs a CUDA device; tests/engine and benchmarks/gpu.py run there"),
    (
        "docs/howto/machines.md",
        "starts several processes; tests/engine/test_ranks.py runs them",
    ),
    ("docs/howto/machines.md", "needs a process group; tests/rank_cases.py calls it so"),
    *[("docs/operations.md", "needs a federation; tests/deploy/test_approval.py runs the commands")]
    * 2,
    ("docs/operations.md", "needs a federation; tests/deploy/test_continuing.py runs the same"),
    (
        "docs/operations.md",
        "needs a finished run; tests/deploy/test_site_model.py runs the commands",
    ),
    (
        "docs/operations.md",
        "needs a container engine or systemd; tests/deploy/test_packages.py checks both",
    ),
    ("docs/reproduction.md", "an hour and more on two cores"),
    (
        "examples/flower-app/README.md",
        "names hosts and paths of your own federation; tests/deploy/test_flower_app.py runs "
        "the app",
    ),
]
#: The blocks that only ``make test-all`` runs.
SLOW = [
    *[("docs/howto/onnx.md", "the exporter takes seconds")] * 2,
    ("docs/howto/plan.md", "ten seconds of processor time"),
    ("docs/planning.md", "three minutes of processor time"),
    ("docs/reproduction.md", "a minute and a half of processor time"),
    *[("docs/tutorials/federation.md", "certificates and keys")] * 3,
    ("docs/tutorials/federation.md", "a SuperLink, a server and three sites"),
]

PAGES = {page.relative_to(HERE).as_posix(): blocks(page) for page in pages()}
WITH_CODE = [name for name, found in PAGES.items() if found]
EVERY = [block for found in PAGES.values() for block in found]


def marked(mark: str) -> list[tuple[str, str]]:
    return sorted((block.page, why) for block in EVERY for why in block.all(mark))


def test_nothing_is_left_out_silently():
    """What is not run is listed here, one by one, and few."""
    assert marked("not run") == sorted(NOT_RUN)
    assert marked("slow") == sorted(SLOW)
    run = [block for block in EVERY if not block.all("not run")]
    assert len(run) >= 0.85 * len(EVERY)


@pytest.mark.parametrize("block", EVERY, ids=lambda block: block.place)
def test_a_fence_says_what_it_holds(block):
    assert block.kind in KINDS, f"{block.place}: say which of {', '.join(KINDS)} it is"
    assert block.kind not in ("ini", "text", "math") or not block.marks or block.all("file")


def test_every_mark_stands_above_a_fence():
    """A mark that was parted from its block, or misspelt, would do nothing."""
    for page in pages():
        found = len(MARK.findall(page.read_text(encoding="utf-8")))
        assert found == sum(len(block.marks) for block in blocks(page)), page


def follow(name: str, short: bool, folder) -> None:
    reader = Reader(folder, short)
    for block in PAGES[name]:
        reader.follow(block)
    if reader.missing:
        pytest.skip(f"the rest of the page ran; {'; '.join(reader.missing)}")


@pytest.mark.parametrize("name", WITH_CODE)
def test_a_page_runs_from_top_to_bottom(name, tmp_path, monkeypatch):
    folder = tmp_path / "reader"
    folder.mkdir()
    monkeypatch.chdir(folder)
    follow(name, True, folder)


def longer(block: Block) -> bool:
    return bool(block.all("short") or block.all("slow"))


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("name", [n for n in WITH_CODE if any(map(longer, PAGES[n]))])
def test_a_page_runs_as_printed(name, tmp_path, monkeypatch):
    folder = tmp_path / "reader"
    folder.mkdir()
    monkeypatch.chdir(folder)
    follow(name, False, folder)


def test_a_block_that_fails_is_noticed(tmp_path, monkeypatch):
    """The reader of these tests reports a wrong block of every kind."""
    monkeypatch.chdir(tmp_path)
    wrong = {
        "python": "assert 1 == 2",
        "sh": "dpscaffold privacy --noise -1",
        "toml": "[plan]\nrouds = 3\n",
    }
    for kind, code in wrong.items():
        with pytest.raises((AssertionError, ValueError)):
            Reader(tmp_path, True).follow(Block("page.md", 1, kind, code))
    for mark in (("says", "ε = 1"), ("same as", "LICENSE"), ("short", "no such -> part")):
        with pytest.raises(AssertionError):
            Reader(tmp_path, True).follow(Block("page.md", 1, "python", "print(2)", (mark,)))
    for line in ("make everything-else", "pip install 'dpscaffold[nonsense]'", "exit 3 # bash"):
        with pytest.raises(AssertionError):
            Reader(tmp_path, True).follow(Block("page.md", 1, "sh", line))
    right = "make demo\npip install 'dpscaffold[onnx]'"
    Reader(tmp_path, True).follow(Block("page.md", 1, "sh", right))
