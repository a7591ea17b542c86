"""models/artefacts.py: files that belong together, all new or all old."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from models.artefacts import FACTS, MODEL, SAMPLES, is_complete, publication, sha256, write_facts
from tritonpilot.errors import HostError, ModelError

ROOT = Path(__file__).resolve().parents[2]


def publish(output: Path, content: bytes) -> None:
    with publication(output) as partial:
        (partial / MODEL).write_bytes(content)
        (partial / SAMPLES).write_bytes(content * 2)
        write_facts(partial, {"content": content.decode()})


def test_published_files_belong_together_and_nothing_else_is_left(tmp_path: Path) -> None:
    publish(tmp_path / "build", b"new")
    assert sorted(path.name for path in (tmp_path / "build").iterdir()) == sorted([MODEL, SAMPLES, FACTS])
    assert is_complete(tmp_path / "build")
    facts = json.loads((tmp_path / "build" / FACTS).read_text())
    assert facts["sha256"] == sha256(tmp_path / "build" / MODEL)


def test_failure_keeps_the_old_files(tmp_path: Path) -> None:
    publish(tmp_path, b"old")
    with pytest.raises(ModelError), publication(tmp_path) as partial:  # noqa: PT012
        (partial / MODEL).write_bytes(b"new")
        raise ModelError("not good enough")
    assert (tmp_path / MODEL).read_bytes() == b"old"
    assert is_complete(tmp_path)


def test_kill_keeps_the_old_files_and_the_next_run_removes_what_it_left(tmp_path: Path) -> None:
    publish(tmp_path, b"old")
    script = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from models.artefacts import publication\n"
        "with publication(Path(sys.argv[1])) as partial:\n"
        "    (partial / 'model.onnx').write_bytes(b'half')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, check=False, env={**os.environ})
    assert killed.returncode == -signal.SIGKILL
    assert (tmp_path / MODEL).read_bytes() == b"old"
    assert is_complete(tmp_path)
    assert len(list(tmp_path.iterdir())) == 4
    publish(tmp_path, b"new")
    assert len(list(tmp_path.iterdir())) == 3


def test_two_runs_at_once_do_not_remove_each_others_files(tmp_path: Path) -> None:
    with publication(tmp_path) as first:
        (first / MODEL).write_bytes(b"first")
        publish(tmp_path, b"second")
        assert (first / MODEL).read_bytes() == b"first"
        (first / SAMPLES).write_bytes(b"first")
        write_facts(first, {})
    assert (tmp_path / MODEL).read_bytes() == b"first"
    assert is_complete(tmp_path)


def test_files_of_two_runs_are_incomplete(tmp_path: Path) -> None:
    publish(tmp_path, b"old")
    (tmp_path / SAMPLES).write_bytes(b"of another run")
    assert not is_complete(tmp_path)
    (tmp_path / FACTS).write_text("{")
    assert not is_complete(tmp_path)
    assert not is_complete(tmp_path / "absent")


def test_folder_that_cannot_be_written_is_one_paragraph(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(HostError, match=r"Cannot write the model into .*--output"), publication(tmp_path / "file"):
        pass


def test_file_that_was_never_written_is_not_published(tmp_path: Path) -> None:
    publish(tmp_path, b"old")
    with pytest.raises(HostError), publication(tmp_path) as partial:
        (partial / MODEL).write_bytes(b"new")
    assert is_complete(tmp_path)
    assert (tmp_path / MODEL).read_bytes() == b"old"


CHAIN = ("rec.onnx", "det.onnx", "characters.txt")


def publish_chain(output: Path, content: bytes) -> None:
    with publication(output, CHAIN) as partial:
        for name in CHAIN:
            (partial / name).write_bytes(content + name.encode())
        write_facts(partial, {"content": content.decode()})


def test_any_set_of_files_is_published_together(tmp_path: Path) -> None:
    publish_chain(tmp_path, b"new")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*CHAIN, FACTS])
    assert json.loads((tmp_path / FACTS).read_text())["files"] == {name: sha256(tmp_path / name) for name in CHAIN}
    assert is_complete(tmp_path)


@pytest.mark.parametrize("name", CHAIN)
def test_any_file_of_another_run_makes_the_set_incomplete(tmp_path: Path, name: str) -> None:
    publish_chain(tmp_path, b"new")
    (tmp_path / name).write_bytes(b"of another run")
    assert not is_complete(tmp_path)
    (tmp_path / name).unlink()
    assert not is_complete(tmp_path)


def test_file_that_nobody_named_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"extra\.txt written, but not among"), publication(tmp_path, CHAIN) as partial:  # noqa: PT012
        for name in (*CHAIN, "extra.txt"):
            (partial / name).write_bytes(b"")
        write_facts(partial, {})
    assert list(tmp_path.iterdir()) == []


def test_facts_written_before_other_sets_existed_still_count(tmp_path: Path) -> None:
    publish(tmp_path, b"old")
    facts = json.loads((tmp_path / FACTS).read_text())
    del facts["files"]
    (tmp_path / FACTS).write_text(json.dumps(facts))
    assert is_complete(tmp_path)
    (tmp_path / SAMPLES).write_bytes(b"of another run")
    assert not is_complete(tmp_path)
