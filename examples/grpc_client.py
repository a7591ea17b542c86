"""One request over gRPC.

python examples/grpc_client.py --url 127.0.0.1:8001
"""

from __future__ import annotations

import argparse

import tritonclient.grpc as triton
from rows import first_rows

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--url", default="127.0.0.1:8001")
url = parser.parse_args().url

dense, categorical = first_rows(3)
inputs = [
    triton.InferInput("dense", dense.shape, "FP32"),
    triton.InferInput("categorical", categorical.shape, "INT64"),
]
inputs[0].set_data_from_numpy(dense)
inputs[1].set_data_from_numpy(categorical)

with triton.InferenceServerClient(url) as client:
    result = client.infer("ctr", inputs, client_timeout=5)  # seconds, for the whole call

print("click probabilities:", result.as_numpy("prob").ravel())
