"""The command line: one file per command."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from dpscaffold.errors import Diverged

#: Each command's file and the function or sub-application in it. A file is imported when its
#: command is used, so that accounting answers without loading PyTorch.
COMMANDS = {
    "demo": "demo_command",
    "train": "train_command",
    "compare": "compare_command",
    "privacy": "privacy",
    "calibrate": "calibrate",
    "budget": "budget_command",
    "data": "app",
    "tune": "tune_command",
    "reproduce": "reproduce_command",
    "provision": "provision_command",
    "server": "app",
    "site": "app",
}


class LazyCommands(TyperGroup):
    """A group whose commands are imported when asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The names, in the order in which a newcomer meets them."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import one command's file."""
        if cmd_name not in COMMANDS:
            return None
        part = getattr(importlib.import_module(f"dpscaffold.cli.{cmd_name}"), COMMANDS[cmd_name])
        if not isinstance(part, typer.Typer):
            single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
            single.command(cmd_name)(part)
            part = single
        command = typer.main.get_command(part)
        command.name = cmd_name
        return command


app = typer.Typer(
    name="dpscaffold",
    cls=LazyCommands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def dpscaffold() -> None:
    """Private federated learning on heterogeneous data: train, account, compare, reproduce."""


def main() -> None:
    """Run a command; bad input is one sentence and a non-zero exit, never a traceback."""
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        app()
    except Diverged as error:
        errors.print(f"error: {error}", markup=False)
        sys.exit(3)
    except (ValueError, OSError) as error:
        if not _is_ours(error):
            raise
        errors.print(f"error: {error}", markup=False)
        sys.exit(2)
    except KeyboardInterrupt:
        errors.print("stopped", markup=False)
        sys.exit(130)


def _is_ours(error: BaseException) -> bool:
    """User errors are raised by this package; a ValueError from elsewhere is a bug and keeps its
    traceback."""
    return type(error).__module__.startswith("dpscaffold") or isinstance(error, OSError)
