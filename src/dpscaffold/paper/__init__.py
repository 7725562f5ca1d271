"""The experiments of the paper, as one application of the library.

Belongs here: definitions, published numbers, figures and pages of the reproduction. Does not belong
here: anything that another part of the package needs; only ``dpscaffold reproduce`` imports it.
"""
