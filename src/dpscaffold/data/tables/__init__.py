"""Tables: CSV and Parquet files as features and labels.

Belongs here: dialects and encodings, missing values, categories, labels, and the drafted
configuration. Does not belong here: other formats (``data/sources``), and how records are divided
among users (``data/partition.py``).
"""
