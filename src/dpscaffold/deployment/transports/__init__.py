"""Who carries messages between the server and its sites. One package for each carrier.

Belongs here: code that knows a network library. Does not belong here: what messages mean.
"""
