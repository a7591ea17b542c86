"""An open-loop load on a served model: every request at its time, whatever became of the others.

    outcome, facts = run(Target("127.0.0.1:8000", "http"), "ctr", samples.read(path), traffic(streams, 30, seed=1), streams)
    outcome.goodput_per_s, outcome.p_ms(0.999), facts.is_limit

Guide: docs/load.md.
"""

from tritonpilot.load.run import SenderFacts, run
from tritonpilot.load.target import Target

__all__ = ["SenderFacts", "Target", "run"]
