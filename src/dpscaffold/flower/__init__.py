"""Private training in your own Flower app.

``Strategy`` belongs into the ServerApp, ``PrivateTraining`` (a client mod) or ``client_app`` into
the ClientApp. See docs/howto/flower.md for a whole app, and for what is promised there.

Belongs here: the names for users of Flower. Does not belong here: what they do, which is in
``deployment/transports/flower``.
"""

from __future__ import annotations

from dpscaffold.deployment.transports.flower import require

require()

from dpscaffold.deployment.transports.flower.client import (  # noqa: E402
    PrivateTraining,
    client_app,
)
from dpscaffold.deployment.transports.flower.strategy import (  # noqa: E402
    ClientGuarantee,
    Strategy,
)

__all__ = ["ClientGuarantee", "PrivateTraining", "Strategy", "client_app"]
