"""Hyperparameters chosen without private data, on public surrogates.

Belongs here: artificial federations with the public facts of a private one, and the choice of a
plan on them. Does not belong here: anything that reads a record, and tuning on records
(``tuning``).
"""
