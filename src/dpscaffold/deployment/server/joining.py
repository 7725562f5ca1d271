"""Whether joining helped, over the sites that say so with noise: the mean of their files."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpscaffold.deployment.protocol.enrolment import EnrolledRun
from dpscaffold.deployment.protocol.joining import (
    LIMIT,
    NUMBERS,
    STEPS,
    NoisedJoining,
    read_joining,
)
from dpscaffold.deployment.protocol.messages import digest
from dpscaffold.deployment.provision import signing_keys
from dpscaffold.deployment.server.continuing import SITES
from dpscaffold.errors import BadInput
from dpscaffold.privacy.further import with_comparison
from dpscaffold.privacy.showing import round_up
from dpscaffold.report.statement_page import render
from dpscaffold.runs.folder import RunFolder
from dpscaffold.runs.ledger import NOISED_JOINING, SitesReleases, read_comparison
from dpscaffold.runs.written import plain
from dpscaffold.tasks.metrics import titled


@dataclass(frozen=True)
class JoiningOverSites:
    """Means over sites of how much better the common and the personal model are than a site's own,
    as shares (0.01 is one point of accuracy, or a hundredth of a number's range).

    ``noise`` is the standard deviation of the noise in either mean, a public number.
    """

    metric: str
    names: tuple[str, ...]
    common: float
    personal: float
    noise: float
    epsilon: float

    @property
    def sentence(self) -> str:
        """Whether joining helps, as far as the noise lets one say."""
        shown = f"{_points(self.personal)} ± {100 * self.noise:.1f}"
        what = f"{shown} points of {titled(self.metric)}, personal model against local model"
        over = f"over {len(self.names)} site{'' if len(self.names) == 1 else 's'}"
        if abs(self.personal) < 2 * self.noise:
            return f"The noise is too large to say whether joining helps {over}: {what}."
        helps = "helps" if self.personal > 0 else "does not help"
        return f"Joining {helps} on average {over}: {what}."

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return {
            "metric": self.metric,
            "sites": list(self.names),
            "global_gain": self.common,
            "personal_gain": self.personal,
            "noise": self.noise,
            "epsilon": self.epsilon,
            "sentence": self.sentence,
            "note": (
                f"Differences from the sites' local models, each cut at ±{100 * LIMIT:g} points "
                f"and noised at its site. Its ε ({round_up(self.epsilon)}, the largest of a site) "
                f"is in the site's ledger and not in the ε of the run: for whoever sees both they "
                f"add. Only sites that allow it are counted."
            ),
        }


def _points(share: float) -> str:
    return f"{100 * share:+.1f}"


def joined(folder: Path, server: Path, paths: Sequence[Path]) -> JoiningOverSites:
    """Check the files of a run's sites, take their mean, and keep it in the run folder."""
    out = RunFolder(folder)
    saved = out.read_json(SITES)
    if saved is None:
        raise BadInput("not-a-run", f"{folder} holds no deployed run ({SITES}); name another")
    enrolled, keys = EnrolledRun.from_dict(saved), signing_keys(server)
    files: dict[str, NoisedJoining] = {}
    for path in paths:
        one = _checked(path, enrolled, keys)
        if one.site in files:
            raise BadInput(
                "combined-twice",
                f"{path} is a second file of {one.site!r}; give one of each site",
            )
        files[one.site] = one
    found = mean_of(list(files.values()))
    known = read_comparison(folder) or SitesReleases()
    now = {digest(dict(one.message.header)): (one.site, one.epsilon) for one in files.values()}
    released = SitesReleases({**known.files, **now})
    shown = found.to_dict() | {"released": released.to_json()}
    out.write_text(NOISED_JOINING, json.dumps(shown, indent=2) + "\n")
    _state(out, released, enrolled.names)
    return found


def _state(out: RunFolder, released: SitesReleases, names: Sequence[str]) -> None:
    """Say in the run's statement that more was released of its records, before it is shown."""
    said = out.statement()
    if said is None:
        return
    said = with_comparison(said, released.epsilon, released.sites)
    out.write_text("privacy.json", json.dumps(plain(said), indent=2) + "\n")
    out.write_text("privacy.md", render(said, names=names))


def _checked(path: Path, enrolled: EnrolledRun, keys: Mapping[str, str]) -> NoisedJoining:
    one = read_joining(path)
    if one.site not in keys or not one.message.signed_by(keys[one.site]):
        raise BadInput(
            "bad-signature",
            f"{path} is not signed by a site {one.site!r:.80} of the roster; ask the site again",
        )
    if one.run != enrolled.run or one.site not in enrolled.names:
        raise BadInput(
            "other-federation",
            f"{path} is about the run {one.run:.12}, and the folder's is {enrolled.run:.12}; name "
            f"the folder of its run, or leave it out",
        )
    return one


def _variance(scale: int) -> float:
    """Of the noise of one number, in steps²."""
    decay = math.exp(-1 / scale)
    return 2 * decay / (1 - decay) ** 2


def mean_of(files: Sequence[NoisedJoining]) -> JoiningOverSites:
    """The mean over sites, and the standard deviation of the noise in it: that of a site is
    √(2q)/(1 − q) steps with q = exp(−1/scale)."""
    if len({one.metric for one in files}) != 1:
        raise BadInput(
            "other-federation",
            "the files are of different metrics, or there are none; give those of one run",
        )
    step, count = LIMIT / STEPS, len(files)
    means = {name: step * sum(getattr(one, name) for one in files) / count for name in NUMBERS}
    variance = sum(_variance(one.scale) for one in files)
    return JoiningOverSites(
        files[0].metric,
        tuple(sorted(one.site for one in files)),
        means["common"],
        means["personal"],
        step * math.sqrt(variance) / count,
        max(one.epsilon for one in files),
    )
