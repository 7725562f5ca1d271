"""A model for one site: the common model, fitted further to the site's own records, at the site.

Nothing here is noised. A personal model is a function of the common model and of one site's records
as they are, so neither it nor its answers are covered by ε: it stays at its site.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from dpscaffold.algorithms.mean_regularised import given_out
from dpscaffold.data.tables.codec import read_labels
from dpscaffold.data.tables.rows import coding_of
from dpscaffold.errors import BadInput, nearest
from dpscaffold.federation import Federation
from dpscaffold.models.evaluate import label_columns
from dpscaffold.models.model import Model
from dpscaffold.privacy import without_guarantee
from dpscaffold.privacy.preparation import Remark
from dpscaffold.runs.folder import RunFolder
from dpscaffold.tasks import Task
from dpscaffold.tasks.metrics import Metric, metrics_for, titled
from dpscaffold.tasks.near import NearFit, SiteRows, better_of, fit_sites

if TYPE_CHECKING:
    import pyarrow as pa
else:
    from dpscaffold.data.tables.arrow import pa

#: λ of a personal model: a number, or chosen by records that are held out at the site.
Strength = float | Literal["auto"]
#: What every personal model and all its answers are marked with.
NOT_COVERED = (
    "This is a personal model: it was fitted without noise to the records of one site. Neither it "
    "nor its answers are covered by ε; keep both at the site."
)
#: What is said of personal models that were trained from noised gradients.
SERVERS_EPSILON = (
    "This is a personal model: it was trained from the noised gradients of one site. ε towards the "
    "server covers it; an ε towards third parties, who see the common model alone, does not."
)
#: Where a run folder keeps the three numbers of every site.
JOINING = "personal.json"
#: The share of rows that is held out where one table must serve for fitting and for testing.
HELD_OUT = 0.2


def personal_model(model: Model, rows: SiteRows, site: str, strength: Strength = "auto") -> Model:
    """The model of one site, fitted to its records near the common ``model``.

    Args:
        model: The common model.
        rows: The records of the site.
        site: The name of the site.
        strength: λ of (1/R)Σf_j(w) + (λ/2)‖w − x‖²; ``"auto"`` chooses it by records that are held
            out, leave-one-out in closed form for a linear model with the squared loss.
    """
    return named_personal(model, _near(model, [rows], strength)[0], site)


def named_personal(model: Model, fit: NearFit, site: str) -> Model:
    """The fit of a site as a model that says that it is not covered by ε."""
    preparation = (*model.preparation, Remark(NOT_COVERED, "unprotected"))
    origin = replace(model.origin, personal=site)
    return replace(
        model,
        params=fit.params,
        preparation=preparation,
        privacy=without_guarantee(NOT_COVERED),
        origin=origin,
    )


def noised_personal(model: Model, params: Tensor, site: str) -> Model:
    """A model that was trained for one site during the run, from its noised gradients: a function
    of what the server's adversary is assumed to see, so that ε towards the server covers it."""
    origin = replace(model.origin, personal=site)
    preparation = (*model.preparation, Remark(SERVERS_EPSILON, "none needed"))
    return replace(model, params=params, preparation=preparation, origin=origin)


def own_models(kept: Mapping[str, Any], users: int, common: Tensor) -> Tensor:
    """The users' own parameters (M, P) from the slots that a checkpoint holds; x for users that
    never took part."""
    found = common.expand(users, -1).clone()
    slots = {name: value.cpu() for name, value in kept["slots"].items()}
    found[kept["users"]] = given_out(slots, common)
    return found


def stored_models(folder: Path, users: int, common: Tensor) -> Tensor:
    """The users' own parameters (M, P) in the folder of a run that makes them."""
    saved = RunFolder(folder).load_checkpoint()
    if saved is None or "personal" not in saved.memories["slots"]:
        raise BadInput(
            "run-unfinished",
            f"{folder} holds no personal models yet; finish the run with --resume",
        )
    return own_models(saved.memories, users, common)


def coverage(model: Model) -> str:
    """Whether ε covers a personal model; what does not say so is not covered."""
    trained = any(step.sentence == SERVERS_EPSILON for step in model.preparation)
    guaranteed = model.privacy is not None and model.privacy.guarantee
    return SERVERS_EPSILON if trained and guaranteed else NOT_COVERED


def _near(model: Model, sites: Sequence[SiteRows], strength: Strength) -> list[NearFit]:
    """The personal fit of each site. Where λ is chosen, a fit of the site's own that is clearly
    better takes the place of one near the common model."""
    if strength != "auto":
        return fit_sites(model.task, sites, model.params, strength)
    near = fit_sites(model.task, sites, model.params)
    return [better_of(pair) for pair in zip(near, local_fits(model.task, sites), strict=True)]


def local_fits(task: Task, sites: Sequence[SiteRows]) -> list[NearFit]:
    """What each site could fit alone, with a strength of its own."""
    return fit_sites(task, sites, task.initial(0))


def user_number(federation: Federation, user: int | str) -> int:
    """The number of a user that is given by number or name."""
    if isinstance(user, str):
        if user in federation.names:
            return federation.names.index(user)
        known = f"{federation.names[0]} to {federation.names[-1]}" if federation.names else "none"
        raise BadInput(
            "unknown-user",
            f"user is '{user}'{nearest(user, federation.names)}, and the federation has no such "
            f"user ({known}); give a name or a number from 0 up",
        )
    if not 0 <= user < federation.users:
        raise BadInput(
            "unknown-user",
            f"user is {user}, and the federation has users 0 to {federation.users - 1}; give one "
            f"of them",
        )
    return user


@dataclass(frozen=True)
class SiteComparison:
    """One site's metric by its local model, by the common one and by its personal one.

    ``rows`` is the number of test records and ``strength`` the λ that was chosen. ``gain`` is how
    much better the personal model is than the local one.
    """

    site: str
    rows: int
    local: float
    common: float
    personal: float
    strength: float
    gain: float
    sentence: str

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON; an infinite λ is the text ``"inf"``."""
        said = {key: value for key, value in asdict(self).items() if key != "common"}
        said["strength"] = self.strength if math.isfinite(self.strength) else "inf"
        order = ("site", "rows", "local", "global", "personal", "gain", "strength", "sentence")
        return {key: {**said, "global": self.common}[key] for key in order}


@dataclass(frozen=True)
class SitesCompared:
    """Whether joining helps: the three numbers of every site, and their means over sites."""

    metric: str
    better: Literal["higher", "lower"]
    sites: tuple[SiteComparison, ...]
    note: str = (
        "Local, global and personal metrics are computed from the sites' records as they are: ε "
        "does not cover them, nor the local and personal models."
    )

    def mean(self, which: Literal["local", "common", "personal", "gain"]) -> float:
        """The mean of a number over the sites where it is defined."""
        return float(np.nanmean([getattr(one, which) for one in self.sites]))

    @property
    def sentence(self) -> str:
        """Whether joining helps, on average and for how many sites."""
        gain = self.mean("gain")
        helped = sum(one.gain > 0 for one in self.sites)
        verdict = _verdict(self.metric, gain, "on average")
        count = f"{helped} of {len(self.sites)} sites have a better model than alone"
        return f"{verdict}; {count}." if len(self.sites) > 1 else self.sites[0].sentence

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        means = {"local": "local", "global": "common", "personal": "personal"}
        return {
            "metric": self.metric,
            "mean": {key: self.mean(which) for key, which in means.items()},  # type: ignore[arg-type]
            "sentence": self.sentence,
            "sites": [one.to_dict() for one in self.sites],
            "note": self.note,
        }


def compare_sites(
    model: Model, federation: Federation, strength: Strength = "auto", own: Tensor | None = None
) -> SitesCompared:
    """The three numbers of every user: fitted on its training records, measured on its test
    records. ``own`` (M, P) are personal models that were trained during the run."""
    sites = [SiteRows(*federation.train.of(user)) for user in range(federation.users)]
    tests = [SiteRows(*federation.test.of(user)) for user in range(federation.users)]
    return compare_rows(model, sites, tests, federation.names, strength, own)


def compare_rows(
    model: Model,
    sites: Sequence[SiteRows],
    tests: Sequence[SiteRows],
    names: Sequence[str],
    strength: Strength = "auto",
    personal: Tensor | None = None,
) -> SitesCompared:
    """As :func:`compare_sites`, for the rows of any sites; ``personal`` are parameters of personal
    models that exist already."""
    metric = metrics_for(model.target)[0]
    local = local_fits(model.task, sites)
    if personal is not None:
        near = [NearFit(params, math.nan, params.new_zeros(0)) for params in personal]
    elif strength == "auto":
        close = fit_sites(model.task, sites, model.params)
        near = [better_of(pair) for pair in zip(close, local, strict=True)]
    else:
        near = _near(model, sites, strength)
    found = []
    for name, test, alone, own in zip(names, tests, local, near, strict=True):
        models = (alone.params, model.params, own.params)
        by_local, by_common, by_own = (_measured(model, metric, w, test) for w in models)
        gain = by_own - by_local if metric.better == "higher" else by_local - by_own
        sentence = f"{_verdict(metric.name, gain, 'here')}."
        numbers = (by_local, by_common, by_own, own.strength, gain)
        found.append(SiteComparison(name, len(test), *numbers, sentence))
    return SitesCompared(metric.name, metric.better, tuple(found))


def _measured(model: Model, metric: Metric, params: Tensor, rows: SiteRows) -> float:
    with torch.no_grad():
        scores = model.task.scores(params, model.task.prepare(rows.features))
    return metric.of(model.target.answers(scores), model.target.restored(rows.labels))


def _verdict(metric: str, gain: float, where: str) -> str:
    """Whether joining helps, in a sentence without its full stop."""
    if not math.isfinite(gain):
        return f"Whether joining helps {where} is not known: the metric is not defined"
    shown = f"{abs(gain) * 100:.1f} points" if "accuracy" in metric else f"{abs(gain):.3g}"
    of = f"{titled(metric)}, personal model against local model"
    if gain > 0:
        return f"Joining helps {where} by {shown} ({of})"
    return (
        f"Joining does not help {where}: the personal model is {shown} worse ({of})"
        if (gain < 0)
        else f"Joining does not help {where}: personal and local model are equally good"
    )


def read_site(model: Model, data: Path, label: str | None = None) -> SiteRows:
    """The rows of one site's table, prepared as the model was trained; incomplete ones are left
    out."""
    wanted = label_columns(model, data, label)
    coding = coding_of(model.preparation, model.columns)
    features, labels = [], []
    for part in model.parts(data, wanted):
        if part.complete.any():
            held, reader = part.others.filter(pa.array(part.complete)), coding.reader(part.decimal)
            read = read_labels(model.target, {name: held.column(name) for name in wanted}, reader)
            features.append(torch.from_numpy(part.features))
            labels.append(torch.from_numpy(read.require()))
    if not features:
        raise BadInput(
            "no-rows",
            f"{data} holds no row with which a personal model could be fitted; give the site's own "
            f"labelled rows",
        )
    whole = model.target.scaled(torch.cat(labels))
    return SiteRows(torch.cat(features), whole)


def split(rows: SiteRows) -> tuple[SiteRows, SiteRows]:
    """Four fifths of a site's rows to fit, and a fifth to test; a fixed shuffle decides."""
    if len(rows) < 5:
        raise BadInput(
            "too-few-rows",
            f"the site has {len(rows)} rows, and a fifth of them is held out to compare models; "
            f"give 5 or more",
        )
    order = torch.from_numpy(np.random.default_rng(1).permutation(len(rows)))
    count = int(len(rows) * HELD_OUT)
    return rows.some(order[count:]), rows.some(order[:count])
