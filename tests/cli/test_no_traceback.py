"""Whatever is damaged, huge or of another kind: one sentence, a non-zero exit, nothing lost."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from typed import SMALL, typed

MODULES = """
import torch
from torch import nn

class Odd(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.layer, self.say = nn.Linear(4, 3), forward

    def forward(self, x):
        return self.say(self.layer, x)

def good(): return nn.Linear(4, 3)
def lazy(): return nn.LazyLinear(3)
def branch(): return Odd(lambda layer, x: layer(x) if x.sum() > 0 else -layer(x))
def pair(): return Odd(lambda layer, x: (layer(x), x))
def named(): return Odd(lambda layer, x: {"scores": layer(x)})
def word(): return Odd(lambda layer, x: "scores")
def fails(): return Odd(lambda layer, x: {}["scores"])
def text(): return "a module"
def klass(): return nn.Linear
def several(): return (nn.Linear(4, 3),)
def luckless(): raise KeyError("no luck")
def needs(width): return nn.Linear(width, 3)
thing = 3
"""


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    """The command line in this process, in a folder with a configuration and modules."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.toml").write_text(SMALL)
    (tmp_path / "mods.py").write_text(MODULES)

    def run(*words):
        code, _, said = typed(monkeypatch, capsys, *words)
        return code, said

    return run


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    from dpscaffold.training.train import run

    folder = tmp_path_factory.mktemp("finished")
    (folder / "c.toml").write_text(SMALL)
    run(folder / "c.toml", out=folder / "run")
    return folder / "run"


FILES = ["metrics.jsonl", "ledger.jsonl", "ledger.head", "config.toml", "secret.json"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: raw[: len(raw) // 2],
        lambda raw: b"\xff\xfe\x00" + raw,
        lambda raw: b"null\n" + raw,
        lambda raw: b'{"round": "x"}\n' + raw,
        lambda raw: b"",
    ],
    ids=["cut", "not UTF-8", "null", "another kind", "empty"],
)
def test_damaged_run_folders(command, finished, tmp_path, name, damage):
    """Each command either answers or refuses in a sentence; the other files stay as they are."""
    shutil.copytree(finished, tmp_path / "bad")
    path = tmp_path / "bad" / name
    path.write_bytes(damage(path.read_bytes()))
    before = {p.name: p.read_bytes() for p in (tmp_path / "bad").iterdir() if p.is_file()}
    refused = 0
    for words in (["train", "--resume", "bad", "-q"], ["compare", "bad", "--json"]):
        code, said = command(*words)
        assert code in (0, 2) and (code == 0 or said.count("error:") == 1), (words, said)
        refused += code == 2
    code, said = command("privacy", "bad", "--json")
    assert code in (0, 2), said
    if refused == 2:
        after = {p.name: p.read_bytes() for p in (tmp_path / "bad").iterdir() if p.is_file()}
        assert {n: after[n] for n in before if n != ".lock"} == {
            n: before[n] for n in before if n != ".lock"
        }


@pytest.mark.parametrize(
    ("name", "content", "refused"),
    [
        ("config.toml", b"\xff\xfe[plan]", True),
        ("config.toml", b"[plan\nrounds", True),
        ("ledger.head", b"null", True),
        ("secret.json", b"3", True),
        ("metrics.jsonl", b"\xff\xfe{}\n", True),
        ("metrics.jsonl", b"", True),
        ("checkpoint.pt", b"", False),
    ],
)
def test_a_report_of_a_damaged_run_is_refused_or_whole(command, finished, name, content, refused):
    shutil.copytree(finished, "bad")
    (Path("bad") / name).write_bytes(content)
    code, said = command("report", "bad", "--out", "page.html")
    assert code == (2 if refused else 0) and said.count("error:") == refused, said
    assert Path("page.html").exists() != refused


@pytest.mark.parametrize(
    ("factory", "sentence"),
    [
        ("lazy", "lazy modules"),
        ("branch", "must not depend on the values of a record"),
        ("pair", "gives tuple instead of scores"),
        ("named", "gives dict instead of scores"),
        ("word", "gives str instead of scores"),
        ("fails", "KeyError"),
        ("text", "returned 'a module'"),
        ("klass", "returned <class 'torch.nn.modules.linear.Linear'>"),
        ("several", "returned ("),
        ("luckless", "factory failed with KeyError"),
        ("needs", "factory failed with TypeError"),
        ("thing", "has no function 'thing'"),
        ("absent", "has no function 'absent'"),
    ],
)
def test_modules_that_cannot_be_trained(command, tmp_path, factory, sentence):
    words = ["--set", "task.kind=module", "--set", f"task.module=mods:{factory}"]
    code, said = command("train", "c.toml", "--out", "run", *words)
    assert code == 2 and sentence in said and said.count("error:") == 1, said
    assert not (tmp_path / "run").exists()


def test_a_module_beside_the_configuration_is_found(command, tmp_path, monkeypatch):
    """Without PYTHONPATH, from another folder."""
    (tmp_path / "elsewhere").mkdir()
    text = SMALL.replace("[plan]", '[task]\nkind = "module"\nmodule = "mods:good"\n[plan]')
    (tmp_path / "m.toml").write_text(text)
    monkeypatch.chdir(tmp_path / "elsewhere")
    code, said = command("train", tmp_path / "m.toml", "--out", "run", "-q")
    assert code == 0, said


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("data.source=[]", "no data source is called"),
        ("data.source={}", "no data source is called"),
        (f"data.records={2**31}", "of memory; use fewer"),
        (f"data.records={2**63}", "of memory; use fewer"),
        (f"data.users={2**31}", "of memory; use fewer"),
        *((f"privacy.noise=1e{power}", "more than can be accounted for") for power in (9, 12, 18)),
        ("task.module=a..b:c", "task.module"),
    ],
)
def test_values_of_another_size_or_kind(command, tmp_path, change, sentence):
    code, said = command("train", "c.toml", "--out", "run", "--set", change)
    assert code == 2 and sentence in said and said.count("error:") == 1, said
    assert not (tmp_path / "run").exists()


def test_a_full_disk_is_one_sentence_and_the_run_goes_on_later(command, tmp_path, monkeypatch):
    """Writing fails in mid-run as on a full disk; what was released is still counted."""
    from dpscaffold.runs.folder import RunFolder

    written = RunFolder.append_metrics

    def full(self, row):
        raise OSError(28, "No space left on device", str(self.file("metrics.jsonl")))

    monkeypatch.setattr(RunFolder, "append_metrics", full)
    code, said = command("train", "c.toml", "--out", "run", "-q")
    assert code == 2 and "No space left on device" in said and "metrics.jsonl" in said
    monkeypatch.setattr(RunFolder, "append_metrics", written)
    code, said = command("train", "--resume", "run", "-q")
    assert code == 0, said
    assert (tmp_path / "run" / "model.pt").exists() or list(Path("run").glob("model*"))
