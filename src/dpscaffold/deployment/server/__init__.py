"""The server of a deployed run: its configuration, its rounds over sites, its folder.

Belongs here: what the coordinator does. Does not belong here: what a site decides (``site``), and
how messages travel (``transports``).
"""
