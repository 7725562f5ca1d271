"""Small runs, and what the old package made of them: features and final parameters.

``python -m frozen.configurations`` (in ``tests/``, with the interpreter of ``.venv-old``) runs
:file:`configurations.toml` and writes :file:`configurations.npz`. It is run once.
"""

from __future__ import annotations

import contextlib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import dpscaffold

HERE = Path(__file__).parent
LIST, ARRAYS = HERE / "configurations.toml", HERE / "configurations.npz"
#: Where the files of the configurations lie.
INPUTS = HERE / "inputs"
#: How many training rows of the features are kept, and how far numbers may be apart.
ROWS, TOLERANCE = 200, 1e-4

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Run:
    """A configuration of the old package, and how far the present one's numbers may be from its."""

    id: str
    tables: dict[str, Any]
    tolerance: float


def read() -> list[Run]:
    """The configurations, in the order of the list."""
    found = []
    for entry in tomllib.loads(LIST.read_text(encoding="utf-8"))["run"]:
        tables = {name: table for name, table in entry.items() if isinstance(table, dict)}
        found.append(Run(entry["id"], tables, entry.get("tolerance", TOLERANCE)))
    return found


def frozen() -> dict[str, Arrays]:
    """What the old package made of each, by the name of the configuration."""
    found: dict[str, Arrays] = {}
    with np.load(ARRAYS) as stored:
        for name in stored.files:
            id, _, what = name.partition("/")
            found.setdefault(id, {})[what] = stored[name]
    return found


def made(tables: Mapping[str, Any]) -> Arrays:
    """What the package makes of a configuration: float32 arrays by name."""
    with contextlib.chdir(INPUTS):
        result = dpscaffold.run(tables)
    arrays = {"features": result.federation.train.features[:ROWS], "parameters": result.params}
    if result.own is not None:
        arrays["personal"] = result.own
    return {name: array.detach().float().cpu().numpy() for name, array in arrays.items()}


def main() -> None:
    """Run them all and write what came of them."""
    if dpscaffold.__version__ != "0.2.0":
        raise SystemExit(f"this is dpscaffold {dpscaffold.__version__}, and 0.2.0 is asked for")
    found = {
        f"{run.id}/{what}": array for run in read() for what, array in made(run.tables).items()
    }
    np.savez_compressed(ARRAYS, **found)
    print(f"{ARRAYS}: {len(found)} arrays, {ARRAYS.stat().st_size} bytes")


if __name__ == "__main__":
    main()
