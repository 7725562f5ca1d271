"""Tuning on records: by cross-validation within users, and with differential privacy.

Belongs here: searches that train on the data that they tune for. Does not belong here: plans from
public facts alone (``planning``).
"""
