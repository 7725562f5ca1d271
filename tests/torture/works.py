"""The commands that write, each with how to run it again and how to tell that nothing was lost."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import world
from forked import Lost, expect, run, said

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
#: Two sites that mask their sums.
MAIL = """
[schema]
features = ["age", "dose"]
label = "ill"
classes = ["0", "1"]
[privacy]
epsilon = 0.4
delta = 1e-6
[sums]
members = ["north", "south"]
colluders = 0
"""
ROWS = ["site,age,dose,ill"] + [
    f"{user},{(user * 7 + k) % 5 + 20},{k % 3}.5,{k % 2}" for user in range(6) for k in range(25)
]
#: A dataset of two files that is published in a folder of this machine.
DATASET, MIRROR = "torture", f"file://{tempfile.gettempdir()}/dpscaffold-torture-{os.getpid()}"
PUBLISHED = {"one.bin": bytes(range(256)) * 3000 + b"\n", "two.bin": b"\0" * 1000 + b"all of it\n"}
#: What may differ between two runs of one configuration: times, and the ε shown next to a round
#: that is run again, which counts the rounds after it that were released before the fault.
TIMES = ("seconds", "epsilon_server")

Result = Callable[[Path], object]


def as_it_is(folder: Path) -> None:
    """Nothing is needed."""


@dataclass
class Work:
    """A command that writes, how to run it again after a fault, and how to tell that all is well.

    ``prepare`` makes what it needs in an empty folder, once; ``result`` reads what it left, in a
    form that is equal whenever nothing was lost (by default, that it is all there); ``outputs`` are
    the files that it writes: under those names there is never a part of one. It is killed
    ``weight`` times for each time that a plotting one is.
    """

    name: str
    arguments: list[str]
    result: Result | None = None
    again: list[str] = field(default_factory=list)
    prepare: Callable[[Path], None] = as_it_is
    outputs: tuple[str, ...] = ()
    weight: int = 1
    seconds: float = 0.0
    reference: object = None
    base: Path | None = None

    def fresh(self, home: Path) -> Path:
        """A new folder with what the command needs."""
        folder = Path(tempfile.mkdtemp(dir=home, prefix=self.name.replace(" ", "-") + "-"))
        folder.chmod(0o755)
        if self.base is not None:
            shutil.copytree(self.base, folder, dirs_exist_ok=True)
            return folder
        (folder / "run.toml").write_text(CONFIG)
        (folder / "tune.toml").write_text(CONFIG + TUNE)
        (folder / "sites.toml").write_text(FEDERATION)
        (folder / "mail.toml").write_text(MAIL)
        (folder / "rows.csv").write_text("\n".join(ROWS) + "\n")
        self.prepare(folder)
        return folder

    def measure(self, home: Path) -> None:
        """Run it without a fault, twice: once what it computes is cached here, children inherit
        it, and the moments of a kill fall into the writing."""
        self.base = self.fresh(home)
        for _ in range(2):
            folder = self.fresh(home)
            started = time.monotonic()
            status = run(folder, self.arguments)
            self.seconds = time.monotonic() - started
            expect(status == 0, f"{self.name} fails without any fault", folder)
            self.check_outputs(folder)
            self.reference = self.left(folder)
            if not (folder / "run").exists():
                break
            world.spent(folder / "run")

    def check_outputs(self, folder: Path) -> None:
        """Whatever stands under its final name is whole."""
        for path in (folder / name for name in self.outputs):
            whole = not path.exists() or is_whole(path)
            expect(whole, f"{self.name} left a part of {path.name}", folder)

    def left(self, folder: Path) -> object:
        """What the command left, to be compared."""
        if self.result is not None:
            return self.result(folder)
        return [(folder / name).stat().st_size > 0 for name in self.outputs]

    def recover(self, folder: Path) -> None:
        """Run it again after a fault, until it is done; then compare."""
        self.check_outputs(folder)
        status = run(folder, self.again or self.arguments)
        answer = said(folder)
        expect(status in (0, 2), f"{self.name} does not recover (status {status})", folder)
        try:  # status 2 is a refusal in a sentence: it must have its result already
            found = self.left(folder)
        except OSError as error:
            found = error
        if found != self.reference:
            raise Lost(f"{self.name} is not as without the fault ({found}), {status}:\n{answer}")
        self.check_outputs(folder)


def is_whole(path: Path) -> bool:
    """Whether a file ends as its kind does."""
    if path.is_dir():
        return any(path.iterdir())
    content = path.read_bytes()
    endings = {".png": b"IEND\xaeB`\x82", ".html": b"</html>\n", ".parquet": b"PAR1"}
    if path.suffix in endings:
        return content.endswith(endings[path.suffix])
    if path.suffix == ".pt2":
        return zipfile.is_zipfile(path)
    if path.suffix == ".toml":
        return bool(tomllib.loads(content.decode()))
    if path.suffix == ".json":
        return bool(json.loads(content))
    return content.endswith(b"\n")


def finished(folder: Path) -> tuple[world.Written, dict[int, int]]:
    """What a completed run states, which is the answer of the command too, and how often its rounds
    were released; its model is there, whole."""
    stated = world.written(folder / "run")
    check_statement(folder, stated)
    expect(world.has_model(folder / "run"), "the summary does not name the model", folder)
    return stated, world.times_released(folder / "run")


def trained(folder: Path) -> object:
    """A completed seeded run: its metrics and statement; checks that it states what it holds."""
    (stated, released), metrics = finished(folder), world.metrics(folder / "run")
    expect(max(released.values()) == 1, "a seeded run has counted a round twice", folder)
    rows = [{k: v for k, v in line.items() if k not in TIMES} for line in metrics]
    return rows, metrics[-1]["epsilon_server"], stated.without_journal


def trained_secretly(folder: Path) -> object:
    """A completed secret run: every release is in its statement, never below the plan's."""
    stated, released = finished(folder)
    whole = set(released) == set(range(1, 9)) and stated.rounds == 8
    expect(whole, f"rounds are missing: {released}", folder)
    expect(stated.server >= stated.planned - 1e-12, "less than the plan's epsilon", folder)
    counted = sum(released.values()) == 8 or stated.server > stated.planned
    expect(counted, "rounds were released twice and not counted", folder)
    return [row["round"] for row in world.metrics(folder / "run")]


def reserved(folder: Path) -> object:
    """A secret run on a budget file: as above, and what it reserved covers what it states."""
    expect(budget_opened(folder) == 40.0, "the budget is not the one that was opened", folder)
    check_granted(folder, world.written(folder / "run").server)
    return trained_secretly(folder)


def check_granted(folder: Path, stated: float) -> None:
    """What the budget file has granted covers what is stated."""
    granted, _ = world.budget_spent(folder / "budget.jsonl")
    expect(granted >= stated - 1e-9, f"{granted} is reserved, {stated} is stated", folder)


def audited(folder: Path) -> object:
    """One run of an audit, killed and played again elsewhere: what the budget file has granted
    covers what all its folders state, and one of them is whole."""
    places = [place for place in folder.glob("audited*") if world.is_readable(place)]
    check_granted(folder, sum(world.spent(place).epsilon["server"] or 0.0 for place in places))
    return any(world.is_complete(place) for place in places)


def check_statement(folder: Path, stated: world.Written) -> None:
    """The written statement is the answer of the command."""
    status = run(folder, ["privacy", "run", "--json"])
    expect(status == 0, "the statement of a finished run cannot be made", folder)
    same = world.read_statement(said(folder)) == stated
    expect(same, "privacy.json is not what dpscaffold privacy says", folder)


def prepared(folder: Path) -> object:
    """The digest of stored data; whatever is there must load whole."""
    return world.digest_of(folder / "stored")


def done(folder: Path, *commands: list[str]) -> None:
    """Commands that must succeed."""
    for arguments in commands:
        expect(run(folder, arguments) == 0, f"{' '.join(arguments)} fails", folder)


def typed(*commands: str) -> Callable[[Path], None]:
    """What makes a folder ready by these commands."""
    return lambda folder: done(folder, *map(shlex.split, commands))


def published(folder: Path) -> None:
    """Something to download, and the catalogue's entry for it, which children inherit."""
    place = Path(MIRROR.removeprefix("file://"))
    place.mkdir(exist_ok=True)
    for name, content in PUBLISHED.items():
        (place / name).write_bytes(content)
    world.publish(DATASET, PUBLISHED)


def downloaded(folder: Path) -> object:
    """Whether every file came whole."""
    place = folder / "fetched" / DATASET
    return {name: (place / name).read_bytes() == content for name, content in PUBLISHED.items()}


def onnx_inputs(folder: Path) -> object:
    """What an exported model takes; it must be one."""
    import onnx

    model = onnx.load(folder / "model.onnx")
    onnx.checker.check_model(model)
    return [one.name for one in model.graph.input]


def same(*names: str) -> Result:
    """The bytes of these files."""
    return lambda folder: [(folder / name).read_bytes() for name in names]


def keys_made(folder: Path) -> object:
    """Which files there are; keys are new every time, and what begins with a dot is left over."""
    found = (path.relative_to(folder) for path in (folder / "keys").rglob("*"))
    return sorted(str(path) for path in found if not path.name.startswith("."))


def budget_opened(folder: Path) -> object:
    """A budget that can be read."""
    status = run(folder, ["privacy", "budget.jsonl", "--json"])
    expect(status == 0, "the budget file cannot be read", folder)
    return world.budget_total(folder / "budget.jsonl")[0]
