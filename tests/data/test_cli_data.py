"""``dpscaffold data``, end to end."""

from __future__ import annotations

import hashlib
import http.server
import json
import threading
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dpscaffold import cli
from dpscaffold.data import load
from dpscaffold.data.sources import catalogue
from dpscaffold.data.sources.catalogue import Dataset, Published

runner = CliRunner()


def run(*words: str) -> str:
    result = runner.invoke(cli.app, ["data", *words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str
) -> str:
    """What the command says on standard error when it refuses: one line, status 2."""
    monkeypatch.setattr("sys.argv", ["dpscaffold", "data", *words])
    with pytest.raises(SystemExit) as left:
        cli.main()
    said = capsys.readouterr().err
    assert left.value.code == 2 and said.startswith("error: ") and said.count("\n") == 1, said
    return said


def test_describe_a_source_with_a_figure(tmp_path: Path) -> None:
    said = run(
        "describe",
        "--source",
        "digits",
        "--set",
        "data.similarity=0",
        "--out",
        str(tmp_path / "d.png"),
    )
    assert (
        "label heterogeneity" in said
        and "1,430" in said
        and "labels by user" in said
        and "█" in said
    )
    assert (tmp_path / "d.png").read_bytes().startswith(b"\x89PNG")


def test_describe_a_configuration_as_json(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text(
        '[data]\nsource = "digits"\nusers = 7\npartition = "dirichlet"\nalpha = '
        "0.1\n[plan]\nrounds = 3\n"
    )
    found = json.loads(run("describe", str(config), "--json", "--set", "data.users=6"))
    assert found["users"] == 6 and found["classes"] == 10 and 0 < found["label_heterogeneity"] < 1
    assert found["title"] == "digits, Dirichlet(0.1)"


def test_describe_the_synthetic_federation() -> None:
    found = json.loads(
        run(
            "describe",
            "--json",
            "--set",
            "data.users=5",
            "--set",
            "data.records=50",
            "--set",
            "data.alpha=5",
        )
    )
    assert (found["users"], found["train_records"]) == (5, 200)


def test_describe_a_table_says_what_it_decided(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("clinic,age,ill\n" + "north,31,no\nsouth,58,yes\n" * 6)
    said = run(
        "describe",
        "--source",
        "csv",
        "--set",
        f"data.path={path}",
        "--set",
        "data.label=ill",
        "--set",
        "data.user=clinic",
    )
    assert "north" in said and "2 classes, numbered in this order: no, yes" in said


def test_prepare_then_use(tmp_path: Path) -> None:
    out = tmp_path / "kept"
    said = run("prepare", "--source", "digits", "--out", str(out))
    assert "digits, 10 % similar: 10 users" in said and 'source = "saved"' in said
    assert load(out).users == 10
    found = json.loads(run("describe", "--source", "saved", "--set", f"data.path={out}", "--json"))
    assert found["train_records"] == 1430
    run("prepare", "--source", "digits", "--set", "data.users=5", "--out", str(out), "--overwrite")
    assert load(out).users == 5


def test_list(tmp_path: Path) -> None:
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / "train-images-idx3-ubyte.gz").write_bytes(b"")
    found = json.loads(run("list", "--json", "--data-dir", str(tmp_path)))
    here = {row["name"]: row["here"] for row in found["datasets"]}
    assert here["mnist"] and not here["cifar10"] and "digits" in found["other_sources"]
    assert "fashion-mnist" in run("list", "--data-dir", str(tmp_path))


def test_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "a.gz").write_bytes(b"content")
    entry = Dataset(
        "small",
        "",
        (Published("a.gz", 7, hashlib.md5(b"content").hexdigest()),),
        ("http://127.0.0.1:1/",),
    )
    monkeypatch.setitem(catalogue.CATALOGUE, "small", entry)

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    handler = partial(Quiet, directory=str(tmp_path / "site"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        address = f"http://127.0.0.1:{server.server_address[1]}"
        said = run("download", "small", "--data-dir", str(tmp_path / "data"), "--mirror", address)
        server.shutdown()
        thread.join()
    assert said.strip() == str(tmp_path / "data" / "small" / "a.gz")
    assert (tmp_path / "data" / "small" / "a.gz").read_bytes() == b"content"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["describe", "--source", "digitz"], "did you mean 'digits'?"),
        (["describe", "nowhere.toml"], "nowhere.toml"),
        (["describe", "c.toml", "--source", "digits"], "give one"),
        (["describe", "--source", "digits", "--set", "plan.rounds=3"], "only keys of [data]"),
        (["describe", "--source", "digits", "--set", "data.usres=3"], "did you mean 'users'?"),
        (["describe", "--source", "digits", "--out", "figure.txt"], "a figure ends in .png"),
        (
            ["describe", "--source", "mnist", "--data-dir", "nowhere"],
            "dpscaffold data download mnist",
        ),
        (["describe", "--source", "digits", "--set", "data.records=5000"], "there are 1797"),
        (["describe", "--source", "digits", "--data-dir", "."], "the source is 'digits'"),
        (["prepare", "--source", "digits"], "--out is missing"),
        (["download", "minst"], "did you mean 'mnist'?"),
    ],
)
def test_refusals_are_one_line(
    words: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert said in refused(capsys, monkeypatch, *words)
    assert list(tmp_path.iterdir()) == []


def test_a_figure_that_cannot_be_written(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = [
        "describe",
        "--source",
        "digits",
        "--out",
        str(tmp_path / "no" / "such" / "folder.png"),
    ]
    assert "cannot be written" in refused(capsys, monkeypatch, *words)
