"""A cluster that is gone is named at once; Ray itself would try to join it for minutes."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from unirl.launchers.ray.address import check_answers


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port that nothing listens at, and that nothing else is given meanwhile."""
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        yield own.getsockname()[1]


def test_an_address_that_answers_and_one_that_is_not_checked_pass() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        check_answers(f"127.0.0.1:{server.getsockname()[1]}")
    for address in ("local", "ray://127.0.0.1:1", ""):
        check_answers(address)


def test_the_address_that_a_killed_cluster_left_behind_is_named_with_its_file(
    closed_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (file := tmp_path / "ray/ray_current_cluster").parent.mkdir()
    file.write_text(f"127.0.0.1:{closed_port}")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    # Clusters of other tests run on this machine, and Ray would join one.
    monkeypatch.setattr("ray._private.services.find_gcs_addresses", set)
    expected = (
        f"127.0.0.1:{closed_port} (left by an earlier cluster in {file}, which may be removed): Connection refused"
    )
    with pytest.raises(ConnectionError, match=re.escape(expected)):
        check_answers("auto")


@pytest.mark.slow
def test_commands_name_the_key_of_an_address_that_does_not_answer(closed_port: int, tmp_path: Path) -> None:
    """In processes of their own: tests of this one may share a cluster."""
    address, unirl = f"127.0.0.1:{closed_port}", Path(sys.executable).with_name("unirl")
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    words = ["quickstart", "launcher=ray", f"launcher.address={address}", f"run.dir={tmp_path / 'run'}"]
    result = subprocess.run([unirl, "train", *words], env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 1
    assert f"launcher.address: no cluster answers at '{address}': {address}: Connection refused." in result.stderr
    environment["RAY_ADDRESS"] = address
    result = subprocess.run(
        [unirl, "doctor", "--cluster"], env=environment, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 1
    assert (
        f"no cluster answers at 'auto': {address} (RAY_ADDRESS): Connection refused." in result.stderr + result.stdout
    )
