"""What people write, checked where it comes in: names, addresses, TOML files."""

from __future__ import annotations

import ipaddress
import re
import tomllib
from pathlib import Path

from dpscaffold.errors import BadInput

_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,62}")


def site_name(name: object) -> str:
    """A site's name: lower case, digits, dash, dot, underscore; it becomes a file's name."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise BadInput(
            "bad-site-name",
            f"the site's name is {name!r}; use lower-case letters, digits, '-', '_' and '.', "
            f"beginning with a letter or digit",
        )
    return name


def host_and_port(what: str, address: str) -> tuple[str, int]:
    """``host:port`` in its parts.

    >>> host_and_port("server", "federation.example:8443")
    ('federation.example', 8443)
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise BadInput(
            "bad-address", f"{what} is {address!r}; write host:port, e.g. federation.example:8443"
        )
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Whether a host name or address is this machine's own.

    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("example.org")
    (True, True, False)
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def read_toml(path: Path, what: str) -> dict[str, object]:
    """A TOML file's tables, or a refusal."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(
            "file-unreadable", f"{what} {path} cannot be read: {error.strerror}"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadInput("not-toml", f"{what} {path} is not valid TOML: {error}") from error
