"""Functions run as the ranks of a pipeline, each on a process or a thread of its own.

Such a function is called as ``function(rank, world_size, store, *args)`` with a fresh store for
the ranks to meet in.
"""
