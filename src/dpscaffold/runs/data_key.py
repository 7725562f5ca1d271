"""The key under which records are known again.

A plain hash of records gives them away: whoever knows all records but one tries every value of the
last. So an identity of records is an HMAC. Its key lies next to it in a file of its own, readable
by its owner alone, and neither of them is in anything that is published. Identities can be
compared where they were made with the same key.
"""

from __future__ import annotations

import hmac
import os
import secrets
from pathlib import Path

from dpscaffold.atomic import sync_file, sync_folder
from dpscaffold.errors import BadInput

#: The name of a key in the folder of a run, of a site's state or of a cache.
KEY = "data.key"
SIZE = 32


def fresh_key() -> bytes:
    """A new key from the operating system."""
    return secrets.token_bytes(SIZE)


def identity(key: bytes, digest: str) -> str:
    """HMAC-SHA-256 of a digest of records.

    >>> identity(bytes(32), "6f3c") == identity(bytes(32), "6f3c") != identity(b"1" * 32, "6f3c")
    True
    """
    return hmac.new(key, digest.encode(), "sha256").hexdigest()


def read_key(path: Path) -> bytes:
    """The key in a file, or a refusal that names the file."""
    try:
        key = bytes.fromhex(path.read_text(encoding="ascii"))
    except FileNotFoundError:
        raise BadInput(
            "data-key-missing", f"{path} is missing, the key of the data's identity; restore it"
        ) from None
    except ValueError:
        key = b""
    if len(key) != SIZE:
        raise BadInput(
            "data-key-damaged",
            f"{path} does not hold a key ({2 * SIZE} hexadecimal digits); restore it, or name "
            f"another file",
        )
    return key


def write_key(path: Path, key: bytes) -> None:
    """Write a key to a new file, whole, readable by its owner alone; a file that is there stays."""
    draft = path.with_name(f".{path.name}.partial{os.getpid()}")
    draft.unlink(missing_ok=True)
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as stream:  # os.write may write a part
            stream.write(f"{key.hex()}\n")
        sync_file(draft)
        os.link(draft, path)  # never replaces a key that another process has just written
        sync_folder(path.parent)
    except FileExistsError:
        pass
    except OSError as error:
        error.filename = str(path)
        raise
    finally:
        draft.unlink(missing_ok=True)


def open_key(path: Path) -> bytes:
    """The key in a file, which is made with a fresh key where there is none.

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
        write_key(path, fresh_key())
    return read_key(path)
