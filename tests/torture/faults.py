"""One fault at a time: a kill, a full disk, a locked folder, a jumping clock, a damaged file."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import world
from commands import RESUMED, SECRET
from forked import begin, ended, expect, nothing, run, said
from works import Work, check_statement

NOBODY = 65534
ENDINGS = ("completed", "stopped")


@contextmanager
def removed(folder: Path) -> Iterator[Path]:
    """A folder that is removed where nothing was lost in it."""
    yield folder
    shutil.rmtree(folder)


def kill(folder: Path, arguments: list[str], seconds: float) -> None:
    """kill −9 after so long."""
    child = begin(folder, arguments)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)  # a child that has ended is not yet waited for
    ended(child)


def kill_once(work: Work, home: Path, rng: random.Random) -> str:
    """A kill at a random moment, sometimes again while it recovers; then compare."""
    with removed(work.fresh(home)) as folder:
        for arguments in [work.arguments] + [work.again or work.arguments] * rng.randrange(3):
            kill(folder, arguments, rng.random() * work.seconds * 1.1)
            work.check_outputs(folder)
        work.recover(folder)
    return work.name


def full_disk_once(work: Work, home: Path, rng: random.Random) -> str:
    """No file can grow beyond some size: short writes and errors in their midst."""
    limit = int(2 ** rng.uniform(0, 17))

    def small() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    with removed(work.fresh(home)) as folder:
        run(folder, work.arguments, small)
        work.recover(folder)
    return f"{work.name}, at {limit} bytes"


def read_only_once(work: Work, home: Path, rng: random.Random) -> str:
    """A folder that may not be written: refused in a sentence, nothing changed."""

    def locked() -> None:
        if os.geteuid() == 0:  # root may write anywhere
            os.setgid(NOBODY)
            os.setuid(NOBODY)

    with removed(work.fresh(home)) as folder:
        (folder / "said").touch()
        (folder / "said").chmod(0o666)
        before = set(folder.iterdir())
        folder.chmod(0o555)
        status = run(folder, work.arguments, locked)
        fine = status not in (0, 70) and "Traceback" not in said(folder)
        expect(fine, f"{work.name} in a read-only folder: status {status}", folder)
        folder.chmod(0o755)
        expect(set(folder.iterdir()) == before, f"{work.name} wrote into it", folder)
        work.recover(folder)
    return f"{work.name}, read-only"


def clock_once(work: Work, home: Path, rng: random.Random) -> str:
    """The clock jumps by years, both ways, at every look."""
    real, real_ns = time.time, time.time_ns

    def jumping() -> None:
        time.time = lambda: real() + rng.uniform(-3e8, 3e8)
        time.time_ns = lambda: real_ns() + int(rng.uniform(-3e17, 3e17))

    with removed(work.fresh(home)) as folder:
        expect(run(folder, work.arguments, jumping) == 0, f"{work.name} fails by the clock", folder)
        same = work.left(folder) == work.reference
        expect(same, f"{work.name} depends on the clock", folder)
    return f"{work.name}, clock"


def stop_at(round: int) -> Callable[[], None]:
    """SIGTERM once a round from this one on is evaluated: the run ends in order after it."""

    def noticed(row: dict[str, object]) -> None:
        if row["round"] >= round:  # type: ignore[operator]
            os.kill(os.getpid(), signal.SIGTERM)

    return lambda: world.after_metrics(noticed)


def killed_then_ended_once(home: Path, ending: str, seconds: float, rng: random.Random) -> str:
    """A secret run killed −9 at three moments, each time resumed, and then ended in one of two
    ways: what it states is what its journal says was released."""
    arguments = [*RESUMED, *SECRET]
    with removed(Work("ended", []).fresh(home)) as folder:
        for _ in range(3):
            kill(folder, arguments, rng.random() * seconds)
        status = run(folder, arguments, stop_at(1) if ending == "stopped" else nothing)
        expect(status in (0, 143), f"a killed run ends with status {status}", folder)
        stated, times = world.written(folder / "run"), world.times_released(folder / "run")
        check_statement(folder, stated)
        repeats = tuple(sorted(count - 1 for count in times.values() if count > 1))
        true = world.epsilon_of(stated, len(times), repeats)
        fits = abs(stated.server - true) <= 1e-9 * true and stated.rounds == len(times)
        expect(fits, f"{ending}: {stated.server} is stated, {true} was released", folder)
        whole = ending == "stopped" or len(times) == 8
        expect(whole, f"completed after {len(times)} rounds", folder)
    return f"{ending}, {sum(times.values())} releases in {len(times)} rounds"


def interrupted(home: Path, secret: bool) -> Path:
    """The folder of a run that was stopped in its midst, in a folder of its own."""
    folder = Work("stopped", []).fresh(home)
    options = SECRET if secret else []
    first = ["train", "run.toml", "--out", "run", *options]
    status = run(folder, first, stop_at(5))
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
    arguments = RESUMED + (SECRET if secret else [])
    with removed(Path(tempfile.mkdtemp(dir=stopped.parent, prefix="damaged-"))) as folder:
        shutil.copytree(stopped, folder, dirs_exist_ok=True)
        path = folder / "run" / name
        what = damage(path, rng)
        if answered(folder, ["privacy", "run", "--json"], what):
            true, now = world.written(stopped / "run"), world.read_statement(said(folder))
            fine = now.server >= true.server - 1e-12 and now.given >= true.given - 1e-12
            expect(fine, f"{what}: a smaller epsilon is stated", folder)
        harmless = answered(folder, arguments, what)
        if not harmless:
            shutil.copy(stopped / "run" / name, path)
            expect(answered(folder, arguments, what), f"{what}: restored, and refused", folder)
        same = work.left(folder) == work.reference
        expect(same, f"{what}: not as without the damage", folder)
    return f"{what}, {'harmless' if harmless else 'refused'}"


def answered(folder: Path, arguments: list[str], what: str) -> bool:
    """Whether a command is answered; otherwise it is refused in a sentence."""
    status = run(folder, arguments)
    fine = status in (0, 2) and "Traceback" not in said(folder)
    expect(fine, f"{what}: {arguments[0]} {status}", folder)
    return status == 0
