"""Keys, certificates and invitations of a federation, with ``cryptography`` alone.

Belongs here: what is made before a federation runs. Does not belong here: messages and policies.

The federation's operator makes a certificate authority, the server's certificate, the coordinator's
signing key and the secret between server and SuperLink; and one *invitation* per site, which holds
public things only. A site makes its own keys, so private keys are made where they are used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
