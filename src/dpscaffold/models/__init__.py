"""Trained models: keep them, use them on new rows, measure them, hand them to other software.

Belongs here: the model, its folder, prediction, evaluation, export. Does not belong here: training
(``training``), and metrics of scores against targets (``tasks/metrics.py``).
"""
