"""Do batch-mates of other lengths change an embedding, and what does serving texts cost? Both from strings, through the pipeline.

The reference is the library tokenizers and ONNX Runtime as one writes it without a server; it shares no code with the backends.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers

from models.text import data
from perf.closed_loop import ClosedLoop
from perf.efficiency import against_alone
from perf.frame import Bench, Outcome
from perf.inprocess import InProcess, session
from perf.open_loop import Request, outputs_of
from perf.subjects import model_file, part, priority, services, serving
from pilotlib.text import use_threads
from tritonpilot import metrics

REQUESTS = 240
QUICK_REQUESTS = 60
SIZES = (1, 1, 1, 2, 3, 5, 8, 16)
IN_FLIGHT = 32
SEED = 30
# What a caller may send beside prose: nothing, no token, one token of 600, other scripts, markup, more than is read.
ODD_TEXTS = (
    "",
    "\0",
    " \n\t ",
    "x" * 600,
    "漢字と仮名",
    "Ünïcödé 😀",
    "[SEP] [MASK] <b>&amp;</b>",
    "more than the model reads " * 80,
)

ROWS = 16
BATCHES = 15
CALLERS = 2  # one executes, one waits: a request takes some 300 ms
TURN_S = 1.0  # some 8 requests


def text_batch_mates(bench: Bench) -> Outcome:
    """The largest difference of any number of any served embedding from the same text's, embedded in process and alone.

    Requests of 1 to 16 texts, short and long ones mixed, many in flight at a time: executed with whatever mates they meet.
    """
    texts = [*data.texts(), *ODD_TEXTS]
    model = session(model_file(part("text_net")))
    bench.say(f"embedding {len(texts)} texts one at a time in process")
    alone = np.concatenate([embed(model, [text]) for text in texts])
    random = np.random.default_rng(SEED)
    service = services(["text"])["text"]
    count = QUICK_REQUESTS if bench.quick else REQUESTS
    chosen = [random.integers(len(texts), size=random.choice(SIZES)) for _ in range(count)]
    requests = [
        Request("text", {"text": as_rows([texts[place] for place in places])}, priority(service, "batch"))
        for places in chosen
    ]
    with serving(bench, ["text"]) as served:
        bench.say(f"sending {count} requests of 1 to {max(SIZES)} texts, {IN_FLIGHT} in flight")
        answers = outputs_of(served.sender.send(requests, in_flight=IN_FLIGHT))
        seen = {name: metrics.statistics(served.server.endpoints.grpc, name) for name in ("text_tokenize", "text_net")}
        served.server.check_alive()
    differences = [
        float(np.abs(answer["sentence_embedding"].astype(np.float64) - alone[places]).max())
        for answer, places in zip(answers, chosen, strict=True)
    ]
    rows = sum(map(len, chosen))
    return Outcome(
        max(differences),
        max(differences) - min(differences),
        count,
        ok=bool(np.isfinite(differences).all()) and all(each.success >= count for each in seen.values()),
        details={
            "max": max(differences),
            "rows": rows,
            "different_texts": len({place for places in chosen for place in places.tolist()}),
            "mean_batch": {name: round(each.mean_batch, 2) for name, each in seen.items()},
            "requests_per_execution": {name: round(each.success / each.executions, 2) for name, each in seen.items()},
        },
    )


def text_efficiency(bench: Bench) -> Outcome:
    """Requests of 16 texts over HTTP, of class batch; the details have the CPU time of each step's process."""
    texts, level = data.texts(), priority(services(["text"])["text"], "batch")
    batches = [{"text": as_rows(texts[start : start + ROWS])} for start in range(0, BATCHES * ROWS, ROWS)]
    with (
        serving(bench, ["text"], is_pinned=True) as served,
        InProcess(model_file(part("text_net")), bench.cores.server, embed_rows) as alone,
        ClosedLoop(served.server.endpoints.http, "text", batches, CALLERS, priority=level) as callers,
    ):
        alone.prepare(batches)
        return against_alone(bench, served.server, callers, alone, rows_per_request=ROWS, turn_s=TURN_S)


def embed_rows(model: Any, batch: dict[str, npt.NDArray[Any]]) -> npt.NDArray[np.float32]:
    """What the pipeline does with a request."""
    return embed(model, [text.decode() for text in batch["text"].ravel().tolist()])


def embed(model: Any, texts: Sequence[str]) -> npt.NDArray[np.float32]:
    """FP32[texts,384], padded to the longest of them and no further."""
    encodings = _tokenizer().encode_batch(list(texts))
    ids = np.array([encoding.ids for encoding in encodings], np.int64)
    mask = np.array([encoding.attention_mask for encoding in encodings], np.int64)
    found: npt.NDArray[np.float32] = model.run(None, {"input_ids": ids, "attention_mask": mask})[0]
    return found


def as_rows(texts: Sequence[str]) -> npt.NDArray[np.object_]:
    """BYTES[texts,1]"""
    return np.array([[text.encode()] for text in texts], np.object_)


@cache
def _tokenizer() -> tokenizers.Tokenizer:
    """With the service's limit; on one thread, as the server's."""
    use_threads(1)
    step = part("text_tokenize").model
    assert step is not None
    found = tokenizers.Tokenizer.from_file(str(services()["text"].folder / step.files[0]))
    padding = found.padding or {}
    found.enable_padding(pad_id=padding.get("pad_id", 0), pad_token=padding.get("pad_token", "[PAD]"))
    found.enable_truncation(int(step.parameters["max_tokens"]))
    return found
