"""quantize/run.py: a folder that cannot be written is said in words, though every step before came from the cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from tritonpilot.errors import HostError
from tritonpilot.quantize.run import _publish


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "build").write_text("a file", encoding="utf-8")
    nothing = cast(Any, None)
    with pytest.raises(HostError, match=r"model\.int8\.onnx cannot be written.*older one there is as it was"):
        _publish(nothing, nothing, tmp_path / "build/model.int8.onnx")
