"""Private training in your own Flower app.

``Strategy`` belongs into the ServerApp, ``PrivateTraining`` (a client mod) or ``client_app`` into
the ClientApp. See docs/howto/flower.md for a whole app, and for what is promised there.

Belongs here: what a user of Flower puts into an app. Does not belong here: Flower as a transport of
deployed federations (``deployment``).

The names of this package are listed in ``__init__.pyi`` and imported when first used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
