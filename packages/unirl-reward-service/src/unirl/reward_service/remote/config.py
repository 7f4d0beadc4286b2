"""Settings of the reward `remote`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from unirl.core.limits import Reason, limit, one_of
from unirl.core.specs.part_config import RewardConfig
from unirl.core.types.media import spread

if TYPE_CHECKING:
    from unirl.core.specs.plan import Plan, Stage

__all__ = ["RemoteConfig"]


@dataclass
class RemoteConfig(RewardConfig):
    urls: list[str] = field(default_factory=lambda: list[str]())
    """URLs of the replicas of a service, such as `http://scorers-1:8790`. Requests go to the least busy one."""
    serve: str = ""
    """File of a service, in place of `urls`: the service is started where the reward is built, and ends with it. For a
    scorer with its own Python environment, which the file names."""
    scorer: str = ""
    """Name of the scorer at the service."""
    version: str = ""
    """Version that the scorer must have, as `unirl reward-service check` shows it. Empty takes the version that the
    replicas have when the reward is built."""
    parts: list[str] = field(default_factory=lambda: list[str]())
    """Components of the scorer to log."""
    key_env: str = ""
    """Name of the environment variable with the API key, on each machine that scores; empty sends none."""
    encoding: str = one_of("raw", "png", "webp", default="raw")
    """How pixels travel: `raw` keeps every bit; `png` and `webp` are smaller, and round to 8 bits a channel."""
    num_frames: int = limit(0, least=0)
    """Frames of each video that the scorer gets, see `frames`; all where a video has fewer. 0 sends whole videos."""
    frames: str = one_of("spread", "first", "last", default="spread")
    """Which frames: `spread` are at equal distances, the first and the last of the video among them, and of one frame
    the first; `first` and `last` are neighbours at its start or end."""
    batch_size: int = limit(8, least=1)
    """Samples per request; a scorer that compares the samples of a group gets whole groups."""
    concurrency: int = limit(16, least=1, most=1024)
    """Requests in progress at a time, over all replicas."""
    timeout_s: float = limit(120.0, above=0)
    """Longest time of one attempt at a request."""
    deadline_s: float = limit(300.0, above=0)
    """How long a request is tried, on all replicas, before the run fails."""

    def __post_init__(self) -> None:
        # A worker may have another current folder.
        if self.serve:
            self.serve = str(Path(self.serve).expanduser().absolute())

    def problems(self, plan: Plan | None, stage: Stage | None) -> Iterator[Reason]:
        yield from super().problems(plan, stage)
        if not self.urls and not self.serve:
            text = "got none, expected the URL of a reward service, or of several replicas; or set `serve`."
            yield Reason(key=".urls", text=text)
        elif self.urls and self.serve:
            yield Reason(key=".serve", text="got a file besides `urls`, expected one of them.")
        for url in self.urls:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
                yield Reason(key=".urls", text=f"got {url!r}, expected http://HOST:PORT or https://HOST.")
            elif parts.username or parts.password:
                yield Reason(key=".urls", text="got a URL with a password, which a run records; use `key_env`.")
        if not self.scorer:
            yield Reason(key=".scorer", text="got none, expected the name of a scorer of the service.")

    def read_versions(self) -> Mapping[str, str]:
        """The scorer's version, of a service that runs already. Raises RewardFailed where no replica answers, and where
        they disagree."""
        if self.serve:
            return {}
        from .replicas import described

        return {".scorer": described(self).version}

    def required_metadata(self) -> Sequence[str]:
        """The keys that the scorer needs, if they can be asked for. Raises as `read_versions` does."""
        if self.serve:
            return ()
        from .replicas import described

        return described(self).metadata

    def named_code(self) -> Mapping[str, str | Path]:
        """A service's file, which may name functions and interpreters."""
        return {".serve": Path(self.serve)} if self.serve else {}

    def read_files(self) -> Mapping[str, Path]:
        return {".serve": Path(self.serve)} if self.serve else {}

    def device_weights(self) -> Mapping[str, str]:
        """The service's file, where one of its scorers has a device other than the CPU."""
        if not self.serve:
            return {}
        from ..config import read_config

        scorers = read_config(Path(self.serve)).scorers.values()
        return {".serve": ""} if any(scorer.device != "cpu" for scorer in scorers) else {}

    def frames_read(self, num_frames: int) -> Sequence[int] | None:
        if not 0 < self.num_frames < num_frames:
            return None
        if self.frames == "spread":
            return spread(self.num_frames, num_frames)
        start = num_frames - self.num_frames if self.frames == "last" else 0
        return range(start, start + self.num_frames)

    def further_parts(self) -> Sequence[str]:
        return self.parts
