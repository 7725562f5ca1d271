"""Command lines that cannot be understood, and options that mean nothing."""

from __future__ import annotations

from collections.abc import Mapping

import click
import typer

from dpscaffold.errors import BadInput, nearest


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


def usage_sentence(error: click.UsageError) -> str:
    """What is wrong with a command line, in Click's words, and the nearest name that there is."""
    path = error.ctx.command_path if error.ctx is not None else "dpscaffold"
    command = error.ctx.command if error.ctx is not None else None
    text = " ".join(error.format_message().split()).rstrip(".")
    text = text[:1].lower() + text[1:]

    if isinstance(error, click.NoSuchOption) and command is not None:
        own = [name for part in command.params for name in part.opts]
        text = f"no such option '{error.option_name}'{nearest(error.option_name, own)}"
        if "--set" in own:
            text += "; a key of the configuration is changed with --set KEY=VALUE"
    elif text.startswith("no such command") and isinstance(command, click.Group):
        word = text.split("'")[1]
        assert error.ctx is not None
        text = f"no such command '{word}'{nearest(word, command.list_commands(error.ctx))}"

    return f"{text}; '{path} --help' shows how to call it"


def interrupted(signal: str) -> typer.Exit:
    """The exit of a command that a signal stopped, with the status that a shell expects."""
    return typer.Exit(143 if "SIGTERM" in signal else 130)
