"""Backend "companion": wakes, from outside, the models whose backends cannot wake themselves (docs/adr/0010-companion.md).

One model per repository, pilot_companion, which `tritonpilot build` adds where it can be of use. Its inference is its own probe:
`milliseconds` FP32[1] -> `slept` FP32[1], at most 20; zero does nothing and serves health checks.
"""

import os
import time

import triton_python_backend_utils as pb_utils

from pilotlib.companion_thread import INPUT, OUTPUT, Companion
from pilotlib.loopback import ENDPOINT_VARIABLE as HTTP_VARIABLE
from pilotlib.loopback import http_endpoint, parent_command_line
from pilotlib.server_metrics import ENDPOINT_VARIABLE as METRICS_VARIABLE
from pilotlib.server_metrics import metrics_endpoint
from pilotlib.stub_memory import stub_memory_of

SLEEP_MAX_MS = 20.0


class TritonPythonModel:
    """The one instance of the one version."""

    def initialize(self, args):
        """Start the companion's threads, or say why there is nothing for them to do."""
        self._companion = None
        self._memory = stub_memory_of(args)
        name = args["model_name"]
        arguments = parent_command_line()
        http, metrics = http_endpoint(os.environ, arguments), metrics_endpoint(os.environ, arguments)
        if http is None or metrics is None:
            what, variable = ("HTTP service", HTTP_VARIABLE) if http is None else ("metrics", METRICS_VARIABLE)
            self._say(
                f"this server has no {what} (or its command line does not show it: set {variable}=host:port), so requests to "
                "models whose backends do not wake themselves may wait 500 ms for a free instance"
            )
            return
        self._wakes_family = pb_utils.MetricFamily(
            name="pilot_companion_wakes_total",
            description="Requests that the companion sent to wake the dynamic batcher of a model",
            kind=pb_utils.MetricFamily.COUNTER,
        )
        self._needed_family = pb_utils.MetricFamily(
            name="pilot_companion_needed",
            description="1 while this server is taken to have the dynamic batcher's 500 ms stall",
            kind=pb_utils.MetricFamily.GAUGE,
        )
        self._needed = self._needed_family.Metric(labels={})
        self._wakes = {}
        self._companion = Companion(
            http,
            metrics,
            name=name,
            say=self._say,
            woke=self._count,
            needed=lambda is_needed: self._needed.set(int(is_needed)),
            server_pid=os.getppid(),
        )
        self._companion.start()

    def execute(self, requests):
        """Sleep as long as each request asks."""
        self._memory.look()
        return [self._answer(request) for request in requests]

    def finalize(self):
        """End the threads."""
        if self._companion is not None:
            self._companion.stop()

    def _answer(self, request):
        wanted = pb_utils.get_input_tensor_by_name(request, INPUT).as_numpy()
        milliseconds = min(float(wanted.max(initial=0.0)), SLEEP_MAX_MS)
        if milliseconds > 0:
            time.sleep(milliseconds / 1e3)
        return pb_utils.InferenceResponse([pb_utils.Tensor(OUTPUT, wanted)])

    def _count(self, model, wakes):
        if model not in self._wakes:
            self._wakes[model] = self._wakes_family.Metric(labels={"model": model})
        self._wakes[model].increment(wakes)

    def _say(self, line):
        pb_utils.Logger.log_warn(f"pilot_companion: {line}")
