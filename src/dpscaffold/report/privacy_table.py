"""The table "same noise, published ε against ours": ``python -m
dpscaffold.report.privacy_table``."""

from __future__ import annotations

from dataclasses import replace

from dpscaffold.privacy import (
    PAPER_THIRD_PARTY,
    RANDOM_PARTICIPATION,
    RANDOM_PARTICIPATION_RDP,
    Mechanism,
    describe,
)
from dpscaffold.privacy.describe import RECORDS
from dpscaffold.privacy.showing import round_up


def _setting(
    rounds: int, steps: int, users: int, drawn: int, records: int, noise: float
) -> Mechanism:
    """One of the paper's settings: s = 0.2 and δ = 1/ΣR_i, R being the training records a user."""
    return describe(
        rounds=rounds,
        local_steps=steps,
        users=users,
        cohort_size=drawn,
        records=records,
        batch_sizes=records // 5,
        noise=noise,
        delta=RECORDS,
    )


#: The paper's settings with the noise it uses.
SETTINGS: dict[str, Mechanism] = {
    "synthetic, σ_g = 60": _setting(400, 50, 100, 20, 4000, 60),
    "FEMNIST, σ_g = 30": _setting(400, 50, 40, 8, 2000, 30),
    "MNIST, σ_g = 30": _setting(100, 50, 60, 12, 800, 30),
    "its Table 1 (K = 5), σ_g = 10": _setting(488, 5, 100, 5, 4000, 10),
}


def comparison() -> str:
    """One row per setting: the published number, and the proved ones, towards the server as well.

    >>> print(comparison().splitlines()[2])
    | synthetic, σ_g = 60 | 2.5e-06 | 12.91 | 2.00 | 0.861 | 0.405 |
    """
    lines = [
        "| setting | δ | published, third party | RDP, server | **PLD, server** | Poisson "
        "zero-out, server |",
        "|---|---|---|---|---|---|",
    ]
    for name, run in SETTINGS.items():
        poisson = replace(run, sampling="poisson")
        lines.append(
            f"| {name} | {run.delta:.2g} | {round_up(PAPER_THIRD_PARTY.epsilon(run), 2)} "
            f"| {round_up(RANDOM_PARTICIPATION_RDP.epsilon(run), 2)} | "
            f"{round_up(RANDOM_PARTICIPATION.epsilon(run))} | "
            f"{round_up(RANDOM_PARTICIPATION.epsilon(poisson))} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(comparison())
