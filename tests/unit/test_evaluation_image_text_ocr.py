"""models/{image,text,ocr}/evaluation.py: the rows fit the models, what is judged is not calibrated on, labels are right."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from models.image import data as image_data
from models.image import evaluation as image
from models.ocr import data as ocr_data
from models.ocr import evaluation as ocr
from models.ocr import export as ocr_export
from models.text import data as text_data
from models.text import evaluation as text
from tritonpilot.errors import ModelError
from tritonpilot.onnx_model import Signature, TensorSignature, read_signature
from tritonpilot.quantize.accuracy import gate, predict
from tritonpilot.quantize.data import Rows, read, write


@pytest.fixture(scope="module")
def image_rows() -> tuple[Rows, Rows]:
    return image.make()


@pytest.fixture(scope="module")
def text_rows() -> tuple[Rows, Rows]:
    return text.make()


def test_images_are_views_of_the_labelled_photos_and_of_other_pictures(image_rows: tuple[Rows, Rows]) -> None:
    calibration, evaluation = image_rows
    assert (calibration.count, evaluation.count) == (17 * 12 + 40, 220)
    photos, labels = image_data.labelled_photos()
    whole = evaluation.slices["view"] == "whole"
    np.testing.assert_array_equal(evaluation.inputs["image"][whole], photos["image"])
    assert evaluation.label is not None
    np.testing.assert_array_equal(evaluation.label[whole], labels)
    assert evaluation.label[:12].tolist() == [labels[0]] * 11 + [labels[1]]
    assert not any(np.array_equal(photo, row) for photo in photos["image"] for row in calibration.inputs["image"])


def test_images_of_every_brightness_are_in_both(image_rows: tuple[Rows, Rows]) -> None:
    for rows in image_rows:
        counts = [int((rows.slices["brightness"] == name).sum()) for name in image.BRIGHTNESS_NAMES]
        assert sum(counts) == rows.count
        assert min(counts) >= 40
        means = rows.inputs["image"].mean(axis=(1, 2, 3))
        assert means[rows.slices["brightness"] == "dark"].max() < means[rows.slices["brightness"] == "bright"].min()


def test_images_are_the_same_every_time_and_come_back_from_their_file(
    image_rows: tuple[Rows, Rows], tmp_path: Path
) -> None:
    photo = image_data.photos()[0].path
    first, second = (np.stack(list(image._views(photo, 3, np.random.default_rng(9)))) for _ in "ab")
    np.testing.assert_array_equal(first, second)
    some = image_rows[1].take(np.arange(4))
    write(some, tmp_path / "rows.npz")
    found = read(tmp_path / "rows.npz", Signature((TensorSignature("image", "FP32", (-1, 3, 224, 224)),), ()))
    np.testing.assert_array_equal(found.inputs["image"], some.inputs["image"])
    assert found.slices["view"].tolist() == ["whole", "part", "part", "part"]


def test_texts_are_judged_by_ratings_of_the_news_alone(text_rows: tuple[Rows, Rows]) -> None:
    calibration, evaluation = text_rows
    assert (calibration.count, evaluation.count) == (450, 100)
    label = evaluation.label
    assert label is not None
    _, ratings = text_data.rated_documents()
    above = np.triu_indices(50, 1)
    np.testing.assert_array_equal(label[:50, :50][above], ratings[above])
    np.testing.assert_array_equal(label, label.T)
    assert (label[50:] == text.NOT_RATED).all()
    assert evaluation.slices["kind"].tolist() == ["news"] * 50 + ["review"] * 50


def test_texts_that_are_judged_are_not_calibrated_on(text_rows: tuple[Rows, Rows]) -> None:
    known, judged = (
        {tuple(ids[mask == 1]) for ids, mask in zip(*rows.inputs.values(), strict=True)} for rows in text_rows
    )
    assert not known & judged
    for rows in text_rows:
        lengths = rows.inputs["attention_mask"].sum(axis=1)
        for low, high, name in zip((0, *text.LENGTH_BOUNDS), text.LENGTH_BOUNDS, text.LENGTH_NAMES, strict=False):
            assert ((lengths > low) & (lengths <= high)).tolist() == (rows.slices["length"] == name).tolist()


def test_gate_finds_in_embeddings_what_the_export_finds(text_rows: tuple[Rows, Rows]) -> None:
    """By bags of words in place of the network: the correlation of the gate is that of models/text/data.py."""
    _, evaluation = text_rows
    bags = np.zeros((100, 30522), np.float32)
    for row, ids in enumerate(evaluation.inputs["input_ids"]):
        np.add.at(bags[row], ids, 1.0)
    bags[:, 0] = 0  # padding
    bags /= np.linalg.norm(bags, axis=1, keepdims=True)
    verdict = gate({"e": bags}, {"e": bags}, evaluation, "pearson", resamples=20)
    assert verdict.reference == pytest.approx(text_data.agreement(bags[:50], text_data.rated_documents()[1]), abs=1e-6)
    assert verdict.reference > 0.15


@pytest.fixture(scope="module")
def ocr_networks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ocr")
    ocr_export.make(folder)
    return folder


def test_drawn_pages_are_the_same_every_time_and_of_all_kinds() -> None:
    texts = ["Ships leave the harbour at noon and return before the evening " * 3]
    first, second = (
        list(ocr._drawn({"paper": 1, "sign": 1, "photo": 1}, texts, np.random.default_rng(3))) for _ in "ab"
    )
    assert [page.kind for page in first] == ["paper", "sign", "photo"]
    for one, other in zip(first, second, strict=True):
        assert one.pixels.shape == (448, 640, 3)
        assert one.pixels.std() > 5
        np.testing.assert_array_equal(one.pixels, other.pixels)


def test_known_pages_are_covered_by_parts_of_one_size() -> None:
    parts = list(ocr._known())
    assert {part.pixels.shape for part in parts} == {(448, 640, 3)}
    assert [part.kind for part in parts] == ["scan"] + ["letter"] * 6 + ["street"] * 4


def test_lines_of_known_pages_are_labelled_by_what_is_written() -> None:
    rows = ocr.known_lines()
    assert rows.label is not None
    assert rows.label.tolist() == [line for page in ocr_data.pages() for line in page.lines]
    assert rows.slices["page"].tolist() == ["scan"] * 7 + ["letter"] * 18 + ["street"] * 6


def test_lines_without_networks_say_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"det.onnx, .* does not exist.*models/ocr/export.py"):
        ocr._lines(tmp_path, list(ocr._known()))


@pytest.mark.slow
def test_chain_reads_the_known_lines_and_the_gate_counts_those_without_difference(ocr_networks: Path) -> None:
    files = (ocr_networks / name for name in (ocr_export.DETECTOR, ocr_export.RECOGNISER, ocr_export.CHARACTERS))
    read = ocr.read_lines(*files)
    verdict = gate(read, read, ocr.known_lines(), "exact", max_loss=0, resamples=20)
    assert verdict.reference == pytest.approx(27 / 31)
    assert verdict.passed


@pytest.mark.slow
def test_ocr_lines_are_what_the_detector_finds(ocr_networks: Path) -> None:
    rows = ocr._lines(ocr_networks, list(ocr._known())[:4])
    assert rows.inputs["line"].shape[1:] == (48, 960, 3)
    assert rows.count > 15
    write(rows, ocr_networks / "rows.npz")
    recogniser = ocr_networks / ocr_export.RECOGNISER
    found = read(ocr_networks / "rows.npz", read_signature(recogniser))
    answers = predict(recogniser, found.take(np.arange(4)), batch=4)
    assert gate(answers, answers, found.take(np.arange(4)), "agreement", output="index", resamples=20).passed
