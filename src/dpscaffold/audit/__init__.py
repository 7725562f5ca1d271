"""Audits: games against the real engine that try to beat the stated ε.

Belongs here: canaries, adversaries, and the lower bounds on ε that their guesses prove. Does not
belong here: upper bounds on ε (``privacy``).
"""
