"""Hyperparameters chosen on a public surrogate: artificial federations with the public facts of a
private one. Nothing here reads a record."""
