"""A federation by e-mail: every site writes one signed file of noised sums, and anyone combines the
files into a model.

Belongs here: the plan of such a federation, its key files and sum files, what a site does, and what
whoever combines does. Does not belong here: the sums themselves (:mod:`dpscaffold.tasks.ridge`),
their ε (:mod:`dpscaffold.privacy.sums`), masks, ledgers and signatures
(:mod:`dpscaffold.deployment`).
"""
