"""Command lines that cannot be understood: one sentence with what was probably meant."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import click
import typer

from dpscaffold.cli.keys import known_keys, names
from dpscaffold.errors import BadInput, nearest

#: The tables of a training configuration, whose keys people type as options.
TABLES = ("privacy", "plan", "data", "algorithm", "task")


def refuse_given(options: Mapping[str, object], why: str) -> None:
    """Refuse the first of these options that is given: it would be accepted without effect.

    ``why`` says why it means nothing here, and what to do.

    >>> refuse_given({"--label": None, "--rows": 20}, "and arrays have no rows; leave it out")
    Traceback (most recent call last):
    dpscaffold.errors.BadInput: --rows is given, and arrays have no rows; leave it out
    """
    for option, value in options.items():
        if value is not None and value is not False:
            raise BadInput("not-applicable", f"{option} is given, {why}")


def usage_sentence(error: click.UsageError, words: Sequence[str]) -> str:
    """What is wrong with the ``words`` of a command line, and what to write instead."""
    command = error.ctx.command if error.ctx is not None else None
    path = error.ctx.command_path if error.ctx is not None else "dpscaffold"
    if isinstance(error, click.NoSuchOption):
        return _no_option(error.option_name, command, path, words)
    text = " ".join(error.format_message().split()).rstrip(".")
    unknown = re.fullmatch(r"No such command '(.*?)'.*", text)
    if unknown and isinstance(command, click.Group) and error.ctx is not None:
        return _no_command(unknown[1], command.list_commands(error.ctx), path)
    extra = re.fullmatch(r"Got unexpected extra arguments? \((.*)\)", text)
    if extra and command is not None:
        return _extra(extra[1], command, path)
    return f"{text[:1].lower()}{text[1:]}; '{path} --help' shows how to call it"


def _no_option(option: str, command: click.Command | None, path: str, words: Sequence[str]) -> str:
    own = [name for part in command.params for name in part.opts] if command else []
    said = f"{path} has no option '{option}'"
    if "--set" in own:
        meant = [f"--set {key}={_value(option, key, words)}" for key in _keys_meant(option, own)]
        if meant:
            return f"{said}; use {' or '.join(meant)}"
    return f"{said}{nearest(option, own)}; '{path} --help' lists its options"


def _keys_meant(option: str, own: Iterable[str]) -> list[str]:
    """The keys of a configuration that were probably meant: of this name, or of one nearer to it
    than those of the command's ``own`` options.

    >>> _keys_meant("--epsilon", ["--out"]), _keys_meant("--seed", ["--set"])
    (['privacy.epsilon'], ['plan.seed', 'data.seed'])
    """
    asked = option.lstrip("-").replace("-", "_")
    keys = sorted(names(TABLES), key=lambda key: TABLES.index(key.partition(".")[0]))
    if asked in keys:
        return [asked]
    by_name: dict[str, list[str]] = {}
    for key in keys:
        by_name.setdefault(key.rpartition(".")[2], []).append(key)
    options = {name.lstrip("-").replace("-", "_") for name in own}
    close = difflib.get_close_matches(asked, [*by_name, *options], n=1, cutoff=0.75)
    found = by_name.get(close[0], []) if close and close[0] not in options else []
    return [key for key in found if not key.startswith("task.")][:2] or found[:1]


def interrupted(signal: str) -> typer.Exit:
    """The exit of a command that a signal stopped, with the status that a shell expects."""
    return typer.Exit(143 if "SIGTERM" in signal else 130)


def _value(option: str, key: str, words: Sequence[str]) -> str:
    """The value that was given after an option, or what represents it."""
    for word, after in zip(words, [*words[1:], ""], strict=True):
        name, sign, value = word.partition("=")
        if name == option and sign:
            return value
        if name == option and after[:1] not in ("", "-"):
            return after
    kinds = [str(entry["kind"]) for entry in known_keys() if entry["name"] == key]
    return "true" if any(kind.startswith("true or false") for kind in kinds) else "VALUE"


def _no_command(word: str, commands: Iterable[str], path: str) -> str:
    if Path(word).suffix == ".toml" and path == "dpscaffold":
        return f"'{word}' is no command; to train, write dpscaffold train {word}"
    return f"{path} has no command '{word}'{nearest(word, commands)}; '{path} --help' lists them"


def _extra(given: str, command: click.Command, path: str) -> str:
    """What to do with arguments that are more than a command takes."""
    options = [name for part in command.params for name in part.opts]
    if "--set" in options and re.match(r"[\w.]+=", given):
        name, _, value = given.partition("=")
        key = next(iter(_keys_meant(name, ())), name)
        return f"'{given}' is not an argument of {path}; use --set {key}={value}"
    if command.name == "init":
        return (
            f"init takes one table, and '{given}' is one too many; put the files of all sites "
            f"into a folder and name the folder, or give a pattern in quotes, such as 'sites/*.csv'"
        )
    return f"{path} does not take the argument '{given}'; '{path} --help' lists what it takes"
