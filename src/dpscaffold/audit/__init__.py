"""The distinguishing game, played against the real engine: does anybody beat the stated ε?"""
