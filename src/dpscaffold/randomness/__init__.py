"""Random numbers: who takes part, which records are drawn, which noise is added.

Belongs here: streams keyed by round and user, the cipher behind secret noise, and Philox. Does not
belong here: which seed a run has (``privacy/seeds.py``), what the numbers are used for, and draws
that a device makes for itself (``engine/draws.py``).
"""
