"""Every option of every command acts, or is refused, in every mode of the command.

The commands are those that Typer knows, so a new option fails here until ``option_cases.py`` says
what it does. A mode's own line is run twice first: only where two runs of the same line agree does
another outcome show that an option made the difference.
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path

import click
import pytest
from cli.option_cases import AS_ASKED, MODES, SHARED, WITHOUT, Mode, build
from typed import done_here
from typer.main import get_command

from dpscaffold import cli

#: Options that Typer adds to the program itself.
OF_TYPER = ("--install-completion", "--show-completion")


def options_of(command: click.Command, name: str = "") -> Iterator[tuple[str, set[str]]]:
    """Every command by its words, with its options, each by its longest name."""
    context = click.Context(command)
    names = command.list_commands(context) if isinstance(command, click.Group) else []
    for inner in names:
        found = command.get_command(context, inner)  # type: ignore[attr-defined]
        yield from options_of(found, f"{name} {inner}".strip())
    of_a_command = [p for p in command.params if isinstance(p, click.Option)]
    yield name, {max(option.opts, key=len) for option in of_a_command} - {"--help", *OF_TYPER}


OPTIONS = {name: options for name, options in options_of(get_command(cli.app)) if options}


def test_every_option_of_every_command_has_its_cases() -> None:
    """In each whole mode of its command, or in a mode that is about it."""
    assert OPTIONS.pop("") == {"--version"}  # see below
    assert set(OPTIONS) == {mode.command for mode in MODES}
    for command, options in OPTIONS.items():
        modes = [mode for mode in MODES if mode.command == command]
        partial = {option for mode in modes if not mode.whole for option in mode.cases()}
        assert any(mode.whole for mode in modes) or partial == options, command
        for mode in modes:
            missing = options - set(mode.cases()) - partial if mode.whole else set()
            assert not missing, f"{mode.title}: say what {', '.join(sorted(missing))} does there"
            unknown = set(mode.cases()) - options
            assert not unknown, f"{mode.title}: there is no {', '.join(sorted(unknown))}"
            assert not set(mode.acting()) & set(mode.refusing()), mode.title


def test_version_acts() -> None:
    done = done_here("--version")
    assert done.returncode == 0 and done.stdout.startswith("dpscaffold ")


#: What differs from run to run: durations, keys and hashes.
PASSING = (
    (r"\d+(\.\d+)? ?(s|ms|min)\b", "TIME"),
    (r'"\w*seconds": [^,\n]+', "TIME"),
    (r"\b[0-9a-f]{8,}\b", "HEX"),
    (r"[A-Za-z0-9+/=_-]{32,}", "KEY"),
)


def plain(text: str, folder: Path, line: str = "") -> str:
    """A text without what differs from run to run, and without the command line that it quotes."""
    text = text.replace(str(folder), "HERE")
    text = text.replace(f"dpscaffold {line}", "LINE") if line else text
    for pattern, word in PASSING:
        text = re.sub(pattern, word, text)
    return text


def files(folder: Path, line: str = "") -> dict[str, str]:
    """The names of all files, and what the small texts among them say."""
    told = (".toml", ".md", ".csv", ".html")
    return {
        path.relative_to(folder).as_posix(): (
            plain(path.read_text(), folder, line) if path.name.endswith(told) else ""
        )
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }


@dataclass(frozen=True)
class Outcome:
    """What a command line does: its status, what it says, and the files before and after."""

    code: int
    printed: str
    error: str
    before: dict[str, str]
    after: dict[str, str]


class Stage:
    """A folder of small things that commands work on; each command works on a copy of its own."""

    def __init__(self, folder: Path, place: Path) -> None:
        self.folder, self.place, self.count = folder, place, 0

    def _copy(self, name: str, to: Path) -> None:
        """Copy what has this name, if there is anything."""
        if (self.folder / name).is_dir():
            shutil.copytree(self.folder / name, to / name)
        elif (self.folder / name).exists():
            shutil.copy(self.folder / name, to / name)

    def run(self, line: str, first: str = "") -> Outcome:
        """What a command line does, after another one."""
        self.count += 1
        copy = self.place / str(self.count)
        copy.mkdir()
        for name in {word.split("/")[0] for word in (*shlex.split(f"{first} {line}"), *SHARED)}:
            self._copy(name, copy)
        with chdir(copy):
            if first:
                assert done_here(*shlex.split(first)).returncode == 0
            before = files(copy)
            done = done_here(*shlex.split(line))
        words = (plain(text, copy, line) for text in (done.stdout, done.stderr))
        outcome = Outcome(done.returncode, *words, before, files(copy, line))
        shutil.rmtree(copy)
        return outcome


def is_named(option: str, words: str, sentence: str) -> bool:
    """Whether a sentence names an option, the key that it sets, or its value."""
    bare = option.removeprefix("--").replace("-", "_")
    typed, *values = words.split()
    known = (option, typed, f".{bare}", f"{bare}=", *(word for word in values if len(word) > 3))
    return any(name in sentence for name in known)


def seen(outcome: Outcome, mode: Mode) -> object:
    """What is compared of an outcome: all of it, what is no matter of chance, or whether there is
    any progress on a terminal."""
    if mode.compares == "progress":
        return outcome.code, bool(outcome.error)
    if mode.compares == "words":
        words = (re.sub(r"[\d.e+-]*\d", "N", text) for text in (outcome.printed, outcome.error))
        return outcome.code, *words, sorted(outcome.after)
    return outcome


def silent(stage: Stage, mode: Mode) -> list[str]:
    """The options of a mode that neither act nor are refused as it says."""
    line = f"{mode.command} {mode.words}"
    first = stage.run(line, mode.first)
    base, again = seen(first, mode), seen(stage.run(line, mode.first), mode)
    assert base == again, f"{mode.title}: two runs of one line differ"
    assert first.code == 0 or not mode.refused, f"{mode.title}: {first.error}"
    wrong = []
    for option, words in mode.cases().items():
        left_out = words.startswith(WITHOUT)
        changed = re.sub(rf" {option}\b", "", line) if left_out else f"{line} {words}"
        outcome = stage.run(changed, mode.first)
        if option in mode.acting() and seen(outcome, mode) == base:
            wrong.append(f"{changed}: {option} makes no difference")
        if option in mode.refusing():
            refused = outcome.code == 2 and outcome.after == outcome.before
            if not refused or not is_named(option, words, outcome.error):
                wrong.append(f"{changed}: {option} is not refused: {outcome.error}")
    return wrong


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Stage:
    """The folder, made by the commands themselves."""
    folder = tmp_path_factory.mktemp("stage")
    build(folder)
    return Stage(folder, tmp_path_factory.mktemp("copies"))


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param(mode, id=mode.title, marks=[pytest.mark.slow] if mode.slow else [])
        for mode in MODES
    ],
)
def test_every_option_acts_or_is_refused(
    mode: Mode, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    if mode.name == AS_ASKED:
        tell_instead(monkeypatch)
    if mode.compares == "progress":
        monkeypatch.setenv("FORCE_COLOR", "1")
    assert not silent(stage, mode)


def tell_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that serve until they are stopped, or download, say what they were asked for
    instead."""
    import dpscaffold.data
    from dpscaffold.deployment.transports.flower import link, operation, serving

    def told(*arguments: object, **named: object) -> None:
        print(*arguments, *(f"{key}={value}" for key, value in named.items()), sep=", ")

    def downloaded(name: str, folder: Path, mirror: str, show: object) -> list[Path]:
        told(name, folder, mirror)
        return [Path(name)]

    monkeypatch.setattr(dpscaffold.data, "download", downloaded)

    monkeypatch.setattr(link, "serve_link", lambda where, ready: told(where))
    monkeypatch.setattr(serving, "run_deployed", lambda *words, **more: told(*words[:-1], **more))
    monkeypatch.setattr(operation, "start_site", lambda *words: told(*words[:2], *words[3:]))
