"""Plant mistakes in a copy of the source, one at a time, and see that the named tests notice.

``python tests/mutants/runner.py`` runs the whole list (:file:`mutants.toml`); ``--only WORD`` runs
those whose name holds the word. The working tree is never touched: every worker has a copy of its
own in a temporary folder. First the tests run without any mistake and must pass. Then each mistake
must make its tests fail. The exit status is 1 where one survives or could not be planted.
"""

from __future__ import annotations

import argparse
import compileall
import multiprocessing
import os
import queue
import shutil
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIST = Path(__file__).with_name("mutants.toml")
SOURCE = Path("src/dpscaffold")
#: What the copies hold of the tree.
PARTS = ("src", "tests", "docs", "examples", "benchmarks")
#: Seconds that the tests of one mistake may take, and those of all without any.
PATIENCE, LONGER = 300, 1800
#: What every test loads, and takes long to: loaded once, and inherited by all processes of tests.
PRELOADED = ("torch", "torch.func", "scipy.stats", "scipy.optimize", "hypothesis", "pydantic")
#: What pytest exits with where a test failed; everything else is no answer.
FAILED = 1


@dataclass(frozen=True)
class Mutant:
    """One mistake: in ``file`` of the package, the text ``old`` becomes ``new``.

    ``tests`` are the node ids that must notice, and ``why`` says what the mistake would cost.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    why: str

    def planted(self, text: str) -> str:
        """The source with the mistake in it."""
        if (found := text.count(self.old)) != 1:
            raise ValueError(f"{self.file} holds the text {found} times, and it must be once")
        return text.replace(self.old, self.new)


@dataclass(frozen=True)
class Outcome:
    """What came of a mistake: ``killed``, ``SURVIVED`` or what went wrong."""

    mutant: Mutant
    verdict: str
    seconds: float
    said: str = ""


def read_list(path: Path = LIST) -> list[Mutant]:
    """The mistakes, in the order of the list."""
    tables = tomllib.loads(path.read_text(encoding="utf-8"))["mutant"]
    return [Mutant(**{**table, "tests": tuple(table["tests"])}) for table in tables]


@contextmanager
def copies(count: int) -> Iterator[queue.Queue[Path]]:
    """This many copies of the tree, compiled, each to be taken and given back."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        found: queue.Queue[Path] = queue.Queue()
        for number in range(count):
            copy = Path(folder) / str(number)
            for part in PARTS:
                ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
                shutil.copytree(ROOT / part, copy / part, ignore=ignored)
            for file in (path for path in ROOT.iterdir() if path.is_file()):
                shutil.copy(file, copy)
            compileall.compile_dir(copy / "src", quiet=2)
            found.put(copy)
        yield found


def run_tests(
    copy: Path, tests: Sequence[str], *options: str, patience: int = PATIENCE
) -> tuple[int | None, str]:
    """pytest in a copy, on its own source: what it exits with (None: not in time), and its end."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    said = copy / "said.txt"
    child = context.Process(target=_tested, args=(copy, [*options, *tests], said))
    child.start()
    child.join(patience)
    status = child.exitcode
    if status is None:
        child.kill()
        child.join()
    return status, said.read_text(encoding="utf-8", errors="replace")[-3000:]


def _tested(copy: Path, arguments: list[str], said: Path) -> None:
    """Run pytest in this process, which is a new one that has loaded nothing of the package."""
    output = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.chdir(copy)
    os.environ |= {
        "PYTHONPATH": str(copy / "src"),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HYPOTHESIS_PROFILE": "no shrinking",
    }
    sys.path.insert(0, str(copy / "src"))
    sys.dont_write_bytecode = True
    sys.exit(int(pytest.main(["-q", "-p", "no:cacheprovider", *arguments])))


def judge(mutant: Mutant, places: queue.Queue[Path]) -> Outcome:
    """Plant a mistake, run its tests, and put the source back."""
    copy, started = places.get(), time.monotonic()
    path = copy / SOURCE / mutant.file
    whole, stamp = path.read_text(encoding="utf-8"), path.stat()
    try:
        path.write_text(mutant.planted(whole), encoding="utf-8")
        # Python takes compiled code for current by its time: never that of the source as it was.
        os.utime(path, (stamp.st_atime, stamp.st_mtime + 10))
        status, said = run_tests(copy, mutant.tests, "-x")
        verdict = {0: "SURVIVED", FAILED: "killed", None: "TIMED OUT"}.get(status, "BROKEN")
    except ValueError as error:
        verdict, said = "NOT PLANTED", str(error)
    finally:
        path.write_text(whole, encoding="utf-8")
        os.utime(path, (stamp.st_atime, stamp.st_mtime))
        places.put(copy)
    return Outcome(mutant, verdict, time.monotonic() - started, said)


def without_any(mutants: Sequence[Mutant], places: queue.Queue[Path], workers: int) -> str:
    """What fails without a mistake, or the empty string."""
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    copy = places.get()
    parallel = ("-n", str(workers)) if len(tests) > 8 else ()
    try:
        status, said = run_tests(copy, tests, *parallel, patience=LONGER)
    finally:
        places.put(copy)
    return "" if status == 0 else said


def main() -> int:
    """Run the list, print a line for each mistake and say what survived."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", default="", help="mistakes whose name holds this word")
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    started = time.monotonic()
    os.environ["OMP_NUM_THREADS"] = "1"
    mutants = [mutant for mutant in read_list() if given.only in mutant.name]
    if not mutants:
        print(f"no mistake is named with {given.only!r}")
        return 2
    with copies(given.workers) as places:
        if failing := without_any(mutants, places, given.workers):
            print(f"the tests fail without any mistake:\n{failing}")
            return 2
        print(f"{len(mutants)} mistakes; their tests pass without them "
              f"({time.monotonic() - started:.0f} s)")  # fmt: skip
        with ThreadPoolExecutor(given.workers) as pool:
            outcomes = list(_shown(pool.map(lambda one: judge(one, places), mutants)))
    bad = [outcome for outcome in outcomes if outcome.verdict != "killed"]
    for outcome in bad:
        print(f"\n{outcome.mutant.name}: {outcome.verdict}\n{outcome.mutant.why}\n{outcome.said}")
    print(f"{len(outcomes) - len(bad)} of {len(outcomes)} killed, in "
          f"{(time.monotonic() - started) / 60:.1f} minutes")  # fmt: skip
    return 1 if bad else 0


def _shown(outcomes: Iterator[Outcome]) -> Iterator[Outcome]:
    for outcome in outcomes:
        print(f"{outcome.verdict:<12} {outcome.seconds:5.1f} s  {outcome.mutant.name}", flush=True)
        yield outcome


if __name__ == "__main__":
    sys.exit(main())
