"""What a plan recommends: lines for people, a configuration, plan.json and a figure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpscaffold.atomic import write_text
from dpscaffold.planning.recommendation import Recommendation, as_tables
from dpscaffold.planning.surrogate import SEPARATIONS
from dpscaffold.planning.trial import Choice
from dpscaffold.privacy import ALONE, Cost, Facts, Part, state
from dpscaffold.privacy.numbers import digits_up, round_up
from dpscaffold.privacy.preparation import charged
from dpscaffold.privacy.statement import large_delta
from dpscaffold.report.drawing import new_figure, save_figure
from dpscaffold.runs.written import plain, to_toml


def score_name(found: Recommendation) -> str:
    """What surrogates are scored by."""
    return "accuracy" if found.facts.classes else "R²"


def towards(found: Recommendation) -> str:
    """Whom ε is promised to, in words."""
    together, secure = found.setting.limits.colluders, found.setting.secure
    return {
        "server": "the server" if secure is None else f"the server {_with(secure.colluders)}",
        "third-party": "a third party",
        "participant": "a participant" if together == 1 else f"{together} participants together",
    }.get(found.goal.view, "a third party (by the published bound, which is no theorem)")


def _with(colluders: int) -> str:
    """Who may help the server where it sees sums only."""
    sites = "1 site" if colluders == 1 else f"{colluders} sites"
    return f"together with at most {sites}" if colluders else "by itself"


def plan_lines(found: Recommendation) -> list[str]:
    """The recommendation: five lines (what, why, what it keeps, what to expect, what it costs), and
    notes."""
    low, high = found.choice.flat
    name = score_name(found)
    promise, *notes = _promise(found)
    lines = [
        _what(found),
        _why(found),
        promise,
        f"expected: on surrogates its {name} is {found.choice.score:.3f}, {100 * found.kept:.0f} % "
        f"of the {found.public:.3f} without privacy; η₀ from {low:g} to {high:g} loses at most a "
        f"point",
        f"it costs {found.traffic / 1e6:.3g} MB of traffic and {found.local_steps:,} local steps, "
        f"over all users and rounds",
        *notes,
    ]
    if found.smaller:
        lines.append(found.smaller)
    if found.facts.similarity is None:
        lines.append("γ is unknown: users were supposed to have nothing in common (γ = 0 %)")
    if found.preset.budgets is not None:
        lines.append(f"budgets: the plan is made for ε = {found.goal.epsilon:g}, the usual one")
    lines += found.preset.remarks
    lines.append("Nothing private was read: no privacy was spent on this choice.")
    return lines


def _what(found: Recommendation) -> str:
    setting, plan = found.setting, found.setting.plan
    assert setting.privacy is not None
    weights = "users" if plan.weighting == "uniform" else plan.weighting
    secure = "" if setting.secure is None else " with secure sums"
    return (
        f"DP-{setting.algorithm.shown}{secure}: T = {plan.rounds} rounds, K = {plan.local_steps} "
        f"steps, {setting.cohort_size} of {setting.users} users a round (l = {plan.user_ratio:g}), "
        f"batches of s = {plan.data_ratio:g}, a mean by {weights}, C = {setting.privacy.clip:g}, "
        f"η₀ = {found.choice.rate:g}, the average of the last half of the rounds"
    )


def _why(found: Recommendation) -> str:
    """How the plan compares with the other candidates that were looked at closely."""
    others = sorted((one for one in found.tried if one.cautious), key=lambda one: -one.score)
    if not others:
        return "why: no other candidate came near it in a quick look"
    shown = "; ".join(f"{_named(one)} {one.score:.3f}" for one in others[:4])
    tied = others[0].score > found.choice.score
    tie = ", which surrogates cannot tell from it" if tied else ""
    ours = f"{_named(found.choice)} {found.choice.score:.3f}"
    return f"why: {ours} on surrogates, against {shown}{tie}"


def _named(choice: Choice) -> str:
    setting = choice.setting
    secure = "" if setting.secure is None else " with secure sums"
    steps, rounds = setting.plan.local_steps, setting.plan.rounds
    return f"{setting.algorithm.name}{secure} (K = {steps}, T = {rounds})"


def _promise(found: Recommendation) -> list[str]:
    """What σ_g keeps, and what should be known of it."""
    run, goal = found.setting.describe(), found.goal
    assert run is not None
    lines = [
        f"σ_g = {digits_up(run.noise, 4)} keeps ε = {goal.epsilon:g} towards {towards(found)} at "
        f"δ = {digits_up(run.delta)}, {goal.sampling} batches"
    ]
    colluders = found.setting.limits.colluders
    said = state([Part(run, run.rounds, None, _costs(found))], Facts(colluders=colluders))
    replaced = said.towards(goal.view.replace("-", "_")).replace_one
    if replaced is not None:
        lines.append(
            f"This is for removing a record's content. For replacing one record by another, "
            f"ε = {round_up(replaced)}."
        )
    alone = epsilon_alone(found)
    if alone is not None:
        lines.append(
            f"The server sees sums of uploads only. If all other sites collude with it, "
            f"ε alone = {round_up(alone)}."
        )
    note = large_delta(run, run.delta)
    return [*lines, note] if note else lines


def epsilon_alone(found: Recommendation) -> float | None:
    """What a site's own noise keeps if all other sites collude with the server; None where the
    server sees every upload."""
    run = found.setting.describe()
    if run is None or run.secure is None:
        return None
    return Part(run, run.rounds, None, _costs(found)).over_the_draw(ALONE).epsilon


def _costs(found: Recommendation) -> tuple[Cost, ...]:
    """What preparation costs besides the run."""
    run = found.setting.describe()
    return () if run is None else charged(found.setting.roster.schema.preparation, run)[0]


def as_json(found: Recommendation) -> dict[str, Any]:
    """Everything that was found, in plain values."""
    setting, run = found.setting, found.setting.describe()
    assert setting.privacy is not None
    return {
        "recommended": as_tables(found),
        "noise": setting.privacy.noise,
        "delta": None if run is None else run.delta,
        "epsilon": {"towards": towards(found), "value": found.goal.epsilon, **_alone(found)},
        "remarks": list(found.preset.remarks),
        "score": {
            "name": score_name(found),
            "private": found.choice.score,
            "without privacy": found.public,
            "kept": found.kept,
            "separations of the surrogates": list(SEPARATIONS),
        },
        "flat": list(found.choice.flat),
        "learning_rates": _rates(found.choice),
        "candidates": [
            {
                "algorithm": one.setting.algorithm.name,
                "rounds": one.setting.plan.rounds,
                "local_steps": one.setting.plan.local_steps,
                "secure": one.setting.secure is not None,
                "learning_rate": one.rate,
                "score": one.score,
            }
            for one in (found.choice, *found.tried)
        ],
        "traffic_bytes": found.traffic,
        "local_steps": found.local_steps,
        "smaller": found.smaller,
    }


def _alone(found: Recommendation) -> dict[str, float]:
    alone = epsilon_alone(found)
    return {} if alone is None else {"alone": alone}


def _rates(choice: Choice) -> list[dict[str, Any]]:
    return [{"learning_rate": t.rate, "scores": list(t.scores)} for t in choice.trials]


def _completed(found: Recommendation, given: Mapping[str, Any]) -> dict[str, Any]:
    """The tables of a configuration, completed by a plan."""
    tables, whole = as_tables(found), dict(given)
    for name, table in tables.items():
        kept = whole.get(name, {}) if name in ("plan", "task", "facts") else {}
        whole[name] = {**table, **kept, **table} if name != "task" else {**table, **kept}
    limits = {k: v for k, v in given.get("privacy", {}).items() if k != "noise"}
    whole["privacy"] = {**limits, **tables["privacy"]}
    if found.preset.algorithm is not None and given.get("algorithm"):
        whole["algorithm"] = given["algorithm"]  # a user's own has a name of its file
    return whole


def write_plan(
    found: Recommendation, folder: Path, given: Mapping[str, Any] | None = None
) -> list[str]:
    """``plan.toml``, ``plan.json`` and, where matplotlib is installed, ``plan.png``; the names.
    ``given`` are the tables of a configuration that the plan completes."""
    folder.mkdir(parents=True, exist_ok=True)
    whole = _completed(found, given or {})
    note = "\n".join(f"# {line}" for line in plan_lines(found))
    write_text(folder / "plan.toml", f"{note}\n\n{to_toml(whole)}")
    text = json.dumps(plain(as_json(found)), indent=2, ensure_ascii=False)
    write_text(folder / "plan.json", text + "\n")
    try:
        _draw(found, folder / "plan.png")
    except ImportError:
        return ["plan.toml", "plan.json"]
    return ["plan.toml", "plan.json", "plan.png"]


def _draw(found: Recommendation, path: Path) -> None:
    """The score over η₀, one curve per separation."""
    figure = new_figure(5, 3.4)
    axis = figure.subplots()
    rates = [trial.rate for trial in found.choice.trials]
    own = found.choice.trials[0].own_models  # the last scores, of users with models of their own
    each = (len(found.choice.trials[0].scores) - own) // len(SEPARATIONS)
    for k, separation in enumerate(SEPARATIONS):
        part = [sum(t.scores[k * each : (k + 1) * each]) / each for t in found.choice.trials]
        axis.plot(rates, part, marker="o", markersize=3, label=f"separation {separation:g}")
    if own:
        models = [sum(t.scores[-own:]) / own for t in found.choice.trials]
        axis.plot(rates, models, marker="o", markersize=3, label="models of their own")
    axis.plot(rates, [t.score for t in found.choice.trials], color="black", label="mean")
    axis.axvline(found.choice.rate, color="0.6", linestyle=":")
    axis.set(xscale="log", xlabel="η₀", ylabel=f"{score_name(found)} on surrogates")
    axis.legend(fontsize=8, frameon=False)
    axis.grid(alpha=0.3)
    figure.suptitle("Planned on public surrogates; no private record was read", fontsize=10)
    save_figure(figure, path, 130)
