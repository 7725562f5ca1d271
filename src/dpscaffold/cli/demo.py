"""``dpscaffold demo``: a comparison of algorithms, in about a minute."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dpscaffold.cli.example import DEMO

#: What is compared: name of the run, algorithm, whether it is private.
RUNS = (
    ("dp-scaffold", "scaffold", True),
    ("dp-fedavg", "fedavg", True),
    ("dp-fedsgd", "fedsgd", True),
    ("scaffold", "scaffold", False),
)


def demo_command(
    out: Annotated[Path, typer.Option(help="Folder for the runs and the figure.")] = Path(
        "runs/demo"
    ),
    rounds: Annotated[int | None, typer.Option(help="Number of rounds; fewer are faster.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Show no progress.")] = False,
) -> None:
    """Compare DP-SCAFFOLD, DP-FedAvg, DP-FedSGD and SCAFFOLD without privacy."""
    from rich.console import Console

    from dpscaffold.algorithms.registry import ONE_PASS
    from dpscaffold.cli.compare import show
    from dpscaffold.config import load
    from dpscaffold.data.loading import load_federation
    from dpscaffold.training.train import run

    console = Console(quiet=as_json)
    console.print(
        "Four federated runs on one federation: 100 users whose data differ a lot, (α, β) = (5, 5)."
    )
    console.print(
        "The private ones add the same noise to every gradient; only the algorithm differs.\n"
    )
    federation = None
    for name, algorithm, private in RUNS:
        changes = [f"algorithm.name={algorithm}"]
        if algorithm in ONE_PASS:
            changes.append(f"plan.local_steps={round(1 / DEMO['plan']['data_ratio'])}")
        if not private:
            changes.append("privacy=false")
        if rounds is not None:
            changes.append(f"plan.rounds={rounds}")
        settings = load(None, changes, base=DEMO)
        federation = federation if federation is not None else load_federation(settings.data)
        progress = not (as_json or quiet)
        result = run(
            settings, out=out / name, resume=True, progress=progress, federation=federation
        )
        if result.ended == "interrupted":
            console.print(f"{result.message}; run the same command again to continue")
            raise typer.Exit(130)
    show([out / name for name, _, _ in RUNS], out / "comparison.png", as_json)
    console.print(
        "\nDP-SCAFFOLD corrects each user's drift with control variates that are computed from "
        "noised gradients only,\nso the correction costs no privacy. `dpscaffold privacy "
        f"{out / RUNS[0][0]}` shows what its ε guarantees."
    )
