"""The reference of every configuration key, generated from the models that read them.

Belongs here: the documentation page and the annotated examples. Does not belong here: the keys.
"""
