"""The queue delay that our backends apply themselves, so that it changes while a model serves (ADR 0018): how it is told and seen.

request.parameters[PARAMETER].string_param = signed(key, "ctr", 2000)      # on any inference of the model
delay_us(samples, "ctr")                                                   # of Triton's metrics; None: its backend has none
"""

from __future__ import annotations

import hashlib
import hmac
import math
import time
from collections.abc import Iterable
from typing import Any

from tritonpilot.metrics import Sample

PARAMETER = "pilot_live_delay"
GAUGE = "pilot_live_delay_us"
Request = Any  # service_pb2.ModelInferRequest: tritonclient ships no types


def signed(key: str, model: str, delay_us: int, when_ns: int | None = None) -> str:
    """The parameter's value. Only who knows the key of the restricted APIs can make one, and each is taken once."""
    said = f"{delay_us}:{time.time_ns() if when_ns is None else when_ns}"
    return f"{said}:{hmac.new(key.encode(), f'{model}:{said}'.encode(), hashlib.sha256).hexdigest()}"


def delay_us(samples: Iterable[Sample], model: str) -> int | None:
    """What the model's instances hold now; None where its backend cannot."""
    own = (s.value for s in samples if s.name == GAUGE and s.labels.get("model") == model)
    found = [int(value) for value in own if math.isfinite(value)]
    return max(found) if found else None
