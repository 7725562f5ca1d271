"""One fault at a time: a kill, a full disk, a locked folder, a jumping clock, a damaged file."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import world
from commands import RESUMED, SECRET
from forked import Lost, begin, ended, expect, nothing, run, said
from works import Work, check_statement, trained

NOBODY = 65534
ENDINGS = ("completed", "stopped")


def kill_once(work: Work, home: Path, rng: random.Random) -> str:
    """kill −9 at a random moment, sometimes again while it recovers; then compare."""
    folder = work.fresh(home)
    for arguments in [work.arguments] + [work.again or work.arguments] * rng.randrange(3):
        child = begin(folder, arguments)
        time.sleep(rng.random() * work.seconds * 1.1)
        os.kill(child, signal.SIGKILL)  # a child that has ended is not yet waited for
        ended(child)
        work.check_outputs(folder)
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


def stop_at(round: int) -> Callable[[], None]:
    """SIGTERM once a round from this one on is evaluated: the run ends in order after it."""

    def noticed(row: dict[str, object]) -> None:
        if row["round"] >= round:  # type: ignore[operator]
            os.kill(os.getpid(), signal.SIGTERM)

    return lambda: world.after_metrics(noticed)


def killed_then_ended_once(home: Path, ending: str, seconds: float, rng: random.Random) -> str:
    """A secret run killed −9 at three moments, each time resumed, and then ended in one of two
    ways: what it states is what its journal says was released."""
    folder = Work("ended", [], trained).fresh(home)
    arguments = [*RESUMED, *SECRET]
    for _ in range(3):
        child = begin(folder, arguments)
        time.sleep(rng.random() * seconds)
        os.kill(child, signal.SIGKILL)
        ended(child)
    status = run(folder, arguments, stop_at(1) if ending == "stopped" else nothing)
    expect(status in (0, 143), f"a killed run ends with status {status}", folder)
    stated = world.written(folder / "run")
    check_statement(folder, stated)
    times = world.times_released(folder / "run")
    repeats = tuple(sorted(count - 1 for count in times.values() if count > 1))
    true = world.epsilon_of(stated, len(times), repeats)
    if abs(stated.server - true) > 1e-9 * true or stated.rounds != len(times):
        raise Lost(f"{ending}: {stated.server} is stated, {true} was released")
    if ending == "completed" and len(times) != 8:
        raise Lost(f"completed after {len(times)} rounds")
    shutil.rmtree(folder)
    return f"{ending}, {sum(times.values())} releases in {len(times)} rounds"


def interrupted(home: Path, secret: bool) -> Path:
    """The folder of a run that was stopped in its midst, in a folder of its own."""
    folder = Work("stopped", [], trained).fresh(home)
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
    folder = Path(tempfile.mkdtemp(dir=stopped.parent, prefix="damaged-"))
    shutil.copytree(stopped, folder, dirs_exist_ok=True)
    path = folder / "run" / name
    what = damage(path, rng)
    status = run(folder, ["privacy", "run", "--json"])
    expect(
        status in (0, 2) and "Traceback" not in said(folder), f"{what}: privacy {status}", folder
    )
    if status == 0:
        true = world.written(stopped / "run")
        now = world.read_statement(said(folder))
        expect(
            now.server >= true.server - 1e-12 and now.given >= true.given - 1e-12,
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
