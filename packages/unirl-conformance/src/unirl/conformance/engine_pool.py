"""Engines of claims. External ones are started once for many claims, and reset for each of them."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from unirl.core.errors import UniRLError
from unirl.core.plugins.catalog import Found
from unirl.core.roles import Engine, Model, WeightUpdate
from unirl.core.specs.capability import Cap
from unirl.core.specs.part_config import PartConfig
from unirl.core.specs.spec import EngineSpec, ModelSpec
from unirl.core.types.request import Request
from unirl.core.types.sampling import SamplingConfig
from unirl.core.types.track import LatentSegment, Track

from .doubles.expected_trajectory import distance
from .doubles.model_state import changes_of, copy_modes, model_state
from .doubles.requests import PROMPTS, make_request
from .doubles.weight_updates import full_update
from .subjects import pair_tracks
from .verdicts import Record

if TYPE_CHECKING:
    from .part_factory import PartFactory

__all__ = ["EnginePool"]

PROBE, QUIET = PROMPTS[0], "euler"
AS_NEW = 5e-5
"""Bound of a difference of log-probs, in nats: half of 1e-4. A request that is sent again may be added up in another
order, 1e-6 to 1e-5 in fp32. Other weights move log-probs by 0.1. Of latents the same, as a share of their rms."""


@dataclass(frozen=True, kw_only=True)
class _Started:
    key: str
    engine: Engine
    model: Model
    """The engine's own. No claim sees it, and nothing may change it."""
    first: WeightUpdate
    """The initial weights and version."""
    request: Request
    """Its samples depend on the weights alone."""
    answer: Track
    """Samples of that request when the engine was new."""


class EnginePool:
    """Opens engines, and keeps an external one for the claims that follow: one at a time, as machines have memory for
    one. Claims of an engine and a model run one after the other.

    Before an engine is used again it gets the weights that it was started with, and must answer a request as it did
    then, with the same version: a greedy text with the same tokens and log-probs, or the same latents. One that does
    not, because a claim closed, killed or damaged it, is closed, and another one is started.
    """

    def __init__(self, factory: PartFactory) -> None:
        self._factory = factory
        self._idle: _Started | None = None
        self.starts = 0
        """Number of external engines that were started to be kept."""

    @staticmethod
    def keeps(engine: Found, model: Found) -> bool:
        """Whether an engine is kept: an external one that can be reset, as it takes full weights, and compared, as the
        weights alone can determine its samples."""
        spec, of = cast(EngineSpec, engine.spec), cast(ModelSpec, model.spec)
        is_determined = "text" in pair_tracks(of, spec) or (
            Cap.INITIAL_NOISE in spec.capabilities and QUIET in spec.kernels
        )
        return bool(spec.environment) and Cap.WEIGHTS_FULL in spec.capabilities and is_determined

    @contextmanager
    def open(
        self,
        engine: Found,
        config: PartConfig,
        *,
        of: Found,
        model: Model,
        device: str,
        record: Record,
        own: bool = False,
    ) -> Generator[Engine]:
        """An engine for a model of the kind `of`, during the block.

        model: what an engine that is not kept is built over; the model of one that is kept gets the training modes of
        its modules.  own: the engine is new, and closed at the end.  record: notes that an engine had to be started
        again.
        """
        if own or not self.keeps(engine, of):
            if self.keeps(engine, of):
                # There may be memory for one alone.
                self.close()
            built: Engine = self._factory.build(engine, config, model=model, device=device)
            try:
                yield built
            finally:
                built.close()
            return
        key = f"{engine.dist} {of.dist} {of.spec.name} {device} {config!r}"
        started = self._idle
        if started is not None and (started.key != key or not self._is_reset(started, record)):
            self.close()
            started = None
        started = started or self._started(key, engine, config, of=of, device=device)
        # Not idle while in use: another engine that the claim opens is a new one.
        self._idle = None
        copy_modes(model, started.model)
        before = model_state(started.model)
        try:
            yield started.engine
        finally:
            self.close()
            self._idle = started
        changes = changes_of(before, model_state(started.model))
        assert not changes, f"engine {engine.spec.name!r} changed the model that it was built with: {changes}"

    def close(self) -> None:
        """Close the engine that is idle."""
        started, self._idle = self._idle, None
        if started is not None:
            started.engine.close()

    def _started(self, key: str, engine: Found, config: PartConfig, *, of: Found, device: str) -> _Started:
        model = self._factory.fresh_model(of, device=device)
        built: Engine = self._factory.build(engine, config, model=model, device=device)
        self.starts += 1
        try:
            request = self._request(engine, of, model, version=built.version)
            return _Started(
                key=key,
                engine=built,
                model=model,
                first=full_update(model, version=built.version),
                request=request,
                answer=built.generate(request),
            )
        except BaseException:
            built.close()
            raise

    def _request(self, engine: Found, of: Found, model: Model, *, version: int) -> Request:
        """A request whose samples depend on the weights alone: a greedy text, or latents by steps without noise."""
        is_text = "text" in pair_tracks(cast(ModelSpec, of.spec), cast(EngineSpec, engine.spec))
        quiet: dict[str, Any] = {"kernel": QUIET, "eta": 0.0, "decode": False, "sde.mode": "none", "sde.steps": []}
        sampling: SamplingConfig = (
            self._factory.text_sampling(of, temperature=0.0) if is_text else self._factory.sampling(of, **quiet)
        )
        return make_request(
            model,
            sampling,
            track=self._factory.track(of, "text" if is_text else "latent"),
            media=partial(self._factory.media, of, engine=engine)
            if is_text
            else partial(self._factory.needed_media, of),
            prompts=(PROBE,),
            samples_per_prompt=1,
            policy_version=version,
        )

    def _is_reset(self, started: _Started, record: Record) -> bool:
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


def _same(result: Track, expected: Track) -> bool:
    """Whether two answers have the same tokens and, to rounding, log-probs; or the same latents."""
    if result.policy_version != expected.policy_version:
        return False
    if isinstance(expected.segment, LatentSegment):
        return distance(result.latent.final, expected.latent.final) <= AS_NEW
    one, two = result.text, expected.text
    if not all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(one.tokens, two.tokens, strict=True)):
        return False
    if one.log_probs is None or two.log_probs is None:
        return one.log_probs is two.log_probs
    gaps = [(a.cpu() - b.cpu()).abs().max() for a, b in zip(one.log_probs, two.log_probs, strict=True)]
    return bool(torch.stack(gaps).max() <= AS_NEW)
