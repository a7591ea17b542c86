"""Fit the table of raw columns, train the credit model on what it makes, export it to ONNX, and check both.

    python models/risk/train.py --output models/risk/build
    python models/risk/train.py --cross-validate

Leaves features.json (the fitted table, which serving reads), model.onnx, samples.npz (1024 rows as the network takes them),
requests.npz (the same rows as callers send them) and facts.json in --output, all or none. Ends with an error, and without
publishing, when the exported model's AUC on the test split is below 0.70.
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
    import numpy.typing as npt
    import torch
    from torch.nn import functional

    from models.artefacts import MODEL, REQUESTS, SAMPLES, publication, versions, write_facts
    from models.ctr.data import auc
    from models.onnx_export import largest_difference, run, session, write_onnx
    from models.risk import data
    from models.risk.network import RiskNet
    from models.script import exit_code
    from pilotlib import table_file
    from pilotlib.table import Table
    from pilotlib.table_fit import Column, Number, arrays, fit
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

FEATURES = "features.json"
SEED = 20240917
THREADS = 2  # fixed: the order of sums, and so the weights, depend on it
EPOCHS = 6
BATCH = 128
LEARNING_RATE = 2e-3
WEIGHT_DECAY = 1.0
# The table of loans lacks missing values, callers do not: a share of the cells is blanked anew in each epoch, so that the
# model learns to answer without them.
BLANKED_SHARE = 0.05
FOLDS = 5
LEAST_AUC = 0.70
TOLERANCE = 1e-5
SAMPLE_ROWS = 1024


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Train the credit model on Lending Club loans and export it to ONNX.")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "build", help="folder to publish into")
    parser.add_argument(
        "--cross-validate", action="store_true", help=f"only print the mean AUC over {FOLDS} folds; publishes nothing"
    )
    options = parser.parse_args(argv)

    def work() -> None:
        if options.cross_validate:
            for name, columns in (("all columns", data.COLUMNS), ("without the lender's verdict", blind())):
                aucs = cross_validation(columns)
                print(f"{name}: cross_validated_auc {np.mean(aucs):.4f} (folds {np.round(aucs, 3).tolist()})")
        else:
            print(f"{options.output / MODEL} test_auc {make(options.output):.4f}")

    return exit_code(work, options.output)


def make(output: Path) -> float:
    """Fit, train, export, check, publish. Returns the test AUC of the exported model."""
    started = time.monotonic()

    def say(text: str, left_s: float) -> None:
        print(f"risk: {time.monotonic() - started:5.1f} s  {text}, about {left_s:.0f} s left", file=sys.stderr)

    with publication(output, (MODEL, FEATURES, SAMPLES, REQUESTS)) as partial:
        say("reading 9,857 loans", 15)
        train_rows, test_rows = data.split(data.load())
        say(f"training on {len(train_rows):,} loans", 13)
        table, model = train(data.COLUMNS, train_rows)
        train_s = time.monotonic() - started
        table_file.write(table, partial / FEATURES)
        numbers, texts = arrays(data.COLUMNS, test_rows.raw)
        test = _inputs(table_file.read(partial / FEATURES), numbers, texts)
        say("exporting to ONNX", 6)
        path = partial / MODEL
        write_onnx(model, {name: array[:8] for name, array in test.items()}, "prob", path)
        difference = largest_difference(model, path, test, TOLERANCE)
        test_auc = auc(test_rows.is_bad, run(session(path), test))
        if not test_auc >= LEAST_AUC:
            raise ModelError(
                f"The trained credit model reaches AUC {test_auc:.4f} on the {len(test_rows)} loans of the test split; "
                f"{LEAST_AUC} is the least that is served. Nothing has been published; what was in {output} is still "
                "there. Install the versions pinned by `make setup`; if it stays below, the data or the columns have changed."
            )
        np.savez(partial / SAMPLES, **{name: array[:SAMPLE_ROWS] for name, array in test.items()})
        np.savez(partial / REQUESTS, **requests(numbers[:SAMPLE_ROWS], texts[:SAMPLE_ROWS]))
        facts = {
            "service": "risk",
            "test_auc": round(test_auc, 6),
            "test_auc_of_int_rate": round(auc(test_rows.is_bad, test_rows.raw["int_rate"]), 6),
            "train_rows": len(train_rows),
            "test_rows": len(test_rows),
            "bad_share": round(float(train_rows.is_bad.mean()), 6),
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "columns": [column.name for column in (*table.numbers, *table.texts)],
            "dense": table.dense_names,
            "categorical_sizes": table.categorical_sizes,
            "largest_difference_to_torch": difference,
            "seed": SEED,
            "epochs": EPOCHS,
            "threads": THREADS,
            "seconds": {"train": round(train_s, 1), "total": round(time.monotonic() - started, 1)},
            "versions": versions("torch", "onnx", "onnxscript", "onnxruntime", "numpy", "pandas", data.DISTRIBUTION),
        }
        write_facts(partial, facts)
    return test_auc


def train(columns: tuple[Column, ...], loans: data.Loans) -> tuple[Table, RiskNet]:
    """The table and a model of what it makes, both fitted on `loans`; the same for the same rows and versions."""
    torch.manual_seed(SEED)
    torch.set_num_threads(THREADS)
    torch.use_deterministic_algorithms(True)
    random = np.random.default_rng(SEED)
    table = fit(columns, loans.raw)
    numbers, texts = arrays(columns, loans.raw)
    is_bad = torch.from_numpy(loans.is_bad).unsqueeze(1)
    model = RiskNet(table.widths["dense"], tuple(table.categorical_sizes.values()), float(loans.is_bad.mean()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    steps = EPOCHS * -(-len(loans) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps)
    for _ in range(EPOCHS):
        blanked = _inputs(table, *_blanked(columns, numbers, texts, random))
        dense, categorical = torch.from_numpy(blanked["dense"]), torch.from_numpy(blanked["categorical"])
        model.train()
        for rows in torch.randperm(len(loans)).split(BATCH):  # type: ignore[no-untyped-call]
            loss = functional.binary_cross_entropy_with_logits(
                model.logit(dense[rows], categorical[rows]), is_bad[rows]
            )
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
    return table, model.eval()


def cross_validation(columns: tuple[Column, ...]) -> list[float]:
    """AUC on each of FOLDS parts after training on the others: how to choose without the test split's luck."""
    loans = data.load()
    folds = data.fold_numbers(loans, FOLDS)
    found = []
    for fold in range(FOLDS):
        table, model = train(columns, loans.rows(np.flatnonzero(folds != fold)))
        held = loans.rows(np.flatnonzero(folds == fold))
        inputs = _inputs(table, *arrays(columns, held.raw))
        with torch.inference_mode():
            prob = model(torch.from_numpy(inputs["dense"]), torch.from_numpy(inputs["categorical"]))
        found.append(auc(held.is_bad, prob.numpy()))
    return found


def blind() -> tuple[Column, ...]:
    """The columns that are known before the lender has judged the risk."""
    return tuple(column for column in data.COLUMNS if column.name not in data.LENDERS_VERDICT)


def requests(numbers: npt.NDArray[np.float32], texts: npt.NDArray[np.object_]) -> dict[str, npt.NDArray[np.generic]]:
    """Rows as callers send them, some cells missing: numbers FP32[n,17], texts as numpy strings S[n,5]."""
    numbers, texts = _blanked(data.COLUMNS, numbers, texts, np.random.default_rng(SEED))
    return {"numbers": numbers, "texts": texts.astype(np.bytes_)}


def _blanked(
    columns: tuple[Column, ...],
    numbers: npt.NDArray[np.float32],
    texts: npt.NDArray[np.object_],
    random: np.random.Generator,
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.object_]]:
    """Copies with BLANKED_SHARE of the cells missing, of those columns that may be."""
    may_lack_number = np.array([column.missing != "refuse" for column in columns if isinstance(column, Number)])
    may_lack_text = np.array([column.missing != "refuse" for column in columns if not isinstance(column, Number)])
    numbers = np.where((random.random(numbers.shape) < BLANKED_SHARE) & may_lack_number, np.float32(np.nan), numbers)
    texts = np.where((random.random(texts.shape) < BLANKED_SHARE) & may_lack_text, b"", texts)
    return numbers, texts


def _inputs(
    table: Table, numbers: npt.NDArray[np.float32], texts: npt.NDArray[np.object_]
) -> dict[str, npt.NDArray[np.generic]]:
    dense, categorical = table.transform(numbers, texts)
    return {"dense": dense, "categorical": categorical}


if __name__ == "__main__":
    sys.exit(main())
