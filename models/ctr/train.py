"""Train the click model on MovieLens 100k, export it to ONNX, and check it.

    python models/ctr/train.py --output models/ctr/build

Leaves model.onnx, samples.npz (4096 rows of the test split) and facts.json in --output, all three or none. Ends with
an error, and without publishing, when the exported model's AUC on the test split is below 0.74.
Exit codes: those of tritonpilot.errors (4 the model is not good enough, 7 something is missing), 2 usage, 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

try:
    import numpy as np
    import numpy.typing as npt
    import torch
    from torch.nn import functional

    from models.artefacts import MODEL, SAMPLES, publication, versions, write_facts
    from models.ctr import data
    from models.ctr.dlrm import Dlrm
    from models.ctr.features import CATEGORICAL, DENSE
    from models.onnx_export import largest_difference, run, session, write_onnx
    from models.script import exit_code
    from tritonpilot.errors import ModelError
except ModuleNotFoundError as missing:
    if __name__ != "__main__":
        raise
    print(
        f"error: this Python ({sys.executable}) has no {missing.name}, which training needs. Nothing has been written. "
        "Run `make setup` and start this again with .venv/bin/python.",
        file=sys.stderr,
    )
    sys.exit(7)

SEED = 20240917
THREADS = 2  # fixed: the order of sums, and so the weights, depend on it
BATCH = 256
LEARNING_RATE = 3e-4
WEIGHT_DECAY = 1.0
# Most users of the test split are new, and many films get rare: a share of ids is hidden in training, so that the
# model learns to answer without them and trains the "unknown" rows of its tables.
HIDDEN_SHARE = {"user": 0.9, "item": 0.3}
HIDDEN_SHARE_OTHERS = 0.02
LEAST_AUC = 0.74
TOLERANCE = 1e-5
SAMPLE_ROWS = 4096
EXPORT_S = 8.0  # what follows training, for the estimate of the time left


@dataclass
class Narration:
    """Progress on stderr."""

    started: float

    def say(self, text: str, left_s: float | None = None) -> None:
        left = "" if left_s is None else f", about {max(left_s, 1):.0f} s left"
        print(f"ctr: {time.monotonic() - self.started:5.1f} s  {text}{left}", file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    options = _options(argv)
    narration = Narration(time.monotonic())

    def work() -> None:
        if options.hold_out:
            auc = hold_out(options.epochs, narration)
            print(f"hold_out_auc {auc:.4f}")
        else:
            auc = make(options.output, options.epochs, narration)
            print(f"{options.output / MODEL} test_auc {auc:.4f}")

    return exit_code(work, options.output)


def make(output: Path, epochs: int, narration: Narration) -> float:
    """Train on the whole train split, export, check, publish. Returns the test AUC of the exported model."""
    with publication(output) as partial:
        dataset = _load(narration)
        before = time.monotonic()
        model = train(dataset.train, dataset.vocabulary_sizes, epochs, narration)
        train_s = time.monotonic() - before
        narration.say("exporting to ONNX", EXPORT_S)
        test = dataset.test
        path = partial / MODEL
        write_onnx(model, {name: array[:8] for name, array in test.inputs.items()}, "prob", path)
        narration.say("comparing ONNX Runtime with torch, computing the test AUC", EXPORT_S / 4)
        difference = largest_difference(model, path, test.inputs, TOLERANCE)
        auc = data.auc(test.click, run(session(path), test.inputs))
        if not auc >= LEAST_AUC:
            raise ModelError(
                f"The trained click model reaches AUC {auc:.4f} on the {len(test)} rows of the test split; "
                f"{LEAST_AUC} is the least that is served. Nothing has been published; what was in {output} is "
                "still there. Train with the default --epochs and the versions pinned by `make setup`; if it stays "
                "below, the data or the features have changed."
            )
        np.savez(partial / SAMPLES, **samples(test))
        facts = {
            "service": "ctr",
            "test_auc": round(auc, 6),
            "test_auc_of_item_click_rate": round(_auc_of(test, "item_click_rate"), 6),
            "test_auc_of_expected_rating": round(_auc_of(test, "expected_rating"), 6),
            "train_rows": len(dataset.train),
            "test_rows": len(test),
            "test_begins": int(test.timestamp[0]),
            "click_share": {
                "train": round(float(dataset.train.click.mean()), 6),
                "test": round(float(test.click.mean()), 6),
            },
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "vocabulary_sizes": dict(zip(CATEGORICAL, dataset.vocabulary_sizes, strict=True)),
            "largest_difference_to_torch": difference,
            "seed": SEED,
            "epochs": epochs,
            "threads": THREADS,
            "seconds": {"train": round(train_s, 1), "total": round(time.monotonic() - narration.started, 1)},
            "versions": versions("torch", "onnx", "onnxscript", "onnxruntime", "numpy", data.DISTRIBUTION),
        }
        write_facts(partial, facts)
    narration.say(f"done: test AUC {auc:.4f}, largest difference to torch {difference:.1e}")
    return auc


def hold_out(epochs: int, narration: Narration) -> float:
    """AUC on the last tenth of the train split after training on the rest: how to choose without the test split."""
    dataset = _load(narration)
    cut = data.split_index(dataset.train.timestamp, 0.9)
    rows, held = dataset.train.part(0, cut), dataset.train.part(cut, len(dataset.train))
    model = train(rows, dataset.vocabulary_sizes, epochs, narration).eval()
    with torch.inference_mode():
        prob = model(torch.from_numpy(held.dense.copy()), torch.from_numpy(held.categorical.copy()))
    return data.auc(held.click, prob.numpy())


def train(split: data.Split, vocabulary_sizes: tuple[int, ...], epochs: int, narration: Narration) -> Dlrm:
    """A trained Dlrm; the same weights for the same rows, epochs and versions."""
    torch.manual_seed(SEED)
    torch.set_num_threads(THREADS)
    torch.use_deterministic_algorithms(True)
    dense = torch.from_numpy(split.dense.copy())
    categorical = torch.from_numpy(split.categorical.copy())
    click = torch.from_numpy(split.click.copy()).unsqueeze(1)
    model = Dlrm(vocabulary_sizes, dense.mean(0), 1 / dense.std(0).clamp_min(1e-6))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    steps = epochs * -(-len(split) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps, pct_start=0.1)
    hidden = torch.tensor([HIDDEN_SHARE.get(name, HIDDEN_SHARE_OTHERS) for name in CATEGORICAL])
    started = said = time.monotonic()
    narration.say(f"training {sum(p.numel() for p in model.parameters()):,} parameters on {len(split):,} rows")
    step = 0
    for epoch in range(1, epochs + 1):
        model.train()
        for rows in torch.randperm(len(split)).split(BATCH):  # type: ignore[no-untyped-call]
            shown = categorical[rows] * (torch.rand(len(rows), len(hidden)) >= hidden)
            loss = functional.binary_cross_entropy_with_logits(model.logit(dense[rows], shown), click[rows])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
            step += 1
            now = time.monotonic()
            if now - said >= 2:
                said = now
                left_s = (now - started) / step * (steps - step) + EXPORT_S
                narration.say(f"epoch {epoch}/{epochs}, step {step}/{steps}, loss {loss.item():.3f}", left_s)
    return model


def samples(test: data.Split) -> dict[str, npt.NDArray[np.generic]]:
    """SAMPLE_ROWS rows spread evenly over the test split: real requests for warmup, load and tests."""
    rows = np.linspace(0, len(test) - 1, SAMPLE_ROWS).astype(np.int64)
    return {name: array[rows] for name, array in test.inputs.items()}


def _load(narration: Narration) -> data.Dataset:
    narration.say("reading 100,000 ratings and computing their features (about 6 s)", 30)
    return data.load()


def _auc_of(test: data.Split, feature: str) -> float:
    return data.auc(test.click, test.dense[:, DENSE.index(feature)])


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the click model on MovieLens 100k and export it to ONNX.")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "build", help="folder to publish into")
    parser.add_argument("--epochs", type=int, default=2, help="passes over the train split (default 2)")
    parser.add_argument(
        "--hold-out",
        action="store_true",
        help="only print the AUC on the last tenth of the train split, training on the rest",
    )
    options = parser.parse_args(argv)
    if options.epochs < 1:
        parser.error(f"--epochs must be 1 or more, not {options.epochs}")
    return options


if __name__ == "__main__":
    sys.exit(main())
