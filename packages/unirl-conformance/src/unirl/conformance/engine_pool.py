"""Engines that are programs of their own: started once for all claims of a row, and as new for each of them."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from unirl.core.capability import Cap, Support
from unirl.core.catalog import Found
from unirl.core.config import PartConfig
from unirl.core.errors import UniRLError
from unirl.core.request import Request
from unirl.core.roles import Engine, Model, TextModel, WeightUpdate
from unirl.core.spec import EngineSpec, ModelSpec
from unirl.core.track import Track

from .verdicts import Record

if TYPE_CHECKING:
    from .workshop import Workshop

__all__ = ["EnginePool"]

AS_NEW = 5e-5
"""Bound of a difference of log-probs, in nats: half of 1e-4. A request that is sent again may be added up in another
order, 1e-6 to 1e-5 in fp32. Other weights move log-probs by 0.1."""


@dataclass(frozen=True, kw_only=True)
class _Started:
    key: str
    engine: Engine
    model: _Borrowed
    first: WeightUpdate
    """The weights that it was started with, and its version then."""
    request: Request
    """Greedy texts of its model."""
    answer: Track
    """What it answered to that when it was new."""


class EnginePool:
    """Holds one engine at a time, as machines have memory for one; claims of a row are tried one after the other.

    Before an engine is lent again it gets the weights that it was started with, and must answer a greedy request as it
    did then: the same tokens, the same log-probs, the same version. One that does not, for a claim closed, killed or
    damaged it, is ended, and another one is started.
    """

    def __init__(self, workshop: Workshop) -> None:
        self._workshop = workshop
        self._idle: _Started | None = None
        self.starts = 0
        """How many engines were started so far."""

    @staticmethod
    def takes(engine: Found, model: Found) -> bool:
        """Whether this engine is started once for many claims: a program of its own that takes full weights, by which
        it can be made as new, and generates text, by which that is seen."""
        spec, of = cast(EngineSpec, engine.spec), cast(ModelSpec, model.spec)
        takes_weights = spec.support(Cap.WEIGHTS_FULL) is Support.NATIVE
        return bool(spec.environment) and takes_weights and "text" in of.tracks.values()

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
        # Imported when an engine is started: this module is loaded with the workshop, also where nothing is built.
        from .workbench.requests import make_text_request
        from .workbench.trained import full_update

        miniature = self._workshop.model(of, device=device)
        borrowed = _Borrowed(miniature)
        track = self._workshop.track(of, "text")
        sampling = {track: self._workshop.text_sampling(of, temperature=0.0)}
        built: Engine = self._workshop.build(engine, config, model=borrowed, device=device)
        self.starts += 1
        try:
            request = make_text_request(
                cast(TextModel, miniature),
                sampling,
                prompts=(PROBE,),
                samples_per_prompt=1,
                policy_version=built.version,
            )
            return _Started(
                key=key,
                engine=built,
                model=borrowed,
                first=full_update(miniature, version=built.version),
                request=request,
                answer=built.generate(request).tracks[track],
            )
        except BaseException:
            built.close()
            raise

    def _renewed(self, started: _Started, record: Record) -> bool:
        """Give an engine its first weights again; whether it then is as it was when it started."""
        try:
            started.engine.load_weights(started.first)
            found = started.engine.generate(started.request).tracks[next(iter(started.request.tracks))]
        except (UniRLError, ValueError):
            found = None
        if found is not None and started.engine.version == started.first.version and _same(found, started.answer):
            return True
        record("engine started again", self.starts)
        return False


PROBE = "a red ring on the left"


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
    """Whether two answers have the same tokens and, to rounding, log-probs."""
    one, two = found.text, wanted.text
    if found.policy_version != wanted.policy_version:
        return False
    if not all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(one.tokens, two.tokens, strict=True)):
        return False
    if one.log_probs is None or two.log_probs is None:
        return one.log_probs is two.log_probs
    gaps = [(a.cpu() - b.cpu()).abs().max() for a, b in zip(one.log_probs, two.log_probs, strict=True)]
    return bool(torch.stack(gaps).max() <= AS_NEW)
