"""What runs at a party: its policy, its ledger, its memory, and its answers.

The server is the paper's adversary, so the site enforces privacy: its file says what it is willing
to do, its disk says what it has spent, and no message changes either.
"""
