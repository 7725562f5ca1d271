"""The configuration that ``demo`` compares algorithms on, and ``train`` falls back to."""

from __future__ import annotations

from typing import Any

from dpscaffold.algorithms import DEFAULT

#: The demo's federation and plan: the paper's synthetic data at its highest heterogeneity, with
#: half the records and half the noise multiplier, so the noise on a gradient is the paper's.
DEMO: dict[str, Any] = {
    "data": {"source": "synthetic", "alpha": 5.0, "beta": 5.0, "users": 100, "records": 2500},
    "task": {"kind": "logistic", "metrics": ["optimum"]},
    "algorithm": {"name": DEFAULT},
    "plan": {
        "rounds": 300,
        "local_steps": 50,
        "user_ratio": 0.2,
        "data_ratio": 0.2,
        "learning_rate": 0.5,
    },
    "privacy": {"clip": 1.5, "noise": 30.0},
}
