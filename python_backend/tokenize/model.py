"""Backend "tokenize": strings as callers send them, token ids as text models take them. `text` BYTES[1] -> INT64[-1].

Outputs `input_ids`, `attention_mask` and, when the config lists it, `token_type_ids`. The file is a tokenizer.json in the version
folder (library tokenizers). All rows of an execution are tokenised in one call (pilotlib.text); a text that is too long or not
UTF-8 gets its request an error that names the row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pilotlib import config_tensors
from pilotlib.parameters import parameter
from pilotlib.tensors import Array
from pilotlib.text import TextError, Tokenizer, Tokens, decoded, use_threads
from pilotlib.triton_model import triton_model
from pilotlib.verbs import Backend, BadRequest, Context

IDS = ("TYPE_INT64", (-1,))


@dataclass(frozen=True)
class Parameters:
    """What the backend tokenize reads."""

    tokenizer: str = parameter("tokenizer.json", "file in the version folder, in the form of the library tokenizers")
    max_tokens: int = parameter(256, "a text is cut off after so many tokens, special ones counted", minimum=1)
    pad_to_multiple: int = parameter(
        16,
        "the longest text of a request is padded up to a multiple of this (at most max_tokens): requests of equal width are "
        "batched together by the next step",
        minimum=1,
    )
    max_bytes: int = parameter(65536, "a request with a longer text is refused", minimum=1)
    threads: int = parameter(1, "threads that tokenise; 0 = the cores of the instance", minimum=0)


class Tokenize(Backend[Parameters, list[str], Tokens]):
    """Makes token ids of strings."""

    parameters = Parameters

    def set_up(self, context: Context[Parameters]) -> None:
        """Load the tokenizer, make the buffers, tokenise a first text."""
        asked = context.parameters
        outputs = {"input_ids": IDS, "attention_mask": IDS, "token_type_ids": IDS}
        config_tensors.check(context.config, {"text": ("TYPE_STRING", (1,))}, outputs, may_lack=["token_type_ids"])
        rows = context.config.get("max_batch_size", 0)
        self._is_batched = rows > 0
        self._max_bytes = asked.max_bytes
        self._names = tuple(entry["name"] for entry in context.config["output"])
        use_threads(asked.threads or context.cores)
        self._tokenizer = Tokenizer(
            context.version_folder / asked.tokenizer,
            max_tokens=asked.max_tokens,
            pad_to_multiple=asked.pad_to_multiple,
            rows=max(1, rows),
            has_types="token_type_ids" in self._names,
        )
        self._tokenizer.encode([["a first text"]])

    def decode(self, inputs: Mapping[str, Array]) -> list[str]:
        """The texts of one request."""
        texts = inputs["text"].ravel().tolist()
        if not texts:
            raise BadRequest("text", "has no rows")
        try:
            return decoded(texts, self._max_bytes)
        except TextError as error:
            raise BadRequest("text", str(error)) from None

    def predict(self, items: Sequence[list[str]]) -> Sequence[Tokens]:
        """Tokenise all texts of all requests; each request is padded for itself."""
        return self._tokenizer.encode(items)

    def encode(self, result: Tokens) -> Mapping[str, Array]:
        """The tensors of one request."""
        found: dict[str, Array] = {name: getattr(result, name) for name in self._names}
        return found if self._is_batched else {name: array[0] for name, array in found.items()}


TritonPythonModel = triton_model(Tokenize)
