"""What a site tells of its three numbers, if it allows it: two differences with noise, once a run.

Adversary: whoever gets the file, together with all that the site ever sent. Neighbours: any two
contents of the site's records, so one record is covered, and the whole site too. Theorem: Laplace
noise of scale Δ₁/ε on integers (Dwork et al. 2006; drawn exactly as in Canonne, Kamath, Steinke
2020). ε adds to that of the runs (Rogers, Roth, Ullman, Vadhan 2016), and is in the ledger before
the noise is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dpscaffold.deployment.protocol.joining import LIMIT, NoisedJoining, noised, scale_for
from dpscaffold.deployment.protocol.messages import digest
from dpscaffold.deployment.provision import read_signing_key, write_whole
from dpscaffold.deployment.site.file import EVALUATION, SiteGrant
from dpscaffold.deployment.site.ledger import GrantedRun, SiteLedger
from dpscaffold.deployment.site.memory import StateFolder
from dpscaffold.deployment.site.personal import FinishedSite, after_run
from dpscaffold.errors import BadInput
from dpscaffold.models.personal import SitesCompared
from dpscaffold.privacy.showing import round_up

#: The file in a run's folder of the site's state; it can be sent again, and is never made again.
KEPT = "noised.joining"


@dataclass(frozen=True)
class MadeJoining:
    """A file that was written, or written again as it was."""

    path: Path
    epsilon: float
    again: bool


def make_joining(
    path: Path, out: Path | None, run: str | None = None, data: Sequence[Path] = ()
) -> MadeJoining:
    """Write the noised comparison of a finished run at the site of ``site.toml``.

    The process of the site must not run: one at a time writes the ledger.

    Args:
        path: The site's file.
        out: The file to write; by default NAME.joining.
        run: The run; the latest by default.
        data: Labelled rows to test on; by default a fifth of the site's records.
    """
    here = after_run(path, run)
    epsilon, out = here.file.policy.evaluation_epsilon, out or Path(f"{here.file.name}.joining")
    if epsilon is None:
        raise BadInput(
            "not-allowed",
            f"{path} has no policy.evaluation_epsilon, so nothing of the comparison may leave this "
            f"site; set it to the ε that this may spend, or use 'site evaluate --personal' here",
        )
    state = StateFolder(here.file.state, here.file.name)
    try:
        return _made(here, epsilon, out, data)
    finally:
        state.close()


def _made(here: FinishedSite, epsilon: float, out: Path, data: Sequence[Path]) -> MadeJoining:
    known, ledger = here.memory.enrolment(), here.ledger()
    assert known is not None
    entry, kept = digest("joining", known.run), here.memory.folder / KEPT
    if entry in ledger.runs:
        return _again(ledger, entry, kept, out)
    if here.stated(ledger) is None:
        raise BadInput(
            "no-privacy",
            "the run has no guarantee at this site (no privacy, or a rehearsal), so noise on the "
            "comparison gives none; use 'site evaluate --personal', and keep its numbers here",
        )
    key, compared = read_signing_key(here.file.signing_key), here.compared("auto", data)
    scale = scale_for(epsilon)
    said = NoisedJoining(known.run, here.file.name, compared.metric, 0, 0, scale)
    _reserve(here, ledger, entry, said.epsilon)
    said = noised(said.run, said.site, said.metric, _differences(here, compared), scale)
    write_whole(kept, said.to_bytes(key))
    write_whole(out, kept.read_bytes())
    return MadeJoining(out, said.epsilon, False)


def _again(ledger: SiteLedger, entry: str, kept: Path, out: Path) -> MadeJoining:
    """The same file as before: noise that is drawn twice would be half as good."""
    if not kept.exists():
        raise BadInput(
            "session-spent",
            "the ledger has a line for the comparison of this run, and its file was not finished; "
            "noise is drawn once for each run, so wait for the next one",
        )
    write_whole(out, kept.read_bytes())
    return MadeJoining(out, ledger.runs[entry].grant.epsilon or 0.0, True)


def _differences(here: FinishedSite, compared: SitesCompared) -> dict[str, float]:
    """How much better than the local model; errors of a number as a share of its range."""
    (one,), target = compared.sites, here.model.target
    scale = 1.0 if compared.better == "higher" else -1.0
    if target.kind == "number":
        low, high = target.low, target.high
        if low is None or high is None or not low < high:  # no schema of a deployed run
            return {"common": math.nan, "personal": math.nan}
        scale /= high - low
    return {
        "common": scale * (one.common - one.local),
        "personal": scale * (one.personal - one.local),
    }


def _reserve(here: FinishedSite, ledger: SiteLedger, entry: str, epsilon: float) -> None:
    """ε in the ledger, as of a run of one participation, before any noise is drawn."""
    policy, left = here.file.policy, ledger.left(here.file.policy)
    room = left.epsilon if policy.secure is None else min(left.epsilon, left.alone)
    if left.runs < 1 or epsilon > room * (1 + 1e-9):
        raise BadInput(
            "budget-too-small",
            f"policy.evaluation_epsilon asks for ε = {round_up(epsilon)}, and the policy has "
            f"{room:.4g} left ({max(0, left.runs)} runs); set a smaller one, or keep the numbers "
            f"here",
        )
    terms, work = here.release_terms(EVALUATION), here.work
    account = terms.to_dict(work.records, work.records, work.declared)
    account["laplace"] = {"epsilon": epsilon, "limit": LIMIT}
    ledger.spend_once(GrantedRun(entry, entry, SiteGrant(1, epsilon, 0.0), account))
