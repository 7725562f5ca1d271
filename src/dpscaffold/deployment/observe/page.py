"""The status page of a run: static HTML, without scripts, that reloads itself."""

from __future__ import annotations

from html import escape
from pathlib import Path

from dpscaffold.deployment.observe.endpoint import HTML, JSON, TEXT, Page
from dpscaffold.deployment.observe.status import ServerStatus, SiteRow, read_server_status
from dpscaffold.privacy.numbers import round_up

_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>dpscaffold: {phase}</title>
<meta http-equiv="refresh" content="5">
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto;
  padding: 0 1rem; color: #1b1f24; background: #fff; }}
h1 {{ font-size: 1.4rem; margin-bottom: 0; }}
.note {{ color: #57606a; margin-top: 0.2rem; }}
.bar {{ background: #e6e9ed; border-radius: 6px; height: 14px; overflow: hidden; }}
.bar div {{ background: #2369b3; height: 100%; }}
dl {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(11rem, 1fr)); gap: 1rem; }}
dt {{ color: #57606a; font-size: 0.85rem; }} dd {{ margin: 0; font-size: 1.25rem; }}
table {{ border-collapse: collapse; width: 100%; margin-top: 1rem; }}
th, td {{ text-align: left; padding: 0.45rem 0.6rem; border-bottom: 1px solid #d8dee4; }}
td.n, th.n {{ text-align: right; }}
.ok {{ color: #11632d; }} .warn {{ color: #8a4b00; }} .bad {{ color: #a40e26; }}
</style></head><body>
<h1>{phase}: round {round} of {rounds}</h1>
<p class="note">run {run}{written}</p>
<div class="bar" role="img" aria-label="{percent:.0f} percent of the rounds">
<div style="width: {percent:.1f}%"></div></div>
<dl>{facts}</dl>
<table><thead><tr><th>site</th><th class="n">rounds</th><th>state</th></tr></thead>
<tbody>{rows}</tbody></table>
{refusals}
</body></html>
"""


def status_page(status: ServerStatus) -> str:
    """The page of a run."""
    age = status.age
    facts = {
        "answered": f"{sum(site.answered for site in status.sites)} of {len(status.sites)} sites",
        "last round": f"{status.round_seconds:.1f} s",
        "total time": _duration(status.seconds),
        "sent / received": f"{_size(status.bytes_sent)} / {_size(status.bytes_received)}",
    }
    if status.epsilon is not None:
        facts["ε towards the server"] = round_up(status.epsilon)
    return _PAGE.format(
        phase=escape(status.phase),
        round=status.round,
        rounds=status.rounds,
        run=escape(status.run),
        written="" if age is None else f", written {age:.0f} s ago",
        percent=100 * min(1.0, status.round / max(1, status.rounds)),
        facts="".join(f"<div><dt>{k}</dt><dd>{escape(v)}</dd></div>" for k, v in facts.items()),
        rows="".join(map(_row, status.sites)),
        refusals=_refusals(status),
    )


def server_pages(folder: Path) -> dict[str, Page]:
    """What the server of a run answers to its administrators."""
    return {
        "/": (HTML, lambda: status_page(read_server_status(folder))),
        "/healthz": (TEXT, lambda: "ok\n" if read_server_status(folder) else ""),
        "/status.json": (JSON, lambda: (folder / "status.json").read_text()),
    }


def _row(site: SiteRow) -> str:
    tone = "ok" if site.answered else "warn" if site.reachable else "bad"
    return (
        f'<tr><td>{escape(site.name)}</td><td class="n">{site.participations}</td>'
        f'<td class="{tone}">{escape(site.words)}</td></tr>'
    )


def _refusals(status: ServerStatus) -> str:
    counts = [f"{escape(code)}: {count:.0f}" for code, count in sorted(status.refusals.items())]
    return f"<p class='note'>refusals so far: {', '.join(counts)}</p>" if counts else ""


def _duration(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours} h {rest // 60} min" if hours else f"{rest // 60} min {rest % 60} s"


def _size(count: int) -> str:
    """A number of bytes for people.

    >>> _size(1_300_000), _size(900)
    ('1.3 MB', '0.9 kB')
    """
    size, units = count / 1000, ["kB", "MB", "GB"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.1f} {units[0]}"
