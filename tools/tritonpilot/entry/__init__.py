"""The entry: a process in front of Triton that knows its callers and decides which request goes when, or not at all.

Triton's queues are strict and reject late: a saturated class starves those below it, and a caller learns only after his timeout
that there was no hope. The entry keeps Triton's queue short (a window of rows in flight per model) and orders the rest itself.
"""
