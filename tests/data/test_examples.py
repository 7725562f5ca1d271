"""The configurations and the documentation of the data part hold what they say."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from dpscaffold.config import load
from dpscaffold.data import load_federation, parse_data
from dpscaffold.training.train import train

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(ROOT.glob("examples/femnist-*.toml")) + sorted(ROOT.glob("examples/mnist-*.toml"))


def test_all_six_are_there() -> None:
    names = {
        f"{data}-{similarity}.toml" for data in ("femnist", "mnist") for similarity in (0, 10, 100)
    }
    assert {path.name for path in EXAMPLES} >= names


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_they_are_the_papers_settings(path: Path) -> None:
    settings = load(path)
    data, plan, privacy = settings.data, settings.plan, settings.privacy
    femnist = path.stem.startswith("femnist")
    assert data.similarity == float(path.stem.split("-")[1])
    assert (data.users, data.records) == ((40, 2500) if femnist else (60, 1000))
    assert (plan.rounds, plan.local_steps) == ((400, 50) if femnist else (100, 50))
    assert plan.user_ratio == plan.data_ratio == 0.2
    assert privacy is not None and privacy.noise == 30.0 and isinstance(privacy.clip, float)
    assert settings.task.kind == ("logistic" if femnist else "mlp")


def test_a_smaller_mnist_run(real_data: Path) -> None:
    """The MNIST configuration with fewer and smaller users learns something within a few rounds."""
    changes = [
        "data.users=10",
        "data.records=200",
        "plan.rounds=8",
        "plan.local_steps=5",
        "plan.user_ratio=1.0",
        "privacy=false",
    ]
    settings = load(ROOT / "examples" / "mnist-100.toml", [*changes, f'data.path="{real_data}"'])
    federation = load_federation(settings.data)
    setting = settings.setting(federation)
    result = train(federation, setting.task, setting.algorithm, setting.plan)
    assert federation.dimension == 60 and result.final["test_accuracy"] > 0.3


def test_the_tables_in_the_documentation_are_valid() -> None:
    pages = ("data", "tables", "partition", "preprocessing", "large-data")
    texts = [(ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8") for page in pages]
    shown = [tomllib.loads(one) for one in re.findall(r"```toml\n(.*?)```", "".join(texts), re.S)]
    tables = [one["data"] for one in shown if "data" in one]
    assert len(tables) >= 2
    for table in tables:
        parse_data(table)
