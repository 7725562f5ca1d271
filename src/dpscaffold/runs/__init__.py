"""The books of a run: its folder, its journal, its ledger, and what all of them cost."""
