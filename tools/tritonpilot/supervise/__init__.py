"""Keep a Triton serving: ask every model, replace dead and hung stubs, bring the server back (docs/healing.md).

`decide` says what to do, and is pure; `processes` and `memory` see what Triton does not tell; `heal` replaces a model's stubs;
`servers` are the two forms, a Triton of our own and somebody's; `run` is the loop.
"""
