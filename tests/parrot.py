"""A model that answers with what reached it of a request: for tests of the entry."""

from __future__ import annotations

# Answers the parameters that reached it, and Triton's name for the request's timeout.
PARROT = """
import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            said = {"timeout_us": request.timeout(), "parameters": json.loads(request.parameters() or "{}")}
            tensor = pb_utils.Tensor("OUTPUT", np.array([json.dumps(said).encode()], np.object_))
            responses.append(pb_utils.InferenceResponse([tensor]))
        return responses
"""
PARROT_CONFIG = """
backend: "python"
max_batch_size: 0
input [{name: "INPUT" data_type: TYPE_FP32 dims: [-1]}]
output [{name: "OUTPUT" data_type: TYPE_STRING dims: [1]}]
instance_group [{kind: KIND_CPU}]
dynamic_batching {
  priority_levels: 2
  default_priority_level: 2
  default_queue_policy { default_timeout_microseconds: 30000000 allow_timeout_override: true }
}
parameters { key: "pilot_classes" value { string_value: "realtime:1,batch:2" } }
"""
