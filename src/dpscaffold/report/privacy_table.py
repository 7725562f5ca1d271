"""The table "same noise, published ε against ours": ``python -m
dpscaffold.report.privacy_table``."""

from __future__ import annotations

from dataclasses import replace

from dpscaffold.privacy import (
    PAPER_THIRD_PARTY,
    RANDOM_PARTICIPATION,
    RANDOM_PARTICIPATION_RDP,
    Run,
    describe,
)

#: The paper's settings with the noise it uses, R being the training records per user.
SETTINGS: dict[str, Run] = {
    "synthetic, σ_g = 60": describe(
        rounds=400, local_steps=50, users=100, participants=20, records=4000, batches=800, noise=60
    ),
    "FEMNIST, σ_g = 30": describe(
        rounds=400, local_steps=50, users=40, participants=8, records=2000, batches=400, noise=30
    ),
    "MNIST, σ_g = 30": describe(
        rounds=100, local_steps=50, users=60, participants=12, records=800, batches=160, noise=30
    ),
    "its Table 1 (K = 5), σ_g = 10": describe(
        rounds=488, local_steps=5, users=100, participants=5, records=4000, batches=800, noise=10
    ),
}


def comparison() -> str:
    """One row per setting: the published number, and the proved ones, towards the server as well.

    >>> print(comparison().splitlines()[2])
    | synthetic, σ_g = 60 | 2.5e-06 | 12.91 | 2.00 | 0.860 | 0.404 |
    """
    lines = [
        "| setting | δ | published, third party | RDP, server | **PLD, server** | Poisson "
        "add/remove, server |",
        "|---|---|---|---|---|---|",
    ]
    for name, run in SETTINGS.items():
        poisson = replace(run, sampling="poisson")
        lines.append(
            f"| {name} | {run.delta:.2g} | {PAPER_THIRD_PARTY.epsilon(run):.2f} "
            f"| {RANDOM_PARTICIPATION_RDP.epsilon(run):.2f} | "
            f"{RANDOM_PARTICIPATION.epsilon(run):.3f} | "
            f"{RANDOM_PARTICIPATION.epsilon(poisson):.3f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(comparison())
