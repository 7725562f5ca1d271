"""Random numbers: who takes part, which records are drawn, which noise is added.

Belongs here: streams keyed by round and user, the cipher behind secret noise, Philox, and the rule
for seeds. Does not belong here: what the numbers are used for, and draws that are only there for
speed on a GPU (``engines/fast``).
"""
