"""models/ocr: the three pages, what counts as read, and the two networks with pixels going in."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from models.artefacts import is_complete
from models.ocr import data, export, graphs
from pilotlib.pages import read_page
from tritonpilot import pipeline, spec


def test_pages_are_the_same_every_time_and_hold_their_lines() -> None:
    pages = data.pages()
    assert [(page.name, len(page.lines)) for page in pages] == [("scan", 7), ("letter", 18), ("street", 6)]
    assert data.pages() == pages
    assert [read_page(page.image, 10**7, 10**7).shape for page in pages] == [
        (191, 384, 3),
        (1180, 900, 3),
        (854, 1280, 3),
    ]


@pytest.mark.parametrize(
    ("expected", "found", "distance"),
    [
        ("same", "same", 0),
        ("two  blanks ", "two blanks", 0),
        ("No. 7", "No.7", 1),
        ("zeros_like", "zer0s_1ike", 2),
        ("", "abc", 3),
        ("kitten", "sitting", 3),
    ],
)
def test_edits_are_the_levenshtein_distance(expected: str, found: str, distance: int) -> None:
    assert data.edits(expected, found) == data.edits(found, expected) == distance


def test_a_line_is_read_within_one_edit_per_twelve_characters_and_in_its_place() -> None:
    lines = ("Invoice No. 2026-0417", "Bergen", "Date: today")
    assert data.lines_read(lines, ["Invoice No.2026-0417", "Bergen", "Date: today"]) == 3
    assert data.lines_read(lines, ["Invoice No.2O26-0417", "Bergen", "Date: today"]) == 2  # two edits in 21
    assert data.lines_read(lines, ["Invoice No. 2026-0417", "Berqen", "Date: today"]) == 2  # short lines must be equal
    assert data.lines_read(lines, ["noise", *lines]) == 0
    assert data.lines_read(lines, []) == 0


def test_the_check_of_the_export_reads_as_the_service_does() -> None:
    service = spec.load_service(Path(data.__file__).parent / "service.yaml")
    (driver,) = [part.model for part in pipeline.parts(service) if part.service == "ocr"]
    assert driver is not None
    assert driver.parameters["min_score"] == export.MIN_SCORE
    assert (driver.parameters["det"], driver.parameters["rec"]) == ("ocr_det", "ocr_rec")


def test_normalisation_in_the_graph_swaps_channels_and_scales_them() -> None:
    floats = helper.make_tensor_value_info(graphs.OLD_INPUT, TensorProto.FLOAT, ["b", 3, "h", "w"])
    output = helper.make_tensor_value_info(graphs.OLD_OUTPUT, TensorProto.FLOAT, ["b", 3, "h", "w"])
    graph = helper.make_graph([helper.make_node("Identity", [floats.name], [output.name])], "same", [floats], [output])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 11)], ir_version=8)
    changed = graphs.with_pixels_in(model, graphs.DETECTOR)

    pixels = np.random.default_rng(1).integers(0, 256, (2, 5, 7, 3), dtype=np.uint8)
    (seen,) = ort.InferenceSession(changed.SerializeToString()).run(None, {"page": pixels})
    red, green, blue = pixels[..., 0] / 255, pixels[..., 1] / 255, pixels[..., 2] / 255
    np.testing.assert_allclose(seen[:, 0], (blue - 0.485) / 0.229, atol=1e-5)
    np.testing.assert_allclose(seen[:, 1], (green - 0.456) / 0.224, atol=1e-5)
    np.testing.assert_allclose(seen[:, 2], (red - 0.406) / 0.225, atol=1e-5)


@pytest.mark.slow
def test_export_publishes_networks_that_read_every_line(tmp_path: Path) -> None:
    assert export.make(tmp_path / "build") == (31, 31)
    assert is_complete(tmp_path / "build")
    assert sorted(path.name for path in (tmp_path / "build").iterdir()) == sorted([*export.FILES, "facts.json"])
    requests = np.load(tmp_path / "build" / export.REQUESTS)
    assert requests["page"].astype(object)[1, 0] == data.pages()[1].image  # no trailing zero was lost
