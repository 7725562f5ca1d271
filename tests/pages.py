"""The code blocks of the documentation, and how each is run.

A fence is ``python``, ``sh``, ``toml``, ``ini``, ``text`` or ``math``. Comments right above it say
what a test needs to know and a reader does not:

``<!-- setup: … -->``         Python that runs first (the reader's own data, for instance)
``<!-- file: NAME -->``       the block is also written to this file
``<!-- short: A -> B -->``    ``make test`` runs it with B for A; ``make test-all`` as printed
``<!-- stand-in: A -> B -->`` B stands in for what a test does not have
``<!-- slow: why -->``        ``make test-all`` runs it, ``make test`` does not
``<!-- not run: why -->``     no test runs it; the list of these is in ``test_blocks.py``
``<!-- says: TEXT -->``       what it prints, as printed, contains this
``<!-- same as: PATH -->``    the block is this file of the repository
``<!-- needs: MODULE -->``    it runs where this module is installed

Python blocks of a page share their names, and all blocks a folder.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import tomllib
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parents[1]
DOCS = HERE / "docs"
FENCE = re.compile(
    r"(?P<marks>(?:^[ \t]*<!--.*?-->[ \t]*\n)*)^(?P<indent>[ \t]*)```(?P<kind>[^\n`]*)\n"
    r"(?P<code>.*?)^(?P=indent)```[ \t]*$",
    re.M | re.S,
)
MARK = re.compile(
    r"<!--\s*(setup|file|short|stand-in|slow|not run|says|same as|needs):\s*(.*?)\s*-->", re.S
)
KINDS = ("python", "sh", "toml", "ini", "text", "math")


@dataclass(frozen=True)
class Block:
    """One fence of a page."""

    page: str
    line: int
    kind: str
    code: str
    marks: tuple[tuple[str, str], ...] = ()

    def all(self, mark: str) -> list[str]:
        """What is said under a mark."""
        return [text for name, text in self.marks if name == mark]

    @property
    def place(self) -> str:
        """Where it stands, for people."""
        return f"{self.page}:{self.line}"

    def text(self, short: bool) -> str:
        """The code with what stands in for parts of it."""
        code = self.code
        for change in self.all("stand-in") + (self.all("short") if short else []):
            old, _, new = change.partition(" -> ")
            assert old in code, f"{self.place}: {old!r} is not in the block"
            code = code.replace(old, new)
        return code


def pages() -> list[Path]:
    """Every page of the documentation that people read in the repository or on the site."""
    found = [HERE / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
    found += sorted(path for path in DOCS.rglob("*.md") if "results" not in path.parts)
    return [*found, *sorted((HERE / "examples").rglob("*.md"))]


def blocks(page: Path) -> list[Block]:
    """The fences of a page, in order."""
    text = page.read_text(encoding="utf-8")
    return [_block(page, text, match) for match in FENCE.finditer(text)]


def _block(page: Path, text: str, match: re.Match[str]) -> Block:
    indent = match["indent"]
    code = "".join(line.removeprefix(indent) for line in match["code"].splitlines(keepends=True))
    line = text.count("\n", 0, match.start("kind")) + 1
    marks = tuple(found.groups() for found in MARK.finditer(match["marks"]))
    name = page.relative_to(HERE).as_posix()
    return Block(name, line, match["kind"].strip(), code, marks)


@dataclass
class Reader:
    """Somebody who follows a page from top to bottom in a folder of their own."""

    folder: Path
    short: bool
    module: types.ModuleType = field(default_factory=lambda: types.ModuleType("__page__"))
    missing: list[str] = field(default_factory=list)
    said: str = ""

    def follow(self, block: Block) -> None:
        """Do what a block says."""
        for code in block.all("setup"):
            self._python(code, block)
        text = block.text(self.short)
        for name in block.all("file"):
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        for name in block.all("same as"):
            assert text == (HERE / name).read_text(encoding="utf-8"), f"{block.place} is not {name}"
        if block.all("not run") or (self.short and block.all("slow")):
            return
        absent = [name for name in block.all("needs") if find_spec(name) is None]
        if absent:
            self.missing.append(f"{block.place} needs {absent[0]}")
            return
        said = self._run(text, block)
        self.said += said
        if not (self.short and block.all("short")):
            for wanted in block.all("says"):
                assert wanted in " ".join(said.split()), f"{block.place}: no {wanted!r} in\n{said}"

    def _run(self, text: str, block: Block) -> str:
        if block.kind == "python":
            return self._python(text, block)
        if block.kind == "sh":
            return self._shell(text, block)
        if block.kind == "toml":
            check_toml(text, self.folder)
        return ""

    def _python(self, code: str, block: Block) -> str:
        lines = "\n" * block.line + code  # a traceback names the page's own line
        said = io.StringIO()
        sys.modules["__page__"] = self.module  # where dataclasses look for the names of their types
        with contextlib.redirect_stdout(said):
            exec(compile(lines, block.page, "exec", dont_inherit=True), self.module.__dict__)
        return said.getvalue()

    def _shell(self, text: str, block: Block) -> str:
        """Plain commands of ours run in this process, which spares their imports; anything else is
        bash's."""
        lines = list(commands(text))
        if any(words[0] != "dpscaffold" or set("|&;<>$*`") & set(line) for words, line in lines):
            return self._bash(text, block)
        whole = ""
        for words, line in lines:
            code, said = typed(words[1:])
            assert code == 0, f"{block.place}: {line}\n{said}"
            whole += said
        return whole

    def _bash(self, text: str, block: Block) -> str:
        tools = stand_ins(self.folder.parent / f"{self.folder.name}-tools")
        path = f"{tools}:{os.environ['PATH']}"
        environment = os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"}
        environment["FLWR_HOME"] = str(tools / "flwr")
        # Whatever fails, every background process is ended.
        ended = "trap 'code=$?; set +e; kill $(jobs -p) 2>/dev/null; wait; exit $code' EXIT\n"
        done = subprocess.run(
            ["bash", "-e", "-c", ended + text],
            cwd=Path.cwd(),
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, f"{block.place}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        return done.stdout


def commands(text: str) -> Iterator[tuple[list[str], str]]:
    """The commands of a block, one a line, as words and as printed."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words:
            yield words, line.partition(" #")[0]


def typed(words: list[str]) -> tuple[int, str]:
    """A command of ours in this process: its exit status and what it printed."""
    from dpscaffold import cli

    said, before = io.StringIO(), sys.argv
    sys.argv = ["dpscaffold", *words]
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            cli.main()
        code = 0
    except SystemExit as left:
        code = int(left.code or 0)
    finally:
        sys.argv = before
    return code, said.getvalue()


def check_toml(text: str, folder: Path) -> None:
    """A configuration, a server's plan, or a file of a party: read as the command would."""
    from dpscaffold.config import load
    from dpscaffold.deployment.provision import read_federation
    from dpscaffold.deployment.server.config import load_served
    from dpscaffold.deployment.site.file import read_site_file
    from dpscaffold.sums.plan import load_plan
    from dpscaffold.tuning.tuning import read_tuning

    path = folder / ".block.toml"
    path.write_text(text, encoding="utf-8")
    held = tomllib.loads(text)
    assert held, "an empty block says nothing"
    readers = {
        "sums": load_plan,
        "schema": load_served,
        "deploy": load_served,
        "tune": lambda path: read_tuning(path, []),
        "policy": read_site_file,
        "sites": read_federation,
    }
    next((read for table, read in readers.items() if table in held), load)(path)


MAKE = """#!/bin/sh
exec /usr/bin/env make -n -C '{here}' "$@" > /dev/null
"""
PIP = """#!{python}
import re, sys, tomllib
known = tomllib.load(open({project!r}, "rb"))["project"]
for word in sys.argv[2:]:
    name, _, extras = word.partition("[")
    wanted = set(filter(None, re.split("[],]", extras)))
    if name != known["name"] or not wanted <= set(known["optional-dependencies"]):
        sys.exit("there is nothing called " + word)
"""


def stand_ins(folder: Path) -> Path:
    """Commands by name: ours and python as they are; make only says what it would do, and pip
    whether there is such an extra."""
    folder.mkdir(parents=True, exist_ok=True)
    path = os.environ["PATH"]
    calls = {"dpscaffold": "-m dpscaffold", "python": ""}
    texts = {
        name: f'#!/bin/sh\nexec {sys.executable} {call} "$@"\n' for name, call in calls.items()
    }
    texts["make"] = MAKE.format(here=HERE).replace("/usr/bin/env", f"/usr/bin/env PATH='{path}'")
    texts["pip"] = PIP.format(python=sys.executable, project=str(HERE / "pyproject.toml"))
    for name, text in texts.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder
