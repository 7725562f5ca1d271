"""A site of a deployed run: its policy, its ledger, its memory, and its answers.

Belongs here: everything that decides what leaves a site. The server is the adversary, so the site
enforces privacy: its file says what it is willing to do, its disk says what it has spent, and no
message changes either. Does not belong here: how messages travel (``transports``).
"""
