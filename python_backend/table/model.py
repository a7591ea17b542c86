"""Backend "table": raw columns as the tensors that a model takes, with the columns that its training script fitted.

`numbers` FP32[n] (NaN = missing) and `texts` BYTES[m] (empty = missing) -> `dense` FP32[N] and `categorical` INT64[M]; what has no
columns is left out. Clipping, log1p, standardisation, buckets, vocabularies, hashing (pilotlib.table, docs/tables.md).
A row with infinity, with text that is not UTF-8, or without what a column insists on, gets its request an error that names row
and column.
"""

from dataclasses import dataclass

from pilotlib import config_tensors, table_file
from pilotlib.parameters import parameter
from pilotlib.table import CATEGORICAL, DENSE, NUMBERS, TEXTS
from pilotlib.triton_model import triton_model
from pilotlib.verbs import Backend


@dataclass(frozen=True)
class Parameters:
    features: str = parameter("features.json", "file with the fitted columns, in the version folder")


class TableBackend(Backend):
    """All rows of an execution through one pilotlib.table.Table."""

    parameters = Parameters

    def set_up(self, context):
        self._table = table_file.read(context.version_folder / context.parameters.features)
        self._is_batched = context.config["max_batch_size"] > 0
        types = {NUMBERS: "TYPE_FP32", TEXTS: "TYPE_STRING", DENSE: "TYPE_FP32", CATEGORICAL: "TYPE_INT64"}
        tensors = {name: (types[name], (width,)) for name, width in self._table.widths.items() if width}
        config_tensors.check(
            context.config,
            {name: tensor for name, tensor in tensors.items() if name in (NUMBERS, TEXTS)},
            {name: tensor for name, tensor in tensors.items() if name in (DENSE, CATEGORICAL)},
            may_lack=(DENSE, CATEGORICAL),
        )

    def decode(self, inputs):
        numbers, texts = inputs.get(NUMBERS), inputs.get(TEXTS)
        if not self._is_batched:
            numbers, texts = (None if array is None else array[None] for array in (numbers, texts))
        self._table.row_count(numbers, texts)
        return numbers, texts

    def predict(self, items):
        return self._table.transform_requests(items)

    def encode(self, result):
        dense, categorical = result
        if not self._is_batched:
            dense, categorical = dense[0], categorical[0]
        return {DENSE: dense, CATEGORICAL: categorical}


TritonPythonModel = triton_model(TableBackend)
