"""Tables: CSV and Parquet files as features and labels.

Belongs here: ``dialect`` (how a file is written), ``reader`` (files as Arrow batches), ``missing``
(NA strings), ``cells`` (single columns and their spellings), ``codec`` (columns
as features and labels), ``source`` and ``scan`` (tables for training), and ``rows`` (new rows).
Does not belong here: guesses about a table (``data/drafts``), other formats (``data/sources``), and
how records are divided among users (``data/partition.py``).
"""
