"""One user's round: batches, noised gradients and K local steps.

Belongs here: the readable version of a participation, for a stack of users at once. Does not belong
here: which users take part (``engines/rounds.py``), the mechanism's public numbers
(``config/gaussian.py``), and faster versions of the same steps (``engines/fast``).
"""
