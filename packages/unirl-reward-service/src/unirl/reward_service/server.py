"""Running a service: its socket, its signals, its end."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import socket
import sys
from types import FrameType

import uvicorn
from unirl.core.errors import RecipeError, RunFailed

from .app import Service, make_app
from .config import ServiceConfig
from .connections import ConnectionLimits, protocol

__all__ = ["serve"]

KEPT_FILES, FILES_OF_SCORER = 64, 8
"""Open files that are not for connections: those of the service, and of each scorer's process."""
ACCEPTED_AT_ONCE = 8
"""Connections accepted before the first of them is counted; within `KEPT_FILES`."""
WAITING_CONNECTIONS = 4096
"""Connections that the kernel keeps until they are accepted."""


def serve(config: ServiceConfig, *, with_stdin: bool = False) -> None:
    """Serve until SIGTERM or SIGINT, then finish requests in progress.

    Prints one line of JSON, with the URL, when all scorers are up.

    with_stdin: also end when stdin does.
    Raises RecipeError for keys that are absent or weak, RunFailed when a scorer or the socket cannot be had.
    """
    asyncio.run(_serve(config, keys=api_keys(config), with_stdin=with_stdin))


def api_keys(config: ServiceConfig) -> list[str]:
    """The keys in the variable that the settings name."""
    if not config.keys_env:
        return []
    keys = [key.strip() for key in os.environ.get(config.keys_env, "").split(",") if key.strip()]
    if not keys or min(map(len, keys)) < 16:
        state = "a key of fewer than 16 characters" if keys else "no key"
        raise RecipeError(
            f"keys_env: {config.keys_env} has {state}. Set it to keys separated by commas, such as that of "
            "`python -c 'import secrets; print(secrets.token_urlsafe(32))'`."
        )
    return keys


async def _serve(config: ServiceConfig, *, keys: list[str], with_stdin: bool) -> None:
    max_connections = _max_connections(config)
    listening = _listening(config)
    service = Service(config, keys=keys)
    server = _Server(service, config, max_connections=max_connections)
    stop = asyncio.create_task(server.wait_for_signal())
    start = asyncio.create_task(service.start())
    await asyncio.wait((start, stop), return_when=asyncio.FIRST_COMPLETED)
    if not start.done():
        start.cancel()
        await asyncio.gather(start, return_exceptions=True)
        await service.close()
        listening.close()
        return
    stop.cancel()
    # Before uvicorn sets its own handlers, which the end of this task would remove.
    await asyncio.gather(stop, return_exceptions=True)
    await start
    if with_stdin:
        asyncio.get_running_loop().add_reader(sys.stdin.fileno(), server.end_with_stdin)
    host = f"[{config.host}]" if ":" in config.host else config.host
    line = {"url": f"http://{host}:{listening.getsockname()[1]}", "pid": os.getpid()}
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()
    await server.serve(sockets=[listening])


class _Server(uvicorn.Server):
    def __init__(self, service: Service, config: ServiceConfig, *, max_connections: int) -> None:
        limits = ConnectionLimits(
            max_connections=max_connections,
            head_timeout_s=config.head_timeout_s,
            body_timeout_s=config.body_timeout_s,
            # Room for framing, and for a body that is refused and dropped.
            max_body_bytes=2 * service.max_body_bytes,
        )
        settings = uvicorn.Config(
            make_app(service),
            http=protocol(limits),
            ws="none",
            log_config=None,
            # Its warnings are a line for each malformed request, from whoever reaches the port.
            log_level="error",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=int(config.drain_s),
            # A run is silent while it generates and trains.
            timeout_keep_alive=75,
            # asyncio accepts as many before it looks at any; the socket gets its own number below.
            backlog=ACCEPTED_AT_ONCE,
        )
        super().__init__(settings)
        self._service = service

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for one in sockets or ():
            one.listen(WAITING_CONNECTIONS)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Load balancers see it at once; requests on connections that are open are refused, for another replica.
        self._service.is_draining = True
        # Not uvicorn's own, which raises the signal again at the end: a service that has drained has not failed.
        self.force_exit = self.should_exit
        self.should_exit = True

    def end_with_stdin(self) -> None:
        if not os.read(sys.stdin.fileno(), 4096):
            asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
            self.handle_exit(signal.SIGTERM, None)

    async def wait_for_signal(self) -> None:
        """Wait for a signal to stop; while scorers start, which can take minutes, uvicorn does not listen to any."""
        loop, stopped = asyncio.get_running_loop(), asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stopped.set)
        try:
            await stopped.wait()
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)


def _max_connections(config: ServiceConfig) -> int:
    """Connections that may be open at any time: those of the settings, or as many as open files allow."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return config.max_connections
    kept = KEPT_FILES + FILES_OF_SCORER * len(config.scorers)
    if files <= kept:
        raise RunFailed(
            f"max_connections: this process may open {files} files, expected more than {kept}. Raise `ulimit -n`."
        )
    return min(config.max_connections, files - kept)


def _listening(config: ServiceConfig) -> socket.socket:
    """The socket, before any scorer is started: a port that is taken is said at once."""
    try:
        return socket.create_server(
            (config.host, config.port),
            backlog=WAITING_CONNECTIONS,
            family=socket.AF_INET6 if ":" in config.host else socket.AF_INET,
        )
    except OSError as error:
        raise RunFailed(f"host: {config.host} port {config.port}: {error.strerror or error}.") from error
