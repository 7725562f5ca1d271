"""The paper's four settings as descriptions, shared by the tests of this folder."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from dpscaffold.privacy import Mechanism, describe

SYNTHETIC: dict[str, Any] = {
    "rounds": 400,
    "local_steps": 50,
    "users": 100,
    "cohort_size": 20,
    "records": 4000,
    "batch_sizes": 800,
    "noise": 60.0,
    "delta": "1/records",
}
FEMNIST = {
    **SYNTHETIC,
    "users": 40,
    "cohort_size": 8,
    "records": 2000,
    "batch_sizes": 400,
    "noise": 30.0,
}
MNIST = {
    **SYNTHETIC,
    "users": 60,
    "cohort_size": 12,
    "records": 800,
    "batch_sizes": 160,
    "noise": 30.0,
    "rounds": 100,
}
TABLE_1 = {**SYNTHETIC, "rounds": 488, "local_steps": 5, "cohort_size": 5, "noise": 10.0}
ALL = {"synthetic": SYNTHETIC, "femnist": FEMNIST, "mnist": MNIST, "table 1": TABLE_1}

SMALL: dict[str, Any] = {
    "rounds": 20,
    "local_steps": 3,
    "users": 10,
    "cohort_size": 2,
    "records": 100,
    "batch_sizes": 20,
    "noise": 2.0,
    "delta": 1e-5,
}


def run_of(base: dict[str, Any], **changes: Any) -> Mechanism:
    """One of the settings, with changes; without memory it is an algorithm such as FedAvg."""
    given = {**base, **changes}
    return describe(**{"one_sum": not given.get("memory", True), **given})


def small_runs(quietest: float, **more: st.SearchStrategy[Any]) -> st.SearchStrategy[Mechanism]:
    """Small runs with at least that much noise; ``more`` draws other arguments too."""
    drawn = {
        "rounds": st.integers(1, 60),
        "local_steps": st.integers(1, 8),
        "cohort_size": st.integers(1, 9),
        "batch_sizes": st.integers(1, 90),
        "noise": st.floats(quietest, 30.0),
        "sampling": st.sampled_from(["fixed", "poisson"]),
    }
    return st.builds(lambda **kw: run_of(SMALL, **kw), **drawn, **more)
