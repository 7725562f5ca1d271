"""Whether joining helped a site, as a noised and signed file that may leave it.

A site compares three models on its records: a local one, the common one and its personal one. Two
numbers leave it: how much better the common and the personal model are than the local one.

The local and the personal model are fitted to the site's records without noise, so one record may
change *every* prediction, and with it a metric by any amount, however many test records there are.
So sensitivity is not one over their number. It is bounded by cutting each difference at ±
:data:`LIMIT`: then no change of the site's records, of one or of all, moves it by more than twice
that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from dpscaffold import __version__
from dpscaffold.deployment.protocol.messages import SignedMessage, pack, sign, unpack
from dpscaffold.errors import BadInput
from dpscaffold.randomness.laplace import discrete_laplace

#: The layout of the files.
FORMAT = "dpscaffold joining 1"
#: Where differences are cut: ten points of accuracy, or a tenth of the range of a number.
LIMIT = 0.1
#: The steps from 0 to the limit; a difference is rounded to one of them.
STEPS = 1000
#: What leaves a site: both are differences from its local model.
NUMBERS = ("common", "personal")
#: The most that all numbers together change, in steps, whatever changes at the site.
SENSITIVITY = 2 * STEPS * len(NUMBERS)
#: Noise beyond this many scales has a chance below 10⁻¹⁷.
_FARTHEST = 40


def scale_for(epsilon: float) -> int:
    """The smallest scale of noise, in steps, that keeps ε for all numbers together.

    >>> scale_for(1.0), scale_for(3.0)
    (4000, 1334)
    """
    return math.ceil(SENSITIVITY / Fraction(epsilon))


def in_steps(difference: float) -> int:
    """A difference cut at the limit, in steps; what is not defined is none.

    >>> in_steps(0.0123), in_steps(-7.0), in_steps(float("nan"))
    (123, -1000, 0)
    """
    if math.isnan(difference):
        return 0
    return round(STEPS * max(-1.0, min(1.0, difference / LIMIT)))


@dataclass(frozen=True)
class NoisedJoining:
    """What a site says: by how many steps the common and the personal model are better than its
    local one, each with noise of this scale. ``message`` is what it signed."""

    run: str
    site: str
    metric: str
    common: int
    personal: int
    scale: int
    message: SignedMessage = field(default_factory=lambda: SignedMessage({}), compare=False)

    @property
    def epsilon(self) -> float:
        """ε of both numbers together, for any change of the site's records."""
        return SENSITIVITY / self.scale

    def to_bytes(self, key: Ed25519PrivateKey) -> bytes:
        """As a signed file."""
        said: dict[str, Any] = {k: v for k, v in vars(self).items() if k != "message"}
        return pack(sign({"format": FORMAT, "version": __version__, **said}, {}, key))


def noised(
    run: str, site: str, metric: str, differences: dict[str, float], scale: int
) -> NoisedJoining:
    """The differences with noise. It is drawn at every call: call it once, after the ledger."""
    sent = {name: in_steps(differences[name]) + discrete_laplace(scale) for name in NUMBERS}
    return NoisedJoining(run, site, metric, sent["common"], sent["personal"], scale)


def read_joining(path: Path) -> NoisedJoining:
    """Read a site's file; whoever knows the site's key checks ``message``."""
    try:
        message = unpack(path.read_bytes())
    except OSError as error:
        raise BadInput("file-unreadable", f"{path} cannot be read: {error.strerror}") from error
    if message is None or message.header.get("format") != FORMAT or message.vectors:
        raise BadInput("not-a-joining-file", f"{path} is not a file of 'dpscaffold site joining'")
    said = {key: value for key, value in message.header.items() if key != "format"}
    if (version := said.pop("version", None)) != __version__:
        raise BadInput(
            "version-differs",
            f"{path} was made by dpscaffold {version!r:.40}, and this is {__version__}; use one "
            f"version at all sites",
        )
    found = _possible(said, message)
    if found is None:
        raise BadInput(
            "not-a-joining-file",
            f"{path} has numbers that 'dpscaffold site joining' never writes; ask for it again",
        )
    return found


def _possible(said: dict[str, Any], message: SignedMessage) -> NoisedJoining | None:
    """What a file says, or None where no site can have written it."""
    kinds = {"run": str, "site": str, "metric": str, "common": int, "personal": int, "scale": int}
    if {key: type(value) for key, value in said.items()} != kinds:
        return None
    found = NoisedJoining(**said, message=message)
    most = STEPS + _FARTHEST * found.scale
    likely = max(abs(found.common), abs(found.personal)) <= most
    return found if found.scale >= 1 and likely else None
