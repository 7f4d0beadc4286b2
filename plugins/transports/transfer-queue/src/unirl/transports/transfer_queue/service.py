"""Services that all processes of a run use: TransferQueue's controller, and storage units or a Mooncake master."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unirl.core.errors import RunFailed

from .config import TransferQueueConfig
from .mooncake import MooncakeMaster, check_installed

__all__ = ["Address", "Service"]

STOP_TIMEOUT_S = 15.0
"""Time for a storage unit to let go of its sockets before it is killed; it looks once a second."""


@dataclass(frozen=True, kw_only=True)
class Address:
    """Address that a client connects to."""

    controller: Any
    """`ZMQServerInfo` of the controller."""
    manager: str
    """TransferQueue's name of the storage."""
    settings: Mapping[str, Any]
    """Settings of its storage manager."""


class Service:
    """Started and stopped by the driver, in the driver's Ray cluster, or in a new one if there is none.

    `transfer_queue.init` is not used: it joins any controller in the cluster, reserves a whole CPU per process, and
    kills every Mooncake master on the machine. Here each run has its own, and they reserve no CPU from Ray.
    """

    def __init__(self, config: TransferQueueConfig) -> None:
        self._timeout_s = config.start_timeout_s
        self._owns_cluster = False
        self._controller: Any = None
        self._units: list[Any] = []
        self._master: MooncakeMaster | None = None
        try:
            self.address = self._start(config)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop all processes. May be called twice."""
        import ray

        units, self._units = self._units, []
        controller, self._controller = self._controller, None
        master, self._master = self._master, None
        try:
            # Their processes end with the cluster, where it is gone already.
            if ray.is_initialized():
                if units:
                    ends = [unit.shutdown.remote() for unit in units]
                    ray.wait(ends, num_returns=len(ends), timeout=STOP_TIMEOUT_S)
                for actor in [*units, *([controller] if controller is not None else [])]:
                    ray.kill(actor)
        finally:
            try:
                if self._owns_cluster:
                    self._owns_cluster = False
                    ray.shutdown()
            finally:
                if master is not None:
                    master.stop()

    def _start(self, config: TransferQueueConfig) -> Address:
        program = check_installed() if config.storage == "mooncake" else ""
        import ray

        from transfer_queue.controller import TransferQueueController

        if not ray.is_initialized():
            self._owns_cluster = True
            # Nothing counts as a CPU here, and rows do not go through Ray's objects. Without "local", Ray would join
            # any cluster that it finds on the machine or in the environment.
            ray.init(
                address="local",
                num_cpus=1,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                object_store_memory=80 * 2**20,
            )
        controller_class: Any = TransferQueueController
        self._controller = controller_class.options(num_cpus=0).remote()
        if config.storage == "simple":
            manager, settings = "SimpleStorage", {"zmq_info": self._start_units(config)}
        else:
            master = config.master
            if not master:
                host = ray.util.get_node_ip_address()
                self._master = MooncakeMaster(program, host=host, timeout_s=config.start_timeout_s)
                master = self._master.address
            manager = "MooncakeStore"
            settings = {
                "metadata_server": "P2PHANDSHAKE",
                "master_server_address": master,
                "local_hostname": "",
                "protocol": config.protocol,
                "device_name": config.rdma_devices,
                "global_segment_size": config.segment_mb * 2**20,
                "local_buffer_size": config.buffer_mb * 2**20,
            }
        (controller,) = self._infos([self._controller], "controller")
        return Address(controller=controller, manager=manager, settings=settings)

    def _start_units(self, config: TransferQueueConfig) -> dict[str, Any]:
        from transfer_queue.storage.simple_storage import SimpleStorageUnit
        from transfer_queue.utils.common import get_node_round_robin_scheduling_strategies

        unit_class: Any = SimpleStorageUnit
        settings = {"num_data_storage_units": config.units, "total_storage_size": None}
        for strategy in get_node_round_robin_scheduling_strategies(config.units):
            options = unit_class.options(num_cpus=0, scheduling_strategy=strategy)
            self._units.append(options.remote(config=settings))
        infos = self._infos(self._units, "storage units")
        return {f"unit-{number}": info for number, info in enumerate(infos)}

    def _infos(self, actors: list[Any], what: str) -> list[Any]:
        import ray
        from ray.exceptions import GetTimeoutError

        try:
            return ray.get([actor.get_zmq_server_info.remote() for actor in actors], timeout=self._timeout_s)
        except GetTimeoutError as error:
            raise RunFailed(
                f"transport: TransferQueue's {what} did not start within {self._timeout_s:g} s "
                "(transport.start_timeout_s)."
            ) from error
