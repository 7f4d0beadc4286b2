"""Running a service: its socket, its signals, its end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from types import FrameType

import uvicorn
from unirl.core.errors import RecipeError, RunFailed

from .app import Service, make_app
from .config import ServiceConfig

__all__ = ["serve"]


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
    listening = _listening(config)
    service = Service(config, keys=keys)
    server = _Server(service, config)
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
    def __init__(self, service: Service, config: ServiceConfig) -> None:
        settings = uvicorn.Config(
            make_app(service),
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=int(config.drain_s),
            # A run is silent while it generates and trains.
            timeout_keep_alive=75,
            backlog=4096,
        )
        super().__init__(settings)
        self._service = service

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


def _listening(config: ServiceConfig) -> socket.socket:
    """The socket, before any scorer is started: a port that is taken is said at once."""
    try:
        return socket.create_server(
            (config.host, config.port), backlog=4096, family=socket.AF_INET6 if ":" in config.host else socket.AF_INET
        )
    except OSError as error:
        raise RunFailed(f"host: {config.host} port {config.port}: {error.strerror or error}.") from error
