"""External engines: started once for many claims, and reset for each of them."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from unirl.core.errors import UniRLError
from unirl.core.plugins.catalog import Found
from unirl.core.roles import DiffusionModel, Engine, Model, TextModel, WeightUpdate
from unirl.core.specs.capability import Cap
from unirl.core.specs.config import PartConfig
from unirl.core.specs.spec import EngineSpec, ModelSpec
from unirl.core.types.request import Request
from unirl.core.types.track import LatentSegment, Track

from .doubles.requests import PROMPTS, make_request, make_text_request
from .doubles.trained import full_update
from .doubles.walk import distance
from .verdicts import Record

if TYPE_CHECKING:
    from .workshop import Workshop

__all__ = ["EnginePool"]

PROBE, QUIET = PROMPTS[0], "euler"
AS_NEW = 5e-5
"""Bound of a difference of log-probs, in nats: half of 1e-4. A request that is sent again may be added up in another
order, 1e-6 to 1e-5 in fp32. Other weights move log-probs by 0.1. Of latents the same, as a share of their rms."""


@dataclass(frozen=True, kw_only=True)
class _Started:
    key: str
    engine: Engine
    model: _Borrowed
    first: WeightUpdate
    """The initial weights and version."""
    request: Request
    """Greedy completions of its model."""
    answer: Track
    """Its answer to that request when it was new."""


class EnginePool:
    """Holds one engine at a time, as machines have memory for one; claims of a row are tried one after the other.

    Before an engine is lent again it gets the weights that it was started with, and must answer a request as it did
    then, with the same version: a greedy text with the same tokens and log-probs, or the same latents. One that does
    not, for a claim closed, killed or damaged it, is ended, and another one is started.
    """

    def __init__(self, workshop: Workshop) -> None:
        self._workshop = workshop
        self._idle: _Started | None = None
        self.starts = 0
        """How many engines were started so far."""

    @staticmethod
    def takes(engine: Found, model: Found) -> bool:
        """Whether this engine is started once for many claims: a program of its own that takes full weights, by which
        it can be made as new, and whose samples can be decided by the weights, by which that is seen."""
        spec, of = cast(EngineSpec, engine.spec), cast(ModelSpec, model.spec)
        takes_weights = Cap.WEIGHTS_FULL in spec.capabilities
        is_decided = "text" in of.tracks.values() or (Cap.INITIAL_NOISE in spec.capabilities and QUIET in spec.kernels)
        return bool(spec.environment) and takes_weights and is_decided

    @contextmanager
    def lent(
        self, engine: Found, config: PartConfig, *, of: Found, model: Model, device: str, record: Record
    ) -> Generator[Engine]:
        """An engine over a model of the kind `of`, as new. record: is told when one had to be started again."""
        key = f"{engine.dist} {of.dist} {of.spec.name} {device} {config!r}"
        started = self._idle
        if started is not None and (started.key != key or not self._renewed(started, record)):
            self.close()
            started = None
        if started is None:
            started = self._started(key, engine, config, of=of, device=device)
        # Not idle while it is lent: what a claim opens besides gets one of its own.
        self._idle = None
        started.model.be(model)
        try:
            yield started.engine
        finally:
            started.model.be(self._workshop.model(of, device=device))
            self.close()
            self._idle = started

    def close(self) -> None:
        """End the engine that is idle."""
        started, self._idle = self._idle, None
        if started is not None:
            started.engine.close()

    def _started(self, key: str, engine: Found, config: PartConfig, *, of: Found, device: str) -> _Started:
        miniature = self._workshop.model(of, device=device)
        borrowed = _Borrowed(miniature)
        with self._workshop.starting(engine, of):
            built: Engine = self._workshop.build(engine, config, model=borrowed, device=device)
        self.starts += 1
        try:
            request = self._request(of, miniature, version=built.version)
            return _Started(
                key=key,
                engine=built,
                model=borrowed,
                first=full_update(miniature, version=built.version),
                request=request,
                answer=built.generate(request),
            )
        except BaseException:
            built.close()
            raise

    def _request(self, of: Found, model: Model, *, version: int) -> Request:
        """A request whose sample is decided by the weights: a greedy text, or latents by steps without noise."""
        rows: dict[str, Any] = {"prompts": (PROBE,), "samples_per_prompt": 1, "policy_version": version}
        if "text" in cast(ModelSpec, of.spec).tracks.values():
            text = self._workshop.text_sampling(of, temperature=0.0)
            return make_text_request(
                cast(TextModel, model),
                text,
                track=self._workshop.track(of, "text"),
                media=partial(self._workshop.media, of),
                **rows,
            )
        steps = {"sde.mode": "none", "sde.steps": list[int]()}
        latent = self._workshop.sampling(of, kernel=QUIET, eta=0.0, decode=False, **steps)
        return make_request(
            cast(DiffusionModel, model),
            latent,
            track=self._workshop.track(of, "latent"),
            media=partial(self._workshop.needed_media, of),
            **rows,
        )

    def _renewed(self, started: _Started, record: Record) -> bool:
        """Give an engine its first weights again; whether it then is as it was when it started."""
        try:
            started.engine.load_weights(started.first)
            result = started.engine.generate(started.request)
        except (UniRLError, ValueError):
            result = None
        if result is not None and started.engine.version == started.first.version and _same(result, started.answer):
            return True
        record("engine started again", self.starts)
        return False


class _Borrowed:
    """Stands for the model of whichever claim has the engine: what the engine does to its model, it does to that."""

    def __init__(self, model: Model) -> None:
        self.be(model)

    def be(self, model: Model) -> None:
        vars(self)["model"] = model

    def __getattribute__(self, name: str) -> Any:
        # Hooks of copying and pickling are this object's own.
        if name == "be" or name.startswith("__"):
            return object.__getattribute__(self, name)
        return getattr(vars(self)["model"], name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(vars(self)["model"], name, value)


def _same(found: Track, wanted: Track) -> bool:
    """Whether two answers have the same tokens and, to rounding, log-probs; or the same latents."""
    if found.policy_version != wanted.policy_version:
        return False
    if isinstance(wanted.segment, LatentSegment):
        return distance(found.latent.final, wanted.latent.final) <= AS_NEW
    one, two = found.text, wanted.text
    if not all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(one.tokens, two.tokens, strict=True)):
        return False
    if one.log_probs is None or two.log_probs is None:
        return one.log_probs is two.log_probs
    gaps = [(a.cpu() - b.cpu()).abs().max() for a, b in zip(one.log_probs, two.log_probs, strict=True)]
    return bool(torch.stack(gaps).max() <= AS_NEW)
