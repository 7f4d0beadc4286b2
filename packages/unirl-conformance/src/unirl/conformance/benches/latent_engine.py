"""An engine with a model of latents: what claims about steps, noise and trajectories need."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from unirl.core.capability import Cap
from unirl.core.match import DETERMINISTIC_KERNELS
from unirl.core.request import Request
from unirl.core.roles import DiffusionModel, Model
from unirl.core.rollout import Rollout
from unirl.core.track import Track
from unirl.numerics.noise import INITIAL, noise, noise_digest

from ..verdicts import NotApplicable
from ..workbench.requests import make_request
from ..workbench.walk import Walk, distance, follow
from .engine import ROUNDING, EngineBench
from .trial import digest

__all__ = ["STEPS", "LatentEngineBench"]

STEPS = 4
"""Denoise steps of a request, unless a claim says otherwise."""


@dataclass(frozen=True, kw_only=True)
class LatentEngineBench(EngineBench):
    @property
    def track(self) -> str:
        return self.workshop.track(self.subject.found("model"), "latent")

    @property
    def kernels(self) -> tuple[str, ...]:
        """Every kernel that the engine runs."""
        assert self.spec.kernels, f"engine {self.spec.name!r} names no kernel in its spec, so nothing can be sampled"
        return self.spec.kernels

    @property
    def noisy_kernels(self) -> tuple[str, ...]:
        """Those with stochastic steps. Raises NotApplicable when there are none."""
        found = tuple(name for name in self.kernels if name not in DETERMINISTIC_KERNELS)
        if not found:
            raise NotApplicable(f"engine {self.spec.name!r} runs deterministic kernels alone")
        return found

    @property
    def quiet_kernel(self) -> str:
        """A kernel for steps without noise: a deterministic one, or one that has no SDE steps in the request."""
        return "euler" if "euler" in self.kernels else self.kernels[0]

    def model(self) -> DiffusionModel:
        return cast(DiffusionModel, super().model())

    def fresh_model(self) -> DiffusionModel:
        return cast(DiffusionModel, super().fresh_model())

    def plain_request(self, model: Model) -> Request:
        return self.request(cast(DiffusionModel, model))

    def decided_request(self, model: Model) -> Request:
        if not self.native(Cap.INITIAL_NOISE):
            raise NotApplicable(f"engine {self.spec.name!r} promises no known start, so weights alone decide no sample")
        return self.request(cast(DiffusionModel, model), sampling=self.by_recipe(), **self.storing_most())

    def moved(self, track: Track, other: Track) -> float:
        return distance(track.latent.final, other.latent.final)

    def check_made_by(self, model: Model, request: Request, track: Track, *, name: str) -> None:
        walk = self.walk(request, track, model=cast(DiffusionModel, model))
        chosen = walk.seen if self.native(Cap.STEP_NOISE) else walk.deterministic
        self.record(name, walk.error(chosen, with_noise=True), bound=ROUNDING)

    def warm_up(self, model: Model, request: Request) -> None:
        latent = cast(DiffusionModel, model)
        latent.encode(request.prompts[:1], sampling=request.latent(self.track).sampling)

    def request(self, model: DiffusionModel, *, sampling: Mapping[str, Any] | None = None, **settings: Any) -> Request:
        """A request of 2 groups of 3 samples for the latent track. sampling: dotted keys; settings: of make_request.

        Steps 0, 1 and 2 of 4 are stochastic where the engine can; not the last one, in which some kernels have none.
        """
        laid: dict[str, Any] = {"steps": STEPS, "eta": 0.6, "sde.mode": "fixed", "sde.steps": [0, 1, 2]}
        laid |= {"kernel": next((name for name in self.kernels if name not in DETERMINISTIC_KERNELS), "")}
        if not laid["kernel"] or not self.native(Cap.SDE_STEPS):
            laid |= self.with_kernel(self.quiet_kernel, eta=0.0)
        laid |= sampling or {}
        if "trajectory" not in settings and not self.native(Cap.TRAJECTORY_WINDOW) and self.native(Cap.TRAJECTORY_FULL):
            settings["trajectory"] = "full"
        found = self.workshop.sampling(self.subject.found("model"), **laid)
        return make_request(model, {self.track: found}, **settings)

    def with_sde_steps(self, request: Request, steps: Tensor) -> Request:
        """The same request with other SDE steps [N, S] for its rows."""
        track = dataclasses.replace(request.latent(self.track), sde_steps=steps)
        return dataclasses.replace(request, tracks={self.track: track})

    def generate(self, *, sampling: Mapping[str, Any] | None = None, **settings: Any) -> tuple[Request, Rollout]:
        """One rollout of an engine as new over the shared model; the same request is sampled once a run."""
        model = self.model()
        asked = self.request(model, sampling=sampling, **settings)

        def rollout() -> tuple[Request, Rollout]:
            # Many claims look at it: whichever comes first has no say in where it is made.
            with dataclasses.replace(self, own_engine=False).engine(model) as engine:
                request = dataclasses.replace(asked, policy_version=engine.version)
                return request, engine.generate(request)

        return self.workshop.shared(f"latents of {self.subject.id}, {digest(asked)}", rollout)

    def with_kernel(self, kernel: str, *, eta: float = 0.6, sde_steps: Sequence[int] = ()) -> dict[str, Any]:
        """Sampling settings of a kernel; a deterministic one takes neither eta nor SDE steps."""
        if kernel in DETERMINISTIC_KERNELS:
            eta, sde_steps = 0.0, ()
        mode = "fixed" if sde_steps else "none"
        return {"kernel": kernel, "eta": eta, "sde.mode": mode, "sde.steps": list(sde_steps)}

    def by_recipe(self) -> dict[str, Any]:
        """Sampling settings under which the recipe decides all of the noise that the engine takes from it."""
        return {} if self.native(Cap.STEP_NOISE) else {"sde.mode": "none", "sde.steps": []}

    def storing_most(self) -> dict[str, str]:
        """Settings of a request that bring back as much of the trajectory as the engine can give."""
        return {"trajectory": "full" if self.native(Cap.TRAJECTORY_FULL) else "window"}

    def walk(self, request: Request, track: Track, *, model: DiffusionModel | None = None) -> Walk:
        """The way that these samples should have taken, by the formulas, with this model's velocity.

        Conditions are those that the engine says it used, where it gives them, as replay takes them; else the model's.
        """
        model = model or self.model()
        sampling = request.latent(self.track).sampling
        given = track.conditions if self.native(Cap.CONDITIONS) else {}
        prompts = {"positive": request.prompts, "negative": (sampling.negative_prompt,) * request.num_rows}
        if sampling.guidance_scale == 1.0:
            del prompts["negative"]
        conditions: dict[str, dict[str, Tensor]] = {}
        for name, texts in prompts.items():
            values = given[name].expanded() if name in given else encoded(model, texts, request, self.track)
            conditions[name] = {key: value.to(model.device) for key, value in values.items()}
        return follow(
            model,
            request,
            track.latent,
            track=self.track,
            positive=conditions["positive"],
            negative=conditions.get("negative"),
            knows_start=self.native(Cap.INITIAL_NOISE),
        )

    def check_start(self, request: Request, track: Track) -> None:
        """Every row must start from the noise of its own id, and echo its digest: bit for bit, where it is stored."""
        wanted = request.latent(self.track)
        shape = self.model().latent_shape(wanted.sampling)
        start = noise(seed=request.seed, rollout=request.rollout, ids=wanted.noise_ids, step=INITIAL, shape=shape)
        assert track.latent.initial_noise == noise_digest(start), (
            f"the recipe gives noise with digests {noise_digest(start)}; the engine echoes {track.latent.initial_noise}"
        )
        positions = track.latent.positions.cpu()
        for row, sample_id in enumerate(track.sample_ids):
            if positions.shape[1] and int(positions[row, 0]) == 0:
                found = track.latent.latents[row, 0].cpu()
                assert torch.equal(found, start[row]), (
                    f"sample {sample_id!r} starts up to {float((found - start[row]).abs().max()):g} off its noise"
                )
            else:
                promised = self.native(Cap.TRAJECTORY_WINDOW, Cap.SDE_STEPS) or self.native(Cap.TRAJECTORY_FULL)
                assert not promised, f"sample {sample_id!r}: position 0 is not stored, {positions[row].tolist()} are"

    def check_conditions(self, request: Request, track: Track, name: str) -> None:
        """The returned conditions of this name must be the model's own of each sample's prompt."""
        sampling = request.latent(self.track).sampling
        texts = request.prompts if name == "positive" else (sampling.negative_prompt,) * request.num_rows
        wanted = encoded(self.model(), texts, request, self.track)
        found = track.conditions[name].expanded()
        assert found.keys() == wanted.keys(), f"{name} has {sorted(found)}; the model's conditions are {sorted(wanted)}"
        for key, value in wanted.items():
            assert found[key].shape == value.shape, (
                f"{name}[{key!r}] is {list(found[key].shape)}; the model gives {list(value.shape)}"
            )
            self.record(f"{name} {key} off", distance(found[key].to(value.device), value), bound=ROUNDING)


def encoded(model: DiffusionModel, prompts: tuple[str, ...], request: Request, track: str) -> dict[str, Tensor]:
    """name -> [N, ...], the model's own conditions of these prompts, each encoded once."""
    distinct = list(dict.fromkeys(prompts))
    values = model.encode(distinct, sampling=request.latent(track).sampling)
    index = torch.tensor([distinct.index(prompt) for prompt in prompts], device=model.device)
    return {name: value.to(model.device)[index] for name, value in values.items()}
