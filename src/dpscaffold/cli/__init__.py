"""The command line: one file per command.

Belongs here: options, what is printed, exit codes. Does not belong here: anything that a Python
user needs too.
"""

from __future__ import annotations

import errno
import importlib
import io
import os
import sys
import typing
from typing import Annotated, Any

import click
import typer
from typer.core import TyperGroup

from dpscaffold.engine.launcher import launched_rank, launched_ranks
from dpscaffold.errors import BadInput, DeviceLost, Diverged

#: Each command's file and the function or sub-application in it. A file is imported when its
#: command is used, and imports PyTorch only where it computes, so that help, completion and
#: accounting answer at once.
COMMANDS = {
    "demo": "demo_command",
    "init": "init_command",
    "train": "train_command",
    "compare": "compare_command",
    "report": "report_command",
    "predict": "predict_command",
    "evaluate": "evaluate_command",
    "personalise": "personalise_command",
    "export": "export_command",
    "privacy": "privacy_command",
    "audit": "audit_command",
    "data": "app",
    "plan": "plan_command",
    "tune": "tune_command",
    "reproduce": "reproduce_command",
    "provision": "app",
    "server": "app",
    "site": "app",
    "sums": "app",
}

#: The command that several processes can share.
ON_RANKS = "train"

#: What ``dpscaffold --help`` says of each, in one line of 80 columns.
SUMMARIES = {
    "demo": "compare DP-SCAFFOLD with other algorithms, in about a minute",
    "init": "look at your data and draft a configuration",
    "train": "train a model and write a run folder",
    "compare": "compare runs in one table and one figure",
    "report": "write a one-page report to share, as HTML and as Markdown",
    "predict": "write predictions for new rows",
    "evaluate": "measure a model on test records or on labelled rows",
    "personalise": "fit a model for one site, near the common model",
    "export": "write a model as ONNX, PyTorch program or safetensors",
    "privacy": "state, solve for or add up what plans and runs guarantee",
    "audit": "try to disprove the claimed ε by experiment",
    "data": "describe, prepare and download data",
    "plan": "choose hyperparameters from public facts; no record is read",
    "tune": "choose hyperparameters by cross-validation, or privately",
    "reproduce": "reproduce the paper's tables and figures",
    "provision": "make the keys and certificates of a deployed federation",
    "server": "run the server of a deployed federation",
    "site": "take part in a deployed federation as a site",
    "sums": "train a model by e-mail: one signed file per site, no server",
}

#: Without Rich's markup, in which the ``[data]`` of a sentence would be a style and vanish.
PLAIN: dict[str, Any] = {"pretty_exceptions_enable": False, "rich_markup_mode": None}
typer.core.HAS_RICH = False


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
            single = typer.Typer(add_completion=False, **PLAIN)
            single.command(cmd_name)(part)
            part = single
        command = typer.main.get_command(part)
        command.name = cmd_name
        _explain_arguments(command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of commands; only one without a summary is imported for it."""
        rows = [
            (name, SUMMARIES.get(name) or self.get_command(ctx, name).get_short_help_str(60))
            for name in COMMANDS
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def _explain_arguments(command: click.Command) -> None:
    """Put back the help of arguments, which some versions of click drop."""
    for inner in getattr(command, "commands", {}).values():
        _explain_arguments(inner)
    hints = typing.get_type_hints(command.callback, include_extras=True) if command.callback else {}
    for argument in command.params:
        said = [getattr(part, "help", None) for part in _metadata(hints.get(str(argument.name)))]
        lost = isinstance(argument, click.Argument) and not getattr(argument, "help", None)
        if lost and any(said):
            record = (argument.make_metavar(click.Context(command)), str(next(filter(None, said))))
            argument.get_help_record = lambda ctx, record=record: record  # type: ignore[method-assign, misc]


def _metadata(hint: Any) -> tuple[Any, ...]:
    return getattr(hint, "__metadata__", ())


app = typer.Typer(
    name="dpscaffold",
    cls=LazyCommands,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    **PLAIN,
)


def _version(asked: bool) -> None:
    if asked:
        from dpscaffold import __version__

        typer.echo(f"dpscaffold {__version__}")
        raise typer.Exit()


@app.callback()
def dpscaffold(
    ctx: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Differentially private federated learning on heterogeneous data.

    Start with `dpscaffold demo`, or with `dpscaffold init FOLDER` for your own files.
    """
    if launched_ranks() > 1 and ctx.invoked_subcommand != ON_RANKS:
        raise BadInput(
            "not-applicable",
            f"{launched_ranks()} processes were started for 'dpscaffold {ctx.invoked_subcommand}', "
            f"which runs on one; start it without torchrun",
        )


def main() -> None:
    """Run a command; bad input is one sentence and a non-zero exit, never a traceback."""
    _print_anything()
    if launched_ranks() > 1:  # PyTorch would print a stack for each connection that ends
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        code = app(standalone_mode=False)
        if isinstance(code, int):
            sys.exit(code)
    except click.UsageError as error:
        _say_usage(error)
        sys.exit(2)
    except click.ClickException as error:
        _refuse(error.format_message())
        sys.exit(error.exit_code)
    except click.Abort:
        _say("stopped")
        sys.exit(1)
    except Diverged as error:
        _refuse(str(error))
        sys.exit(3)
    except DeviceLost as error:
        _refuse(str(error))
        sys.exit(5)
    except (ValueError, OSError, MemoryError, RuntimeError) as error:
        sentence = _sentence(error)
        if sentence is None:
            raise
        _refuse(sentence)
        sys.exit(2)
    except KeyboardInterrupt:
        _say("stopped")
        sys.exit(130)


def _print_anything() -> None:
    """Let what is printed never fail because a console lacks a character: it shows a ``?``."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _refuse(sentence: str) -> None:
    """Print why the command ends."""
    _say(f"error: {sentence}")


def _say(text: str) -> None:
    """Print to the standard error; of several processes each says which one it is."""
    rank = f"rank {launched_rank()}: " if launched_ranks() > 1 else ""
    typer.echo(f"{rank}{text}", err=True)


def _say_usage(error: click.UsageError) -> None:
    """What is wrong with the command line; without any word on it, the help."""
    from dpscaffold.cli.usage import usage_sentence

    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
    else:
        _refuse(usage_sentence(error))


#: A disk, a quota or the size of a file that is used up.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def _sentence(error: BaseException) -> str | None:
    """What to say of a user's error. A ValueError of another package is a bug of ours: None, and it
    keeps its traceback."""
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
        return (
            "this needs more memory than the machine has; use fewer or shorter records (data.users,"
            " data.records), or store the data with dpscaffold data prepare and map them"
        )
    if isinstance(error, BrokenPipeError):
        return "broken pipe: the reader of our output exited"
    if isinstance(error, OSError):
        place = f"{error.filename}: " if error.filename else ""
        said = f"{place}{error.strerror or error}"
        if error.errno in _NO_ROOM:
            return f"{said}; free space on the disk and run the command again"
        return said
    return str(error) if type(error).__module__.startswith("dpscaffold") else None
