"""The report: complete, self-contained, safe, and the same in HTML and in Markdown."""

from __future__ import annotations

import base64
import re
import shutil
import subprocess
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from refusals import refuses
from stated import described, summary_of
from stated import written as statement_in

from dpscaffold import (
    Gaussian,
    Logistic,
    Plan,
    run,
    scaffold,
    scaffold_balanced,
    synthetic,
    train,
)
from dpscaffold.privacy import round_up
from dpscaffold.report.blocks import BarChart, Curves, Line, Page, Section, Table, Text
from dpscaffold.report.card import as_markdown
from dpscaffold.report.html import as_html, style
from dpscaffold.report.story import page_of
from dpscaffold.report.svg import COLOURS, bars, curves
from dpscaffold.runs.folder import RunFolder

VOID = {"meta", "line", "rect", "polyline", "br", "link", "img", "input"}


class Reader(HTMLParser):
    """Checks that elements close in order, and collects what a page is made of."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A private run whose users are capped, and one without privacy."""
    place = tmp_path_factory.mktemp("runs")
    data = synthetic(users=8, records=60, dimension=5, classes=3)
    plan = Plan(rounds=30, local_steps=3, user_ratio=0.5, evaluate_every=2)
    private = Gaussian(clip=1.0, noise=4.0, user_epsilon=9.0)
    task = Logistic(5, 3)
    train(data, task, scaffold(), plan, private, out=place / "private")
    train(data, task, scaffold(), plan, out=place / "open")
    return [place / "private", place / "open"]


def test_the_page_says_everything_of_the_statement(runs: list[Path]) -> None:
    page = as_html(page_of(runs[:1]))
    said = statement_in(runs[0])
    plain = re.sub(r"</?\w+>", "", page)
    for value in (said.epsilon, said.towards("server").given, said.towards("participant").epsilon):
        assert round_up(value) in page
    for sentence in (words for _, words in (*said.outside, *said.needs)):
        assert _escaped(sentence.replace("`", "")) in plain, sentence
    summary = summary_of(runs[0])
    assert f"{summary['final']['test_accuracy']:.4f}" in page
    assert f'<td class="short">{summary["baseline_test_accuracy"]:.4f}</td>' in page
    assert "A drawn user may decline: user_epsilon" in page
    assert "[plan]" in page and "rounds = 30" in page


def _escaped(text: str) -> str:
    return escape(text).replace("&#x27;", "'")


def test_the_page_needs_nothing_from_elsewhere_and_is_well_formed(runs: list[Path]) -> None:
    page = as_html(page_of(runs))
    reader = Reader(page)
    assert len(page) < 2_000_000
    assert not {tag for tag, _ in reader.tags} & {"script", "link", "iframe", "object"}
    assert not re.search(r'(src|href)="(?!#|data:)', page)
    assert "url(" not in page and "@import" not in page
    ids = [a["id"] for _, a in reader.tags if "id" in a]
    assert len(ids) == len(set(ids))
    assert {a["href"] for t, a in reader.tags if t == "a"} <= {f"#{name}" for name in ids}
    # What assistive software needs: language, one h1, captions, heads of rows and columns, words
    # for figures.
    assert ("html", {"lang": "en"}) in reader.tags
    count = [tag for tag, _ in reader.tags].count
    assert count("h1") == 1 and count("caption") == count("table") > 3
    assert all(a.get("scope") in ("col", "row") for t, a in reader.tags if t == "th")
    drawn = [a for t, a in reader.tags if t == "img"]
    assert drawn and all(a["alt"] for a in drawn)


def test_what_a_run_is_called_cannot_become_code() -> None:
    evil = '<script>alert("x")</script>`<b>`'
    blocks = (
        Text(evil),
        Table(evil, (evil,), ((evil,),)),
        Curves(evil, evil, evil, (Line(evil, ((0, 1), (1, 2))), Line(evil, ((0, 1),)))),
        BarChart(evil, evil, evil, ((evil, 1.0),)),
    )
    page = as_html(Page(evil, evil, (Section(evil, blocks),)))
    tags = {tag for tag, _ in Reader(page).tags}
    assert "script" not in tags and "b" not in tags


def test_several_runs_stand_side_by_side_and_the_open_one_is_marked(runs: list[Path]) -> None:
    page = as_html(page_of(runs))
    assert "private (DP-SCAFFOLD)" in page and "open (SCAFFOLD)" in page
    assert "Nothing here protects a record" in page
    assert "no guarantee" in page


def test_the_model_card_says_the_same(runs: list[Path]) -> None:
    page = page_of(runs[:1])
    card = as_markdown(page)
    for part in page.sections:
        assert f"## {part.title}" in card
        for block in part.blocks:
            if isinstance(block, Text):
                assert block.text in card


def both(*given: Any, **named: Any) -> list[str]:
    """What people read of a page and a card of the same runs: not the places of lines in figures,
    whose digits may be those of any number."""
    page = page_of(*given, **named)
    html = re.sub(r'\b(?:d|x|y|transform|viewBox|points|id|href)="[^"]*"', "", as_html(page))
    return [html, as_markdown(page)]


def test_no_private_run_shows_its_seed(tmp_path: Path) -> None:
    """The seed of a simulation gives its noise away, that of a secret run tells who took part."""
    data = synthetic(users=6, records=40, dimension=4, classes=3)
    plan = Plan(rounds=3, local_steps=2, user_ratio=0.5, seed=987654321)
    mechanisms = (Gaussian(noise=4.0, secret=True), Gaussian(noise=4.0), None)
    for k, mechanism in enumerate(mechanisms):
        out = tmp_path / str(k)
        train(data, Logistic(4, 3), scaffold(), plan, mechanism, out=out)
        text = (out / "config.toml").read_text()
        for written in (text, text.replace("[plan]\nseed", "[plan]\n'seed'")):
            (out / "config.toml").write_text(written)
            for page in both([out]):
                assert ("987654321" in page) is (mechanism is None) and "rounds = 3" in page
                assert ("every number is repeated" in page) is (k > 0)
                assert ("kept nowhere" in page) is (k == 0)


def test_no_page_names_a_run_by_its_seed(tmp_path: Path) -> None:
    """The folders of train --seeds do: their pages have the name of the folder around them."""
    tables = {
        "data": {"users": 4, "records": 30},
        "plan": {"rounds": 1, "user_ratio": 0.5},
        "privacy": {"noise": 4.0},
    }
    folders = [tmp_path / "mine" / f"seed-{seed}" for seed in (70001, 70002)]
    for folder in folders:
        run(tables, [f"plan.seed={int(folder.name[5:])}"], out=folder)
    for paths, names in (
        (folders[:1], ["mine (DP-SCAFFOLD)"]),
        (folders, ["mine (DP-SCAFFOLD) 1", "mine (DP-SCAFFOLD) 2"]),
    ):
        for text in both(paths):
            assert "7000" not in text and all(name in text for name in names)
    with refuses("several-runs"):
        page_of([tmp_path / "mine"])


def read_off_records(folder: Path) -> dict[str, float]:
    """The numbers of a run folder that are computed from records without noise, or from time."""
    summary = summary_of(folder)
    rows = [dict(row) for row in RunFolder(folder).metrics()]
    allowed = ("round", "rounds", "epsilon_server")
    found = {
        f"{place}.{name}": value
        for place, row in (("summary", summary), *((f"round {r['round']}", r) for r in rows))
        for name, value in row.items()
        if isinstance(value, float) and value not in (0.0, 1.0) and name not in allowed
    }
    assert len(found) > 8
    return found


def shown(number: float) -> str:
    return f"{number:.4f}"


def test_the_page_of_a_run_that_keeps_a_promise_has_no_metrics(tmp_path: Path) -> None:
    """They are computed from private records without noise. --with-metrics adds them, marked."""
    data = synthetic(users=6, records=40, dimension=4, classes=3)
    plan = Plan(rounds=4, local_steps=2, user_ratio=0.5, evaluate_every=1)
    mechanism = Gaussian(noise=4.0, release=["unprotected-preprocessing"])
    out = tmp_path / "release"
    made = (data, Logistic(4, 3), scaffold_balanced(), plan, mechanism)
    train(*made, metrics=["optimum"], out=out)
    raw = read_off_records(out)
    for text in both([out]):
        assert not [name for name, number in raw.items() if shown(number) in text]
        assert "training loss" not in text and "accuracy" not in text.partition("Privacy")[0]
        for word in ("issimilarity by round", "Trust a", "spread", "no feature", "| time"):
            assert word not in text
        assert "The course of the training" not in text
        assert "No metrics are shown" in text and "towards the server by round" in text
    for text in both([out], with_metrics=True):
        final = summary_of(out)["final"]
        for name in ("test_accuracy", "train_loss"):
            assert shown(final[name]) in text
        marks = [text.index("Outside ε"), text.index("outside ε")]
        assert max(marks) < text.index("est accuracy") and "issimilarity by round" in text
        assert "No metrics are shown" not in text
    train(
        *made[:4], Gaussian(noise=4.0), out=tmp_path / "simulation"
    )  # may be looked at in any way
    for text in both([tmp_path / "simulation"]):
        assert "raining loss F(x) by round" in text and "utside ε" not in text
    own = {shown(number) for number in read_off_records(tmp_path / "simulation").values()}
    for text in both([tmp_path / "simulation", out]):  # side by side
        strange = {shown(number) for number in raw.values()} - own
        assert not [number for number in strange if number in text]
        assert "raining loss F(x) by round" in text


def test_no_page_tells_the_identity_of_the_data(runs: list[Path]) -> None:
    known = described(runs[0])
    for text in both(runs[:1]):
        assert known["data"] not in text and known["covers"] not in text
        assert known["engine"] in text


def _luminance(colour: str) -> float:
    """Relative luminance of #rrggbb (WCAG 2.2)."""
    parts = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    light, dark = sorted((_luminance(a), _luminance(b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_colours_can_be_told_apart() -> None:
    """Text 4.5 to 1, lines of figures 3 to 1 against what they stand on (WCAG 2.2, AA)."""
    assert contrast("#000000", "#ffffff") == pytest.approx(21.0)
    screen = style().partition("@media print")[0]
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", screen))
    for text in ("ink", "soft", "accent"):
        assert contrast(colours[text], colours["paper"]) >= 4.5, text
    assert contrast(colours["ink"], colours["tint"]) >= 4.5
    assert contrast(colours["accent"], colours["tint"]) >= 4.5
    assert contrast(colours["warn"], colours["warn-tint"]) >= 4.5
    for colour in COLOURS:
        assert contrast(colour, colours["paper"]) >= 3, colour


def test_the_page_has_landmarks_and_headings_in_order(runs: list[Path]) -> None:
    reader = Reader(as_html(page_of(runs)))
    count = [tag for tag, _ in reader.tags].count
    for landmark in ("header", "nav", "main", "footer"):
        assert count(landmark) == 1, landmark
    (nav,) = [a for t, a in reader.tags if t == "nav"]
    assert nav["aria-label"]
    levels = [int(tag[1]) for tag, _ in reader.tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1 and set(levels[1:]) == {2}
    ids = {a["id"] for _, a in reader.tags if "id" in a}
    sections = [a for t, a in reader.tags if t == "section"]
    assert sections and all(a["aria-labelledby"] in ids for a in sections)
    assert ("a", {"class": "skip", "href": "#content"}) in reader.tags
    assert len([1 for t, a in reader.tags if t == "th" and a["scope"] == "row"]) > 10


def drawing_in(element: str) -> str:
    """The SVG inside an image of the page."""
    (data,) = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', element)
    return base64.b64decode(data).decode()


def test_figures_keep_their_words_inside_and_are_the_same_again() -> None:
    lines = (Line("a", ((0, 0.00341), (400, 0.00329))), Line("b", ((0, 0.003), (400, 0.0031))))
    figure = Curves("c", "round", "what", lines, (("base", 0.0032),))
    chart = BarChart("c", "times", "users", tuple((str(k), float(k)) for k in range(40)))
    assert curves(figure) == curves(figure)
    for drawn in map(drawing_in, (curves(figure), bars(chart))):
        wide, high = (float(size) for size in re.findall(r'viewBox="0 0 (\S+) (\S+)"', drawn)[0])
        words = re.findall(r'<text style="[^"]*" x="([-\d.]+)" y="([-\d.]+)"', drawn)
        assert len(words) > 8 and all(0 <= float(x) <= wide for x, _ in words)
        assert all(0 <= float(y) <= high for _, y in words)
    assert drawn.count(f"fill: {COLOURS[0]}") == 40


def test_a_formula_in_a_name_stays_text() -> None:
    lines = (Line("$y_1$", ((0, 1), (1, 2))),) * 2
    drawn = drawing_in(curves(Curves("c", "$x^2$", "a $b$", lines)))
    for name in ("$x^2$", "a $b$", "$y_1$"):
        assert f">{name}</text>" in drawn


@pytest.mark.slow
def test_a_browser_shows_it_on_a_phone_and_on_paper(runs: list[Path], tmp_path: Path) -> None:
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("needs Chromium (Debian's package chromium)")
    (tmp_path / "page.html").write_text(as_html(page_of(runs)), encoding="utf-8")

    def browse(*arguments: str) -> str:
        done = subprocess.run(
            [chromium, "--headless", "--no-sandbox", "--disable-gpu", *arguments],
            capture_output=True,
            text=True,
            timeout=120,
        )
        return done.stdout

    # The page inside a frame of a phone's width: nothing may stand out on the right.
    (tmp_path / "frame.html").write_text(
        "<iframe id=f src=page.html width=360 height=700></iframe><p id=said></p><script>"
        "f.onload=()=>{const d=f.contentDocument;said.textContent=d.scrollingElement.scrollWidth"
        "+' '+d.querySelectorAll('figure>img').length}</script>"
    )
    reading = ("--allow-file-access-from-files", "--virtual-time-budget=4000", "--dump-dom")
    shown = browse(*reading, f"file://{tmp_path / 'frame.html'}")
    said = re.search(r'<p id="said">(\d+) (\d+)</p>', shown)
    assert said and int(said[1]) <= 360 and int(said[2]) >= 3
    pdf = tmp_path / "page.pdf"
    browse(f"--print-to-pdf={pdf}", f"file://{tmp_path / 'page.html'}")
    assert pdf.read_bytes()[:5] == b"%PDF-" and pdf.stat().st_size > 20_000


def test_the_page_begins_with_a_verdict_and_privacy(tmp_path: Path) -> None:
    """One training loss, every metric next to its baseline, privacy before dissimilarity."""
    data = synthetic(users=6, records=40, dimension=4, classes=3)
    plan = Plan(rounds=4, local_steps=2, user_ratio=0.5, evaluate_every=1)
    train(data, Logistic(4, 3), scaffold(), plan, Gaussian(noise=4.0), out=tmp_path / "run")
    summary = summary_of(tmp_path / "run")
    for page in both([tmp_path / "run"]):
        assert summary["verdict"].split('"')[0] in page
        assert page.index("Nobody could tell") < page.index("issimilarity by round")
        assert page.lower().count("training loss |") + page.count(">training loss<") == 1
        for name in ("test_log_loss", "test_balanced_accuracy"):
            assert shown(summary[f"baseline_{name}"]) in page
