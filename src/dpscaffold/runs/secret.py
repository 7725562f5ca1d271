"""What a run folder keeps for its owner alone: the seed, and the key of the data's identity.

A plain hash of records gives them away: whoever knows all records but one tries every value of the
last. So an identity of records is an HMAC, and identities can be compared where they were made with
one key. Neither the seed nor the key is in anything that is published.
"""

from __future__ import annotations

import hmac
import json
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dpscaffold.atomic import new_file, write_private
from dpscaffold.errors import BadInput
from dpscaffold.privacy.seeds import SECRET, Seed

SIZE = 32


@dataclass(frozen=True)
class Secret:
    """The content of ``secret.json``: the key of the data's identity, and of a private run the seed
    that it draws from."""

    data_key: bytes
    seed: Seed | None = None

    def write(self, folder: Path) -> None:
        """To a run folder, readable by its owner alone."""
        seed = self.seed.to_json() if self.seed else None
        said = {"data_key": self.data_key.hex(), "seed": seed}
        write_private(folder / SECRET, json.dumps(said) + "\n")

    def is_of(self, path: Path) -> bool:
        """Whether a key file holds the key."""
        return path.exists() and open_key(path) == self.data_key

    def identity(self, digest: str) -> str:
        """HMAC-SHA-256 of a digest of records.

        >>> one, other = Secret(bytes(32)), Secret(b"1" * 32)
        >>> one.identity("6f3c") == one.identity("6f3c") != other.identity("6f3c")
        True
        """
        return hmac.new(self.data_key, digest.encode(), "sha256").hexdigest()


def read_secret(folder: Path) -> Secret | None:
    """The secret of a run folder; None where it is not there, or for others."""
    path = folder / SECRET
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        key, seed = bytes.fromhex(said["data_key"]), said["seed"]
    except OSError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise BadInput(
            "seed-damaged",
            f"{path} does not hold the seed and the key of its run ({error}); restore it or start "
            f"a new run",
        ) from error
    return Secret(key, None if seed is None else Seed.from_json(seed, str(path)))


def fresh_key() -> bytes:
    """A new key from the operating system."""
    return secrets.token_bytes(SIZE)


def open_key(path: Path) -> bytes:
    """The key in a file that several runs share, which is made where there is none.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "records.key"
    >>> open_key(path) == open_key(path), oct(path.stat().st_mode & 0o777)
    (True, '0o600')
    """
    if path.is_dir():
        raise BadInput("not-a-file", f"{path} is a folder; name a file for the key")
    if not path.parent.is_dir():
        raise BadInput(
            "folder-not-found", f"{path} cannot be made: its folder does not exist; make it first"
        )
    if not path.exists():
        with suppress(FileExistsError), new_file(path) as draft:  # another's key stays
            write_private(draft, f"{fresh_key().hex()}\n")
    try:
        key = bytes.fromhex(path.read_text(encoding="ascii"))
    except ValueError:
        key = b""
    if len(key) != SIZE:
        raise BadInput(
            "data-key-damaged",
            f"{path} does not hold a key ({2 * SIZE} hexadecimal digits); restore it, or name "
            f"another file",
        )
    return key
