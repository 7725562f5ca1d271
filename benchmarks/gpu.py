"""Rounds and runs on a GPU: time, launches, and whether recorded rounds are the plain ones.

    python benchmarks/gpu.py --out FOLDER [--limit 280] [--figure1]

Every part prints what it found; what fails or does not fit the limit is said and passed over.
FOLDER gets ``gpu.md``, ``gpu.json`` and ``gpu.png``. ``--figure1`` runs the whole of that
reproduction (108 runs of 400 rounds). Without a GPU the parts run on the CPU, with ``--small``
sizes for trying the script itself.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from going import rounds_of
from torch import nn

from dpscaffold import Gaussian, Logistic, Mlp, ModuleTask, Plan, fedavg, scaffold, synthetic, train
from dpscaffold.config import make_run
from dpscaffold.engine import Round, draws, gpu
from dpscaffold.engine.work import Work
from dpscaffold.federation import Federation
from dpscaffold.randomness.streams import Sampling
from dpscaffold.tasks import Task

#: Milliseconds of a round, or seconds of a run, that were set as goals for an H200.
GOALS = {
    "logistic, 1 run": 4.0,
    "logistic, 3 runs stacked": 6.0,
    "logistic, 12 runs stacked": 15.0,
    "network 784-200-10": 25.0,
    "convolutions, 13,066 parameters": 25.0,
}


@dataclass
class Report:
    """What was found, printed as it comes."""

    limit: float
    rows: list[dict[str, object]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self.started

    def say(self, text: str) -> None:
        print(f"[{self.elapsed:6.1f} s] {text}", flush=True)

    def note(self, text: str) -> None:
        self.notes.append(text)
        self.say(text)

    def part(self, name: str, work: Callable[[], None], seconds: float = 10.0) -> None:
        """Run a part, unless it would not fit the limit; a failure ends the part alone."""
        if self.elapsed + seconds > self.limit:
            self.note(f"{name}: left out, the limit of {self.limit:.0f} s is near")
            return
        try:
            work()
        except Exception as error:
            self.note(f"{name}: failed, {type(error).__name__}: {error}")


def settled(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def stack(
    data: Federation,
    task: Task,
    plan: Plan,
    runs: int,
    device: torch.device,
    sampling: Sampling = "fixed",
) -> Iterator[Round]:
    """Runs of different seeds side by side."""
    settings = [
        make_run(
            data.roster,
            task,
            scaffold(),
            plan.changed(seed=seed),
            Gaussian(clip=1.5, noise=60.0, sampling=sampling),
        )
        for seed in range(runs)
    ]
    return rounds_of(settings, data, device)


@contextmanager
def changed(*places: tuple[object, str, object]) -> Iterator[None]:
    """Attributes are these values in this block."""
    before = [getattr(owner, name) for owner, name, _ in places]
    for owner, name, value in places:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for (owner, name, _), value in zip(places, before, strict=True):
            setattr(owner, name, value)


def nothing(*given: object) -> None:
    """No program can be had."""


#: Rounds kernel by kernel, and rounds without programs of our own.
UNRECORDED = ((Work, "key", None),)
UNFUSED = ((gpu, "tried", nothing), (draws, "tried", nothing))


def timed(left: Iterator[object], device: torch.device, repeats: int) -> tuple[float, float]:
    """Median and best of this many rounds in ms, after three that record and warm up."""
    for _ in range(3):
        next(left)
    times = []
    for _ in range(repeats):
        settled(device)
        start = time.perf_counter()
        next(left)
        settled(device)
        times.append(1e3 * (time.perf_counter() - start))
    times.sort()
    return times[len(times) // 2], times[0]


def measure(
    report: Report,
    name: str,
    data: Federation,
    task: Task,
    plan: Plan,
    runs: int,
    device: torch.device,
    repeats: int,
    sampling: Sampling = "fixed",
) -> None:
    """One row: the round recorded, and kernel by kernel."""
    given = (data, task, plan, runs, device, sampling)
    median, best = timed(stack(*given), device, repeats)
    with changed(*UNRECORDED):
        plain, _ = timed(stack(*given), device, max(3, repeats // 3))
    with changed(*UNFUSED):
        unfused, _ = timed(stack(*given), device, max(3, repeats // 3))
    row = {
        "round": name,
        "ms": round(median, 2),
        "best_ms": round(best, 2),
        "unrecorded_ms": round(plain, 2),
        "without_programs_ms": round(unfused, 2),
        "goal_ms": GOALS.get(name),
    }
    report.rows.append(row)
    report.say(json.dumps(row))


def convolutions() -> ModuleTask:
    net = nn.Sequential(
        nn.Conv2d(1, 16, 5, stride=2),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(800, 10),
    )
    return ModuleTask(net, (1, 28, 28))


def same_numbers(report: Report, data: Federation, plan: Plan, device: torch.device) -> None:
    """Recorded and plain rounds end at the same parameters, and those without our own programs at
    nearly the same."""

    def end() -> torch.Tensor:
        left = stack(data, Logistic(40, 10), plan, 1, device)
        for _ in range(5):
            done = next(left)
        return done.state.params

    recorded = end()
    with changed(*UNRECORDED):
        plain = end()
    with changed(*UNFUSED):
        unfused = end()
    apart = float((recorded - plain).abs().max())
    report.note(f"largest difference of recorded and plain rounds after 5 rounds: {apart:.1e}")
    apart = float((recorded - unfused).norm() / unfused.norm())
    report.note(f"relative difference to 5 rounds without our own programs: {apart:.1e}")


def launches(report: Report, data: Federation, plan: Plan, device: torch.device) -> None:
    """What a recorded round spends its time on."""
    from torch.profiler import ProfilerActivity, profile

    left = stack(data, Logistic(40, 10), plan, 1, device)
    for _ in range(4):
        next(left)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        for _ in range(3):
            next(left)
        settled(device)
    kernels = [e for e in found.key_averages() if e.device_type == torch.autograd.DeviceType.CUDA]
    total = sum(e.self_device_time_total for e in kernels) / 3e3
    count = sum(e.count for e in kernels) / 3
    report.note(f"a logistic round: {count:.0f} kernels, {total:.2f} ms of the device's own time")
    for event in sorted(kernels, key=lambda e: -e.self_device_time_total)[:10]:
        share = event.self_device_time_total / 3e3
        report.note(f"  {share:.3f} ms in {event.count / 3:.0f} × {event.key[:70]}")


def femnist_sized(report: Report, device: torch.device, rounds: int) -> None:
    """400 rounds, K = 50, of a federation with FEMNIST's shape (40 users × 2,500 × 784, 47
    classes; the records are made, which changes no time)."""
    data = synthetic(alpha=1, beta=1, users=40, records=2500, dimension=784, classes=47)
    plan = Plan(rounds=rounds, local_steps=50, user_ratio=0.2, data_ratio=0.2, evaluate_every=10)
    for algorithm in (fedavg(), scaffold()):
        start = time.perf_counter()
        result = train(
            data, Logistic(784, 47), algorithm, plan, Gaussian(clip=1.0, noise=30.0), device=device
        )
        settled(device)
        report.note(
            f"FEMNIST's shape, {algorithm.shown}, {result.rounds} rounds: "
            f"{time.perf_counter() - start:.1f} s (goal: 8 s for 400)"
        )


def figure1(report: Report, out: Path, device: torch.device) -> None:
    """The reproduction of figure 1, as its command runs it."""
    left = max(10.0, report.limit - report.elapsed - 5)
    start = time.perf_counter()
    command = ["reproduce", "figure1", "--device", device.type, "--quiet"]
    try:
        subprocess.run(
            [sys.executable, "-m", "dpscaffold", *command, "--out", str(out / "reproduction")],
            check=True,
            timeout=left,
        )
        report.note(f"figure1, 108 runs of 400 rounds: {time.perf_counter() - start:.0f} s")
    except subprocess.TimeoutExpired:
        report.note(f"figure1: not done within {left:.0f} s (goal: 120 s)")


def machine(device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    return f"{name}, PyTorch {torch.__version__}, Python {platform.python_version()}"


def write(report: Report, out: Path, device: torch.device, command: str) -> None:
    """Markdown, JSON and a figure."""
    out.mkdir(parents=True, exist_ok=True)
    lines = [
        "# Rounds on a GPU",
        "",
        f"Measured on: {machine(device)}.",
        "",
        f"Command: `{command}`.",
        "",
        "| round | median ms | best ms | without programs, ms | kernel by kernel, ms | goal ms |",
        "|---|---|---|---|---|---|",
    ]
    for row in report.rows:
        goal = row["goal_ms"] if row["goal_ms"] is not None else "–"
        lines.append(
            f"| {row['round']} | {row['ms']} | {row['best_ms']} | {row['without_programs_ms']} "
            f"| {row['unrecorded_ms']} | {goal} |"
        )
    lines += ["", "![rounds](gpu.png)", "", *(f"- {note.strip()}" for note in report.notes), ""]
    (out / "gpu.md").write_text("\n".join(lines), encoding="utf-8")
    found = {"machine": machine(device), "rows": report.rows, "notes": report.notes}
    (out / "gpu.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        figure, axes = plt.subplots(figsize=(7, 0.6 * len(report.rows) + 1.2))
        names = [str(row["round"]) for row in report.rows]
        places = range(len(names))
        axes.barh([p + 0.2 for p in places], [r["unrecorded_ms"] for r in report.rows], 0.4,
                  label="kernel by kernel", color="0.75")  # fmt: skip
        axes.barh([p - 0.2 for p in places], [r["ms"] for r in report.rows], 0.4,
                  label="recorded", color="C0")  # fmt: skip
        axes.set_yticks(list(places), names)
        axes.invert_yaxis()
        axes.set_xlabel("milliseconds a round")
        axes.legend()
        figure.tight_layout()
        figure.savefig(out / "gpu.png", dpi=120)
    except ImportError:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit", type=float, default=280.0, help="seconds for everything")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--figure1", action="store_true", help="run that reproduction as well")
    parser.add_argument("--small", action="store_true", help="small sizes, to try the script")
    chosen = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    report, small = Report(chosen.limit), chosen.small
    flags = " --figure1" * chosen.figure1 + " --small" * small
    command = f"python benchmarks/gpu.py --out FOLDER{flags}"
    report.say(machine(device))
    report.say(f"TF32 before any run: cuDNN {torch.backends.cudnn.allow_tf32}")
    users, records = (20, 200) if small else (100, 5000)
    steps, repeats = (3 if small else 50), (3 if small else chosen.repeats)
    data = synthetic(alpha=5, beta=5, users=users, records=records)
    plan = Plan(rounds=10**6, local_steps=steps, user_ratio=0.2, data_ratio=0.2, learning_rate=0.5)
    for runs, name in (
        (1, "logistic, 1 run"),
        (3, "logistic, 3 runs stacked"),
        (12, "logistic, 12 runs stacked"),
    ):

        def rounds_of(runs: int = runs, name: str = name) -> None:
            measure(report, name, data, Logistic(40, 10), plan, runs, device, repeats)

        report.part(name, rounds_of)
        write(report, chosen.out, device, command)
    report.part(
        "Poisson batches",
        lambda: measure(report, "logistic, 1 run, Poisson batches", data, Logistic(40, 10), plan, 1,
                        device, repeats, "poisson"),
    )  # fmt: skip
    report.part("same numbers", lambda: same_numbers(report, data, plan, device))
    if device.type == "cuda":
        report.part("launches", lambda: launches(report, data, plan, device))
    images = synthetic(
        alpha=1, beta=1, users=16, records=100 if small else 2500, dimension=784, classes=10
    )
    deep = Plan(rounds=10**6, local_steps=steps, user_ratio=0.5, data_ratio=0.2, learning_rate=0.5)
    few = deep.changed(local_steps=2 if small else 10)
    report.part(
        "network",
        lambda: measure(report, "network 784-200-10", images, Mlp(784, 10, hidden=200), deep, 1,
                        device, repeats),
    )  # fmt: skip
    report.part(
        "convolutions",
        lambda: measure(report, "convolutions, 13,066 parameters", images, convolutions(), few, 1,
                        device, repeats),
    )  # fmt: skip
    write(report, chosen.out, device, command)
    report.part("FEMNIST's shape", lambda: femnist_sized(report, device, 4 if small else 400), 30)
    report.note(
        f"TF32 in runs: products {torch.backends.cuda.matmul.allow_tf32}, cuDNN "
        f"{torch.backends.cudnn.allow_tf32}"
    )
    if device.type == "cuda":
        report.note(f"most memory: {torch.cuda.max_memory_allocated(device) / 1e9:.2f} GB")
    write(report, chosen.out, device, command)
    if chosen.figure1:
        report.part("figure1", lambda: figure1(report, chosen.out, device), 20)
    write(report, chosen.out, device, command)
    report.say(f"written: {chosen.out / 'gpu.md'}")


if __name__ == "__main__":
    main()
