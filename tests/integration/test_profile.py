"""The costs of an emulated accelerator, measured in a real Triton, are those of its curve and of Triton around it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import tritonclient.http as httpclient

from perf import emulated
from pilotlib.curve import read
from tritonpilot.errors import MeasurementError
from tritonpilot.profile import profile, speed
from tritonpilot.server import EmbeddedServer

NAME = "emulated_v100"


def test_a_profile_finds_the_emulated_curve_and_little_cpu_time(tmp_path: Path) -> None:
    curve = read(emulated.CURVES / f"{emulated.V100}.json")
    root = emulated.repository_of(tmp_path, {NAME: "batching: {max_batch_size: 16, queue_delay_us: 500}"})
    lines: list[str] = []

    with EmbeddedServer(root) as server:
        found = profile(
            server, NAME, emulated.rows(), max_batch_size=16, is_on_cpu=False, passes=2, on_progress=lines.append
        )
        slower = speed(server, NAME, emulated.rows(), found, max_rows=4)
        client = httpclient.InferenceServerClient(server.endpoints.http)
        tensor = httpclient.InferInput("row", [3, 1], "FP32")
        tensor.set_data_from_numpy(np.array([[7], [8], [9]], np.float32))
        answer = client.infer(NAME, [tensor]).as_numpy("emulated")
        client.close()
        log = server.log_file.read_text(errors="replace")
        error = ""
        try:
            profile(server, NAME, emulated.rows(), max_batch_size=17, is_on_cpu=False, passes=1)
        except MeasurementError as refused:
            error = str(refused)

    costs = found.costs
    assert answer.tolist() == [[7], [8], [9]]
    assert costs.rows == (1, 2, 4, 8, 16)
    assert all(burst.executing_us > 0.85 * curve.mean_us(burst.rows) for burst in found.bursts)  # the spread is 5 %
    assert costs.host_us + costs.front_us + costs.reply_us < curve.mean_us(1)
    assert slower > 0
    assert len(lines) == 2
    assert f"those of {curve.name}" in log
    assert "batch-size must be <= 16" in error
