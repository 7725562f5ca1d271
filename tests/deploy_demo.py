"""``make deploy-demo``: three sites, a server and a SuperLink as processes, next to the simulator.

DP-SCAFFOLD is trained twice: as a rehearsal, whose noise comes from the plan's seed so that it can
be compared, and with secret noise. Exit status 0 only if the rehearsal's model equals the
simulator's, bit for bit.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from local_federation import LocalFederation

from dpscaffold.algorithms import DEFAULT
from dpscaffold.config.gaussian import Gaussian
from dpscaffold.config.plan import Plan
from dpscaffold.data import synthetic
from dpscaffold.federation import Federation
from dpscaffold.runs.folder import RunFolder

NAMES = ("east", "north", "south")  # in the order of the roster
POLICY = {
    "epsilon": "200.0",
    "delta": "1e-4",
    "max_runs": "4",
    "units": '["record", "none"]',
}
ROUNDS = 15


def demo_data(records: int = 500) -> Federation:
    """The paper's synthetic data among three sites."""
    return synthetic(alpha=1, beta=1, users=3, records=records, dimension=40, classes=10, seed=3)


def demo_tables(rounds: int = ROUNDS, rehearsal: bool = True) -> dict[str, dict[str, object]]:
    """The server's configuration."""
    plan: dict[str, object] = {
        "rounds": rounds,
        "local_steps": 10,
        "user_ratio": 1.0,
        "data_ratio": 0.2,
    }
    return {
        "schema": {"features": 40, "classes": 10},
        "algorithm": {"name": DEFAULT},
        "plan": plan | {"data_ratio": 0.2, "learning_rate": 0.5, "evaluate_every": 10},
        "privacy": {"clip": 1.0, "noise": 10.0, "secret": not rehearsal},
        "deploy": {"deadline": 300.0},
    }


def site_data(federation: Federation) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """The training records of each user, as the sites hold them."""
    tables = {}
    for user, name in enumerate(NAMES[: federation.users]):
        features, labels = federation.train.of(user)
        tables[name] = (features.numpy(), labels.numpy())
    return tables


def simulated(federation: Federation, tables: dict[str, dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Where the simulator ends, one row at a time and with one thread."""
    from dpscaffold.algorithms import scaffold
    from dpscaffold.config import make_run
    from dpscaffold.engine import Draw, Engine, State
    from dpscaffold.tasks import Logistic

    plan, privacy = Plan(**tables["plan"]), Gaussian(**tables["privacy"])
    setting = make_run(federation.roster, Logistic(40, 10), scaffold(), plan, privacy)
    engine = Engine([setting], [federation], chunk=1)
    streams, state = setting.randomness(), State.initial(setting)
    for number in range(1, plan.rounds + 1):
        drawn = streams.cohort(number, setting.users, setting.cohort_size)
        state = engine.round(state, [Draw.all(drawn)]).state
    return {"params": state.params, **state.server.slots}


def deployed(out: Path) -> dict[str, torch.Tensor]:
    """Where a deployed run's last checkpoint stands."""
    saved = RunFolder(out).load_checkpoint()
    assert saved is not None
    return {"params": saved.state.params, **saved.state.server.slots}


def main(folder: Path | None = None) -> int:
    """Run the demonstration; returns the exit status."""
    torch.set_num_threads(1)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="dpscaffold-") as scratch:
        place = folder or Path(scratch) / "federation"
        federation = demo_data()
        with LocalFederation(place, site_data(federation), POLICY) as local:
            print(f"starting a SuperLink and the sites {', '.join(NAMES)}", flush=True)
            local.start()
            apart = _compare(local, federation)
            _secret(local)
            for name in NAMES:
                _show_ledger(local, name)
        print(f"in all {time.monotonic() - began:.0f} s")
        same = apart == 0.0
        verdict = "equals" if same else "DIFFERS FROM"
        print(f"the deployed model {verdict} the simulator's (max |x − simulator| = {apart:g})")
        return 0 if same else 1


def _compare(local: LocalFederation, federation: Federation) -> float:
    tables = demo_tables(rehearsal=True)
    out = local.folder / "rehearsal"
    if local.run(local.config("rehearsal", tables), out):
        raise SystemExit(local.log("server")[-2000:])
    _show_run("rehearsal", out)
    found, wanted = deployed(out), simulated(federation, tables)
    return max(float((found[name] - value).abs().max()) for name, value in wanted.items())


def _secret(local: LocalFederation) -> None:
    out = local.folder / "secret"
    if local.run(local.config("secret", demo_tables(rehearsal=False)), out):
        raise SystemExit(local.log("server")[-2000:])
    _show_run("secret noise", out)


def _show_run(title: str, out: Path) -> None:
    status = json.loads((out / "status.json").read_text())
    per_round = status["seconds"] / status["rounds"]
    crossed = (status["bytes_sent"] + status["bytes_received"]) / status["rounds"]
    print(
        f"{title}: {status['rounds']} rounds, each {per_round:.2f} s and {crossed / 1e3:.1f} kB",
        flush=True,
    )


def _show_ledger(local: LocalFederation, name: str) -> None:
    from dpscaffold.deployment.site.operation import ledger_lines, ledger_of

    for line in ledger_lines(ledger_of(local.folder / name / "site.toml")):
        print(f"  {line}")


if __name__ == "__main__":
    from dpscaffold.deployment.transports import flower

    flower.require()
    sys.exit(main())
