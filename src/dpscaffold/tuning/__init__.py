"""Experiments: the central optimum, tuning, and the paper's figures and tables."""
