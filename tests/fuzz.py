"""``python tests/fuzz.py [COUNT] [SEED] [FIRST]``: mutated configurations, tables and command
lines; none may end in a traceback or take over 20 s to answer.

Case n of a seed is always the same, so what went wrong can be run again by itself
(``python tests/fuzz.py 1 SEED n``). A few hundred are run by the tests. Cases run in child
processes of limited memory: a crash of a child is a failure too.
"""

from __future__ import annotations

import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from fuzzing import arguments, configurations, tables
from fuzzing.watching import Overdue, sentence_of, watched

#: What a case mutates, by its number modulo 10.
KINDS: tuple[Callable[[random.Random, Path], str], ...] = (
    *(configurations.attempt for _ in range(6)),
    *(tables.attempt for _ in range(3)),
    arguments.attempt,
)
#: Cases that one child runs; its folder is fresh.
CHUNK = 500
MEMORY = 8 << 30


def case(seed: int, number: int, folder: Path) -> str | None:
    """What went wrong in one case, or None."""
    rng = random.Random(f"{seed}-{number}")
    kind = KINDS[number % len(KINDS)]
    told: list[str] = []
    try:
        with watched():
            told.append(kind(rng, folder))
        return None
    except Overdue as late:
        what = f"over {late.seconds:g} s"
    except Exception as error:
        if sentence_of(error) is not None:
            return None
        what = f"{type(error).__name__}: {error}"
    shown = getattr(kind, "last", ["?"])[-1]
    return f"case {number} of seed {seed}: {what} of {shown}"[:600]


def chunk(seed: int, first: int, count: int, say: Callable[[str], None]) -> None:
    """Some cases, in a folder of their own."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        back = Path.cwd()
        os.chdir(folder)
        try:
            for number in range(first, first + count):
                wrong = case(seed, number, folder)
                if wrong:
                    say(wrong)
        finally:
            os.chdir(back)


def fuzz(count: int, seed: int = 0, first: int = 0) -> list[str]:
    """What went wrong, one line each, in this process."""
    wrong: list[str] = []
    chunk(seed, first, count, wrong.append)
    return wrong


def apart(seed: int, first: int, count: int) -> list[str]:
    """As :func:`fuzz`, in a child process, so that a crash is seen and told."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(read)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        with os.fdopen(write, "w") as out:
            chunk(seed, first, count, lambda line: print(line.replace("\n", " "), file=out))
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as inside:
        wrong = inside.read().splitlines()
    status = os.waitpid(child, 0)[1]
    if status:
        wrong.append(f"the process died ({status}) in cases {first} to {first + count} of {seed}")
    return wrong


def together(seed: int, first: int, count: int) -> Iterator[str]:
    """As :func:`apart`, chunk by chunk, on all cores; lines come as they are found."""
    read, write = os.pipe()
    starts = range(first, first + count, CHUNK)
    workers = min(len(os.sched_getaffinity(0)), len(starts))
    for k in range(workers):
        if not os.fork():
            os.close(read)
            for start in starts[k::workers]:
                for line in apart(seed, start, min(CHUNK, first + count - start)):
                    os.write(write, f"{line[:1000]}\n".encode())  # in one piece: it is short
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as inside:
        yield from (line.rstrip("\n") for line in inside)
    for _ in range(workers):
        os.wait()


def main(count: int = 100_000, seed: int = 0, first: int = 0) -> int:
    """Run this many cases and print what went wrong as it does."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells let their jobs ignore it
    arguments.load_all()  # once, before the children
    began, failures = time.monotonic(), 0
    for line in together(seed, first, count):
        failures += 1
        print(line, flush=True)
    print(f"{failures} of {count} went wrong (seed {seed}, {time.monotonic() - began:.0f} s)")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:4])))
