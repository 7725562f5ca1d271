"""What a launcher such as ``torchrun`` tells each process that it starts. Needs no PyTorch."""

from __future__ import annotations

import os

#: The environment variables of PyTorch's launchers.
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def launched_ranks() -> int:
    """How many processes were started for this command; 1 without a launcher."""
    given = [os.environ.get(name, "") for name in VARIABLES]
    return int(given[1]) if all(given) and given[1].isdecimal() else 1


def launched_rank() -> int:
    """Which of them this process is; 0 without a launcher."""
    return int(os.environ["RANK"]) if launched_ranks() > 1 else 0


def restarted() -> bool:
    """Whether ``torchrun`` started this process again after a failure."""
    return launched_ranks() > 1 and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
