"""Makes the frozen evidence: random descriptions, and what the old package says of each.

``python -m frozen.make KIND`` (in ``tests/``) writes ``KIND.json`` next to this file, with fixed
seeds. It is run once; the files change only where a later version needs more cases.
"""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from frozen import histories, mechanisms, old, statements

HERE = Path(__file__).parent
MOST = 300_000  # bytes of a file that is not compressed
MAKERS = {
    "mechanisms": mechanisms.inputs,
    "histories": histories.inputs,
    "statements": statements.inputs,
}


def ask_old(kind: str, inputs: list[Any]) -> list[Any]:
    """What the old package says of these descriptions."""
    return answers(start_old(kind, inputs))


def start_old(kind: str, inputs: list[Any]) -> subprocess.Popen[str]:
    """The old package at work on these descriptions; :func:`answers` waits for it."""
    command = [str(old.make()), "-m", "frozen.old_api", kind]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=old.environment(),
        cwd=old.TESTS,
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(inputs))
    process.stdin.close()
    return process


def answers(process: subprocess.Popen[str]) -> list[Any]:
    """What the old package said."""
    assert process.stdout is not None
    text = process.stdout.read()
    if process.wait():
        raise RuntimeError("the old package ended with an error; it stands above")
    said: list[Any] = json.loads(text)
    return said


def path_of(kind: str) -> Path:
    """The file of this kind."""
    plain = HERE / f"{kind}.json"
    return plain if plain.exists() else HERE / f"{kind}.json.gz"


def read(kind: str) -> list[dict[str, Any]]:
    """The frozen cases: ``id``, ``given`` and what the old package ``said``."""
    data = path_of(kind).read_bytes()
    cases: list[dict[str, Any]] = json.loads(
        gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    )
    return cases


def write(kind: str, cases: list[dict[str, Any]]) -> None:
    """One case a line, compressed where it is long."""
    lines = [json.dumps(case, separators=(",", ":"), allow_nan=False) for case in cases]
    data = ("[\n" + ",\n".join(lines) + "\n]\n").encode()
    for old_file in HERE.glob(f"{kind}.json*"):
        old_file.unlink()
    if len(data) > MOST:
        (HERE / f"{kind}.json.gz").write_bytes(gzip.compress(data, 9, mtime=0))
    else:
        (HERE / f"{kind}.json").write_bytes(data)


def main() -> None:
    """Make the file of one kind."""
    kind = sys.argv[1]
    named = MAKERS[kind]()
    said = ask_old(kind, [given for _, given in named])
    write(
        kind,
        [
            {"id": name, "given": given, "said": one}
            for (name, given), one in zip(named, said, strict=True)
        ],
    )
    print(f"{path_of(kind)}: {len(named)} cases, {path_of(kind).stat().st_size} bytes")


if __name__ == "__main__":
    main()
