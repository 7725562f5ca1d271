"""Mutated command lines of every command, over a folder of small inputs."""

from __future__ import annotations

import contextlib
import io
import os
import random
import shutil
import sys
from pathlib import Path

import numpy as np
from typed import SMALL, TABLE

from dpscaffold import cli

TUNED = '\n[tune]\nfolds = 2\n[tune.grid]\n"plan.learning_rate" = [0.1, 0.5]\n'
FEDERATION = """
[federation]
name = "f"
server = "localhost:9092"
sites = ["north", "south"]
"""
NUMBERS = "--users 10 --records 40 --rounds 5 --local-steps 2 --user-ratio 0.2 --data-ratio 0.2"

#: A line of every command that answers quickly; what it does is less important than that its
#: options are met.
LINES: tuple[str, ...] = (
    "train c.toml --out new --set plan.rounds=1 -q",
    "train c.toml --out new --json --set privacy=false",
    "train --resume run",
    "train --resume run --set plan.rounds=3 -v",
    "train t.toml --out new --device cpu -v",
    "train c.toml --out new --set privacy.release=['median-clip']",
    "train --set data.source=csv --set data.path=table.csv --set data.label=ill --out new -q",
    "init table.csv --out drafted.toml --label ill --user site --epsilon 1 --rows 50 --force",
    "init sites --json --out drafted.toml",
    "compare run run2 --json",
    "compare run --out figure.svg",
    "report run --out page.html",
    "report run",
    "predict run3 table.csv --out said.csv --keep site --probabilities",
    "predict run3 sites --out said.csv --keep site",
    "predict run3 sites/*.csv table.csv --out said.parquet --json",
    "evaluate run3 table.csv --label ill --site site --json",
    "evaluate run3 sites --label ill --json",
    "evaluate run --figure f.svg",
    "export run --to torch --out exported --only-protected",
    "export run --to safetensors --out exported",
    f"privacy {NUMBERS} --noise 4 --json",
    f"privacy {NUMBERS} --noise 4 --sampling poisson --unit record",
    f"privacy {NUMBERS} --noise 4 --colluders 2 --delta 1e-4",
    "privacy run --json",
    "privacy hurt --json",
    "train --resume hurt -q",
    "train --resume hurt --set plan.rounds=3",
    "report hurt --out hurt.html",
    "compare hurt run --json",
    "compare hurt --out hurt.svg",
    "evaluate hurt --json",
    "predict hurt table.csv --out said.csv",
    "export hurt --to safetensors --out exported",
    "privacy hurt --epsilon 2",
    "audit hurt --trials 100 --minutes 0.001",
    "train hurt/config.toml --dry-run",
    "privacy run run2 --fixed-in-advance --same-records",
    f"privacy {NUMBERS} --epsilon 2 --json",
    f"privacy {NUMBERS} --noise 4 --epsilon 2 --solve rounds --algorithm fedavg",
    f"privacy {NUMBERS} --guess 60",
    "privacy c.toml --guess 55 --against third-party",
    "audit c.toml --trials 100 --minutes 0.01 --view server --json",
    "audit c.toml --one-run 1 --minutes 0.01 --seed 3 --confidence 0.9",
    "privacy shared.jsonl --epsilon 3 --delta 1e-5",
    "privacy shared.jsonl --json",
    "data describe t.toml --json",
    "data describe --source digits --set data.users=4 --out figure.svg",
    "data prepare t.toml --out prepared --overwrite --json",
    "data download mnist --data-dir data --mirror http://127.0.0.1:1",
    "data list --data-dir data --json",
    "train c.toml --dry-run --set plan.rounds=4 --set privacy=false --json",
    "plan --users 5 --records 40 --features 3 --classes 2 --epsilon 1 --rounds 2 --local-steps 1"
    " --participants 2 --config p.toml --json",
    "tune tune.toml --out tuned --json",
    "reproduce --list nothing",
    "reproduce --list --estimate --scale 0.02 --json",
    "reproduce nothing --scale 0.001 --seeds 1 --out results",
    "provision f.toml --out kit --with-keys",
    "server status run --json",
    "server admit key.pem --server nowhere",
    "server remove north --server nowhere",
    "server start --server nowhere --public 127.0.0.1:1 --inner 127.0.0.1:2",
    "server run c.toml --server nowhere --out deployed --set plan.rounds=1 --json",
    "site init invitation.toml --out there",
    "site check site.toml --offer offer.json --offline",
    "site ledger site.toml --json",
    "site recover site.toml --yes",
    "site status site.toml --json",
    "site start site.toml",
    "demo --rounds x --out demo --json",
)
#: Words to be put anywhere; none names a place outside the folder.
WORDS = (
    *("", "-", "--", "0", "-1", "1", "2", "1e9", "1e18", "1e-300", "nan", "inf", "2147483648"),
    *("9" * 40, "x", "ε", "\x01", "a" * 300, "run", "c.toml", "table.csv", "sites", "a.npz", "."),
    *("--json", "--help", "--set", "--set=plan.rounds=0", "--set=privacy.epsilon=1e6", "nowhere"),
    *("--set=data.users=0", "--set=plan.seed=-1", "--set=privacy.noise=1e12", "--set=data.source="),
    *("--out=new2", "--resume", "-q", "-v", "-vv", "*.csv", "run/config.toml", "server", "user"),
    *(
        "third-party",
        "poisson",
        "broken.toml",
        "half.csv",
        "run/metrics.jsonl",
        "fedavg",
        "=",
        "[]",
    ),
)


def attempt(rng: random.Random, folder: Path) -> str:
    """One command line, in a folder of its own."""
    home = folder / "commands"
    if rng.random() < 0.05 or not home.exists():
        _furnish(home)
    words = mutated(rng, rng.choice(LINES).split())
    said = damage(rng, home) if "hurt" in words or "hurt/config.toml" in words else ""
    attempt.last = [f"{said}{words!r}"]  # type: ignore[attr-defined]
    code, told = run(words, home)
    attempt.last = [f"{said}{words!r}: {code}, {told[-200:]}"]  # type: ignore[attr-defined]
    if "Traceback" in told or code not in (0, 2, 3, 4, 130, 143):
        raise RuntimeError(f"exit {code}")
    return ""


def damage(rng: random.Random, home: Path) -> str:
    """Make ``hurt``, a copy of a run with one of its files cut, changed, emptied or lost."""
    hurt = home / "hurt"
    shutil.rmtree(hurt, ignore_errors=True)
    whole = home / rng.choice(("run", "run3"))
    if not whole.is_dir():
        return ""
    shutil.copytree(whole, hurt)
    files = sorted(path for path in hurt.rglob("*") if path.is_file() and path.name != ".lock")
    path = rng.choice(files)
    content, at = bytearray(path.read_bytes()), 0
    kind = rng.choice(("cut", "not text", "flipped", "emptied", "lost", "doubled", "other JSON"))
    if kind == "cut":
        del content[rng.randrange(len(content) + 1) :]
    elif kind == "not text":
        content = bytearray(b"\xff\xfe") + content
    elif kind == "flipped" and content:
        at = rng.randrange(len(content))
        content[at] ^= 1 << rng.randrange(8)
    elif kind == "doubled":
        content = content * 2
    elif kind == "other JSON":
        content = bytearray(rng.choice((b"[]", b"{}", b"null", b"3", b'"x"', b"[1, {}]\n")))
    path.unlink()
    if kind != "lost":
        path.write_bytes(b"" if kind == "emptied" else bytes(content))
    return f"{path.relative_to(home)} {kind} at {at}: "


def mutated(rng: random.Random, words: list[str]) -> list[str]:
    """The words with up to three of them replaced, lost, doubled, cut or joined by others."""
    words = list(words)
    for _ in range(rng.randint(0, 3)):
        at = rng.randrange(len(words) + 1)
        kind = rng.randrange(6)
        if kind == 0 or at == len(words):
            words.insert(at, rng.choice(WORDS))
        elif kind <= 2:
            words[at] = rng.choice(WORDS)
        elif kind == 3 and len(words) > 1:
            del words[at]
        elif kind == 4:
            words.insert(at, words[at])
        else:
            words[at] = words[at][: rng.randrange(len(words[at]) + 1)]
    return words


def load_all() -> None:
    """Import what the commands import late, so that no case waits for it."""
    import importlib
    import pkgutil

    import dpscaffold

    for found in pkgutil.walk_packages(dpscaffold.__path__, "dpscaffold."):
        if not found.name.endswith("__main__"):
            with contextlib.suppress(ImportError):  # an extra that is not installed
                importlib.import_module(found.name)


def run(words: list[str], home: Path) -> tuple[int, str]:
    """The command line in this process: its exit status and what it said of errors."""
    out, err = io.StringIO(), io.StringIO()
    before, back = sys.argv, Path.cwd()
    os.chdir(home)
    sys.argv = ["dpscaffold", *words]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            cli.main()
        code = 0
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
    finally:
        sys.argv = before
        os.chdir(back)
    return code, err.getvalue()


def _furnish(home: Path) -> None:
    """The small inputs that the lines name."""
    shutil.rmtree(home, ignore_errors=True)
    (home / "sites").mkdir(parents=True)
    files = {"c.toml": SMALL, "t.toml": TABLE, "tune.toml": SMALL + TUNED, "f.toml": FEDERATION}
    files |= {"broken.toml": "[plan\n", "half.csv": 'a,b\n1,"2', "key.pem": "no key"}
    files |= {"site.toml": "[site]\n", "invitation.toml": "x = 1\n", "offer.json": "{}"}
    files |= {"p.toml": SMALL.replace("noise = 4.0", "epsilon = 1.0")}
    rng = random.Random(0)
    rows = [f"{rng.gauss(0, 1):.3f},{'ns'[i % 2]},{'yn'[rng.randrange(2)]}" for i in range(60)]
    files["table.csv"] = "age,site,ill\n" + "\n".join(rows) + "\n"
    files["sites/north.csv"] = files["sites/south.csv"] = files["table.csv"]
    for name, text in files.items():
        (home / name).write_text(text)
    np.savez(home / "a.npz", features=np.eye(20), labels=np.arange(20) % 2, users=np.arange(20) % 3)
    for line in ("train c.toml --out run -q", "train c.toml --out run2 --set plan.seed=7 -q"):
        run(line.split(), home)
    run(["train", "t.toml", "--out", "run3", "-q"], home)
