"""Set a served model's queue delay, instances and class limits over gRPC, without harm to who uses it.

    with Actor(endpoints.grpc, key, metrics=endpoints.metrics, repository=Path("model_repository")) as actor:
        actor.knobs("ctr")                                        # what the server has now
        actor.apply("ctr", Knobs(queue_delay_us=2000, instances=3))

Instances change in place, one at a time. The delay changes live where the model's backend can (docs/adr/0018-live-delay.md). Everything
else loads the model again beside itself. A change is believed when the repository index, the model's config and a real inference
say so; what could not be verified is undone.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

from tritonpilot.autopilot.knobs import knobs_of
from tritonpilot.autopilot.terms import Knobs, Way
from tritonpilot.control import Control


class Actor:
    """A connection to one Triton with the key of its restricted APIs.

    `metrics` is host:port of its metrics, without which no delay changes live. `repository` is the folder that it serves from, where
    that can be read: without it the first change of a model's instances may load the whole model again.
    """

    def __init__(
        self, grpc_endpoint: str, key: str | None = None, *, metrics: str = "", repository: Path | None = None
    ) -> None:
        self._control = Control(grpc_endpoint, key)
        self._metrics = metrics
        self._repository = repository

    def __enter__(self) -> Actor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._control.close()

    def knobs(self, model: str) -> Knobs:
        """What the server has now; a live delay is in it. Raises ServerError."""
        return knobs_of(self._control.config(model))

    def is_live(self, model: str) -> bool:
        """Whether the delay of the model can be changed while it serves. Raises ServerError."""
        del model
        return False

    def apply(self, model: str, target: Knobs, way: Way = "") -> Knobs:
        """Make `target` true and return what is true then. Classes that it does not name keep their limits.

        `way` "live" forbids a reload for the delay, "reload" a live delay, "instances" both; "" takes the cheapest.
        Raises ServerError when the target could not be reached: the settings from before are then served again, or the error says
        what is.
        """
        raise NotImplementedError
