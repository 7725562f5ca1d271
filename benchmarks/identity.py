"""Do two source trees train the same models, bit for bit?

Every algorithm × kind of run × engine goes through :func:`dpscaffold.train` for some rounds on a
small federation; what is kept is the sha256 of x and of every metric over the rounds. Run it on one
tree, then on the other with ``--compare``, which looks at the metrics that both have; exit status 1
says that they differ::

    PYTHONPATH=old/src python benchmarks/identity.py --out old.json
    PYTHONPATH=src python benchmarks/identity.py --compare old.json
"""

from __future__ import annotations

import argparse
import hashlib
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from dpscaffold import ALGORITHMS, Federation, Gaussian, Logistic, Plan, train

EQUAL, UNEQUAL = (20,) * 10, (20, 35, 11, 52, 20, 8, 27, 30, 14, 20)

#: K·s = 1, so that FedSGD may run it too.
PLAN = Plan(
    rounds=20,
    local_steps=5,
    user_ratio=0.4,
    data_ratio=0.2,
    learning_rate=0.4,
    warm_rounds=4,
    evaluate_every=4,
)

#: What is varied: the sizes of the users, changes of the plan, the mechanism.
KINDS: dict[str, tuple[tuple[int, ...], dict[str, str], Gaussian | None]] = {
    "no privacy": (EQUAL, {}, None),
    "fixed": (EQUAL, {}, Gaussian(clip=0.7, noise=2.0)),
    "poisson": (EQUAL, {}, Gaussian(clip=0.7, noise=2.0, sampling="poisson")),
    "user level": (EQUAL, {}, Gaussian(clip=0.7, noise=0.5, unit="user")),
    "unequal users": (UNEQUAL, {}, Gaussian(clip=0.7, noise=2.0)),
    "record weights": (UNEQUAL, {"weighting": "records"}, Gaussian(clip=0.7, noise=2.0)),
    "averaging": (UNEQUAL, {"averaging": "tail"}, None),
}


def federation(sizes: tuple[int, ...]) -> Federation:
    """Users with their own centres and labels, from a fixed seed."""
    stream = np.random.default_rng(7)
    tables = []
    for size in sizes:
        centre, weights = stream.standard_normal(6), stream.standard_normal((6, 3))
        x = (centre + stream.standard_normal((size, 6))).astype(np.float32)
        tables.append((x, (x @ weights).argmax(1)))
    return Federation.from_arrays(tables, tables, classes=3)


def digests() -> dict[str, dict[str, str]]:
    """The digests by algorithm, kind and engine."""
    found = {}
    for name, make in ALGORITHMS.items():
        for kind, (sizes, changes, privacy) in KINDS.items():
            data, plan = federation(sizes), replace(PLAN, **changes)  # type: ignore[arg-type]
            for engine in ("loop", "simulator"):
                run = train(data, Logistic(6, 3), make(), plan, privacy, engine=engine)
                found[f"{name} | {kind} | {engine}"] = {
                    "x": hashlib.sha256(run.params.numpy().tobytes()).hexdigest(),
                    **{
                        metric: hashlib.sha256(
                            json.dumps([row[metric] for row in run.history]).encode()
                        ).hexdigest()
                        for metric in run.history[0]
                    },
                }
    return found


def main() -> int:
    """Print, write or compare."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--out", type=Path, help="write the digests here")
    options.add_argument("--compare", type=Path, help="digests of another tree")
    chosen = options.parse_args()
    torch.set_num_threads(1)
    found = digests()
    if chosen.out:
        chosen.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if not chosen.compare:
        print(json.dumps(found, indent=1))
        return 0
    other = json.loads(chosen.compare.read_text(encoding="utf-8"))
    shared = sorted(found.keys() & other.keys())
    parts = [(key, part) for key in shared for part in found[key].keys() & other[key].keys()]
    unlike = [f"{key}: {part}" for key, part in parts if found[key][part] != other[key][part]]
    print("\n".join(sorted(unlike)))
    print(f"{len(shared)} runs and {len(parts)} digests in both trees, {len(unlike)} differ")
    return bool(unlike) or not shared


if __name__ == "__main__":
    raise SystemExit(main())
