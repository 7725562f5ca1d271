"""Training: the rounds of a run, what is measured, and the result.

Belongs here: what happens around rounds. Does not belong here: a round itself (``engine``), and
the use of a trained model (``models``).
"""
