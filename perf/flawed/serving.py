"""Model of the proof `guard_detects`: a probability of four numbers, wrong in the way that the file of parameter `fault` says.

one_in_1000: each thousandth execution on average adds 0.01. drift: probabilities are squared.
"""

import json
import random
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

from pilotlib.intake import intake_of
from pilotlib.parameters import parse


class TritonPythonModel:
    """Answers x [b, 4] with p [b, 1]."""

    def initialize(self, args):
        """Start the waker."""
        config = json.loads(args["model_config"])
        self._fault = Path(config["parameters"]["fault"]["string_value"])
        ours = {name: value for name, value in config["parameters"].items() if name.startswith("pilot_")}
        self._intake, _ = intake_of(args, config, parse(ours)[0])

    def execute(self, requests):
        """Answer."""
        return self._intake.execute(requests, self._answer)

    def finalize(self):
        """End the waker."""
        self._intake.stop()

    def _answer(self, requests):
        fault = self._fault.read_text()
        is_wrong = fault == "one_in_1000" and random.random() < 0.001
        answers = []
        for request in requests:
            p = 1 / (1 + np.exp(-request.inputs()[0].as_numpy().sum(axis=1, keepdims=True)))
            p = p**2 if fault == "drift" else p + 0.01 * is_wrong
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("p", p.astype(np.float32))]))
        return answers
