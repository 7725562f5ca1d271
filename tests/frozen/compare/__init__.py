"""Comparisons of today's package with version 0.2.0: one module each, found by name.

A module takes part when it has ``compare(quick: bool) -> Iterable[Difference]``. ``adapter.py`` is
the only file here that calls today's package.
"""
