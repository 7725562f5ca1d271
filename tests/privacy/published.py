"""The settings of the paper's experiments, in the words of ``world.epsilon``."""

from __future__ import annotations

from typing import Any

SYNTHETIC: dict[str, Any] = {
    "users": 100,
    "cohort": 20,
    "rounds": 400,
    "local_steps": 50,
    "size": 4000,
    "batch": 800,
    "noise": 60.0,
    "delta": 1 / (100 * 4000),
}
FEMNIST: dict[str, Any] = {
    **SYNTHETIC,
    "users": 40,
    "cohort": 8,
    "size": 2000,
    "batch": 400,
    "noise": 30.0,
    "delta": 1 / (40 * 2000),
}
MNIST: dict[str, Any] = {
    **SYNTHETIC,
    "users": 60,
    "cohort": 12,
    "rounds": 100,
    "size": 800,
    "batch": 160,
    "noise": 30.0,
    "delta": 1 / (60 * 800),
}
TABLE_1: dict[str, Any] = {
    **SYNTHETIC,
    "cohort": 5,
    "rounds": 488,
    "local_steps": 5,
    "noise": 10.0,
}
ALL = {"synthetic": SYNTHETIC, "femnist": FEMNIST, "mnist": MNIST, "table 1": TABLE_1}
