"""Where the files of a site lie: next to its ``site.toml``, under names that are always the same,
so that nobody starts a ledger over by naming another folder."""

from __future__ import annotations

from pathlib import Path

from dpscaffold.errors import BadInput

#: The certificate that must have signed the server's certificate, from the invitation.
CERTIFICATE = "ca.crt"
#: The key of the connection. Only its owner may read it.
NODE_KEY = "node.key"
#: The key that signs this site's messages. Only its owner may read it.
SIGNING_KEY = "site.key"
#: The ledger and the memory. Never restored from a backup, and never copied.
STATE = "state"


def refuse_other_state(path: Path, tables: dict[str, object]) -> None:
    """Refuse a file that names its state folder: without the key, a ledger elsewhere would be
    started over as if nothing had been spent."""
    if STATE in tables:
        raise BadInput(
            "unknown-key",
            f"{path}: state is {tables[STATE]!r}, and the state folder is always "
            f"{path.resolve().parent / STATE}; move the ledger there if it lies elsewhere, and "
            f"remove the key",
        )
