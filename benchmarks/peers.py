"""The same work by us and by whichever peers are importable, in one run, taking turns.

    python benchmarks/peers.py --out FOLDER [--repeats 10] [--threads 1] [--clock cpu]

Nothing is installed. Two kinds of work: a DP-SCAFFOLD round (20 users × 50 steps × batch 800 of
4,000 records, 41 × 10 weights, sampling and noise included), and a clipped sum of a convolutional
network (13,066 parameters, batch 400). Peers of the round: Opacus' hooks, and pfl's SCAFFOLD on the
same shapes, which has no privacy and passes over the records in order instead of drawing batches,
and Flower's simulation with a node a user and Opacus in each (its actors are processes; a round is
timed once they stand). Peers of the sum: Opacus' hooks and its ghost clipping. The best of all
repeats counts. ``--clock cpu`` takes CPU time of this process and of those that it started, so that
other programs matter little; ``wall`` that on the wall. A peer that is missing, or fails here, is
named with the reason.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from flowers import end_all, flower, tree_time
from module import RECORDS as IMAGES
from module import network, opacus_steps, our_step, plain_step
from round import CLASSES, FEATURES, RECORDS, STEPS, bare, opacus, ours
from torch import nn

Side = Callable[[], object]
PARTICIPANTS, BATCH = 20, 800
FLOWER = "Flower's simulation, Opacus clients"


class Scored(nn.Linear):
    """A linear model with the two methods that pfl asks for."""

    def loss(self, x: torch.Tensor, y: torch.Tensor, **_: object) -> torch.Tensor:
        return nn.functional.cross_entropy(self(x), y)

    def metrics(self, *_: object, **__: object) -> dict[str, object]:
        return {}


def pfl_scaffold() -> Side:
    """A round of pfl's SCAFFOLD in its simulator: 10 passes of 5 batches are the 50 steps."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.scaffold import SCAFFOLD, SCAFFOLDParams
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.data.user_state import InMemoryUserStateStorage
    from pfl.hyperparam.base import NNTrainHyperParams
    from pfl.model.pytorch import PyTorchModel

    size = RECORDS * 4 // 5
    tables = {
        user: [torch.randn(size, FEATURES), torch.randint(0, CLASSES, (size,))]
        for user in range(PARTICIPANTS)
    }
    sampler = get_user_sampler("minimize_reuse", list(tables))
    data = FederatedDataset.from_slices(tables, sampler)
    module = Scored(FEATURES, CLASSES)
    central = torch.optim.SGD(module.parameters(), lr=1.0)
    model = PyTorchModel(module, torch.optim.SGD, central)
    options = SCAFFOLDParams(
        central_num_iterations=10**6,
        evaluation_frequency=10**6,
        train_cohort_size=PARTICIPANTS,
        val_cohort_size=0,
        population=5 * PARTICIPANTS,
        use_gradient_as_control_variate=False,
        user_state_storage=InMemoryUserStateStorage(),
    )
    passes = NNTrainHyperParams(
        local_num_epochs=STEPS * BATCH // size, local_learning_rate=0.05, local_batch_size=BATCH
    )
    backend, algorithm, rounds = SimulatedBackend(data, data), SCAFFOLD(), [0]

    def once() -> None:
        contexts, _, _ = algorithm.get_next_central_contexts(model, rounds[0], options, passes)
        rounds[0] += 1
        found, metrics = backend.gather_results(
            model=model, training_algorithm=algorithm, central_context=contexts[0]
        )
        algorithm.process_aggregated_statistics(contexts[0], metrics, model, found)

    return once


def round_sides(notes: list[str], threads: int) -> dict[str, Side]:
    """Every side that can do the round."""
    sides: dict[str, Side] = {"ours": ours(), "bare work, no privacy": bare()}
    for name, make in (
        ("Opacus' hooks", opacus),
        (FLOWER, lambda: flower(max(1, threads))),
        ("pfl SCAFFOLD, no privacy", pfl_scaffold),
    ):
        try:
            side = make()
            side()
        except ImportError as error:
            notes.append(f"{name}: not here ({error})")
        except Exception as error:
            notes.append(f"{name}: fails here ({type(error).__name__}: {error})")
        else:
            sides[name] = side
    return sides


def sum_sides(notes: list[str]) -> dict[str, Side]:
    """Every side that can do the clipped sum."""
    torch.manual_seed(0)
    net, x = network(), torch.randn(IMAGES, 1, 28, 28)
    y = torch.randint(0, 10, (IMAGES,))
    sides: dict[str, Side] = {"ours": our_step(net, x, y), "a plain step": plain_step(net, x, y)}
    found = opacus_steps(net, x, y)
    if not found:
        notes.append("Opacus' clipped sums: not here")
    return {**sides, **found}


def best(sides: dict[str, Side], repeats: int, kind: str) -> dict[str, float]:
    """The best time of each side in milliseconds; the sides take turns."""
    least = dict.fromkeys(sides, float("inf"))
    for turn in range(repeats + 1):
        for name, side in sides.items():
            clock = time.perf_counter
            if kind == "cpu":  # only Flower has processes of its own, whose clocks are coarser
                clock = tree_time if name == FLOWER else time.process_time
            start = clock()
            side()
            if turn:  # the first turn warms up
                least[name] = min(least[name], 1e3 * (clock() - start))
    return least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=("cpu", "wall"), default="cpu")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(chosen.threads)
    notes: list[str] = []
    works = {
        "DP-SCAFFOLD round": (round_sides(notes, chosen.threads), chosen.repeats),
        "clipped sum of a convolutional network": (sum_sides(notes), 4 * chosen.repeats),
    }
    command = (
        f"python benchmarks/peers.py --out FOLDER --repeats {chosen.repeats} "
        f"--threads {chosen.threads} --clock {chosen.clock}"
    )
    lines = ["# Compared with other libraries", "",
             f"Machine: {platform.machine()}, {chosen.threads} thread(s), PyTorch "
             f"{torch.__version__}, {chosen.clock} time, best of the repeats.",
             "", f"Command: `{command}`.", "",
             "| work | side | ms | of ours |", "|---|---|---|---|"]  # fmt: skip
    found = {}
    for work, (sides, repeats) in works.items():
        times = found[work] = best(sides, repeats, chosen.clock)
        for name, ms in times.items():
            lines.append(f"| {work} | {name} | {ms:.1f} | {ms / times['ours']:.2f} × |")
            print(lines[-1], flush=True)
    lines += ["", "![peers](peers.png)", "", *(f"- {note}" for note in notes), ""]
    chosen.out.mkdir(parents=True, exist_ok=True)
    (chosen.out / "peers.md").write_text("\n".join(lines), encoding="utf-8")
    (chosen.out / "peers.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    draw(found, chosen.out / "peers.png")
    print("\n".join(notes))


def draw(found: dict[str, dict[str, float]], file: Path) -> None:
    """One bar a side, in units of ours."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, all_axes = plt.subplots(1, len(found), figsize=(10, 2.6))
    for axes, (work, times) in zip(all_axes, found.items(), strict=True):
        axes.barh(list(times), [ms / times["ours"] for ms in times.values()])
        axes.set_title(work, fontsize=9)
        axes.set_xlabel("time, in units of ours")
        axes.invert_yaxis()
    figure.tight_layout()
    figure.savefig(file, dpi=110)


if __name__ == "__main__":
    try:
        main()
    finally:
        end_all()
