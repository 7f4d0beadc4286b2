"""Settings of the transport, accepted and refused, and the master, which ends with the process that started it."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest
from unirl.core.errors import PlanRejected, PluginNotFound, RecipeError, RunFailed
from unirl.core.match.match import match
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose
from unirl.core.specs.check import check_config
from unirl.transports.transfer_queue import mooncake
from unirl.transports.transfer_queue.config import TransferQueueConfig
from unirl.transports.transfer_queue.mooncake import MooncakeMaster
from unirl.transports.transfer_queue.plugin import TRANSFER_QUEUE
from unirl.transports.transfer_queue.service import Service

RAY = ("launcher=ray", "transport=transfer-queue")


def test_the_installed_plugin_provides_the_spec():
    result = Catalog.discover().get("transport", "transfer-queue")
    assert (result.spec, result.dist) == (TRANSFER_QUEUE, "unirl-transport-transfer-queue")


def test_a_recipe_takes_it_with_settings_and_the_numbers_of_a_run_do_not_depend_on_it():
    catalog = Catalog.discover()
    plan = compose("quickstart", [*RAY, "transport.storage=mooncake", "transport.protocol=rdma"], catalog=catalog)
    assert plan.transport is not None and plan.transport in plan.choices
    config = plan.transport.config
    assert isinstance(config, TransferQueueConfig)
    assert (config.storage, config.protocol) == ("mooncake", "rdma")
    assert match(plan, catalog=catalog).accepted
    assert plan.hash == compose("quickstart", [], catalog=catalog).hash


def test_it_is_refused_where_nothing_travels():
    catalog = Catalog.discover()
    verdict = match(compose("quickstart", ["transport=transfer-queue"], catalog=catalog), catalog=catalog)
    assert [str(reason) for reason in verdict.reasons] == [
        "transport: 'transfer-queue' has no effect within one process; remove it, or choose launcher=ray."
    ]


def test_misspelt_names_and_keys_get_the_nearest_one():
    catalog = Catalog.discover()
    with pytest.raises(PluginNotFound, match=r"transport 'tranfer-queue' is unknown.*did you mean 'transfer-queue'"):
        compose("quickstart", ["launcher=ray", "transport=tranfer-queue"], catalog=catalog)
    with pytest.raises(RecipeError, match=r"transport\.unit.*units"):
        compose("quickstart", [*RAY, "transport.unit=2"], catalog=catalog)
    with pytest.raises(RecipeError, match=r"transport\.units"):
        compose("quickstart", [*RAY, "transport.units=many"], catalog=catalog)


def test_the_defaults_and_rdma_by_configuration_are_fine():
    check_config(TransferQueueConfig(), key="transport")
    rdma = TransferQueueConfig(
        storage="mooncake", protocol="rdma", rdma_devices="mlx5_0,mlx5_1", master="10.0.0.1:5000"
    )
    check_config(rdma, key="transport")


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (TransferQueueConfig(storage="redis"), "storage"),
        (TransferQueueConfig(storage="mooncake", protocol="udp"), "protocol"),
        (TransferQueueConfig(units=0), "units"),
        (TransferQueueConfig(storage="mooncake", segment_mb=0), "segment_mb"),
        (TransferQueueConfig(storage="mooncake", buffer_mb=-1), "buffer_mb"),
        (TransferQueueConfig(start_timeout_s=0), "start_timeout_s"),
        (TransferQueueConfig(storage="mooncake", master="somewhere"), "master"),
        # Settings that the chosen storage would not look at.
        (TransferQueueConfig(master="10.0.0.1:5000"), "master"),
        (TransferQueueConfig(protocol="rdma"), "protocol"),
        (TransferQueueConfig(storage="mooncake", rdma_devices="mlx5_0"), "rdma_devices"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_settings_that_cannot_be_are_named_by_their_key(config: TransferQueueConfig, key: str):
    with pytest.raises(RecipeError) as caught:
        check_config(config, key="transport")
    assert re.findall(r"transport\.\w+: ", str(caught.value)) == [f"transport.{key}: "]


def test_mooncake_that_is_not_installed_gets_its_install_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "mooncake", None)
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(PlanRejected, match=r"pip install unirl-transport-transfer-queue\[mooncake-cpu\].*libibverbs1"):
        Service(TransferQueueConfig(storage="mooncake"))


def script(folder: Path, text: str) -> str:
    path = folder / "program"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_a_master_that_ends_at_once_is_an_error_with_its_last_words(tmp_path: Path):
    began = time.monotonic()
    with pytest.raises(RunFailed, match=r"did not answer at 127\.0\.0\.1:\d+ within 60 s: no libraries here"):
        MooncakeMaster(script(tmp_path, "echo no libraries here; exit 3"), host="127.0.0.1", timeout_s=60)
    # At once, not after the time that it was given.
    assert time.monotonic() - began < 30


def test_a_master_that_never_answers_is_ended_when_its_time_is_over(tmp_path: Path):
    pid_file = tmp_path / "pid"
    with pytest.raises(RunFailed, match="within 1 s: it wrote nothing"):
        MooncakeMaster(script(tmp_path, f"echo $$ > {pid_file}; exec sleep 600"), host="127.0.0.1", timeout_s=1)
    wait_until_gone(int(pid_file.read_text()))


DRIVER = """
    import sys, time
    from unirl.transports.transfer_queue.mooncake import MooncakeMaster
    master = MooncakeMaster(sys.argv[1], host="127.0.0.1", timeout_s=60)
    print(master.address, flush=True)
    time.sleep(600)
"""
LISTENER = """
    import socket, sys
    port = next(int(word.split("=")[1]) for word in sys.argv if word.startswith("--rpc_port="))
    listener = socket.create_server(("127.0.0.1", port))
    while True:
        listener.accept()
"""


def listener(folder: Path) -> str:
    """A program that answers on its port and does nothing else: what is tried is who ends it."""
    code = folder / "listener.py"
    code.write_text(textwrap.dedent(LISTENER))
    return script(folder, f'exec "{sys.executable}" "{code}" "$@"')


def real(folder: Path) -> str:
    if importlib.util.find_spec("mooncake") is None:
        pytest.skip("not run: the extra mooncake-cpu is not installed")
    return mooncake.check_installed()


@pytest.mark.parametrize("program", [listener, real])
def test_a_master_ends_with_a_driver_that_is_killed(tmp_path: Path, program):
    driver = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(DRIVER), program(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert driver.stdout is not None
        assert driver.stdout.readline().startswith("127.0.0.1:")
        started = [child.pid for child in psutil.Process(driver.pid).children(recursive=True)]
        assert len(started) >= 2
    finally:
        os.kill(driver.pid, signal.SIGKILL)
        driver.wait(30)
        driver.stdout.close()
    for pid in started:
        wait_until_gone(pid)


@pytest.mark.parametrize("program", [listener, real])
def test_a_master_that_is_stopped_is_gone_and_may_be_stopped_twice(tmp_path: Path, program):
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    master = MooncakeMaster(program(tmp_path), host="127.0.0.1", timeout_s=60)
    started = {child.pid for child in psutil.Process().children(recursive=True)} - before
    assert len(started) >= 2
    master.stop()
    master.stop()
    for pid in started:
        wait_until_gone(pid)


def wait_until_gone(pid: int) -> None:
    end = time.monotonic() + 30
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end, f"process {pid} is still there"
        time.sleep(0.05)
