"""An audit in words: what was proved next to what is claimed."""

from __future__ import annotations

from dpscaffold.audit.play import Finding, Report
from dpscaffold.privacy.numbers import round_up


def adversary(finding: Finding) -> str:
    """Who played, for a table."""
    k = finding.colluders
    if finding.view == "alone":
        return "server with all other sites"
    if finding.view == "server" and finding.secure:
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
    if report.beaten:
        said.append("THE CLAIM IS BEATEN: the stated epsilon is too small.")
    return said
