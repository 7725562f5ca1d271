"""What administrators look at: logs, a health check and a status page.

Belongs here: how numbers of a running site or server are shown. Does not belong here: the numbers
themselves, which come from the ledger and from status files. Everything listens on loopback only
and answers questions; nothing here changes a run.
"""
