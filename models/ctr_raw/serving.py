"""Ids to the inputs of the click model: an example of a backend of one's own, on the four verbs (docs/backends.md).

Input `user` BYTES[1], `item` BYTES[1], `timestamp` INT64[1] (seconds since 1970; 0 = when the history ends); output `dense`
FP32[28], `categorical` INT64[8]. Published as model.py, with features.py, the module that training computes them with, and
history.json, the counters after the last event that training saw.
"""

from features import CATEGORICAL, DENSE, Snapshot

from pilotlib import config_tensors
from pilotlib.triton_model import triton_model
from pilotlib.verbs import Backend, BadRequest

INPUTS = {"user": ("TYPE_STRING", (1,)), "item": ("TYPE_STRING", (1,)), "timestamp": ("TYPE_INT64", (1,))}
OUTPUTS = {"dense": ("TYPE_FP32", (len(DENSE),)), "categorical": ("TYPE_INT64", (len(CATEGORICAL),))}
LATEST = 253_402_300_799  # the end of the year 9999, the last that Python's calendar has


class Ids(Backend):
    """Rows of all requests of an execution, from one snapshot of the history."""

    def set_up(self, context):
        """Load the history once; it does not grow, however many ids are asked for."""
        config_tensors.check(context.config, INPUTS, OUTPUTS)
        path = context.version_folder / "history.json"
        self._snapshot = Snapshot.from_json(path.read_text(encoding="utf-8"), str(path))

    def decode(self, inputs):
        """One request -> its (user, item, timestamp) rows."""
        users, items = _texts(inputs, "user"), _texts(inputs, "item")
        times = inputs["timestamp"][:, 0].tolist()
        end = self._snapshot.end
        for row, time in enumerate(times):
            if time and not end <= time <= LATEST:
                raise BadRequest(
                    "timestamp", f"row {row}: {time} is not between {end}, when the history ends, and the year 9999"
                )
        return [(user, item, time or end) for user, item, time in zip(users, items, times, strict=True)]

    def predict(self, items):
        """The rows of all requests at once, cut apart again."""
        encoded = self._snapshot.encode([row for rows in items for row in rows])
        results, start = [], 0
        for rows in items:
            results.append({name: array[start : start + len(rows)] for name, array in encoded.items()})
            start += len(rows)
        return results

    def encode(self, result):
        """They are named as the outputs are."""
        return result


def _texts(inputs, name):
    texts = []
    for row, text in enumerate(inputs[name][:, 0].tolist()):
        try:
            texts.append(text.decode())
        except UnicodeDecodeError as error:
            raise BadRequest(name, f"row {row} is not UTF-8: {error.reason} at byte {error.start}") from None
    return texts


TritonPythonModel = triton_model(Ids)
