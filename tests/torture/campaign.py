"""The fault campaign: kill, fill the disk, lock the folder, turn the clock, damage every file.

``make torture`` runs all of it, ``tests/torture/test_campaign.py`` a small part. After every fault
the same command is run again, and then nothing may be lost: metrics are those without the fault,
the ledger holds every round that was released, and what is stated is what the folder says.

Commands run in forked children of one process that has imported everything, so that a fault costs
a fraction of a second and the moments of a kill fall into the work, not into the imports.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from itertools import cycle, islice
from pathlib import Path

import dpscaffold.cli.audit
import dpscaffold.cli.budget
import dpscaffold.cli.compare
import dpscaffold.cli.data
import dpscaffold.cli.demo
import dpscaffold.cli.privacy
import dpscaffold.cli.provision
import dpscaffold.cli.train
import dpscaffold.cli.tune
import dpscaffold.data.loading
import dpscaffold.report.runs
import dpscaffold.training  # noqa: F401
from dpscaffold.books.runledger import read_account
from dpscaffold.cli import main

#: What commands import when they need it: a child that has dropped its rights may not find it.
LATE = (
    "absl.logging",
    "dp_accounting.rdp",
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "PIL.PngImagePlugin",
)
for name in LATE:
    importlib.import_module(name)

CONFIG = """
[data]
source = "synthetic"
alpha = 2.0
beta = 2.0
users = 12
records = 60
[plan]
rounds = 8
local_steps = 3
user_ratio = 0.25
evaluate_every = 1
checkpoint_every = 3
[privacy]
clip = 1.0
noise = 4.0
delta = 1e-5
"""
TUNE = '\n[tune]\nfolds = 2\ngrid = {"plan.learning_rate" = [0.1, 0.5]}\n'
FEDERATION = """
address = "127.0.0.1:9470"
sites = ["one", "two"]
"""
NOBODY = 65534
#: What may differ between two runs of one configuration: times, and the ε shown beside a round that
#: is run again, which counts the rounds after it that were released before the fault.
TIMES = ("seconds", "epsilon_server")

Before = Callable[[], None]


def nothing() -> None:
    """No fault."""


def begin(folder: Path, arguments: list[str], before: Before = nothing) -> int:
    """Start a command in a child of this process, in ``folder``; its output goes to ``said``."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    code = 70
    try:
        os.chdir(folder)
        out = os.open(folder / "said", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
        os.dup2(out, 1)
        os.dup2(out, 2)
        before()
        sys.argv = ["dpscaffold", *arguments]
        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def run(folder: Path, arguments: list[str], before: Before = nothing) -> int:
    """Run a command to its end; its exit status."""
    return os.waitstatus_to_exitcode(os.waitpid(begin(folder, arguments, before), 0)[1])


def said(folder: Path) -> str:
    """What the last command printed."""
    return (folder / "said").read_text(errors="replace")


class Lost(AssertionError):
    """Something that must survive did not."""


def expect(condition: bool, what: str, folder: Path) -> None:
    """Fail the campaign with what the command printed."""
    if not condition:
        raise Lost(f"{what}\n--- last output:\n{said(folder)[-3000:]}")


def rows(path: Path) -> list[dict[str, object]]:
    """The metrics of a run, without times."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in TIMES} for line in lines]


def journalled(run_folder: Path) -> Counter[int]:
    """How often each round was released, read with nothing but json."""
    lines = [json.loads(line) for line in (run_folder / "ledger.jsonl").read_text().splitlines()]
    return Counter(line["round"] for line in lines if "round" in line)


class Work:
    """A command that writes, how to run it again after a fault, and how to tell that all is well.

    ``prepare`` makes what it needs in an empty folder; ``result`` reads what it left, in a form
    that is equal whenever nothing was lost.
    """

    def __init__(
        self,
        name: str,
        arguments: list[str],
        again: list[str],
        result: Callable[[Path], object],
        prepare: Callable[[Path], None] = nothing,  # type: ignore[assignment]
        outcome: str = "run",
    ) -> None:
        self.name, self.arguments, self.again = name, arguments, again
        self.result, self.outcome = result, outcome
        self._prepare = prepare
        self.seconds, self.reference = 0.0, object()

    def fresh(self, home: Path) -> Path:
        """A new folder with what the command needs."""
        folder = Path(tempfile.mkdtemp(dir=home, prefix=self.name.replace(" ", "-") + "-"))
        folder.chmod(0o755)
        (folder / "run.toml").write_text(CONFIG)
        (folder / "tune.toml").write_text(CONFIG + TUNE)
        (folder / "sites.toml").write_text(FEDERATION)
        if self._prepare is not nothing:
            self._prepare(folder)
        return folder

    def measure(self, home: Path) -> None:
        """Run it without a fault, twice: once what it computes is cached here, children inherit
        it, and the moments of a kill fall into the writing."""
        for _ in range(2):
            folder = self.fresh(home)
            started = time.monotonic()
            status = run(folder, self.arguments)
            self.seconds = time.monotonic() - started
            expect(status == 0, f"{self.name} fails without any fault", folder)
            self.reference = self.result(folder)
            if not (folder / "run").exists():
                break
            read_account(folder / "run").statement()

    def recover(self, folder: Path) -> None:
        """Run it again after a fault, until it is done; then compare."""
        status = run(folder, self.again)
        answer = said(folder)
        expect(status in (0, 2), f"{self.name} does not recover (status {status})", folder)
        try:  # status 2 is a refusal in a sentence: it must have its result already
            self.result(folder)
        except OSError as error:
            raise Lost(
                f"{self.name} has no result ({error}), status {status}:\n{answer}"
            ) from error
        expect(
            self.result(folder) == self.reference,
            f"{self.name} is not as without the fault",
            folder,
        )


def trained(folder: Path) -> object:
    """A completed seeded run: its metrics and statement; checks that it states what it holds."""
    place = folder / "run"
    stated = json.loads((place / "privacy.json").read_text())
    check_statement(folder, stated)
    if max(journalled(place).values()) > 1:
        raise Lost("a seeded run has counted a round twice")
    kept = {k: v for k, v in stated.items() if k != "journal"}
    last = json.loads((place / "metrics.jsonl").read_text().splitlines()[-1])
    return rows(place / "metrics.jsonl"), last["epsilon_server"], kept


def trained_secretly(folder: Path) -> object:
    """A completed secret run: every release is in its statement, never below the plan's."""
    place = folder / "run"
    stated = json.loads((place / "privacy.json").read_text())
    check_statement(folder, stated)
    released = journalled(place)
    if set(released) != set(range(1, 9)) or stated["rounds"] != 8:
        raise Lost(f"rounds are missing: {released}")
    if stated["server"]["epsilon"] < stated["planned"]["epsilon"] - 1e-12:
        raise Lost("the statement is below the plan's epsilon")
    if sum(released.values()) > 8 and stated["server"]["epsilon"] <= stated["planned"]["epsilon"]:
        raise Lost("rounds were released twice and not counted")
    return [row["round"] for row in rows(place / "metrics.jsonl")]


def booked(folder: Path) -> object:
    """A secret run on a budget file: as above, and what it booked covers what it states."""
    run(folder, ["budget", "budget.jsonl", "--json"])
    book = json.loads(said(folder))
    stated = json.loads((folder / "run" / "privacy.json").read_text())
    if json.dumps(book).count("Infinity") or book["epsilon"] != 40.0:
        raise Lost(f"the budget file is not the one that was opened: {book}")
    text = (folder / "budget.jsonl").read_text()
    granted = sum(
        json.loads(line).get("grant", {}).get("epsilon", 0.0) for line in text.splitlines()
    )
    if granted and granted < stated["server"]["epsilon"] - 1e-9:
        raise Lost(f"{granted} is booked, {stated['server']['epsilon']} is stated")
    return trained_secretly(folder)


def check_statement(folder: Path, stated: dict[str, object]) -> None:
    """The written statement is the answer of the command."""
    status = run(folder, ["privacy", "run", "--json"])
    expect(status == 0, "the statement of a finished run cannot be made", folder)
    if json.loads(said(folder)) != stated:
        raise Lost("privacy.json is not what dpscaffold privacy says")


def prepared(folder: Path) -> object:
    """The digest of stored data; whatever is there must load whole."""
    from dpscaffold.data.storage import load

    return load(folder / "stored").digest().value


def open_budget(folder: Path) -> None:
    """A budget that is never exhausted here."""
    status = run(folder, ["budget", "budget.jsonl", "--epsilon", "40", "--delta", "0.01"])
    expect(status == 0, "a budget file cannot be opened", folder)


def two_runs(folder: Path) -> None:
    """Something to compare."""
    for name in ("one", "two"):
        status = run(folder, ["train", "run.toml", "--out", name, "--set", "plan.rounds=2"])
        expect(status == 0, "a run to compare fails", folder)


def whole_figure(name: str) -> Callable[[Path], object]:
    """A figure that is complete."""

    def result(folder: Path) -> object:
        return (folder / name).read_bytes()[-8:-4] == b"IEND"

    return result


def tuned(folder: Path) -> object:
    """The best configuration."""
    return (folder / "tuning" / "best.toml").read_text()


def shown_demo(folder: Path) -> object:
    """The rows of the demo's comparison."""
    return sorted(
        path.name for path in (folder / "demo").iterdir() if not path.name.startswith(".")
    )


def provisioned(folder: Path) -> object:
    """What there is; the keys are new every time."""
    return sorted(str(path.relative_to(folder)) for path in (folder / "keys").rglob("*"))


def budget_opened(folder: Path) -> object:
    """A budget that can be read."""
    status = run(folder, ["budget", "budget.jsonl", "--json"])
    expect(status == 0, "the budget file cannot be read", folder)
    return json.loads(said(folder))["epsilon"]


RESUMED = ["train", "run.toml", "--out", "run", "--resume"]
SECRET = ["--set", "privacy.secret=true"]
BOOKED = [*SECRET, "--set", "privacy.budget_file=budget.jsonl"]
OPEN = ["budget", "budget.jsonl", "--epsilon", "40", "--delta", "0.01"]

#: Every command that writes, and how often it is killed for each time that a plotting one is.
WORKS: tuple[tuple[Callable[[], Work], int], ...] = (
    (lambda: Work("train", RESUMED, RESUMED, trained), 6),
    (lambda: Work("train secret", RESUMED + SECRET, RESUMED + SECRET, trained_secretly), 6),
    (
        lambda: Work("train booked", RESUMED + BOOKED, RESUMED + BOOKED, booked, open_budget),
        6,
    ),
    (
        lambda: Work(
            "data prepare",
            ["data", "prepare", "run.toml", "--out", "stored"],
            ["data", "prepare", "run.toml", "--out", "stored", "--overwrite"],
            prepared,
            outcome="stored",
        ),
        3,
    ),
    (lambda: Work("budget", OPEN, OPEN, budget_opened, outcome="budget.jsonl"), 1),
    (
        lambda: Work(
            "tune",
            ["tune", "tune.toml", "--out", "tuning", "--quiet"],
            ["tune", "tune.toml", "--out", "tuning", "--quiet"],
            tuned,
            outcome="tuning/best.toml",
        ),
        2,
    ),
    (
        lambda: Work(
            "provision",
            ["provision", "sites.toml", "--out", "keys"],
            ["provision", "sites.toml", "--out", "keys"],
            provisioned,
            outcome="keys",
        ),
        1,
    ),
    (
        lambda: Work(
            "compare",
            ["compare", "one", "two", "--out", "figure.png"],
            ["compare", "one", "two", "--out", "figure.png"],
            whole_figure("figure.png"),
            two_runs,
        ),
        1,
    ),
    (
        lambda: Work(
            "privacy plot",
            ["privacy", "run.toml", "--plot", "figure.png"],
            ["privacy", "run.toml", "--plot", "figure.png"],
            whole_figure("figure.png"),
        ),
        1,
    ),
    (
        lambda: Work(
            "audit",
            ["audit", "run.toml", "--trials", "100", "--view", "server", "--figure", "figure.png"],
            ["audit", "run.toml", "--trials", "100", "--view", "server", "--figure", "figure.png"],
            whole_figure("figure.png"),
        ),
        1,
    ),
)


def kill_once(work: Work, home: Path, rng: random.Random) -> str:
    """kill −9 at a random moment, sometimes again while it recovers; then compare."""
    folder = work.fresh(home)
    for arguments in [work.arguments] + [work.again] * rng.randrange(3):
        child = begin(folder, arguments)
        time.sleep(rng.random() * work.seconds * 1.1)
        os.kill(child, signal.SIGKILL)  # a child that has ended is not yet waited for
        os.waitpid(child, 0)
    work.recover(folder)
    shutil.rmtree(folder)
    return work.name


def full_disk_once(work: Work, home: Path, rng: random.Random) -> str:
    """No file can grow beyond some size: short writes and errors in their midst."""
    folder = work.fresh(home)
    limit = int(2 ** rng.uniform(0, 17))

    def small() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    run(folder, work.arguments, small)
    work.recover(folder)
    shutil.rmtree(folder)
    return f"{work.name}, at {limit} bytes"


def read_only_once(work: Work, home: Path) -> str:
    """A folder that may not be written: refused in a sentence, nothing changed."""
    folder = work.fresh(home)
    before = sorted(path.name for path in folder.iterdir() if path.name != "said")
    (folder / "said").touch()
    (folder / "said").chmod(0o666)

    def locked() -> None:
        if os.geteuid() == 0:  # root may write anywhere
            os.setgid(NOBODY)
            os.setuid(NOBODY)

    folder.chmod(0o555)
    status = run(folder, work.arguments, locked)
    expect(status not in (0, 70), f"{work.name} in a read-only folder: status {status}", folder)
    expect("Traceback" not in said(folder), f"{work.name} shows a traceback", folder)
    folder.chmod(0o755)
    if sorted(path.name for path in folder.iterdir() if path.name != "said") != before:
        raise Lost(f"{work.name} wrote into a read-only folder")
    work.recover(folder)
    shutil.rmtree(folder)
    return f"{work.name}, read-only"


def clock_once(work: Work, home: Path, rng: random.Random) -> str:
    """The clock jumps by years, both ways, at every look."""
    folder = work.fresh(home)
    real, real_ns = time.time, time.time_ns

    def jumping() -> None:
        time.time = lambda: real() + rng.uniform(-3e8, 3e8)
        time.time_ns = lambda: real_ns() + int(rng.uniform(-3e17, 3e17))

    expect(run(folder, work.arguments, jumping) == 0, f"{work.name} fails by the clock", folder)
    if work.result(folder) != work.reference:
        raise Lost(f"{work.name} depends on the clock")
    shutil.rmtree(folder)
    return f"{work.name}, clock"


def interrupted(home: Path, secret: bool) -> Path:
    """The folder of a run that was stopped in its midst, in a folder of its own."""
    folder = Work("stopped", [], [], trained).fresh(home)
    options = SECRET if secret else []
    # A target that halts it before the end leaves a folder as an interruption does.
    first = ["train", "run.toml", "--out", "run", *options]

    def stop_early() -> None:
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        from dpscaffold.books.runfolder import RunFolder

        real = RunFolder.append_metrics

        def append(self: RunFolder, row: dict[str, object]) -> None:
            real(self, row)
            if row["round"] == 5:
                os.kill(os.getpid(), signal.SIGTERM)

        RunFolder.append_metrics = append  # type: ignore[method-assign]

    status = run(folder, first, stop_early)
    expect(status == 143, f"a run is not interrupted (status {status})", folder)
    return folder


def damage(path: Path, rng: random.Random) -> str:
    """Truncate the file, or flip one bit of it."""
    content = bytearray(path.read_bytes())
    if rng.random() < 0.4:
        size = rng.randrange(len(content))
        path.write_bytes(bytes(content[:size]))
        return f"{path.name} cut to {size} of {len(content)} bytes"
    place, bit = rng.randrange(len(content)), rng.randrange(8)
    content[place] ^= 1 << bit
    path.write_bytes(bytes(content))
    return f"{path.name}: bit {bit} of byte {place} of {len(content)} flipped"


def damage_once(stopped: Path, name: str, secret: bool, work: Work, rng: random.Random) -> str:
    """Damage one file of a stopped run, then ask for its statement and resume it.

    Either is refused in a sentence, or right: an ε that is not below the true one, and metrics as
    without the damage. A refusal must leave a folder that goes on once the file is restored.
    """
    folder = Path(tempfile.mkdtemp(dir=stopped.parent, prefix="damaged-"))
    shutil.copytree(stopped, folder, dirs_exist_ok=True)
    path = folder / "run" / name
    what = damage(path, rng)
    status = run(folder, ["privacy", "run", "--json"])
    expect(
        status in (0, 2) and "Traceback" not in said(folder), f"{what}: privacy {status}", folder
    )
    if status == 0:
        true = json.loads((stopped / "run" / "privacy.json").read_text())
        now = json.loads(said(folder))
        expect(
            now["server"]["epsilon"] >= true["server"]["epsilon"] - 1e-12
            and now["ledger"]["epsilon"] >= true["ledger"]["epsilon"] - 1e-12,
            f"{what}: a smaller epsilon is stated",
            folder,
        )
    arguments = RESUMED + (SECRET if secret else [])
    status = run(folder, arguments)
    expect(status in (0, 2) and "Traceback" not in said(folder), f"{what}: resume {status}", folder)
    if status == 2:
        shutil.copy(stopped / "run" / name, path)
        status = run(folder, arguments)
        expect(status == 0, f"{what}: does not go on when the file is restored", folder)
        what += ", refused"
    else:
        what += ", harmless"
    expect(work.result(folder) == work.reference, f"{what}: not as without the damage", folder)
    shutil.rmtree(folder)
    return what


def campaign(kills: int, disks: int, damages: int, seconds: float, seed: int, only: str) -> int:
    """All faults, one after the other, as far as the seconds reach; how many were played."""
    rng = random.Random(seed)
    home = Path(tempfile.mkdtemp(prefix="torture-"))
    home.chmod(0o755)
    started, played, failed = time.monotonic(), 0, []
    works = [(make(), weight) for make, weight in WORKS]
    works = [(work, weight) for work, weight in works if only in work.name]
    try:
        for work, _ in works:
            work.measure(home)
            print(f"{work.name}: {work.seconds:.2f} s without a fault", flush=True)
        chosen = [work for work, _ in works]
        weights = [weight for _, weight in works]
        faults: list[Callable[[], str]] = []
        picks = chosen + rng.choices(chosen, weights, k=max(0, kills - len(chosen)))
        faults += [lambda w=w: "killed: " + kill_once(w, home, rng) for w in picks[:kills]]
        picks = rng.choices(chosen, weights, k=disks)
        faults += [lambda w=w: "disk full: " + full_disk_once(w, home, rng) for w in picks]
        faults += [lambda w=w: read_only_once(w, home) for w in chosen if disks]
        faults += [lambda w=w: clock_once(w, home, rng) for w in chosen if disks]
        for secret, work in ((False, "train"), (True, "train secret")):
            matching = [w for w in chosen if w.name == work]
            if not matching or not damages:
                continue
            stopped = interrupted(home, secret)
            names = sorted(p.name for p in (stopped / "run").iterdir() if p.stat().st_size)
            faults += [
                lambda n=name, s=secret, w=matching[0], f=stopped: (
                    "damaged: " + damage_once(f, n, s, w, rng)
                )
                for name in islice(cycle(names), damages)
            ]
        for fault in faults:
            if time.monotonic() - started > seconds:
                print(f"stopped after {seconds:.0f} s with {len(faults) - played} faults to go")
                break
            try:
                print(f"{played + 1}/{len(faults)} {fault()}", flush=True)
            except (Lost, OSError, ValueError, KeyError) as error:
                failed.append(error)
                print(f"LOST: {type(error).__name__}: {error}", flush=True)
            played += 1
    finally:
        shutil.rmtree(home, ignore_errors=True)
    print(f"{played} faults, {len(failed)} losses, {time.monotonic() - started:.0f} s")
    return len(failed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--disks", type=int, default=40, help="full disks; 0: no locks, no clocks")
    parser.add_argument("--damages", type=int, default=120, help="of each of two stopped runs")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--only", default="", help="commands whose name contains this")
    given = parser.parse_args()
    print(f"seed {given.seed}")
    losses = campaign(
        given.kills, given.disks, given.damages, 60 * given.minutes, given.seed, given.only
    )
    sys.exit(1 if losses else 0)
