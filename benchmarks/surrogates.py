"""Whether a smaller surrogate chooses what a larger one chooses: fewer rounds, fewer classes.

    python benchmarks/surrogates.py rounds      # 2000 rounds tried in 2000, 500, 250 and 125
    python benchmarks/surrogates.py classes     # 100 classes tried as 100, 50 and 20

Each line is one run's best η₀ and the accuracy of every η₀, in per cent, on the surrogates.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from dpscaffold.planning import Facts, Goal, Limits, shape
from dpscaffold.planning.recommendation import Preset, _candidates
from dpscaffold.planning.trial import Bench


def compare(
    name: str,
    sizes: Sequence[int],
    facts: Facts,
    epsilon: float,
    limits: Limits,
    rates: Sequence[float],
    seeds: Sequence[int] = (0, 1),
) -> None:
    """The same settings with surrogates of each size."""
    found = _candidates(facts, Goal(epsilon), limits, Preset())
    settings = [one for one in found if one.plan.rounds == limits.rounds]
    for most in sizes:
        setattr(shape, name, most)
        bench = Bench(facts.guess, seeds=tuple(seeds))
        for choice in bench.choices([(one, rates) for one in settings]):
            scores = ", ".join(f"{100 * trial.score:.1f}" for trial in choice.trials)
            print(
                f"γ = {facts.similarity:g} %, ε = {epsilon:g}, {name.lower()} {most}, "
                f"{choice.setting.algorithm.name}: η₀ = {choice.rate:g} ({scores})",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["rounds", "classes"])
    if parser.parse_args().what == "rounds":
        rates = [0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0]
        facts = Facts.of(users=20, records=60, features=10, classes=4, similarity=0.0)
        for epsilon in (1.0, 5.0):
            compare("ROUNDS", (2000, 500, 250, 125), facts, epsilon, Limits(2000, 3, 4), rates)
        return
    rates = [0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0]
    for similarity in (100.0, 0.0):
        facts = Facts.of(users=20, records=2000, features=15, classes=100, similarity=similarity)
        for epsilon in (1.0, 10.0):
            compare("CLASSES", (100, 50, 20), facts, epsilon, Limits(100, 5, 10), rates, (0,))


if __name__ == "__main__":
    main()
