"""Broadcasts of weights among ranks that are threads here: what they bring, and how one that cannot end is ended."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from unirl.core.errors import RunFailed
from unirl.transfer.weights.carriers import CollectiveCarrier
from unirl.transfer.weights.group import WeightGroup, interface_of, listen, reach

CPU = torch.device("cpu")


def formed(world: int, *, timeout_s: float) -> list[WeightGroup]:
    store, address = listen("127.0.0.1", world, timeout_s=30)

    def join(rank: int) -> WeightGroup:
        at = reach(address, world, timeout_s=30) if rank else store
        return WeightGroup(at, rank=rank, world=world, device=CPU, timeout_s=timeout_s)

    with ThreadPoolExecutor(world) as threads:
        return list(threads.map(join, range(world)))


def begun(call: Callable[[], object]) -> Future[object]:
    thread = ThreadPoolExecutor(1)
    job = thread.submit(call)
    thread.shutdown(wait=False)
    return job


def test_a_bucket_comes_to_all_receivers_and_the_default_group_is_left_alone() -> None:
    data = torch.arange(1000).to(torch.uint8)
    carriers = [CollectiveCarrier(group) for group in formed(3, timeout_s=30)]
    assert not dist.is_initialized()
    for _ in range(2):
        ticket = carriers[0].send(data)
        result = [begun(lambda c=carrier, t=ticket: c.receive(t)) for carrier in carriers[1:]]
        assert all(torch.equal(job.result(30), data) for job in result)
        carriers[0].release(ticket)
    for carrier in carriers:
        carrier.leave()
    with pytest.raises(RunFailed, match="has left its group of 3"):
        wait_until(lambda: carriers[0].send(data))


def wait_until(call: Callable[[], object]) -> None:
    """Call until it raises: a group ends on a separate thread."""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        call()
        time.sleep(0.01)


def test_a_rank_that_does_not_take_part_is_waited_for_no_longer_than_was_said() -> None:
    carriers = [CollectiveCarrier(group) for group in formed(3, timeout_s=1)]
    waits = begun(lambda: carriers[1].receive((1, 8)))
    with pytest.raises(RunFailed, match=r"all 3 ranks .* within 1 s. .* launcher\.call_timeout_s"):
        waits.result(20)


def test_leaving_ends_what_waits_at_once() -> None:
    """gloo itself would wait for as long as the group's timeout, here longer than a test may take."""
    carriers = [CollectiveCarrier(group) for group in formed(3, timeout_s=600)]
    waits = begun(lambda: carriers[1].receive((1, 8)))
    time.sleep(0.1)
    assert not waits.done()
    carriers[1].leave()
    with pytest.raises(RunFailed, match="left the group while a bucket was in flight"):
        waits.result(5)
    # What the sender began is given up as well, and gives back nothing.
    ticket = carriers[0].send(torch.zeros(8, dtype=torch.uint8))
    carriers[0].leave()
    carriers[0].release(ticket)


def test_a_rank_that_never_comes_is_an_error_of_the_start() -> None:
    store, _ = listen("127.0.0.1", 2, timeout_s=1)
    with pytest.raises(RunFailed, match=r"rank 0 could not reach the others of a group of 2: .* timeout"):
        WeightGroup(store, rank=0, world=2, device=CPU, timeout_s=1)


def test_a_rendezvous_is_at_the_address_that_others_know(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where the machine's own name leads: on Debian to 127.0.1.1, which no other machine reaches."""

    def never(name: str) -> str:
        raise AssertionError(f"{name!r} was looked up")

    monkeypatch.setattr(socket, "gethostbyname", never)
    store, (host, port) = listen("127.0.0.2", 2, timeout_s=30)
    assert host == "127.0.0.2"
    other = reach((host, port), 2, timeout_s=30)
    other.set("who", "rank 1")
    assert store.get("who") == b"rank 1"


@pytest.mark.skipif(sys.platform != "linux", reason="interfaces are asked as Linux answers")
def test_an_interface_is_found_by_its_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    # Reserved for documentation, so no machine has it.
    assert interface_of("203.0.113.9") == ""
