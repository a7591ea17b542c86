from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from unit.onnx_files import identity

from tritonpilot import assets, backends, samples
from tritonpilot.errors import ModelError
from tritonpilot.onnx_model import read_signature

INSIDE = "hidden-words"


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("model.pt", b"", "is empty"),
        ("tokenizer.json", b"", "is empty"),
        ("tokenizer.json", b'{"hidden-words": [1, 2', "is no JSON: Expecting ',' delimiter (line 1, column 23)"),
        ("tokenizer.json", b'{"a": "hidden-words', "is no JSON: Unterminated string starting at (line 1, column 7)"),
        ("tokenizer.json", b'["hidden-words\\z"]', "is no JSON: Invalid"),
        ("tokenizer.json", b'{"a": hidden-words}', "is no JSON: Expecting value (line 1, column 7)"),
        ("history.json", b"hidden-words\xff\xfe", "is no UTF-8 text: invalid start byte at byte 12"),
        ("deep.json", b"[" * 200_000, "is no JSON: "),
        ("gone.json", None, "cannot be read: No such file"),
    ],
)
def test_what_is_wrong_is_said_without_the_files_content(
    name: str, content: bytes | None, says: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ModelError) as caught:
        assets.check(path)
    said = str(caught.value)
    assert said.startswith(f"{path} {says}")
    assert "Nothing was changed" in said
    assert INSIDE not in said
    assert len(said) < len(str(path)) + 200


def test_what_is_right_passes(tmp_path: Path) -> None:
    for name, content in (
        ("__init__.py", b""),
        ("notes.txt", b"\xff\x00"),
        ("a.json", b"[1, NaN]"),
        ("m.bin", b"\x00"),
    ):
        (tmp_path / name).write_bytes(content)
        assets.check(tmp_path / name)


@pytest.mark.parametrize(
    ("backend", "name"), [("labels", "labels.txt"), ("ctc", "characters.txt"), ("ocr", "mine.txt")]
)
def test_text_that_a_backend_reads_is_utf8(backend: str, name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(b"hidden-words\n\xb8")
    parameters = {"characters": "mine.txt"} if name == "mine.txt" else {}
    with pytest.raises(ModelError, match=re.escape(f"{path} is no UTF-8 text: invalid start byte at byte 13")):
        backends.check_files(backend, parameters, {name: path})
    backends.check_files("python", parameters, {name: path})


@pytest.mark.parametrize(
    "content",
    [
        5,
        [],
        {},
        {"widths": 3},
        {"widths": {"numbers": "hidden-words"}},
        {"widths": {"numbers": 1e400}},
        {"widths": None},
    ],
    ids=repr,
)
def test_a_features_file_without_widths_is_refused(content: Any, tmp_path: Path) -> None:
    path = tmp_path / "features.json"
    path.write_text(json.dumps(content).replace("Infinity", "1e400"))
    with pytest.raises(ModelError, match="is no features file of the backend table") as caught:
        backends.signature("table", {}, {path.name: path}, is_batched=True)
    assert INSIDE not in str(caught.value)


def refusal(read: Callable[[Path], Any], path: Path) -> str:
    try:
        read(path)
    except ModelError as error:
        return str(error)
    return ""


def test_damaged_samples_are_refused_whatever_numpy_meets(tmp_path: Path) -> None:
    """Every third byte of an archive spoiled, one at a time."""
    path = tmp_path / "samples.npz"
    np.savez_compressed(path, text=np.array([INSIDE] * 3), x=np.arange(6.0).reshape(3, 2))
    whole = path.read_bytes()
    refused = []
    for place in range(0, len(whole), 3):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        refused.append(refusal(samples.read, path))
    assert sum(map(bool, refused)) > len(refused) / 4
    assert not [said for said in refused if INSIDE in said or (said and not said.isprintable())]


def test_samples_with_a_file_among_the_arrays_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "samples.npz"
    np.savez(path, x=np.ones((3, 2)))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("readme.txt", INSIDE)
    said = refusal(samples.read, path)
    assert "holds a file that is no array" in said
    assert INSIDE not in said


def test_damaged_bytes_in_an_onnx_file_are_refused_or_harmless(tmp_path: Path) -> None:
    path = identity(tmp_path / "model.onnx")
    whole = path.read_bytes()
    refused = []
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + b"\xff" + whole[place + 1 :])
        refused.append(refusal(read_signature, path))
    assert sum(map(bool, refused)) > len(refused) / 4
    assert not [said for said in refused if said and not said.isprintable()]
