"""The command line: one file per command."""

from __future__ import annotations

import sys

import typer
from rich.console import Console

from dpscaffold.errors import Diverged

app = typer.Typer(
    name="dpscaffold",
    help="Private federated learning on heterogeneous data: train, account, compare, reproduce.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _register() -> None:
    from dpscaffold.cli import calibrate, compare, data, demo, privacy, reproduce, train, tune

    app.command("train")(train.train_command)
    app.command("compare")(compare.compare_command)
    app.command("demo")(demo.demo_command)
    app.command("privacy")(privacy.privacy)
    app.command("calibrate")(calibrate.calibrate)
    app.command("reproduce")(reproduce.reproduce_command)
    app.command("tune")(tune.tune_command)
    app.add_typer(data.app, name="data")


_register()


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
    """User errors are raised by this package; a ValueError from elsewhere is a bug and keeps its traceback."""
    return type(error).__module__.startswith("dpscaffold") or isinstance(error, OSError)
