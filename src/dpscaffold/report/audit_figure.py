"""An audit as a figure and in words: what was proved next to what is claimed."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dpscaffold.audit.play import Finding, Report
from dpscaffold.audit.secure import MaskCheck
from dpscaffold.audit.subject import AuditedRun
from dpscaffold.errors import BadInput
from dpscaffold.privacy.showing import round_up
from dpscaffold.report.drawing import new_figure, save_figure


def plot_audit(report: Report, case: AuditedRun, path: Path | str) -> None:
    """Proved and claimed ε by view on the left; the counted tests against the claimed trade-off
    curve of the server's view on the right, where none may lie above the line."""
    if not report.findings:
        raise BadInput("nothing-to-draw", "no game was played, so there is nothing to draw")
    figure = new_figure(7.6, 3.4)
    left, right = figure.subplots(1, 2)
    names = [adversary(finding) for finding in report.findings]
    places = np.arange(len(names))
    left.bar(places - 0.2, [f.claimed for f in report.findings], 0.4, label="claimed", color="0.75")
    left.bar(places + 0.2, [f.proved for f in report.findings], 0.4, label="proved", color="C0")
    left.set_xticks(places, names)
    left.set_ylabel(f"ε at δ = {report.findings[0].delta:.2g}")
    left.legend(frameon=False)
    rates = np.geomspace(1e-3, 1.0, 200)
    for k, finding in enumerate(report.findings):
        curve = case.claims[finding.view].curve
        right.plot(rates, curve.power(rates), color=f"C{k}", label=f"claimed, {names[k]}")
        right.plot(*zip(*finding.points, strict=True), ".", color=f"C{k}", markersize=4)
    right.plot(rates, rates, color="0.6", linewidth=1, label="a coin")
    right.set(xscale="log", yscale="log", xlim=(1e-3, 1), ylim=(1e-3, 1.1))
    right.set(xlabel="false-positive rate", ylabel="true-positive rate")
    right.legend(frameon=False, fontsize="small")
    save_figure(figure, path)


def adversary(finding: Finding) -> str:
    """Who played, for a table or a figure."""
    k = finding.colluders
    if finding.view == "alone":
        return "server with all other sites"
    if finding.view == "server" and finding.masks is not None:
        return f"server with {k} site" + ("" if k == 1 else "s") if k else "server with no site"
    return finding.view.replace("_", " ")


def round_down(value: float) -> str:
    """A proved ε for reading: never more than was proved.

    >>> round_down(0.4999)
    '0.499'
    """
    return f"{int(value * 1000) / 1000:.3f}"


def audit_rows(report: Report) -> list[tuple[str, ...]]:
    """View, proved, claimed, ratio, games and the statistic that proved it."""
    rows: list[tuple[str, ...]] = [
        (
            adversary(f),
            round_down(f.proved),
            round_up(f.claimed),
            f"{f.ratio:.2f}",
            f"{f.games:,} × 2",
            f.statistic + (", curve beaten" if f.curve_beaten else ""),
        )
        for f in report.findings
    ]
    if report.one_run:
        one = report.one_run
        said = f"{one.right} of {one.guesses} guesses right"
        rows.append(
            (
                "one run",
                round_down(one.proved),
                round_up(one.claimed),
                f"{one.ratio:.2f}",
                f"{one.canaries} canaries",
                said,
            )
        )
    return rows


def audit_sentences(report: Report, confidence: float) -> list[str]:
    """What the numbers mean."""
    said = [
        f"Each proved epsilon is below the truth with confidence {confidence:g}, all of them "
        f"together; games on a user of {report.records} records, batches of {report.batch}"
        + (f", {report.participations} participations" if report.participations else "")
        + f", in {report.seconds:.0f} s."
    ]
    if report.simulated:
        said.append(
            "The run is a simulation: these games keep its seed from the adversary, as secret "
            "noise would."
        )
    if report.one_run:
        said.append(report.one_run.spent.sentence)
    if report.remark:
        said.append(f"Not played: {report.remark}.")
    if report.unclipped:
        length = "without bound" if report.canary is None else f"by {report.canary:.3g} C"
        said.append(f"One record moves a clipped sum {length}: the clip does not hold.")
    if any(f.not_finite for f in report.findings):
        said.append("Some uploads were not finite: the clip does not hold for every float.")
    said += [_mask_sentence(f.masks) for f in report.findings if f.masks is not None]
    if report.beaten:
        said.append("THE CLAIM IS BEATEN: the stated epsilon is too small.")
    return said


def _mask_sentence(masks: MaskCheck) -> str:
    """What the tests of the masked uploads say."""
    if masks.refuted:
        return (
            f"The masks do not hide single uploads: the {masks.least_uniform} is not uniform "
            f"(p = {masks.p_value:.1e})."
        )
    return (
        f"Without the keys of two honest sites, single uploads look uniform: p = "
        f"{masks.p_value:.2g} for {masks.words:,} numbers, refuted below {masks.tail:.2g}."
    )
