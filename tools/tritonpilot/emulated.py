"""Is the device of a service emulated? Then every figure of it says so: it is that of the device's curve, not of this machine.

title = labelled(service)          # "ctr", or "device (emulated)"
reason = noted(service, reason)
"""

from __future__ import annotations

from tritonpilot.spec import Service

BACKEND = "emulated"


def is_emulated(service: Service) -> bool:
    """Whether its executions take the times of a curve."""
    return service.model is not None and service.model.backend == BACKEND


def labelled(service: Service) -> str:
    """Its name, for titles."""
    return f"{service.service} (emulated)" if is_emulated(service) else service.service


def noted(service: Service, text: str) -> str:
    """A text about its figures, with what they are."""
    if not is_emulated(service):
        return text
    return f"{text} The device of {service.service} is emulated: its executions take the times of a curve, without such a device."
