"""Runs across real sites: messages, the server, the sites, their keys, and who carries messages.

Belongs here: all that exists because the parties are on machines of their own. Does not belong
here: what is learnt and how noise is added; a site calls the same functions as the simulator.
"""
