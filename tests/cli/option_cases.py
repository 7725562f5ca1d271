"""What every option of every command does, mode by mode, as data for ``test_options.py``.

A mode is one way to use a command: a command line that works. For each of its options a mode holds
words that are added to that line, and says whether they change what the command does (``acts``) or
are refused because the option means nothing there (``refused``). An option without words in a mode
fails the tests, and so does one that is accepted without effect.
"""

from __future__ import annotations

import shutil
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from typed import SMALL, done_here

#: Other names of options.
ALSO = {
    "-q": "--quiet",
    "-v": "--verbose",
    "--no-probabilities": "--probabilities",
}
#: The name of modes in which a command says what it was asked for, instead of doing it.
AS_ASKED = "as it is asked"
#: Before an option that stands in the mode's own line: it is left out there.
WITHOUT = "without "


@dataclass(frozen=True)
class Mode:
    """One way to use a command: ``words`` after its name, and the words to add for each option.

    ``acts`` and ``refused`` are words with a semicolon between two options. ``whole`` modes have
    words for all options, but for those that other modes of the command are about. ``slow`` ones
    take seconds for each line, or have the options of another whole mode of the command.
    ``first`` is a line to run before. ``compares`` says what shows that an option acts: the
    ``words`` without numbers where these are a matter of chance, or only whether there is
    ``progress`` on a terminal.
    """

    command: str
    name: str
    words: str
    acts: str = ""
    refused: str = ""
    first: str = ""
    whole: bool = True
    slow: bool = False
    compares: Literal["all", "words", "progress"] = "all"

    @property
    def title(self) -> str:
        """The mode in a test's name."""
        return f"{self.command}, {self.name}"

    def acting(self) -> dict[str, str]:
        """The words of options that act, by option."""
        return by_option(self.acts)

    def refusing(self) -> dict[str, str]:
        """The words of options that are refused, by option."""
        return by_option(self.refused)

    def cases(self) -> dict[str, str]:
        """The words of every option that the mode speaks of."""
        return self.acting() | self.refusing()


def by_option(text: str) -> dict[str, str]:
    """Words by the option that they are about.

    >>> by_option("--view server; -q; without --list")
    {'--view': '--view server', '--quiet': '-q', '--list': 'without --list'}
    """
    cases = {}
    for words in filter(None, map(str.strip, text.split(";"))):
        name = words.removeprefix(WITHOUT).split()[0]
        cases[ALSO.get(name, name)] = words
    return cases


RUN = "--users 10 --records 50 --local-steps 1 --user-ratio 0.4 --data-ratio 0.2"
SIZES = "--users 12; --records 60; --local-steps 2; --user-ratio 0.5; --data-ratio 0.3"
DESCRIBED = f"{SIZES}; --sampling poisson; --algorithm fedavg; --unit user; --rounds 5; --noise 3"
SEVERAL = "--fixed-in-advance; --same-records; --already-spent 1 1e-6"
ASKED = "--delta 0.001; --colluders 2"
SOLVED = "--solve rounds; --against participant"

PRIVACY = (
    Mode(
        "privacy",
        "numbers",
        f"{RUN} --rounds 4 --noise 2 --algorithm fedavg",
        acts=f"{SIZES}; --rounds 5; --noise 3; --sampling poisson; --algorithm scaffold; "
        f"--unit user; {ASKED}; --epsilon 1; --guess 60; --json",
        refused=f"{SEVERAL}; {SOLVED}",
    ),
    Mode(
        "privacy",
        "noise from numbers",
        f"{RUN} --rounds 4 --epsilon 1 --algorithm fedavg",
        acts=f"{SIZES}; --rounds 5; --sampling poisson; --algorithm scaffold; --unit user; "
        f"{ASKED}; --epsilon 2; --against participant; --json",
        refused=f"{SEVERAL}; --guess 60; --noise 3; --solve rounds",
    ),
    Mode(
        "privacy",
        "rounds from numbers",
        f"{RUN} --noise 2 --epsilon 3 --solve rounds --algorithm fedavg",
        acts=f"{SIZES}; --noise 3; --sampling poisson; --algorithm scaffold; --unit user; "
        f"{ASKED}; --epsilon 2; --against participant; --json",
        refused=f"{SEVERAL}; --guess 60; --rounds 5; --solve noise",
        slow=True,
    ),
    Mode(
        "privacy",
        "a configuration",
        "sum.toml",
        acts=f"{ASKED}; --epsilon 1; --guess 60; --json",
        refused=f"{DESCRIBED}; {SEVERAL}; {SOLVED}",
        slow=True,
    ),
    Mode(
        "privacy",
        "a run",
        "sum",
        acts=f"{ASKED}; --json",
        refused=f"{DESCRIBED}; {SEVERAL}; {SOLVED}; --epsilon 1; --guess 60",
    ),
    Mode(
        "privacy",
        "several configurations",
        "sum.toml other.toml",
        acts=f"{ASKED}; --fixed-in-advance; --json",
        refused=f"{DESCRIBED}; --same-records; --already-spent 1 1e-6; {SOLVED}; --epsilon 1; "
        "--guess 60",
    ),
    Mode("privacy", "runs of one key", "keyed other", acts="--same-records", whole=False),
    Mode(
        "privacy",
        "nothing promised",
        "plain.toml",
        acts="--json",
        refused=f"{DESCRIBED}; {SEVERAL}; {ASKED}; {SOLVED}; --epsilon 1; --guess 60",
    ),
    Mode(
        "privacy",
        "a new budget file",
        "new.jsonl --epsilon 2 --delta 1e-5",
        acts="--epsilon 3; --delta 1e-6; --json; --already-spent 1 1e-6",
        refused=f"{DESCRIBED}; --fixed-in-advance; --same-records; {SOLVED}; --guess 60; "
        "--colluders 2",
    ),
    Mode(
        "privacy",
        "a budget file that is there",
        "budget.jsonl",
        acts="--json",
        refused=f"{DESCRIBED}; {SEVERAL}; {SOLVED}; --guess 60; --colluders 2; --epsilon 3; "
        "--delta 1e-6",
    ),
)

TRAINED = "--out elsewhere; --device nowhere; --json; -q; -v; --dry-run"
TRAIN = (
    Mode(
        "train",
        "a configuration",
        "small.toml",
        acts=f"{TRAINED}; --set plan.rounds=3; --data-key key; --track nowhere; --seeds 2",
    ),
    Mode(
        "train",
        "a folder that holds a run",
        "small.toml",
        acts="--resume",
        first="train small.toml",
        whole=False,
    ),
    Mode(
        "train",
        "a run that goes on",
        "small --resume",
        acts=f"{TRAINED}; --set plan.rounds=3; --track nowhere; without --resume",
        refused="--data-key key; --seeds 2",
    ),
    Mode(
        "train",
        "several seeds",
        "small.toml --seeds 2",
        acts=f"{TRAINED}; --set plan.rounds=3; --data-key key; --seeds 3",
        refused="--track tensorboard",
        slow=True,
    ),
)

SCORED = "--label well; --site ward; --figure figure.png; --module own_net:net; --json"
MODELS = (
    Mode("compare", "two runs", "small sum", acts="--out other.png; --json"),
    Mode(
        "report",
        "two runs",
        "small released",
        acts="--out other.html; --with-metrics; --json",
    ),
    Mode("report", "a simulation", "small", refused="--with-metrics", whole=False),
    Mode("report", "a release", "released", acts="--with-metrics", whole=False),
    Mode(
        "predict",
        "a file",
        "table rows.csv",
        acts="--out said.csv; --keep site; --no-probabilities; --module own_net:net",
        refused="--json",
    ),
    Mode(
        "predict",
        "many files",
        "table rows.csv more.csv --out said.csv",
        acts="--out others.csv; --keep site; --no-probabilities; --module own_net:net; --json",
    ),
    Mode(
        "predict",
        "a number",
        "number rows.csv",
        acts="--keep site",
        refused="--probabilities",
        whole=False,
    ),
    Mode(
        "predict",
        "a number without",
        "number rows.csv",
        refused="--no-probabilities",
        whole=False,
    ),
    Mode("evaluate", "numbers", "number rows.csv", acts="--figure figure.png", whole=False),
    Mode(
        "evaluate",
        "records held out",
        "table",
        acts="--figure figure.png; --personal; --module own_net:net; --json",
        refused="--label ill; --site site",
    ),
    Mode("evaluate", "a file", "table rows.csv", acts=SCORED, refused="--personal"),
    Mode("evaluate", "many files", "table rows.csv more.csv", acts=SCORED, refused="--personal"),
    Mode(
        "personalise",
        "a table",
        "table rows.csv",
        acts="--out other; --site north; --label well; --strength 1; --module own_net:net; --json",
    ),
    Mode(
        "export",
        "a run",
        "table --to safetensors",
        acts="--to nowhere; --out other; --only-protected; --module own_net:net; --json",
    ),
)

DATA = (
    Mode(
        "init",
        "a table",
        "rows.csv",
        acts="--out other.toml; --label well; --user ward; --epsilon 2; --rows 20; --release; "
        "--json",
    ),
    Mode(
        "init",
        "a folder",
        "folder",
        acts="--label well; --user ward; --epsilon 2; --rows 20; --json",
        whole=False,
    ),
    Mode(
        "init",
        "a draft that is there",
        "rows.csv",
        acts="--force",
        first="init rows.csv",
        whole=False,
    ),
    Mode(
        "data describe",
        "a configuration",
        "small.toml",
        acts="--set data.users=4; --out figure.png; --json",
        refused="--source digits; --data-dir data",
    ),
    Mode(
        "data describe",
        "a source",
        "--source mnist --data-dir data",
        acts="--source synthetic; --data-dir other",
        whole=False,
    ),
    Mode(
        "data prepare",
        "a configuration",
        "small.toml --out stored",
        acts="--out other; --set data.users=4; --json",
        refused="--source digits; --data-dir data",
    ),
    Mode(
        "data prepare",
        "what is there",
        "small.toml --out stored",
        acts="--overwrite",
        first="data prepare small.toml --out stored",
        whole=False,
    ),
    Mode(
        "data download",
        AS_ASKED,
        "mnist",
        acts="--data-dir other; --mirror http://127.0.0.1:9; --json",
    ),
    Mode("data list", "all", "", acts="--data-dir data; --json"),
)

LONG = (
    Mode(
        "demo",
        "one round",
        "--rounds 1",
        acts="--out elsewhere; --rounds 2; --json",
        slow=True,
    ),
    Mode(
        "demo",
        "on a terminal",
        "--rounds 1",
        acts="-q",
        whole=False,
        slow=True,
        compares="progress",
    ),
    Mode("tune", "on a terminal", "tune.toml", acts="-q", whole=False, compares="progress"),
    Mode(
        "reproduce",
        "on a terminal",
        'figure1 --row "K = 50" --scale 0.01 --seeds 1',
        acts="-q",
        whole=False,
        slow=True,
        compares="progress",
    ),
    Mode(
        "audit",
        "a configuration",
        "small.toml --trials 300 --view server --seed 1",
        acts="--set privacy.noise=1; --trials 400; --minutes -1; --confidence 0.9; "
        "--view third-party; --seed 2; --json",
        refused="--one-run 10; --out elsewhere",
        slow=True,
    ),
    Mode(
        "audit",
        "a real run",
        "small.toml --trials 100 --view server --seed 1 --one-run 10 --out real",
        acts="--one-run 2; --out elsewhere",
        whole=False,
        slow=True,
        compares="words",
    ),
    Mode(
        "audit",
        "secure sums",
        "small.toml --set algorithm.name=fedavg --set plan.local_steps=1 --set secure.colluders=0 "
        "--trials 100 --seed 1 --view server",
        acts="--view alone",
        whole=False,
        slow=True,
    ),
    Mode(
        "audit",
        "secure sums towards participants",
        "small.toml --set algorithm.name=fedavg --set plan.local_steps=1 --set secure.colluders=0 "
        "--trials 100 --seed 1 --view server",
        refused="--view participant",
        whole=False,
        slow=True,
    ),
    Mode(
        "audit",
        "a run",
        "small --trials 100 --view server --seed 1",
        refused="--set privacy.noise=1",
        whole=False,
        slow=True,
    ),
    Mode(
        "plan",
        "facts",
        "--users 6 --records 20 --features 2 --classes 2 --epsilon 1 --rounds 3 --local-steps 2",
        acts="--users 8; --records 30; --features 3; --classes 3; --epsilon 4; "
        "--view third-party; --delta 0.001; --sampling fixed; --similarity 50; --row-norm 2; "
        "--rounds 4; --local-steps 1; --participants 2; --config facts.toml; --out elsewhere; "
        "--unit user; --secure-sums; --device nowhere; --json; -q",
        slow=True,
    ),
    Mode(
        "tune",
        "a grid",
        "tune.toml",
        acts="--set tune.folds=3; --out elsewhere; --device nowhere; --json",
    ),
    Mode(
        "tune",
        "privately",
        "private.toml",
        acts="--set privacy.sampling=poisson; --out elsewhere; --device nowhere; --json",
        compares="words",
    ),
    Mode(
        "reproduce",
        "the list",
        "--list --seeds 1 --scale 0.01",
        acts="--seeds 2; --scale 0.02; --json; without --list",
        refused="--device auto; --out elsewhere; --row x; -q; --data-dir data",
        slow=True,
    ),
    Mode(
        "reproduce",
        "an experiment",
        'figure1 --row "K = 50" --scale 0.01 --seeds 1',
        acts="--seeds 2; --scale 0.02; --device nowhere; --out elsewhere; --row nowhere; --json",
        refused="--list; --data-dir data",
        slow=True,
    ),
)

DEPLOYED = (
    Mode(
        "provision new",
        "two sites",
        "federation.toml --out made",
        acts="--out other; --with-keys; --json",
    ),
    Mode(
        "provision renew",
        "a federation",
        "--server site/server",
        acts="--server other; --out other.renewal; --coordinator",
    ),
    Mode(
        "server start",
        AS_ASKED,
        "--server site/server --public 127.0.0.1:9443 --inner 127.0.0.1:9444",
        acts="--server other; --public 127.0.0.1:9445; --inner 127.0.0.1:9446; --insecure",
    ),
    Mode(
        "server run",
        AS_ASKED,
        "served.toml --out deployed --server site/server",
        acts="--out other; --server other; --resume; --without one; --set plan.rounds=3; "
        "--insecure; --json; --continue deployed",
    ),
    Mode(
        "server admit",
        "a site",
        "site/one/one.site",
        acts="--server site/server",
    ),
    Mode("server remove", "a site", "one", acts="--server site/server"),
    Mode("server status", "a run", "deployed", acts="--json", refused="--page 0.0.0.0:8080"),
    Mode("site init", "an invitation", "site/one.invitation", acts="--out other"),
    Mode(
        "site check",
        "a site",
        "site/one/site.toml --offline",
        acts="--offer served.toml; --json; without --offline",
    ),
    Mode(
        "site start",
        AS_ASKED,
        "site/one/site.toml",
        acts="--insecure",
    ),
    Mode("site ledger", "a site", "site/one/site.toml", acts="--json"),
    Mode("site recover", "a site", "site/one/site.toml", acts="--yes"),
    Mode(
        "site renew",
        "a site",
        "notice site/one/site.toml",
        acts="--yes",
        first="provision renew --server site/server --out notice",
    ),
    Mode("site requests", "a site", "site/one/site.toml", acts="--waiting; --json"),
    Mode("site approve", "a run", "7 site/one/site.toml", acts="--yes"),
    Mode("site refuse", "a run", "7 site/one/site.toml", acts="--yes"),
    Mode("site audit", "a site", "site/one/site.toml", acts=f"--since 1:{64 * '0'}; --json"),
    Mode("site status", "a site", "site/one/site.toml", acts="--json", whole=False),
)

SUMS = (
    Mode("sums keys", "a site", "mail.toml --name a", acts="--name b; --out other; --json"),
    Mode(
        "sums make",
        "a site",
        "mail.toml --site mail/a/site.toml",
        acts="--site mail/b/site.toml; --out other.sums; --json",
        refused="--keys mail/a/a.sumkey",
    ),
    Mode(
        "sums combine",
        "two files",
        "mail.toml mail/a/a.sums mail/b/b.sums --out combined",
        acts="--out other; --json",
    ),
    Mode("sums check", "two files", "mail.toml mail/a/a.sums mail/b/b.sums", acts="--json"),
)

#: Files that commands find by themselves.
SHARED = ("rows.csv", "own_net.py")
MODES = (*PRIVACY, *TRAIN, *MODELS, *DATA, *LONG, *DEPLOYED, *SUMS)

SUM = """
[data]
users = 6
records = 30
features = 3
classes = 2
[plan]
rounds = 2
local_steps = 1
user_ratio = 1.0
seed = {seed}
[algorithm]
name = "fedavg"
[privacy]
noise = 4.0
secret = true
"""
TABLE = """
[data]
source = "csv"
path = "rows.csv"
label = "ill"
user = "site"
categories = ["ward"]
exclude = ["well"]
[plan]
rounds = 1
local_steps = 1
user_ratio = 1.0
[privacy]
noise = 4.0
"""
NUMBER = TABLE.replace(
    'label = "ill"', 'label = "age"\ntarget = { kind = "number", low = 0, high = 99 }'
).replace('["well"]', '["ill", "well"]\n[task]\nkind = "linear"')
TUNE = (
    SMALL
    + """
[tune]
folds = 2
[tune.grid]
"plan.learning_rate" = [0.1, 0.2]
"""
)
PRIVATE = (
    SUM.format(seed=1)
    + """
[tune]
trials = 2.0
folds = 2
score_noise = 5.0
[tune.grid]
"plan.learning_rate" = [0.1, 0.2]
"""
)
FEDERATION = """
address = "127.0.0.1:8443"
sites = ["one", "two"]
"""
SERVED = """
[schema]
features = ["age", "height", "weight"]
label = "ill"
classes = ["no", "yes"]
[plan]
learning_rate = 0.5
rounds = 2
local_steps = 1
[privacy]
noise = 10.0
[deploy]
address = "127.0.0.1:8444"
"""
STATUS = """
{"run": "1", "phase": "training", "round": 1, "rounds": 2,
 "sites": {"one": {"participations": 1, "last": "answered"}}}
"""
MAIL = """
[schema]
features = ["age", "weight"]
label = "ill"
classes = ["no", "yes"]
[privacy]
epsilon = 0.9
delta = 1e-6
[sums]
members = ["a", "b"]
"""
FACTS = """
[facts]
similarity = 100
"""
NET = """
import torch
def net():
    return torch.nn.Linear(4, 2)
"""


def write_rows(path: Path, seed: int) -> None:
    """A table of people at two sites, with two labels to choose from."""
    rng = np.random.default_rng(seed)
    lines = ["age,weight,ward,site,ill,well"]
    for k in range(60):
        age, weight = rng.integers(20, 90), round(float(rng.normal(75, 9)), 1)
        ill = "yes" if age + rng.normal(0, 9) > 55 else "no"
        well = "yes" if weight + rng.normal(0, 9) > 75 else "no"
        lines.append(f"{age},{weight},{'ab'[k % 2]},{'xy'[k // 30]},{ill},{well}")
    path.write_text("\n".join(lines) + "\n")


def two_requests(state: Path) -> None:
    """A run that waits for a decision (7…), and one that was approved (8…)."""
    from dpscaffold.deployment.site.approval import RunRequest, requests_in

    state.mkdir(mode=0o700)
    model = {"task": "logistic", "algorithm": "fedavg", "label": "ill", "unit": "record"}
    model |= {"columns": ("age",), "classes": ("no", "yes"), "rounds": 2, "local_steps": 1}
    sent = {"parameters": 4, "uploads": 4, "records": 9, "declared": False, "participations": 4}
    cost = {"epsilon": 0.5, "delta": 1e-6, "epsilon_alone": None, "epsilon_left": 2.0}
    found = requests_in(state)
    for run in ("7" * 32, "8" * 32):
        asked = RunRequest(run, "plan", "ed25519:" + 64 * "0", "now", **model, **sent, **cost)
        found._write(asked, {})
    found.decide(asked, "approved", "somebody")


def build(folder: Path) -> None:
    """Fill a folder with what the modes work on."""
    texts = {
        "small.toml": SMALL,
        "plain.toml": SMALL.partition("[privacy]")[0],
        "sum.toml": SUM.format(seed=1),
        "other.toml": SUM.format(seed=2),
        "table.toml": TABLE,
        "release.toml": TABLE,
        "tune.toml": TUNE,
        "private.toml": PRIVATE,
        "number.toml": NUMBER,
        "federation.toml": FEDERATION,
        "served.toml": SERVED,
        "own_net.py": NET,
        "facts.toml": FACTS,
        "mail.toml": MAIL,
        "deployed/status.json": STATUS,
    }
    for name in ("deployed", "folder"):
        (folder / name).mkdir()
    for name, text in texts.items():
        (folder / name).write_text(text)
    write_rows(folder / "rows.csv", 1)
    write_rows(folder / "more.csv", 2)
    for name in ("rows.csv", "more.csv"):
        shutil.copy(folder / name, folder / "folder" / name)
    public = [f"{k / 9:.3f},{k % 3 - 1},{k / 7:.3f},1,{k % 3}" for k in range(12)]
    (folder / "stop.csv").write_text("\n".join(["0,1,2,3,label", *public]) + "\n")
    with chdir(folder):
        for line in (
            "train small.toml --out small",
            "train sum.toml --out sum",
            "train sum.toml --out keyed --data-key records.key",
            "train other.toml --set data.seed=9 --out other --data-key records.key",
            "train table.toml --out table",
            "train number.toml --out number",
            "train sum.toml --set plan.seed= "
            "--set privacy.release=['unprotected-preprocessing'] --out released",
            "privacy budget.jsonl --epsilon 2 --delta 1e-5",
            "provision federation.toml --out site --with-keys",
            *(f"sums keys mail.toml --name {name} --out mail/{name}" for name in "ab"),
        ):
            done = done_here(*line.split())
            assert done.returncode == 0, f"{line}: {done.stderr}"
        two_requests(Path("site/one/state"))
        for name in "ab":
            shutil.copy("rows.csv", f"mail/{name}/records.csv")
            line = f"sums make mail.toml --site mail/{name}/site.toml"
            assert done_here(*line.split()).returncode == 0, line
