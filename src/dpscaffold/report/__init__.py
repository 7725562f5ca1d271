"""What people look at: tables, figures, pages, model cards and the privacy statement.

Belongs here: how results are shown. Does not belong here: how they are computed.
"""
