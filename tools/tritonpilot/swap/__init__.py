"""A service's model is replaced while it serves: `tritonpilot swap` and `tritonpilot rollback`.

terms       what the parts say to each other
journal     what was done, so that a killed run can be finished or taken back
steps       publish, load, check, promote, retire: each with its undo
run         the order of the steps
rollback    back to a version that is kept
checks      what a candidate has to stand: golden, latency, and with live requests of the entry: canary
asking      real rows, asked gently; compare judges the answers
"""
