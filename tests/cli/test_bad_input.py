"""What people type wrong first: each ends in one sentence with cause and remedy, with exit
status 2, and writes nothing."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from typed import HOSPITALS, done_here, typed

from dpscaffold import run

#: Four hospitals in one table, with an identifier, a category and a date-like number.
COLUMNS = "patient_id,site,age,sex,admitted,readmitted"


def rows(labelled: bool = True) -> str:
    """A table of 80 patients."""
    lines = [COLUMNS if labelled else COLUMNS.removesuffix(",readmitted")]
    for i in range(80):
        cells = [f"p{i}", "abcd"[i % 4], str(20 + 7 * i % 60), "fm"[i % 3 > 0], str(i % 28)]
        lines.append(",".join([*cells, *(["yes" if i % 5 < 2 else "no"] if labelled else [])]))
    return "\n".join(lines) + "\n"


CONFIG = f"""{HOSPITALS}exclude = ["patient_id"]
categories = ["sex"]
[plan]
rounds = 2
local_steps = 1
user_ratio = 0.5
[privacy]
epsilon = 2
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tables, a configuration and a finished run."""
    place = tmp_path_factory.mktemp("home")
    (place / "h.csv").write_text(rows())
    (place / "h2.toml").write_text(CONFIG)
    (place / "new.csv").write_text(rows(labelled=False))
    (place / "twice.csv").write_text(rows().replace("site,age", "age,age", 1))
    (place / "bare.toml").write_text(CONFIG.replace('"csv"', "csv", 1))
    (place / "many").mkdir()
    for name in ("a.csv", "b.csv"):
        (place / "many" / name).write_text(rows(labelled=False))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        run("h2.toml", out=place / "runs" / "h2")
    return place


#: What is typed, the cause that is named, and the remedy.
BAD = [
    # The first mistakes of a new user, as they were rated.
    ("init h.csv --label readmited", "no label column 'readmited'", "did you mean 'readmitted'?"),
    ("predict runs/h2 new.csv --keep Patient", "column 'Patient'", "did you mean 'patient_id'?"),
    ("init twice.csv --label readmitted", "'age'", "give each its own name"),
    ("train h2.toml --out runs/h2", "already holds a run", "add --resume to continue it, or"),
    ("export runs/h2 --to tensorflow", "--to is 'tensorflow'", "choose one of onnx, torch"),
    ("privacy --users 10", "missing --records, --rounds", "give them all, or a configuration"),
    (
        "train h2.toml --set plan.weighting=record",
        "plan.weighting is 'record'",
        "did you mean 'records'?); give 'uniform', 'records' or 'noise'",
    ),
    ("predict runs/nope new.csv", "runs/nope is no folder", "name a run folder of 'dpscaffold"),
    ("train h2.tml", "h2.tml cannot be read", "did you mean 'h2.toml'?"),
    ("train bare.toml", "bare.toml is not valid TOML", 'needs quotes: source = "csv"'),
    ("train h2.toml --set privacy.delta=1", "privacy.delta is 1", "strictly between 0 and 1"),
    ("train h2.toml --set privacy.epsilon=-1", "privacy.epsilon is -1", "give a number above 0"),
    ("train h2.toml --set plan.rounds=ten", "plan.rounds is 'ten'", "give a whole number"),
    (
        "train h2.toml --set 'data.missing=\"mean\"'",
        "data.missing is 'mean'",
        'a table, such as { "*" = "indicator" }',
    ),
    ("trian h2.toml", "no such command 'trian'", "did you mean 'train'?"),
    (
        "init many/a.csv many/b.csv",
        "argument (many/b.csv)",
        "--help' shows how to call it",
    ),
    (
        "evaluate runs/h2 new.csv",
        "no column 'readmitted' with the true answers",
        "use 'dpscaffold predict' for rows without answers",
    ),
    (
        "predict runs/h2 new.csv --out said.xlsx",
        "--out is said.xlsx, and predictions are written as CSV or Parquet",
        "name a .csv or .parquet file",
    ),
    ("privacy runs/h2 --delta 0", "delta is 0", "strictly between 0 and 1"),
    ("train h2.toml --epsilon 1", "no such option '--epsilon'", "with --set KEY=VALUE"),
    # Their neighbours.
    ("train h2.toml --resmue", "no such option '--resmue'", "did you mean '--resume'?"),
    (
        "predict runs/h2 new.csv --epsilon 1",
        "no such option '--epsilon'",
        "--help' shows how to call it",
    ),
    (
        "train h2.toml privacy.epsilon=1",
        "unexpected extra argument",
        "--help' shows how to call it",
    ),
    ("train h2.toml --set rounds=9", "--set is 'rounds=9'", "write plan.rounds=9"),
    ("train h2.toml --set privacy.noise=2", "both are given", "--set privacy.epsilon="),
    ("train h2.toml --set privacy.secret=ja", "privacy.secret is 'ja'", "give true or false"),
    ("train h2.toml h3.toml", "argument (h3.toml)", "--help' shows how to call it"),
    ("train h2", "h2 cannot be read", "did you mean 'h2.toml'?"),
    ("h2.toml", "no such command 'h2.toml'", "--help' shows how to call it"),
    ("data descirbe h2.toml", "no such command 'descirbe'", "did you mean 'describe'?"),
    ("predict runs/h2 many --out all.xlsx", "--out is all.xlsx", "name a .csv or .parquet file"),
    ("predict runs/h2", "missing argument 'DATA...'", "--help' shows how to call it"),
    ("privacy --users ten", "'ten' is not a valid integer", "--help' shows how to call it"),
    ("evaluate runs/h2 h.csv --label readmited", "'readmited'", "did you mean 'readmitted'?"),
    ("evaluate runs/h2 many", "many/a.csv has no column 'readmitted'", "use 'dpscaffold predict'"),
    ("privacy h2.toml --epsilon -1", "epsilon", "above 0"),
]


@pytest.mark.parametrize(("line", "cause", "remedy"), BAD, ids=[line for line, *_ in BAD])
def test_a_mistake_is_one_sentence_with_cause_and_remedy(
    home: Path, monkeypatch: pytest.MonkeyPatch, line: str, cause: str, remedy: str
) -> None:
    monkeypatch.chdir(home)
    before = {path: path.stat().st_mtime_ns for path in home.rglob("*")}
    done = done_here(*shlex.split(line))
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert cause in done.stderr and remedy in done.stderr
    assert {path: path.stat().st_mtime_ns for path in home.rglob("*")} == before


def test_no_word_at_all_shows_the_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = typed(monkeypatch, capsys)
    assert code == 2 and "evaluate" in out + err and "error" not in out + err
    code, out, err = typed(monkeypatch, capsys, "--help")
    assert code == 0 and "evaluate" in out
