"""Flower as a transport: the only imports of ``flwr`` in this package.

Belongs here: all that touches Flower. It carries signed messages; nothing of the privacy argument
rests on it. Flower's internals move from release to release, so ``tests/deploy`` checks the names
that are used, and an untested release is refused with a sentence. Does not belong here: what
messages mean.
"""

from __future__ import annotations

import os
from importlib import metadata
from urllib.request import getproxies, proxy_bypass

from dpscaffold.deployment.provision import host_and_port, is_loopback
from dpscaffold.errors import BadInput

#: The releases this room was written for and tried with.
TESTED = ("1.41", "1.42")

#: Flower phones home, looks for updates and installs what a bundle asks for unless told not to, and
#: cuts arrays into parts of 5 MiB. Fewer parts cost fewer requests, and more memory at the
#: SuperLink, which holds them whole. Flower reads these when it is imported.
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE": str(8 << 20),
}


def require() -> None:
    """Make Flower quiet and refuse to go on without a release that was tried. Call it before
    anything here that imports flwr is imported."""
    os.environ.update(QUIET)
    try:
        version = metadata.version("flwr")
    except metadata.PackageNotFoundError:
        raise BadInput(
            "package-missing",
            "a deployed federation needs Flower; run pip install 'dpscaffold[flower]'",
        ) from None
    check_version(version)


def check_version(version: str) -> None:
    """Refuse a release of Flower whose internals were not tried.

    >>> check_version("1.41.0")
    """
    if ".".join(version.split(".")[:2]) not in TESTED:
        raise BadInput(
            "package-version",
            f"Flower {version} is installed, and this version of dpscaffold was tried with "
            f"{' and '.join(TESTED)}; run pip install 'flwr=={TESTED[0]}.*'",
        )


def check_proxy(address: str) -> None:
    """Refuse a proxy variable that would catch connections to this very machine."""
    host, _ = host_and_port("the server's address", address)
    if is_loopback(host) and not proxy_bypass(host):
        caught = [name for name in ("https", "all") if name in getproxies()]
        if caught:
            name = f"{caught[0]}_proxy"
            raise BadInput(
                "proxy-set",
                f"the variable {name} sends connections to {host} through a proxy; set "
                f"no_proxy=localhost,127.0.0.1",
            )
