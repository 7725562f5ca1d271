"""Formats other than tables: images, arrays, LEAF, data frames, downloads.

Belongs here: one file for each format. Does not belong here: CSV and Parquet (``data/tables``).
"""
