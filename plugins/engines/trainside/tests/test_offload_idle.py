"""Encoders and VAE in CPU memory while they are idle."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from external_engines.plans import reasons_against
from torch import nn
from unirl.conformance.doubles import tiny_denoiser as workbench
from unirl.conformance.doubles.requests import make_request
from unirl.core.errors import RecipeError
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.core.types.track import Track
from unirl.engines.trainside.config import TrainsideConfig
from unirl.engines.trainside.engine import build
from unirl.models.sd3 import tiny
from unirl.models.sd3.config import Sd3Config
from unirl.models.sd3.model import Sd3Model
from unirl.models.sd3.model import build as build_model

SAMPLING = LatentSamplingConfig(num_inference_steps=3, height=32, width=32, max_sequence_length=16)


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Any]:
    """A miniature of sd3 on a device, for one test."""
    tiny.write(tmp_path / "sd3", seed=0)
    yield lambda device: build_model(Sd3Config(path=str(tmp_path / "sd3")), device=device)


def idle_parts(model: Sd3Model) -> dict[str, nn.Module]:
    parts = model.pipeline.components.items()
    return {name: part for name, part in parts if isinstance(part, nn.Module) and part is not model.transformer}


def forward(model: Sd3Model, track: Track) -> None:
    """As a loss runs it."""
    (conditions,) = track.conditions.values()
    latents = track.latent.final
    sigma = torch.full((track.num_rows,), 0.5, device=latents.device)
    model.velocity(latents, sigma, conditions.expanded())


def test_parts_come_when_they_are_called_and_leave_before_the_next_forward(own: Any) -> None:
    """The order of moves through a rollout, with a second name of the CPU in place of a GPU."""
    expected = build(TrainsideConfig(), model=(whole := own("cpu")), device="cpu").generate(
        make_request(whole, SAMPLING, track="image")
    )
    model = own(torch.device("cpu:0"))
    places = dict.fromkeys(idle_parts(model), "device")
    assert places.keys() == {"vae", "text_encoder", "text_encoder_2", "text_encoder_3"}
    seen: list[tuple[str, frozenset[str]]] = []

    def note(what: str) -> None:
        entry = what, frozenset(name for name, place in places.items() if place == "device")
        if seen[-1:] != [entry]:
            seen.append(entry)

    for name, part in idle_parts(model).items():

        def to(place: Any, *, name: str = name) -> None:
            places[name] = "device" if place == model.device else "cpu"

        part.to = to
        (part.decoder if name == "vae" else part).register_forward_pre_hook(
            lambda *_, what="vae" if name == "vae" else "encoder": note(what)
        )
    model.transformer.register_forward_pre_hook(lambda *_: note("transformer"))
    engine = build(TrainsideConfig(), model=model, device="cpu:0")
    model.offload_idle()
    request = make_request(model, SAMPLING, track="image")
    track = engine.generate(request)
    encoders, vae = frozenset(places) - {"vae"}, frozenset({"vae"})
    rollout = [("transformer", frozenset()), ("vae", vae)]
    assert seen == [("encoder", encoders), *rollout]
    # The VAE leaves first.
    forward(model, track)
    assert seen[3:] == [("transformer", frozenset())]
    # The prompts are cached: encoders stay where they are.
    engine.generate(request)
    assert seen[3:] == rollout
    assert track.media is not None and expected.media is not None
    assert torch.equal(track.media.stacked, expected.media.stacked)


def test_parts_that_are_named_leave_alone(own: Any) -> None:
    """With a second name of the CPU in place of a GPU."""
    model, moved = own(torch.device("cpu:0")), list[tuple[str, str]]()
    for name, part in idle_parts(model).items():
        part.to = lambda place, name=name: moved.append((name, "device" if place == model.device else "cpu"))
    encoders = sorted(idle_parts(model).keys() - {"vae"})
    for _ in range(2):
        model.offload_idle("encode")
        assert sorted(moved) == [(name, "cpu") for name in encoders]
        moved.clear()
        conditions = model.encode(make_request(model, SAMPLING, track="image").inputs, sampling=SAMPLING)
        assert sorted(moved) == [(name, "device") for name in encoders]
        moved.clear()
    model.decode(torch.zeros(1, *model.latent_shape(SAMPLING)))
    assert conditions and sorted(moved) == [(name, "cpu") for name in encoders], "only the VAE computes now"


def test_on_a_cpu_and_where_nothing_is_idle_it_is_refused(own: Any, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"engine\.offload_idle: got true on a CPU; encoders and VAE are in CPU mem"):
        build(TrainsideConfig(offload_idle=True), model=own("cpu"), device="cpu")
    (reason,) = reasons_against("quickstart", "engine.offload_idle=true", "run.device=cpu")
    assert reason.startswith("engine.offload_idle: got true with run.device=cpu; encoders and VAE are in CPU memory")
    (reason,) = reasons_against("quickstart-refl", "engine.offload_idle=true")
    assert "the loss decodes samples, so the VAE is not idle while the model trains" in reason
    (reason,) = reasons_against("quickstart-text", "engine.offload_idle=true")
    assert "generates text and has neither encoders nor a VAE" in reason
    assert reasons_against("quickstart", "engine.offload_idle=true") == []


@pytest.mark.gpu
def test_on_a_gpu_idle_parts_free_their_bytes_and_change_no_sample(own: Any) -> None:
    def held() -> int:
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    whole = own("cuda")
    expected = build(TrainsideConfig(), model=whole, device="cuda").generate(
        make_request(whole, SAMPLING, track="image")
    )
    del whole
    model = own("cuda")
    parts = [*idle_parts(model).values()]
    # Embeddings of encoders are tied: each tensor counts once.
    tensors = {tensor.data_ptr(): tensor.nbytes for part in parts for tensor in (*part.parameters(), *part.buffers())}
    before = held()
    engine = build(TrainsideConfig(offload_idle=True), model=model, device="cuda")
    assert before - held() >= sum(tensors.values())
    track = engine.generate(make_request(model, SAMPLING, track="image"))
    assert track.media is not None and expected.media is not None
    assert torch.equal(track.media.stacked, expected.media.stacked)
    assert {param.device.type for param in model.vae.parameters()} == {"cuda"}
    forward(model, track)
    assert {param.device.type for part in parts for param in part.parameters()} == {"cpu"}


def test_a_model_in_one_piece_is_refused(tmp_path: Path) -> None:
    workbench.write(tmp_path, seed=0)
    model: Any = workbench.build(workbench.TinyDenoiserConfig(path=str(tmp_path)), device="cpu")
    model.device = torch.device("meta")
    with pytest.raises(RecipeError, match="does not keep encoders and VAE apart"):
        build(TrainsideConfig(offload_idle=True), model=model, device="meta")
