"""Run folders: journal, ledger, privacy account, and budget files that runs share.

Belongs here: what is on disk about a run, and what it has spent. Does not belong here: how ε is
computed (``privacy``), and trained models (``models``).
"""
