"""One request over HTTP with binary tensors.

python examples/http_client.py --url 127.0.0.1:8000
"""

from __future__ import annotations

import argparse

import tritonclient.http as triton
from rows import first_rows

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--url", default="127.0.0.1:8000")
url = parser.parse_args().url

dense, categorical = first_rows(3)
inputs = [
    triton.InferInput("dense", dense.shape, "FP32"),
    triton.InferInput("categorical", categorical.shape, "INT64"),
]
inputs[0].set_data_from_numpy(dense, binary_data=True)
inputs[1].set_data_from_numpy(categorical, binary_data=True)
outputs = [triton.InferRequestedOutput("prob", binary_data=True)]

# One client per thread: this one is not safe to share between threads.
with triton.InferenceServerClient(url, network_timeout=5) as client:
    result = client.infer("ctr", inputs, outputs=outputs)

print("click probabilities:", result.as_numpy("prob").ravel())
