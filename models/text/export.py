"""Export MiniLM with its published weights to ONNX, and check that its embeddings agree with people about news texts.

    python models/text/export.py --output models/text/build

Leaves model.onnx, tokenizer.json, samples.npz (tokens), requests.npz (texts) and facts.json in --output, all or none.
Ends with an error, and without publishing, when the correlation with people's ratings is below 0.64.
Exit codes: those of tritonpilot.errors (4 the model is not good enough, 7 something is missing), 2 usage, 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

try:
    import numpy as np
    import numpy.typing as npt
    import torch

    from models.artefacts import MODEL, REQUESTS, SAMPLES, publication, versions, write_facts
    from models.onnx_export import largest_difference, run, session, write_onnx
    from models.packages import data_file
    from models.script import exit_code
    from models.text import data
    from models.text.minilm import SentenceEncoder
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

TOKENIZER = "tokenizer.json"
OUTPUT = "sentence_embedding"
LEAST_AGREEMENT = 0.64
TOLERANCE = 2e-6  # of numbers whose squares sum to 1
SAMPLE_ROWS = 64
THREADS = 2

Tensors = Mapping[str, npt.NDArray[np.int64]]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Export MiniLM to ONNX and check it against people's ratings.")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "build", help="folder to publish into")
    options = parser.parse_args(argv)

    def work() -> None:
        agreement = make(options.output)
        print(f"{options.output / MODEL} pearson {agreement:.4f}")

    return exit_code(work, options.output)


def make(output: Path) -> float:
    """Export, check, publish. Returns the correlation of the exported model's cosines with people's ratings."""
    started = time.monotonic()
    torch.set_num_threads(THREADS)

    def say(text: str, left_s: float) -> None:
        print(f"text: {time.monotonic() - started:5.1f} s  {text}, about {left_s:.0f} s left", file=sys.stderr)

    with publication(output, (MODEL, TOKENIZER, SAMPLES, REQUESTS)) as partial:
        say("reading weights and texts", 25)
        shutil.copyfile(data_file(data.MODEL, data.TOKENIZER_FILE), partial / TOKENIZER)
        network = SentenceEncoder.load(data_file(data.MODEL, data.WEIGHTS_FILE))
        texts = data.texts()
        samples = tokens(sorted(texts, key=len)[:SAMPLE_ROWS])
        documents, ratings = data.rated_documents()
        long_samples = tokens(documents)
        say("exporting to ONNX", 24)
        path = partial / MODEL
        example = {name: array[:2] for name, array in samples.items()}
        write_onnx(network, example, OUTPUT, path, free=("batch", "sequence"))
        say("comparing ONNX Runtime with torch on short and on long texts", 12)
        difference = max(largest_difference(network, path, each, TOLERANCE) for each in (samples, long_samples))
        say("embedding the rated texts", 2)
        agreement = data.agreement(run(session(path, THREADS), long_samples, batch=10), ratings)
        if agreement < LEAST_AGREEMENT:
            raise ModelError(
                f"The exported text model agrees with people's ratings by {agreement:.4f} (Pearson); {LEAST_AGREEMENT} is "
                f"the least that is served. Nothing has been published; what was in {output} is still there. Install the "
                "pinned versions with `make setup`; if it stays below, the weights or the tokenizer have changed."
            )
        np.savez(partial / SAMPLES, **samples)
        np.savez(partial / REQUESTS, text=np.array([[text.encode()] for text in texts]))
        facts = {
            "service": "text",
            "pearson_with_ratings": agreement,
            "rated_texts": len(documents),
            "parameters": sum(parameter.numel() for parameter in network.parameters()),
            "largest_difference_to_torch": difference,
            "max_tokens": data.MAX_TOKENS,
            "pad_to_multiple": data.PAD_TO_MULTIPLE,
            "seconds": {"total": round(time.monotonic() - started, 1)},
            "versions": versions(
                *("torch", "onnx", "onnxscript", "onnxruntime", "numpy", "tokenizers", "safetensors"),
                *(data.MODEL, data.TEXTS),
            ),
        }
        write_facts(partial, facts)
    return agreement


def tokens(texts: Sequence[str]) -> Tensors:
    """The model's inputs for these texts: INT64[texts, longest] by name."""
    (found,) = data.tokenizer().encode([texts])
    return {"input_ids": found.input_ids, "attention_mask": found.attention_mask}


if __name__ == "__main__":
    sys.exit(main())
