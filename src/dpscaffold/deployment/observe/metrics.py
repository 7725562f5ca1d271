"""Numbers in the text format of Prometheus, from the files that a site or a server keeps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from dpscaffold.deployment.observe.status import ServerStatus, SiteStatus


@dataclass(frozen=True)
class Series:
    """One metric: its name, what it means, and its values by labels."""

    name: str
    kind: str
    meaning: str
    values: tuple[tuple[Mapping[str, str], float], ...] = field(default=())

    def lines(self) -> list[str]:
        """As Prometheus reads it.

        >>> Series("rounds", "gauge", "Rounds.", (({"site": 'a"b'}, 2.0),)).lines()[-1]
        'dpscaffold_rounds{site="a\\\\"b"} 2'
        """
        name = f"dpscaffold_{self.name}"
        head = [f"# HELP {name} {self.meaning}", f"# TYPE {name} {self.kind}"]
        return head + [f"{name}{_labels(labels)} {_number(v)}" for labels, v in self.values]


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    quoted = (
        value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        for value in labels.values()
    )
    return "{" + ",".join(f'{k}="{v}"' for k, v in zip(labels, quoted, strict=True)) + "}"


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) else repr(float(value))


def text_of(metrics: Iterable[Series]) -> str:
    """The answer to ``/metrics``."""
    return "\n".join(line for metric in metrics for line in metric.lines()) + "\n"


def _by(label: str, counts: Mapping[str, float]) -> tuple[tuple[Mapping[str, str], float], ...]:
    return tuple(({label: name}, value) for name, value in sorted(counts.items()))


def site_metrics(status: SiteStatus) -> list[Series]:
    """What a site can be watched by. ε is that of its own ledger."""
    return [
        Series("site_answers_total", "counter", "Messages answered.", (({}, status.answered),)),
        Series("site_refusals_total", "counter", "Refusals by code.", _by("code", status.refusals)),
        Series(
            "site_participations_total",
            "counter",
            "Participations in the ledger.",
            (({}, status.participations),),
        ),
        Series(
            "site_epsilon_reserved",
            "gauge",
            "Epsilon reserved by runs.",
            (({}, status.epsilon_reserved),),
        ),
        Series(
            "site_epsilon_left",
            "gauge",
            "Epsilon that is left for new runs.",
            (({}, status.epsilon_left),),
        ),
        Series(
            "site_requests_waiting",
            "gauge",
            "Requests that wait for a person's decision.",
            (({}, status.waiting),),
        ),
        Series(
            "site_last_answer_seconds",
            "gauge",
            "Seconds that the last answer took.",
            (({}, status.last_seconds),),
        ),
    ]


def server_metrics(status: ServerStatus) -> list[Series]:
    """What a run at the server can be watched by."""
    sites = status.sites
    crossed = {"sent": float(status.bytes_sent), "received": float(status.bytes_received)}
    return [
        Series("round", "gauge", "The last finished round.", (({}, status.round),)),
        Series("rounds_planned", "gauge", "The rounds of the plan.", (({}, status.rounds),)),
        Series(
            "seconds_total",
            "counter",
            "Seconds by phase.",
            _by("phase", {"all": status.seconds, "last_round": status.round_seconds}),
        ),
        Series("bytes_total", "counter", "Bytes by direction.", _by("direction", crossed)),
        Series("refusals_total", "counter", "Refusals by code.", _by("code", status.refusals)),
        Series(
            "epsilon_spent",
            "gauge",
            "Epsilon towards the server, given who took part.",
            () if status.epsilon is None else (({}, status.epsilon),),
        ),
        Series(
            "site_participations",
            "gauge",
            "Participations by site.",
            _by("site", {site.name: float(site.participations) for site in sites}),
        ),
        Series(
            "site_reachable",
            "gauge",
            "Whether a site's connection is open.",
            _by("site", {site.name: float(site.reachable) for site in sites}),
        ),
        Series(
            "site_running",
            "gauge",
            "Whether a site answered the last round.",
            _by("site", {site.name: float(site.running) for site in sites}),
        ),
    ]
