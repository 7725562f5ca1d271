"""``dpscaffold site init``: keys made where they are used, and a ``site.toml`` to be read."""

from __future__ import annotations

import json
from pathlib import Path

from dpscaffold.algorithms.registry import AGREED
from dpscaffold.atomic import write_text
from dpscaffold.deployment.provision import (
    Invitation,
    Member,
    make_node_key,
    make_signing_key,
    write_whole,
)
from dpscaffold.deployment.site.layout import CERTIFICATE, NODE_KEY, SIGNING_KEY
from dpscaffold.errors import BadInput

#: Stands in a site's folder from its first key until its ``site.toml`` is there.
BEGUN = ".begun"
KEYS = (SIGNING_KEY, NODE_KEY)

_TEMPLATE = """# This site's file. No message changes it: read the policy, and set it.
# Next to it: site.key, node.key and ca.crt, and the folder state with the ledger and the memory.
# Never restore that folder from a backup, and never copy it.
name = "{name}"
server = "{server}"
coordinator = "{coordinator}"   # whose messages are obeyed

[data]                          # one source of a training configuration; this site is one user
{data}

[policy]
{policy}
"""

_DATA = '''source = "csv"
path = "records.csv"'''

#: The policy of a new site, key by key, with what each means.
_POLICY = {
    "epsilon": ("2.0", "towards the server, all runs over these records together"),
    "delta": ("1e-6", "likewise"),
    "max_runs": ("10", "each is granted at most epsilon/max_runs"),
    "max_local_steps": ("100", "K"),
    "units": ('["record"]', 'of protection: also "user", or "none" for public data'),
    "algorithms": (json.dumps(AGREED), "by name, from installed code"),
    "tasks": ('["logistic", "mlp"]', "your own module only by its full name"),
    "max_parameters": ("2_000_000", "of the model"),
    "preparation": ("true", "centre, standardise, pca by noised sums, each a run within epsilon"),
    "approval": ('"policy"', '"each-run": in addition a person says yes (site approve)'),
}


def make_site(
    invitation: Invitation, folder: Path, data: str = _DATA, policy: dict[str, str] | None = None
) -> Member:
    """Make a site's keys and files in ``folder``; returns what the server may know of it.

    ``data`` is the text of the ``[data]`` table, ``policy`` replaces single values.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path, begun = folder / "site.toml", folder / BEGUN
    if path.exists():
        raise BadInput("site-exists", f"{path} exists; a site is made once, so name another folder")
    if begun.exists():  # keys that nobody knows of: making this site was cut short
        for name in KEYS:
            (folder / name).unlink(missing_ok=True)
    for name in KEYS:
        if (folder / name).exists():
            raise BadInput("keys-exist", f"{folder / name} exists, and keys are never overwritten")
    begun.touch()
    member = Member(
        invitation.name,
        make_signing_key(folder / SIGNING_KEY),
        make_node_key(folder / NODE_KEY),
    )
    write_text(folder / CERTIFICATE, invitation.ca)
    values = {key: value for key, (value, _) in _POLICY.items()} | (policy or {})
    lines = [f"{key} = {value:<40} # {_POLICY[key][1]}" for key, value in values.items()]
    text = _TEMPLATE.format(
        name=invitation.name,
        server=invitation.server,
        coordinator=invitation.coordinator,
        data=data,
        policy="\n".join(lines),
    )
    write_text(folder / f"{member.name}.site", member.to_toml())
    write_whole(path, text.encode())
    begun.unlink()
    return member
