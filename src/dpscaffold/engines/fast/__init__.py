"""Everything that is only there for speed: the same results as the plain engine, sooner.

Belongs here: GPU programs and graphs, draws on the device, runs that move in lockstep, threads and
shards. Does not belong here: anything that changes a result. Each fast path accepts only algorithms
of which it knows every field, and the readable engines stay its reference.
"""
