"""The example service image in the real server: photos of every kind, and everything else that callers send as photos."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import photos
import pytest

from models.image import data
from perf import machine
from perf.inprocess import session
from perf.open_loop import Answer, Request, Sender
from tritonpilot import build, metrics
from tritonpilot.server import EmbeddedServer

ROOT = Path(__file__).parents[2]
GOOD = photos.good()
BAD = photos.bad()
MODELS = ("image_decode", "image_net", "image_labels")

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def server(example_repository: Path) -> Iterator[EmbeddedServer]:
    probes = build.probe_inputs(ROOT / "models", example_repository)
    with EmbeddedServer(example_repository, models=["image"], probe_inputs=probes) as running:
        stubs = sorted(machine.stub_cpu_s(running.pid))
        yield running
        running.check_alive()
        assert sorted(machine.stub_cpu_s(running.pid)) == stubs == sorted(MODELS), "a stub died"


@pytest.fixture(scope="module")
def sender(server: EmbeddedServer) -> Iterator[Sender]:
    with Sender(server.endpoints.grpc) as connection:
        yield connection


def column(*each: bytes) -> npt.NDArray[Any]:
    found = np.empty((len(each), 1), np.object_)
    found[:, 0] = each
    return found


def request(*each: bytes) -> Request:
    return Request("image", {"photo": column(*each)}, priority=2)


def ask(sender: Sender, model: str, **inputs: npt.NDArray[Any]) -> Answer:
    (answer,) = sender.send([Request(model, inputs, priority=2)])
    return answer


def stub_of(server: EmbeddedServer, model: str) -> int:
    """The process of the model's only instance."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            is_child = f" {server.pid} " in (folder / "stat").read_text()
            if is_child and f"{model}_0_0".encode() in (folder / "cmdline").read_bytes():
                return int(folder.name)
        except OSError:  # it ended in between
            continue
    raise AssertionError(f"{model} has no stub")


def resident_mb(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) >> 8


def test_every_kind_of_photo_has_the_labels_of_this_process(sender: Sender) -> None:
    alone = session(ROOT / "models" / "image" / "build" / "model.onnx")
    names = data.class_names()
    answers = sender.send([request(photo) for photo in GOOD.values()], in_flight=8)
    for (kind, photo), answer in zip(GOOD.items(), answers, strict=True):
        assert not answer.error, kind
        logits = alone.run(None, {"image": data.preprocess(photo)[np.newaxis]})[0][0].astype(np.float64)
        shares = np.exp(logits) / np.exp(logits).sum()
        best = np.argsort(-shares)[:5]
        np.testing.assert_allclose(answer.outputs["score"][0], shares[best], atol=1e-5, err_msg=kind)
        assert [name.decode() for name in answer.outputs["label"][0]] == [names[each] for each in best], kind


@pytest.mark.parametrize("kind", BAD)
def test_what_is_no_photo_gets_an_error_that_names_field_and_row(sender: Sender, kind: str) -> None:
    photo, words = BAD[kind]
    bad, good = sender.send([request(photo), request(GOOD["jpeg"])])
    assert '"photo": row 0 ' in bad.error
    assert words in bad.error
    assert not good.error


def test_one_bad_photo_among_32_requests_of_a_batch_fails_alone(server: EmbeddedServer, sender: Sender) -> None:
    before = metrics.statistics(server.endpoints.grpc, "image_decode")
    requests = [request(GOOD["jpeg"]) for _ in range(32)]
    requests[13] = request(BAD["half a jpeg"][0])
    answers = sender.send(requests)
    assert [place for place, answer in enumerate(answers) if answer.error] == [13]
    assert '"photo": row 0 is damaged' in answers[13].error
    first = answers[0].outputs["label"].tolist()
    assert all(answer.outputs["label"].tolist() == first for answer in answers if not answer.error)
    delta = metrics.statistics(server.endpoints.grpc, "image_decode") - before
    assert delta.mean_batch > 2, "they were decoded together"


def test_a_request_of_several_photos_is_answered_row_by_row_or_names_the_bad_row(sender: Sender) -> None:
    several, spoilt, *each = sender.send(
        [
            request(GOOD["jpeg"], GOOD["animated gif"], GOOD["16-bit png"]),
            request(GOOD["jpeg"], GOOD["png"], b"oh", b""),
            *(request(GOOD[kind]) for kind in ("jpeg", "animated gif", "16-bit png")),
        ]
    )
    assert several.outputs["label"].tolist() == [answer.outputs["label"][0].tolist() for answer in each]
    assert '"photo": row 2 is no image' in spoilt.error


def test_bombs_take_no_memory(server: EmbeddedServer, sender: Sender) -> None:
    pid = stub_of(server, "image_decode")
    bombs = [request(BAD[kind][0]) for kind in ("png bomb", "jpeg bomb")] * 16
    before = resident_mb(pid)
    assert all("it was not decoded" in answer.error for answer in sender.send(bombs))
    assert resident_mb(pid) - before < 32, "each of them would be gigabytes"


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (column(GOOD["jpeg"])[:, 0], "unexpected shape"),
        (column(GOOD["jpeg"], GOOD["jpeg"]).reshape(1, 2), "unexpected shape"),
        (column(GOOD["jpeg"]).reshape(1, 1, 1), "unexpected shape"),
        (column(*[GOOD["jpeg"]] * 17), "batch-size must be <= 16"),
        (np.zeros((1, 1), np.float32), "data-type"),
        (column(), ""),
    ],
    ids=["rank 1", "two columns", "rank 3", "17 rows", "numbers", "no rows"],
)
def test_a_request_of_another_form_is_refused(sender: Sender, array: npt.NDArray[Any], words: str) -> None:
    refused = ask(sender, "image", photo=array)
    assert refused.error
    assert words in refused.error
    assert not ask(sender, "image", photo=column(GOOD["jpeg"])).error


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_logits_that_are_no_numbers_are_refused_and_mates_answered(sender: Sender, bad: float) -> None:
    logits = np.random.default_rng(6).normal(size=(3, 1000)).astype(np.float32)
    spoilt = logits.copy()
    spoilt[1, 77] = bad
    requests = [Request("image_labels", {"logits": each}, priority=2) for each in (logits, spoilt, logits)]
    first, middle, last = sender.send(requests)
    assert '"logits": row 1: class 77 is ' in middle.error
    assert first.outputs["index"].tolist() == last.outputs["index"].tolist() == np.argsort(-logits)[:, :5].tolist()


def test_the_call_in_the_readme_names_the_dog(server: EmbeddedServer, capsys: pytest.CaptureFixture[str]) -> None:
    readme = (ROOT / "models" / "image" / "README.md").read_text(encoding="utf-8")
    block = next(block for block in re.findall(r"```python\n(.*?)```", readme, re.DOTALL) if "tritonclient" in block)
    exec(block.replace("127.0.0.1:8000", server.endpoints.http), {})  # noqa: S102  our own README
    assert capsys.readouterr().out.startswith("[b'Bullmastiff' b'Boxer'")
