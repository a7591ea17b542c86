from __future__ import annotations

from pathlib import Path

import pytest

from tritonpilot.control_key import control_key, key_file
from tritonpilot.errors import HostError


def test_a_key_is_generated_once_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    environ = {"XDG_STATE_HOME": str(tmp_path)}
    first = control_key(environ)
    assert first == control_key(environ)
    assert first.file == tmp_path / "tritonpilot" / "control.key"
    assert first.file.stat().st_mode & 0o777 == 0o600
    assert first.file.parent.stat().st_mode & 0o777 == 0o700
    assert len(first.value) >= 40
    assert [entry.name for entry in first.file.parent.iterdir()] == ["control.key"]


def test_the_variable_goes_before_the_file(tmp_path: Path) -> None:
    given = control_key({"XDG_STATE_HOME": str(tmp_path), "TRITONPILOT_CONTROL_KEY": "a-key-of-16-chars"})
    assert (given.value, given.file) == ("a-key-of-16-chars", None)
    assert not list(tmp_path.iterdir())
    assert given.value not in repr(given)


@pytest.mark.parametrize("unusable", ["", "short", "has a space in the middle", "has,a,comma,in,it", "k" * 300])
def test_a_key_that_triton_cannot_take_is_refused_and_not_shown(unusable: str) -> None:
    with pytest.raises(HostError, match="is no usable key") as refused:
        control_key({"TRITONPILOT_CONTROL_KEY": unusable})
    assert not unusable or unusable not in str(refused.value)


def test_a_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    environ = {"XDG_STATE_HOME": str(tmp_path)}
    control_key(environ)
    key_file(environ).chmod(0o644)
    with pytest.raises(HostError, match=r"mode 644.*Delete the file"):
        control_key(environ)


def test_a_state_folder_that_cannot_be_made_says_what_to_set(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HostError, match="set XDG_STATE_HOME"):
        control_key({"XDG_STATE_HOME": str(tmp_path / "file")})


def test_the_file_is_under_the_home_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert key_file({}) == Path("/home/me/.local/state/tritonpilot/control.key")
