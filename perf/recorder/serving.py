"""Model of the proof `deadlines`: every execution sleeps, and writes down when it began and ended and its requests' deadlines.

One line an execution in the file of parameter `record`: begin, end, and a deadline for each request, CLOCK_MONOTONIC ns (0: none).
"""

import json
import time
from pathlib import Path

import triton_python_backend_utils as pb_utils

from pilotlib.deadlines import deadline_ns
from pilotlib.intake import intake_of
from pilotlib.parameters import parse


class TritonPythonModel:
    """Answers x with x."""

    def initialize(self, args):
        """Open the record and start the waker."""
        config = json.loads(args["model_config"])
        said = {name: value["string_value"] for name, value in config["parameters"].items()}
        self._seconds = float(said["seconds"])
        self._record = Path(said["record"]).open("a", encoding="ascii", buffering=1)  # noqa: SIM115 -- closed by finalize
        ours = {name: value for name, value in config["parameters"].items() if name.startswith("pilot_")}
        self._intake, _ = intake_of(args, config, parse(ours)[0])

    def execute(self, requests):
        """Hand on what is not late."""
        return self._intake.execute(requests, self._answer)

    def finalize(self):
        """End the waker."""
        self._intake.stop()
        self._record.close()

    def _answer(self, requests):
        began = time.monotonic_ns()
        time.sleep(self._seconds)
        deadlines = [deadline_ns(request.parameters()) or 0 for request in requests]
        self._record.write(" ".join(map(str, [began, time.monotonic_ns(), *deadlines])) + "\n")
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("y", request.inputs()[0].as_numpy())]) for request in requests
        ]
