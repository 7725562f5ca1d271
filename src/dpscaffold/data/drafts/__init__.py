"""Drafted configurations: what a file seems to be, as TOML for people to check.

Belongs here: ``guesses`` (what the values of a column seem to be), ``profile`` (a look at a whole
table) and ``draft`` (the TOML). Does not belong here: anything that a run reads records by
(``data/tables``).
"""
