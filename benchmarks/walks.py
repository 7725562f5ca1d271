"""How often does the call path change packages: in training, in prediction, in a deployed round?

``train`` goes from the command to the first local step of a run on a CSV file; ``predict`` is a
whole prediction of a CSV file; ``deployed`` is one round over two sites, with messages in memory.
Counted are the calls of functions whose package is not that of the call before. Calls of the three
modules at the top level (errors, checks, atomic) are no visits, and calls while a module is
imported are left out. The script runs on other trees too::

    python benchmarks/walks.py
    PYTHONPATH=old/src python benchmarks/walks.py --list train
    python benchmarks/walks.py --functions
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

import dpscaffold

ROOT = Path(dpscaffold.__file__).parent
TESTS = Path(__file__).resolve().parents[1] / "tests"
CONFIG = """
[data]
source = "csv"
path = "{path}"
user = "who"
label = "ill"
[plan]
rounds = 4
local_steps = 3
user_ratio = 0.5
[privacy]
epsilon = 2.0
"""

#: A function (not a module or the body of a class) keeps its variables in fast slots.
FUNCTION = 0x1

#: Where local steps are taken; their noise is still to be drawn.
STEPS = ("noised_query", "scripted_steps")


class Arrived(BaseException):
    """The walk is at its end."""


class Walk:
    """Records the package of every function of ours that is called, in order, up to the first call
    of one that ``until`` names."""

    def __init__(self, until: tuple[str, ...] = ()) -> None:
        self.until = until
        self.visits: list[tuple[str, str]] = []
        self.changes = 0
        self.counts: Counter[str] = Counter()
        self.imports = 0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """A profile function."""
        code = frame.f_code
        if code.co_name == "_find_and_load" and event in ("call", "return"):
            self.imports += 1 if event == "call" else -1
        if self.imports or event != "call" or not code.co_flags & FUNCTION:
            return
        path = Path(code.co_filename)
        if path.is_relative_to(ROOT):
            self._visit(path.relative_to(ROOT), code.co_qualname)
            if code.co_name in self.until:
                raise Arrived

    def _visit(self, place: Path, name: str) -> None:
        package = place.parts[0]
        if package.endswith(".py"):
            return
        if not self.visits or self.visits[-1][0] != package:
            self.changes += 1
        self.visits.append((package, f"{place}:{name}"))
        self.counts[name] += 1

    def follow(self, work: Callable[[], object]) -> Walk:
        """Do the work, or its part up to the end of the walk."""
        sys.setprofile(self)
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                work()
        except Arrived:
            pass
        finally:
            sys.setprofile(None)
        return self


@contextmanager
def csv_run() -> Iterator[Path]:
    """A folder with a table of ten users and its configuration."""
    stream = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "table.csv"
        rows = [
            f"user{u},{stream.normal():.4f},{stream.normal():.4f},{stream.integers(2)}"
            for u in range(10)
            for _ in range(40)
        ]
        table.write_text("who,age,dose,ill\n" + "\n".join(rows) + "\n", encoding="utf-8")
        config = Path(folder) / "run.toml"
        config.write_text(CONFIG.format(path=table), encoding="utf-8")
        yield config


def training(until: tuple[str, ...] = STEPS) -> Walk:
    """From the command to the first local step."""
    from dpscaffold.cli.train import train_command

    with csv_run() as config:
        out = config.parent / "out"
        return Walk(until).follow(lambda: train_command(config, out=out, as_json=True))


def prediction() -> Walk:
    """A whole prediction, for the table that a model was trained on."""
    from dpscaffold.cli.predict import predict_command
    from dpscaffold.cli.train import train_command

    with csv_run() as config, contextlib.redirect_stdout(io.StringIO()):
        run = config.parent / "out"
        train_command(config, out=run, as_json=True)
        table, found = config.parent / "table.csv", config.parent / "found.csv"
        return Walk().follow(lambda: predict_command(run, [table], out=found, as_json=True))


def deployed() -> Walk:
    """The second of three rounds over two sites: the first one has enrolment's work in it."""
    sys.path[0] = str(TESTS)  # in place of this folder, whose deploy.py would hide tests/deploy
    from deploy.test_deployed import deployment
    from deploy.world import World
    from small import federation

    from dpscaffold import Gaussian

    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        privacy = Gaussian(clip=1.0, noise=5.0)
        data = federation((9, 12))
        world = World(place / "sites", privacy=privacy, data=data, user_ratio=1.0, rounds=3)
        run = deployment(world, place / "run")
        whole = Walk().follow(lambda: run.run(world.names, resume=False))
    return one_round(whole)


def one_round(whole: Walk, marker: str = "Sites.gather") -> Walk:
    """The part of a walk from the second call of ``marker`` up to the third."""
    places = [i for i, (_, where) in enumerate(whole.visits) if where.endswith(f":{marker}")]
    found = Walk()
    for _, where in whole.visits[places[1] : places[2]]:
        place, _, name = where.partition(":")
        found._visit(Path(place), name)
    return found


WALKS: dict[str, Callable[[], Walk]] = {
    "train": training,
    "predict": prediction,
    "deployed": deployed,
}


def main() -> None:
    """Print the counts."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--list", choices=sorted(WALKS), help="print every change of package")
    options.add_argument(
        "--functions", action="store_true", help="print the functions too, once each"
    )
    chosen = options.parse_args()
    os.environ.setdefault("DPSCAFFOLD_CACHE", tempfile.gettempdir())
    for name in [chosen.list] if chosen.list else WALKS:
        found = WALKS[name]()
        if chosen.functions:
            walk = training(until=()) if name == "train" else found
            print("\n".join(dict.fromkeys(where for _, where in walk.visits)), end="\n\n")
        before = ""
        for package, where in found.visits if chosen.list else ():
            if package != before:
                print(where)
            before = package
        print(f"{found.changes} changes of package: {name}")
        if name == "train":
            for counted in ("Setting.__post_init__", "Records.validate", "Plan.__post_init__"):
                print(f"{found.counts[counted]} × {counted}")


if __name__ == "__main__":
    main()
