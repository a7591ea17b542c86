"""Many requests in flight from one asyncio program; Triton's dynamic batcher joins them.

python examples/asyncio_client.py --url 127.0.0.1:8001
"""

from __future__ import annotations

import argparse
import asyncio

import numpy as np
import tritonclient.grpc.aio as triton
from rows import first_rows

REQUESTS, IN_FLIGHT = 200, 32


async def main(url: str) -> None:
    dense, categorical = first_rows(REQUESTS)
    places = asyncio.Semaphore(IN_FLIGHT)

    async with triton.InferenceServerClient(url) as client:

        async def one(row: int) -> float:
            inputs = [triton.InferInput("dense", [1, 28], "FP32"), triton.InferInput("categorical", [1, 8], "INT64")]
            inputs[0].set_data_from_numpy(dense[row : row + 1])
            inputs[1].set_data_from_numpy(categorical[row : row + 1])
            async with places:
                result = await client.infer("ctr", inputs, client_timeout=5)
            return float(result.as_numpy("prob")[0, 0])

        answers = await asyncio.gather(*(one(row) for row in range(REQUESTS)))

    print(f"{len(answers)} answers, mean click probability {np.mean(answers):.4f}")


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--url", default="127.0.0.1:8001")
asyncio.run(main(parser.parse_args().url))
