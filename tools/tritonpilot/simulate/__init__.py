"""How would Triton's dynamic batcher serve this traffic? An answer in milliseconds, without a server.

    batcher = Batcher.of(config)                       # from Triton's ModelConfig
    found = simulate(batcher, costs, traffic(streams, seconds=60, seed=1), streams)
    found.outcome.p_ms(0.99), found.outcome.goodput_per_s, found.batch_sizes

`batcher` holds the rules' settings, `kernel` the rules, `tables` what they work on; `run` puts traffic in and reads the outcome.
"""

from tritonpilot.simulate.batcher import Batcher, Level
from tritonpilot.simulate.host import Host
from tritonpilot.simulate.run import Run, Simulated, Window, simulate

__all__ = ["Batcher", "Host", "Level", "Run", "Simulated", "Window", "simulate"]
