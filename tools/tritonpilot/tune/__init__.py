"""Which settings serve a service best within its SLO? Few points are measured, thousands simulated, the best three verified.

    found = tune(service, Wish.of(service, rate_per_s=2000), services=load_services(Path("models")))
    found.setting, found.reason, found.seconds          # what to choose, why, and what it took to know

`wish` says what is asked for, `search` decides, `explain` puts it into words, `rewrite` changes the service file, `run` measures.
"""

from tritonpilot.tune.run import Tuned, tune
from tritonpilot.tune.wish import Space, Wish

__all__ = ["Space", "Tuned", "Wish", "tune"]
