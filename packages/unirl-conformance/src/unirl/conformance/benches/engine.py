"""An engine with a model: what claims about any rollout and weights need. Those about latents and text have more."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from unirl.core.capability import Cap, Support
from unirl.core.errors import UniRLError
from unirl.core.request import Request
from unirl.core.roles import Engine, Model
from unirl.core.spec import EngineSpec, ModelSpec
from unirl.core.track import Track

from .base import Bench

__all__ = ["ROUNDING", "EngineBench"]

ROUNDING = 1e-4
"""Bound of a difference in latents, as a share of their rms. A forward in fp32 in another batch, kernel or library adds
up in another order: 1e-7 to 1e-5 of the latents over the few steps of a miniature. A sigma rounded to bf16, a wrong
mean or another condition moves them by 1e-3 and more."""


@dataclass(frozen=True, kw_only=True)
class EngineBench(Bench):
    @property
    def spec(self) -> EngineSpec:
        return cast(EngineSpec, self.subject.found("engine").spec)

    @property
    def model_spec(self) -> ModelSpec:
        return cast(ModelSpec, self.subject.found("model").spec)

    def native(self, *caps: Cap) -> bool:
        """Whether the engine states all of these as its own."""
        return all(self.spec.support(cap) is Support.NATIVE for cap in caps)

    @property
    def track(self) -> str:
        """The track that is asked for."""
        raise NotImplementedError

    def model(self) -> Model:
        """The model on its miniature, shared by all claims: look, do not change."""
        return self.workshop.model(self.subject.found("model"), device=self.device)

    def fresh_model(self) -> Model:
        """The same of this claim alone, to change."""
        return self.workshop.fresh_model(self.subject.found("model"), device=self.device)

    @contextmanager
    def engine(self, model: Model | None = None, *, enable: Cap | None = None, **settings: Any) -> Iterator[Engine]:
        """The engine over a model, closed at the end. enable: a capability that its config must switch on.

        One that is a program of its own is not closed, but made as new for the next claim, unless the claim says that
        it takes one of its own.
        """
        found = self.subject.found("engine")
        with self.workshop.engine(
            found,
            self.workshop.config(found, settings, enable=enable),
            of=self.subject.found("model"),
            model=model or self.model(),
            device=self.device,
            record=self.record,
            own=self.own_engine,
        ) as engine:
            yield engine

    def plain_request(self, model: Model) -> Request:
        """A request of 2 groups of 3 samples."""
        raise NotImplementedError

    def decided_request(self, model: Model) -> Request:
        """A request whose samples are decided by the weights, so that they can be compared. Raises NotApplicable where
        the engine promises none."""
        raise NotImplementedError

    def moved(self, track: Track, other: Track) -> float:
        """How far apart the samples of two tracks are, on a scale on which `ROUNDING` is the rounding of fp32."""
        raise NotImplementedError

    def check_made_by(self, model: Model, request: Request, track: Track, *, name: str) -> None:
        """The samples are those that this model's weights make of a decided request. name: of the number."""
        raise NotImplementedError

    def warm_up(self, model: Model, request: Request) -> None:
        """Use the model once without the engine."""
        raise NotImplementedError

    def sample(self, engine: Engine, request: Request) -> Track:
        """What the engine makes of a request that asks for the version it has."""
        asked = dataclasses.replace(request, policy_version=engine.version)
        return engine.generate(asked).tracks[self.track]

    @contextmanager
    def refusal(self, of: str, *, naming: str) -> Iterator[None]:
        """What is done inside must be refused by an error for users whose message has `naming` in it."""
        try:
            yield
        except (UniRLError, ValueError) as error:
            assert naming in str(error), f"{of} is refused without naming {naming!r}: {error}"
        else:
            raise AssertionError(f"{of} is taken without a word")
