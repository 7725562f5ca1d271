"""What a newcomer gets: ``init`` and ``train`` as they are, next to training on all records at
once.

    python benchmarks/tables.py [--data-dir DIR] [--out FOLDER] [--splits 101 102 103]

For every table the two commands run in processes of their own, with nothing edited, and ``train``
once for every split of the records into training and test. The same rows that training keeps are
given to scikit-learn (a linear model without privacy) and to Opacus (DP-SGD at the same ε and δ, on
all records in one place). AUC, R² and log-loss are those of all test rows together. The result is
printed and written to FOLDER/tables.md (benchmarks/results) and tables.json.

Tables are made here or come with scikit-learn; those of ``--data-dir`` (benefits.csv and four more)
are added where the folder is there.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
from made_tables import MADE, Written
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.metrics import log_loss, r2_score, roc_auc_score

from dpscaffold import load_model, state
from dpscaffold.config import load
from dpscaffold.data.loading import load_federation
from dpscaffold.federation.schema import Target
from dpscaffold.privacy import Statement

RESULTS = Path(__file__).resolve().parent / "results"

#: Tables of a folder: label, column of sites.
REAL = {
    "benefits": ("ui", "state"),
    "vietnam": ("ill", "commune"),
    "insteval": ("good", "dept"),
    "nlschools": ("lang", "class"),
    "star": ("tmathssk", "schidkn"),
}

LIMITS = (
    "What limits it: Opacus shows what ε costs where all records lie in one place. Here every site "
    "adds noise of its own, since the server sees its uploads, so M sites have √M times the noise "
    "of one place. That is what is left between the two columns, and most where many sites have "
    "few records each. Sums that hide single uploads would remove it; towards a third party, who "
    "sees sums alone, ε is smaller already. AUC of few test rows varies by more than these "
    "distances from split to split."
)

#: The largest distances below training without privacy: of AUC on average and at worst, of R² where
#: sites have 50 records or more and where they have fewer; and the seconds of both commands.
GOALS = {"auc": 0.015, "worst auc": 0.03, "r2": 0.05, "r2 of small sites": 0.12, "seconds": 60.0}


@dataclass(frozen=True)
class Rows:
    """The rows that training keeps: features as the draft prepares them (``cut``: long rows are
    scaled down) and standardised alone (``plain``), and labels, of training and of test."""

    cut: tuple[np.ndarray, np.ndarray]
    plain: tuple[np.ndarray, np.ndarray]
    labels: tuple[np.ndarray, np.ndarray]
    classes: int
    sizes: tuple[int, ...]
    target: Target


@dataclass(frozen=True)
class Split:
    """One split of one table; ``score`` is AUC or R², losses are None for numbers."""

    seed: int
    central: float
    opacus: float | None
    drafted: float
    central_loss: float | None
    drafted_loss: float | None
    constant_loss: float | None
    seconds: float
    cpu: float


@dataclass(frozen=True)
class Found:
    """What was found on a table."""

    name: str
    metric: str
    sites: int
    records: int
    smallest: int
    typical: float
    columns: int
    init: float
    epsilon: float
    replace_one: float
    third_party: float
    delta: float
    splits: tuple[Split, ...]

    def mean(self, what: str) -> float | None:
        """Over the splits."""
        found = [getattr(split, what) for split in self.splits]
        return None if None in found else fmean(found)

    @property
    def gap(self) -> float:
        """How far the drafted model is below training without privacy."""
        return fmean(split.central - split.drafted for split in self.splits)


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    asked.add_argument("--data-dir", type=Path, default=None)
    asked.add_argument("--out", type=Path, default=RESULTS)
    asked.add_argument("--splits", type=int, nargs="+", default=[101, 102, 103])
    asked.add_argument("--tables", nargs="+", default=None)
    asked.add_argument("--epsilon", type=float, default=2.0)
    given = asked.parse_args()
    names = [*MADE, *REAL] if given.tables is None else given.tables
    there = given.data_dir is not None and given.data_dir.is_dir()
    if not there and any(name in REAL for name in names):
        where = (
            "no --data-dir is given" if given.data_dir is None else f"{given.data_dir}: no folder"
        )
        print(f"{where}: {', '.join(REAL)} are left out; give the folder of these CSV files")
        names = [name for name in names if name not in REAL]
    found = []
    with tempfile.TemporaryDirectory() as place:
        for name in names:
            table = given.data_dir / f"{name}.csv" if name in REAL else None
            if table is not None and not table.exists():
                print(f"{table} is not there: {name} is left out")
                continue
            written = Written(table, *REAL[name]) if table else MADE[name](Path(place))
            found.append(measured(name, written, given.splits, given.epsilon, Path(place)))
            print(line(found[-1]), flush=True)
    if not found:
        return
    page = as_page(found, given.epsilon)
    print(page)
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "tables.md").write_text(page)
        text = json.dumps([asdict(one) for one in found], indent=1)
        (given.out / "tables.json").write_text(text + "\n")


def measured(name: str, table: Written, seeds: list[int], epsilon: float, place: Path) -> Found:
    """Both commands, and the two other ways to train on the same rows."""
    config = place / f"{name}.toml"
    site = [] if table.site is None else ["--user", table.site]
    words = ["init", str(table.path), "--label", table.label, *site, "--epsilon", f"{epsilon}"]
    begun, _ = run([*words, "--out", str(config), "--force"])
    splits, said, rows = [], {}, None
    for seed in seeds:
        folder = place / f"{name}-{seed}"
        told = ["--set", f"data.seed={seed}", "--out", str(folder), "-q"]
        seconds, cpu = run(["train", str(config), *told])
        rows = kept(folder)
        said = state(folder)
        splits.append(judged(folder, rows, said, seed, seconds, cpu))
    assert rows is not None
    return Found(
        name,
        "AUC" if rows.classes else "R²",
        len(rows.sizes),
        sum(rows.sizes),
        min(rows.sizes),
        float(np.median(rows.sizes)),
        rows.cut[0].shape[1],
        begun,
        said.towards("server").epsilon,
        said.towards("server").replace_one,
        said.towards("third_party").epsilon,
        said.delta,
        tuple(splits),
    )


def run(words: list[str]) -> tuple[float, float]:
    """Seconds on the clock and of processor time of one command."""
    clock, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "dpscaffold", *words], capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(
            f"dpscaffold {' '.join(words)} ended with {done.returncode}: {done.stderr}"
        )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - clock, spent


def kept(folder: Path) -> Rows:
    """The rows of a run, as it split them; numbers in their own units."""
    settings = load(folder / "config.toml").data
    cut = load_federation(settings)
    plain = load_federation(
        {**settings.model_dump(exclude_none=True), "preprocess": ["standardise"]}
    )
    labels = [
        np.asarray(part.labels if cut.classes else cut.target.restored(part.labels), dtype=float)
        for part in (cut.train, cut.test)
    ]
    features = [
        tuple(part.features.double().numpy() for part in (one.train, one.test))
        for one in (cut, plain)
    ]
    return Rows(*features, tuple(labels), cut.classes, cut.roster.sizes, cut.target)


def judged(
    folder: Path, rows: Rows, said: Statement, seed: int, seconds: float, cpu: float
) -> Split:
    """The three models on the same test rows."""
    y, truth = rows.labels
    plain, tested = rows.plain
    model, inputs = load_model(folder / "model"), rows.cut[1].astype(np.float32)
    private = opacus(rows, said.towards("server").epsilon, said.delta, seed)
    if not rows.classes:
        ours = model.predict(inputs, prepared=True).numpy()
        central = LinearRegression().fit(plain, y).predict(tested)
        guessed = None if private is None else rows.target.restored(private[:, 0])
        scores = [None if p is None else r2_score(truth, p) for p in (central, guessed, ours)]
        return Split(seed, *scores, None, None, None, seconds, cpu)
    ours = model.probabilities(inputs, prepared=True).double().numpy()
    central = LogisticRegression(max_iter=5000).fit(plain, y).predict_proba(tested)
    chances = None if private is None else torch.tensor(private).softmax(1).numpy()
    constant = np.tile(np.bincount(y.astype(int), minlength=rows.classes) / len(y), (len(truth), 1))
    return Split(
        seed,
        auc(truth, central),
        None if chances is None else auc(truth, chances),
        auc(truth, ours),
        log_loss(truth, central),
        log_loss(truth, ours / ours.sum(1, keepdims=True)),
        log_loss(truth, constant),
        seconds,
        cpu,
    )


def auc(truth: np.ndarray, chances: np.ndarray) -> float:
    """Of two classes, or the mean over classes of one against the rest."""
    if chances.shape[1] == 2:
        return float(roc_auc_score(truth, chances[:, 1]))
    each = chances / chances.sum(1, keepdims=True)
    return float(roc_auc_score(truth, each, multi_class="ovr"))


def opacus(rows: Rows, epsilon: float, delta: float, seed: int) -> np.ndarray | None:
    """Scores of a linear model that Opacus trains on all records at once, at this (ε, δ); None
    where Opacus is not installed. Opacus counts the removal of a record (Poisson batches). Rows and
    clip are those of a draft, and so is the average of the later half of the steps."""
    try:
        from opacus import GradSampleModule
        from opacus.accountants.utils import get_noise_multiplier
        from opacus.optimizers import DPOptimizer
    except ImportError:
        return None
    warnings.simplefilter("ignore")
    torch.manual_seed(seed)
    steps, rate, number = 200, 0.25, not rows.classes
    x, tested = (torch.tensor(part).float() for part in rows.cut)
    y = rows.target.scaled(torch.tensor(rows.labels[0])).float() if number else rows.labels[0]
    y = y[:, None] if number else torch.tensor(y).long()
    net = torch.nn.Linear(x.shape[1], rows.classes or 1)
    torch.nn.init.zeros_(net.weight)
    torch.nn.init.zeros_(net.bias)
    length = math.sqrt(float((x**2).sum(1).max()) + 1)
    wanted = {"target_epsilon": epsilon, "target_delta": delta, "sample_rate": rate, "steps": steps}
    optimiser = DPOptimizer(
        torch.optim.SGD(net.parameters(), lr=(1 if number else 2) / length**2),
        noise_multiplier=get_noise_multiplier(**wanted, accountant="prv"),
        max_grad_norm=length / 4 if number else length,
        expected_batch_size=round(rate * len(x)),
    )
    module, total = GradSampleModule(net), torch.zeros(len(tested), rows.classes or 1)
    loss = torch.nn.functional.mse_loss if number else torch.nn.functional.cross_entropy
    for step in range(steps):
        drawn = torch.rand(len(x)) < rate
        optimiser.zero_grad()
        ((0.5 if number else 1) * loss(module(x[drawn]), y[drawn])).backward()
        optimiser.step()
        if step >= steps // 2:
            with torch.no_grad():
                total += net(tested)
    return (total / (steps // 2)).double().numpy()


def line(one: Found) -> str:
    """One table in one line."""
    others = one.mean("opacus")
    shown = "–" if others is None else f"{others:.3f}"
    text = f"{one.name}: {one.metric} {one.mean('drafted'):.3f}, central {one.mean('central'):.3f}"
    return f"{text}, Opacus {shown}, {one.mean('seconds') or 0:.0f} s"


def as_page(found: list[Found], epsilon: float) -> str:
    """The Markdown page."""
    head = [
        "table", "sites", "records", "columns", "metric", "central, no privacy", "Opacus, central",
        "drafted", "below central", "log-loss (constant)", "ε removing", "ε replacing",
        "ε third party", "seconds (CPU)",
    ]  # fmt: skip
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(_cells(one)) + " |" for one in found]
    return "\n".join(
        [
            "# What a draft reaches",
            "",
            f"`python benchmarks/tables.py --data-dir DIR`: `init --epsilon {epsilon:g}` and "
            f"`train`, nothing edited, mean over {len(found[0].splits)} splits "
            f"({', '.join(str(split.seed) for split in found[0].splits)}). All models are linear "
            f"and see the same rows, standardised; the private ones with long rows scaled down, as "
            f"the draft says. Metrics are of all test rows together. Records are "
            f"those of training, by site the smallest and the median. ε is towards the server for "
            f"removing a record's content and for replacing it, and towards a third party for "
            f"removing; Opacus trains on all records in one place at the first of these. Seconds "
            f"are of `init` and one `train`, CPU seconds of `train`.",
            "",
            *lines,
            "",
            *goals(found),
            "",
            LIMITS,
            "",
        ]
    )


def _cells(one: Found) -> list[str]:
    others, loss = one.mean("opacus"), one.mean("drafted_loss")
    losses = "–" if loss is None else f"{loss:.3f} ({one.mean('constant_loss'):.3f})"
    spread = [split.drafted for split in one.splits]
    return [
        one.name,
        str(one.sites),
        f"{one.records:,} ({one.smallest}, {one.typical:.0f})",
        str(one.columns),
        one.metric,
        f"{one.mean('central'):.3f}",
        "–" if others is None else f"{others:.3f}",
        f"{one.mean('drafted'):.3f} ± {float(np.std(spread)):.3f}",
        f"{one.gap:+.3f}",
        losses,
        f"{one.epsilon:.2f}",
        f"{one.replace_one:.2f}",
        f"{one.third_party:.2f}",
        f"{one.init + (one.mean('seconds') or 0):.0f} ({one.mean('cpu') or 0:.0f})",
    ]


def goals(found: list[Found]) -> list[str]:
    """Which goals are met."""
    ranks = {one.name: one.gap for one in found if one.metric == "AUC"}
    said = []
    if ranks:
        mean, worst = fmean(ranks.values()), max(ranks, key=lambda name: ranks[name])
        said.append(_goal("AUC below central on average", mean, GOALS["auc"]))
        said.append(
            _goal(f"AUC below central at worst ({worst})", ranks[worst], GOALS["worst auc"])
        )
        losses = {
            one.name: (one.mean("drafted_loss") or 0) - (one.mean("constant_loss") or 0)
            for one in found
            if one.metric == "AUC"
        }
        worst = max(losses, key=lambda name: losses[name])
        said.append(_goal(f"log-loss over the constant's at worst ({worst})", losses[worst], 0.0))
    for one in found:
        if one.metric == "R²":
            most = GOALS["r2" if one.typical >= 50 else "r2 of small sites"]
            said.append(_goal(f"R² below central on {one.name}", one.gap, most))
    slowest = max(found, key=lambda one: one.init + (one.mean("seconds") or 0))
    seconds = slowest.init + (slowest.mean("seconds") or 0)
    said.append(_goal(f"seconds of init and train at most ({slowest.name})", seconds, 60.0))
    return said


def _goal(what: str, value: float, most: float) -> str:
    return f"- {what}: {value:.3g}, goal {most:g}: {'met' if value <= most else 'missed'}"


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    main()
