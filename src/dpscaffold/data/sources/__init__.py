"""Formats other than tables: images, arrays, data frames, downloads.

Belongs here: one file for each format. Does not belong here: CSV and Parquet (``data/tables``).
"""
