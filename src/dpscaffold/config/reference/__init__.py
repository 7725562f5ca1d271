"""The reference of every configuration key, generated from the models that read them.

Belongs here: the page of the documentation. Does not belong here: the keys.
"""
