"""Inputs and outputs in system shared memory: for big tensors on the same machine, nothing is copied through the socket.

TRITONPILOT_CONTROL_KEY=$(cat KEYFILE) python examples/shared_memory.py --url 127.0.0.1:8001

Registering regions is a restricted API: the key goes along as a header. Regions are always unregistered and removed, also
after an error, as both Triton and the kernel keep them otherwise.
"""

from __future__ import annotations

import argparse
import os
import uuid

import numpy as np
import tritonclient.grpc as triton
import tritonclient.utils.shared_memory as shm
from rows import first_rows

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--url", default="127.0.0.1:8001")
url = parser.parse_args().url
headers = {"triton-grpc-protocol-tritonpilot-control-key": os.environ.get("TRITONPILOT_CONTROL_KEY", "")}

dense, categorical = first_rows(64)
prob = np.empty((64, 1), np.float32)
name = f"example-{uuid.uuid4().hex[:8]}"
ends = np.cumsum([0, dense.nbytes, categorical.nbytes, prob.nbytes]).tolist()

region = shm.create_shared_memory_region(name, f"/{name}", ends[-1])
try:
    shm.set_shared_memory_region(region, [dense, categorical])
    with triton.InferenceServerClient(url) as client:
        client.register_system_shared_memory(name, f"/{name}", ends[-1], headers=headers)
        try:
            inputs = [
                triton.InferInput("dense", dense.shape, "FP32"),
                triton.InferInput("categorical", categorical.shape, "INT64"),
            ]
            inputs[0].set_shared_memory(name, dense.nbytes, offset=ends[0])
            inputs[1].set_shared_memory(name, categorical.nbytes, offset=ends[1])
            output = triton.InferRequestedOutput("prob")
            output.set_shared_memory(name, prob.nbytes, offset=ends[2])
            client.infer("ctr", inputs, outputs=[output])
            prob = shm.get_contents_as_numpy(region, np.float32, list(prob.shape), offset=ends[2]).copy()
        finally:
            client.unregister_system_shared_memory(name, headers=headers)
finally:
    shm.destroy_shared_memory_region(region)

print("click probabilities:", prob[:3].ravel(), f"and {len(prob) - 3} more")
