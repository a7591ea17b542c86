"""Model of the proof `alerts`: an execution takes as many seconds as the file of parameter `pace` says at that time."""

import json
import time
from pathlib import Path

import triton_python_backend_utils as pb_utils

from pilotlib.intake import intake_of
from pilotlib.parameters import parse


class TritonPythonModel:
    """Answers x with x."""

    def initialize(self, args):
        """Start the waker."""
        config = json.loads(args["model_config"])
        self._pace = Path(config["parameters"]["pace"]["string_value"])
        ours = {name: value for name, value in config["parameters"].items() if name.startswith("pilot_")}
        self._intake, _ = intake_of(args, config, parse(ours)[0])

    def execute(self, requests):
        """Take the time."""
        return self._intake.execute(requests, self._answer)

    def finalize(self):
        """End the waker."""
        self._intake.stop()

    def _answer(self, requests):
        time.sleep(float(self._pace.read_text()))
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("y", request.inputs()[0].as_numpy())]) for request in requests
        ]
