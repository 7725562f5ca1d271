"""Plant mistakes at random, and compare the share that the tests catch with that of 0.2.0.

``python tests/mutants/random_mistakes.py`` plants mistakes in each package of the present code, as
many as were tried in that of 0.2.0 (``planting.py`` says which), one at a time and in a copy, and
runs the tests of that package (``packages.toml``). A mistake is caught where a test fails, breaks
or hangs. The tests of one mistake stop after 30 s of processor time; what they have not noticed by
then is missed. Tests that fail without any mistake are left out. The exit status is 1 where a
package's share lies below that of 0.2.0 (``share-0.2.0.json``).

``--out FILE`` writes the share to a file, mistake by mistake; what the file already holds is not
tried again. The share of 0.2.0 was made so, with its tree as ``--tree``: nothing is compared then.

Some mistakes change no behaviour, and no test can catch those; so only shares are compared.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from mutants.planting import Mistake, chosen  # noqa: E402

ROOT = HERE.parents[1]
SHARE = HERE / "share-0.2.0.json"
PACKAGES = HERE / "packages.toml"
SOURCE = Path("src/dpscaffold")
#: What the copy holds of the tree.
PARTS = ("src", "tests", "docs", "examples", "benchmarks", "deploy")
SEED, EACH = 20, 10
#: Seconds of processor time after which no further test of a mistake starts, and after which they
#: are taken to loop for ever; seconds of any time after which they are taken to wait for ever.
LIMIT, LOOPING, HANGING = 30, 90, 600
#: Memory that the tests of a mistake may take, in bytes: a mistake may ask for all there is.
MEMORY = 16 * 1024**3
PRELOADED = ("torch", "torch.func", "scipy.stats", "scipy.optimize", "hypothesis", "pydantic")
PRELOADED += ("pytest", "sklearn.linear_model", "cryptography.x509", "pyarrow")


class _Limit:
    """A plugin of pytest: after so much processor time no test starts; which tests failed."""

    def __init__(self, left_out: Sequence[str], seconds: float) -> None:
        self.left_out, self.seconds = set(left_out), seconds
        self.failed: list[str] = []
        self.ran = 0
        self.enough = False

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid not in self.left_out]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.ran += report.when == "call"
        if report.failed:
            self.failed.append(report.nodeid)

    def pytest_runtest_logfinish(self, nodeid: str, location: object) -> None:
        self.enough = _used() > self.seconds

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: object) -> bool | None:
        return True if self.enough else None  # taken for done: nothing of it runs


def _used() -> float:
    whose = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    found = [resource.getrusage(who) for who in whose]
    return sum(one.ru_utime + one.ru_stime for one in found)


def _tested(copy: Path, arguments: list[str], left_out: list[str], clean: bool) -> None:
    """Run pytest in this process, which is new and has loaded nothing of the package.

    Only the run without any mistake writes compiled code: the next ones take it over.
    """
    output = os.open(copy / "said.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.setsid()
    os.chdir(copy)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (LOOPING, LOOPING))
    os.environ |= {
        "PYTHONPATH": str(copy / "src"),
        "PYTHONDONTWRITEBYTECODE": "" if clean else "1",
        "HYPOTHESIS_PROFILE": "no shrinking",
        "HOME": str(copy),
    }
    sys.path.insert(0, str(copy / "src"))
    sys.dont_write_bytecode = not clean
    limit = _Limit(left_out, LIMIT + _used())
    options = ["-q", "-p", "no:cacheprovider", "-m", "not slow and not processes"]
    status = int(pytest.main([*options, *arguments], plugins=[limit]))
    told = {"status": status, "failed": limit.failed, "ran": limit.ran, "cut": limit.enough}
    (copy / "told.json").write_text(json.dumps(told), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)


def run_tests(
    copy: Path, arguments: Sequence[str], left_out: Sequence[str], clean: bool = False
) -> dict[str, Any] | None:
    """What pytest tells: its status, which tests failed, how many ran. None: hangs, or dies."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    told = copy / "told.json"
    told.unlink(missing_ok=True)
    child = context.Process(target=_tested, args=(copy, [*arguments], [*left_out], clean))
    child.start()
    child.join(HANGING)
    assert child.pid  # it has started
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)  # the tests, and whatever they have started
    child.kill()
    child.join()
    return json.loads(told.read_text(encoding="utf-8")) if told.is_file() else None


@contextmanager
def copied(tree: Path) -> Iterator[Path]:
    """A copy of a tree, to plant in."""
    with tempfile.TemporaryDirectory(prefix="random-mistakes-") as folder:
        copy = Path(folder)
        for part in PARTS:
            if (tree / part).is_dir():
                ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
                shutil.copytree(tree / part, copy / part, ignore=ignored)
        for file in (path for path in tree.iterdir() if path.is_file() and path.name != ".git"):
            shutil.copy(file, copy)
        yield copy


def files_of(copy: Path, patterns: Sequence[str], file: str) -> list[str]:
    """The test files of a package in their order; those that name the file's module come first."""
    found: dict[str, None] = {}
    for pattern in patterns:
        for path in sorted(copy.glob(pattern)):
            files = sorted(path.rglob("test_*.py")) if path.is_dir() else [path]
            found |= dict.fromkeys(one.relative_to(copy).as_posix() for one in files)
    dotted = "dpscaffold." + file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    parent, _, last = dotted.rpartition(".")
    names = (dotted, f"from {parent} import {last}\n")

    def names_it(test: str) -> bool:
        text = (copy / test).read_text(encoding="utf-8")
        return any(name in text for name in names)

    return sorted(found, key=lambda test: not names_it(test))


def attempt(
    copy: Path, mistake: Mistake, patterns: Sequence[str], left_out: Sequence[str]
) -> dict[str, Any]:
    """Plant a mistake, run the tests, and put the source back."""
    path, started = copy / SOURCE / mistake.file, time.monotonic()
    text = path.read_text(encoding="utf-8")
    stamp = path.stat()
    path.write_text(mistake.planted(text), encoding="utf-8")
    # Python takes compiled code for current by its time: never that of the source as it was.
    os.utime(path, (stamp.st_atime, stamp.st_mtime + 10))
    try:
        told = run_tests(copy, ["-x", *files_of(copy, patterns, mistake.file)], left_out)
    finally:
        path.write_text(text, encoding="utf-8")
        os.utime(path, (stamp.st_atime, stamp.st_mtime))
    caught = told is None or told["status"] != 0
    by = "hangs or dies" if told is None else next(iter(told["failed"]), "cannot be loaded")
    return {
        "file": mistake.file,
        "line": mistake.line,
        "kind": mistake.kind,
        "before": mistake.before,
        "after": mistake.after,
        "caught": caught,
        "by": by if caught else None,
        "seconds": round(time.monotonic() - started, 1),
    }


def measured(
    tree: Path, out: Path, only: Sequence[str], then: dict[str, Any] | None
) -> dict[str, Any]:
    """The share that the tests of a tree catch, written as it grows; all packages in turn. As many
    mistakes are planted as were for the share that it is to be compared with."""
    table = tomllib.loads(PACKAGES.read_text(encoding="utf-8"))
    source = tree / SOURCE
    packages = [path.name for path in sorted(source.iterdir()) if (path / "__init__.py").is_file()]
    if lacking := [name for name in packages if name not in table]:
        raise SystemExit(f"tests/mutants/packages.toml has no tests of {', '.join(lacking)}")
    known: dict[str, Any] = {"seed": SEED, "packages": {}}
    if out.is_file():
        known = json.loads(out.read_text(encoding="utf-8"))
    plan = {}
    for name in only or packages:
        tried = 0 if then is None else _then(then, table[name].get("was", [name]))[1]
        plan[name] = chosen(source, name, tried or EACH, SEED)
    with copied(tree) as copy:
        for number in range(max(map(len, plan.values()))):
            for name, mistakes in plan.items():
                so_far = known["packages"].setdefault(name, {"left_out": None, "mistakes": []})
                if number >= len(mistakes) or len(so_far["mistakes"]) > number:
                    continue
                patterns = table[name]["tests"]
                if so_far["left_out"] is None:
                    so_far |= _without(copy, patterns)
                one = attempt(copy, mistakes[number], patterns, so_far["left_out"])
                while one["by"] and _fails_anyway(copy, one["by"], so_far):
                    one = attempt(copy, mistakes[number], patterns, so_far["left_out"])
                so_far["mistakes"].append(one)
                print(f"{'caught' if one['caught'] else 'MISSED'} {one['seconds']:6.1f} s  "
                      f"{one['file']}:{one['line']} {one['kind']}", flush=True)  # fmt: skip
                _write(out, known)
    return known


def _without(copy: Path, patterns: Sequence[str]) -> dict[str, Any]:
    """Which tests fail without any mistake, and how many run within the limit."""
    told = run_tests(copy, files_of(copy, patterns, ""), (), clean=True)
    if told is None or not told["ran"]:
        raise SystemExit(f"without any mistake no test runs: {(copy / 'said.txt').read_text()}")
    return {"left_out": sorted(set(told["failed"])), "ran": told["ran"], "all_ran": not told["cut"]}


def _fails_anyway(copy: Path, test: str, so_far: dict[str, Any]) -> bool:
    """Whether a test fails without any mistake too; it is left out from then on. The first run may
    not have come to it."""
    if so_far["all_ran"] or "::" not in test:
        return False
    told = run_tests(copy, [test], ())
    if told is not None and not told["failed"]:
        return False
    so_far["left_out"].append(test)
    return True


def _write(out: Path, known: dict[str, Any]) -> None:
    for one in known["packages"].values():
        tried = len(one["mistakes"])
        one["caught"] = sum(mistake["caught"] for mistake in one["mistakes"])
        one["share"] = round(one["caught"] / tried, 3) if tried else None
    new = out.with_suffix(".new")
    new.write_text(json.dumps(known, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    new.replace(out)


def lower(now: dict[str, Any], then: dict[str, Any]) -> list[str]:
    """The packages whose share lies below that of the packages that they come from."""
    table = tomllib.loads(PACKAGES.read_text(encoding="utf-8"))
    found = []
    for name, package in now["packages"].items():
        caught, tried = _then(then, table[name].get("was", [name]))
        if tried and package["caught"] * tried < caught * len(package["mistakes"]):
            found.append(f"{name}: {package['caught']} of {len(package['mistakes'])} caught, "
                         f"and {caught} of {tried} in 0.2.0")  # fmt: skip
    return found


def _then(then: dict[str, Any], names: Sequence[str]) -> tuple[int, int]:
    """How many mistakes in these packages of 0.2.0 were caught, and of how many."""
    came = [then["packages"][name] for name in names if name in then["packages"]]
    return sum(one["caught"] for one in came), sum(len(one["mistakes"]) for one in came)


def main() -> int:
    """Measure the present code and compare its share, or measure another tree."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("packages", nargs="*", help="these packages only")
    parser.add_argument("--tree", type=Path, default=ROOT)
    parser.add_argument("--out", type=Path, help="write the share here, and go on from what it has")
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    then = None
    if given.tree.resolve() == ROOT:
        then = json.loads(SHARE.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        out = given.out or Path(folder) / "share.json"
        now = measured(given.tree, out, given.packages, then)
    if then is None:
        return 0
    missed = lower(now, then)
    print("\n".join(missed) if missed else "every package catches at least the share of 0.2.0")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
