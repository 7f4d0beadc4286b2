"""Settings of a service, as its YAML file has them."""

from __future__ import annotations

import dataclasses
import ipaddress
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from unirl.core.errors import RecipeError
from unirl.core.limits import Reason, broken_limits, limit
from unirl.reward_service.wire import WireLimits
from yaml import YAMLError

__all__ = ["ScorerConfig", "ServiceConfig", "read_config"]


@dataclass
class ScorerConfig:
    """One scorer: a reward with its settings, in a separate process."""

    use: str = MISSING
    """Name of an installed reward."""
    settings: dict[str, Any] = field(default_factory=lambda: dict[str, Any]())
    """Its settings, as in a recipe."""
    device: str = "cpu"
    """Device of the reward, such as `cuda`."""
    gpus: list[int] | None = None
    """GPUs that its process sees (CUDA_VISIBLE_DEVICES); null shows it all of them."""
    python: str = ""
    """Python executable of its process, for a scorer with a separate environment; empty takes the service's. That
    environment needs unirl-reward-service and the reward's dist."""
    max_batch_size: int = limit(32, least=1)
    """Samples per call of the reward; requests are joined up to it, and up to `max_body_mb`. A larger request is one
    call."""
    max_wait_s: float = limit(0.005, least=0, most=10)
    """How long the first request of a batch waits for others."""
    max_queue: int = limit(64, least=1)
    """Requests that wait; those beyond are answered with 429."""
    timeout_s: float = limit(120.0, above=0)
    """Longest call of the reward; its process is then ended and started again."""
    start_timeout_s: float = limit(600.0, above=0)
    """Longest start: imports, loading and hashing of weights."""


@dataclass
class ServiceConfig:
    """The service."""

    host: str = "127.0.0.1"
    """Address to listen on. Any but a loopback address needs `keys_env`."""
    port: int = limit(8790, least=0, most=65535)
    """0 takes a free one."""
    keys_env: str = ""
    """Environment variable with the API keys, separated by commas; empty asks for none."""
    hosts: list[str] = field(default_factory=lambda: list[str]())
    """Names in the header Host besides `host` and loopback names. Checked without keys, or where there are any."""
    max_connections: int = limit(1024, least=1)
    """Connections at any time, or as many as `ulimit -n` allows. One beyond ends the one that has gone longest without
    a request, and is answered with 429 where all have one."""
    head_timeout_s: float = limit(10.0, above=0)
    """Longest time to receive the head of a request."""
    max_body_mb: float = limit(64.0, above=0)
    """Largest body of a request, in MB (1e6 bytes)."""
    max_pending_mb: float = limit(1024.0, above=0)
    """Bodies held at any time, in MB; requests beyond are answered with 429."""
    body_timeout_s: float = limit(60.0, above=0)
    """Longest time to receive a body, and for a client to take a reply."""
    request_timeout_s: float = limit(300.0, above=0)
    """Longest time from a request's arrival to its scores, waiting included."""
    keep_replies_s: float = limit(600.0, least=0)
    """How long a reply is kept for a retry of its request."""
    keep_replies_mb: float = limit(64.0, least=0)
    """Replies kept at any time, in MB; the oldest go first."""
    drain_s: float = limit(120.0, least=0, most=86400)
    """Time for requests in progress after SIGTERM."""
    max_samples: int = limit(1024, least=1)
    """Samples in a request."""
    max_image_pixels: int = limit(2**24, least=1)
    """Height x width of an image or a frame."""
    max_request_pixels: int = limit(2**26, least=1)
    """Pixels of all images and frames of a request."""
    max_request_frames: int = limit(8192, least=1)
    """Images and frames of a request."""
    max_metadata_mb: float = limit(4.0, above=0)
    """Metadata of all samples of a request, in MB; it takes up to sixty times as much memory in a scorer."""
    scorers: dict[str, ScorerConfig] = field(default_factory=lambda: dict[str, ScorerConfig]())
    """Name of each scorer -> its settings."""

    @property
    def wire_limits(self) -> WireLimits:
        return WireLimits(
            max_samples=self.max_samples,
            max_image_pixels=self.max_image_pixels,
            max_request_pixels=self.max_request_pixels,
            max_request_frames=self.max_request_frames,
            max_metadata_bytes=int(self.max_metadata_mb * 1e6),
        )


def read_config(file: Path, **replaced: Any) -> ServiceConfig:
    """The settings of a file, checked. replaced: fields of ServiceConfig to set in place of the file's.

    Raises RecipeError, with the file and the key, for YAML that cannot be read and settings that cannot be used.
    """
    try:
        config = OmegaConf.merge(OmegaConf.structured(ServiceConfig), OmegaConf.load(file))
        result = cast(ServiceConfig, OmegaConf.to_object(config))
    except (OSError, ValueError, YAMLError, OmegaConfBaseException) as error:
        raise RecipeError(f"{file}: {' '.join(str(error).split())}") from error
    result = dataclasses.replace(result, **replaced)
    if reasons := list(_problems(result)):
        raise RecipeError(f"{file}: " + " ".join(map(str, reasons)))
    return result


def _problems(config: ServiceConfig) -> Iterator[Reason]:
    yield from broken_limits(config, key="")
    if not config.scorers:
        yield Reason(key="scorers", text="got none, expected one or more: a name, and the reward that it uses.")
    for name, scorer in config.scorers.items():
        yield from broken_limits(scorer, key=f"scorers.{name}")
    for place, host in enumerate(config.hosts):
        if not host or "*" in host.removeprefix("*.") or set(host) & set(":/ "):
            text = f"got {host!r}, expected a name without a port, or `*.` and a domain."
            yield Reason(key=f"hosts[{place}]", text=text)
    try:
        is_local = config.host == "localhost" or ipaddress.ip_address(config.host).is_loopback
    except ValueError:
        is_local = False
    if not is_local and not config.keys_env:
        yield Reason(key="keys_env", text=f"got none with host {config.host!r}, which others reach; set API keys.")
