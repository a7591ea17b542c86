"""Does a served model still answer as it should? What decides, without a server: answers and windows in, findings out.

`compare` holds two answers to the same request against each other, `watch` what a model answers now against what it used to
answer, `findings` reads what the entry's guard tells in its metrics. The entry (tritonpilot.entry.guard) asks and listens.
"""
