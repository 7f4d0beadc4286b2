"""Cases of the VeOmni backend on several ranks, each also run on one rank of fsdp2. Imports neither of them."""

from __future__ import annotations

import dataclasses
from importlib import import_module
from typing import Any

import torch
from toy_denoiser import Clipped, Judged, ToyModel, draw_adapters, gradients, make_steps, make_track
from unirl.conformance.doubles.ppo import FakeScorePPO
from unirl.core.roles import Job, Losses, LossTerm
from unirl.core.specs.config import TrainConfig
from unirl.core.types.inputs import Inputs
from unirl.core.types.request import TextRequest
from unirl.core.types.sampling import TextSamplingConfig
from unirl.core.types.track import Status, TextSegment, Track
from unirl.models.causal_lm.config import AutoCausalLmConfig
from unirl.models.causal_lm.model import build as build_text
from unirl.models.wan.config import Wan21Config
from unirl.models.wan.model import build as build_video
from unirl.numerics.tokens.batches import pad_batch
from unirl.numerics.tokens.rollout import generate_text
from unirl.numerics.train.actions import action_mask
from unirl.train_host.sections import AverageConfig, CriticConfig, FakeScoreConfig, LoraSettings
from unirl.train_host.sharding import full

FULL = {"trains": "full", "max_grad_norm": 0.05}
LORA = {"trains": "lora", "lora": LoraSettings(rank=3, alpha=6.0), "max_grad_norm": None}
CASES: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        # The layers of LoRA rank 3 do not divide by two.
        "lora": LORA,
        "full": {**FULL, "reference_copy": True},
        "anyprecision": {**FULL, "optimizer": "anyprecision_adamw"},
        "critic": {**LORA, "critic": CriticConfig(lr=3e-2, max_grad_norm=None)},
        "fake-score": {**FULL, "fake_score": FakeScoreConfig(lr=3e-2, max_grad_norm=None, steps_per_update=2)},
        "bf16": {**FULL, "mixed_precision": "bf16", "activation_checkpointing": True},
        "experts": {**FULL, "mesh": {"expert": 2}},
        "experts-lora": {**LORA, "mesh": {"expert": 2}},
        "experts-rates": {
            **{**FULL, "mesh": {"expert": 2}},
            "lr_scales": {r"layers\.0\.mlp\.experts\.down_proj": 0.0, "experts": 0.25, "embed_tokens": 0.0},
        },
        "sequence": {**FULL, "mesh": {"sequence": 2}},
        "words-sequence": {**FULL, "mesh": {"sequence": 2}},
        "words-sequence-lora": {**LORA, "mesh": {"sequence": 2}},
    },
    4: {
        # Two copies in two shards each.
        "hsdp": {**FULL, "mesh": {"shard": 2}},
        # The experts of two ranks, each sharded over two more.
        "experts-sharded": {**FULL, "mesh": {"expert": 2}},
        # The experts of each of two copies.
        "experts-hsdp": {**FULL, "mesh": {"expert": 2, "shard": 2}},
        "sequence-hsdp": {**FULL, "mesh": {"sequence": 2, "shard": 2}},
    },
}
KINDS = {"experts": "text", "words": "text", "sequence": "video"}


class Reinforce:
    """The loss - log p x advantage over the tokens of a text."""

    trains_critic = False
    trains_fake_score = False
    separates_steps = False

    def with_old_log_probs(self, track, replay):
        return track

    def loss_weights(self, track):
        return {"policy": action_mask(track) * track.sample_weights[:, None]}

    def loss(self, track, replay, *, progress):
        values = -replay(track).log_probs * track.advantages[:, None]
        return Losses(terms=[LossTerm(name="policy", values=values, weights=self.loss_weights(track)["policy"])])


def kind_of(case: str) -> str:
    return KINDS.get(case.split("-")[0], "image")


def make_model(case, folder, *, lazy=False):
    kind = kind_of(case)
    if kind == "text":
        path = folder / ("moe" if "experts" in case else "dense")
        return build_text(AutoCausalLmConfig(path=str(path)), device="cpu", lazy=lazy)
    if kind == "video":
        model = build_video(Wan21Config(path=str(folder / "wan21")), device="cpu", serves=frozenset())
        model.net = model.transformer
        return model
    return ToyModel()


def make_rows(case, model) -> tuple[Track, Any]:
    """Eight rows and an algorithm that trains on them."""
    kind = kind_of(case)
    if kind == "text":
        return make_texts(), Reinforce()
    if case == "critic":
        return make_steps(), Judged()
    if case == "fake-score":
        return make_track(ToyModel()), FakeScorePPO()
    if kind == "image":
        return make_track(ToyModel()), Clipped()
    width = model.transformer.config.text_dim
    texts = {"prompt_embeds": torch.randn(2, 16, width, generator=torch.Generator().manual_seed(4))}
    return make_track(model, shape=(4, 2, 4, 4), texts=texts), Clipped()


def make_texts(num_rows: int = 8) -> Track:
    random = torch.Generator().manual_seed(1)
    drawn = [torch.randint(200, (4 + (3 * row) % 5,), generator=random) for row in range(num_rows)]
    segment = TextSegment(prompt_tokens=tuple(row[:2] for row in drawn), tokens=tuple(row[2:] for row in drawn))
    return Track(
        name="text",
        sample_ids=tuple(f"s{row}" for row in range(num_rows)),
        group_ids=tuple(f"g{row // 4}" for row in range(num_rows)),
        inputs=Inputs.of_texts(("",) * num_rows),
        metadata=({},) * num_rows,
        segment=segment,
        advantages=torch.randn(num_rows, generator=random),
        sample_weights=torch.ones(num_rows),
        status=(Status.COMPLETED,) * num_rows,
        policy_version=(0,) * num_rows,
    )


def texts_of(model, segment: TextSegment) -> dict[str, Any]:
    """Log-probs of the texts' tokens, and a rollout from their first prompts; by all ranks of a sequence."""
    batch = pad_batch(segment.prompt_tokens, segment.tokens, pad_token=model.pad_token)
    with torch.no_grad():
        log_probs = model.score(batch, temperature=0.7, with_entropy=False)[0]
    sampling = TextSamplingConfig(temperature=0.0, max_new_tokens=6)
    prompts = segment.prompt_tokens[:2]
    request = TextRequest(sampling=sampling, prompt_tokens=prompts, stop_tokens=(), seeds=(0, 1))
    return {"log_probs": log_probs, "rollout": list(generate_text(model, request).tokens)}


def make_backend(name, case, model):
    """Backend `name` for a case; with one rank its mesh is left out, and so are settings that fsdp2 does not have."""
    config = import_module(f"unirl.backends.{name}.config")
    settings = dict(next(cases[case] for cases in CASES.values() if case in cases))
    mesh = settings.pop("mesh", {})
    if name == "fsdp2":
        settings.pop("optimizer", None)
        cls, mesh = config.Fsdp2Config, {}
    else:
        cls = config.VeomniConfig
    built = import_module(f"unirl.backends.{name}.backend").build(
        cls(
            lr=1e-2,
            # Adam divides gradients by no less, and so does not blow up the rounding of those near 0.
            eps=1e-4,
            ema=AverageConfig(kind="constant", decay=0.5),
            mesh=config.MeshConfig(**mesh),
            **settings,
        ),
        model=model,
        train=TrainConfig(micro_batch_size=2),
        steps=10,
        seed=3,
    )
    draw_adapters(built)
    return built


def run(name, case, folder, *, rank=0, world=1, lazy=False):
    """Gradients, metrics and weights of a rank with its share of eight rows, after three updates; collective."""
    model = make_model(case, folder, lazy=lazy)
    backend = make_backend(name, case, model)
    copies = backend._config.copies if world > 1 else 1
    track, algorithm = make_rows(case, model)
    mine = track.select([row for row in range(8) if row % (world // copies) == rank // copies])
    kind = "full" if backend._config.trains == "full" else "merged"
    first = dict(backend.export_weights(kind=kind).tensors)
    texts = texts_of(model, track.text) if "words" in case else {}
    caught = gradients(backend, mine, algorithm)
    reports = [backend.train([Job(track=mine, algorithm=algorithm)], progress=0.0) for _ in range(2)]
    live = backend.export_weights(kind=kind)
    result = {
        "first": first,
        "texts": texts,
        "gradients": caught,
        "metrics": dict(reports[-1].metrics),
        "live": dict(live.tensors),
        "checksum": live.checksum,
        "critic": {n: full(v) for n, v in backend._critic.tensors().items()} if backend._critic else {},
        "fake": dict(backend.export_weights(kind=kind, policy="fake").tensors) if backend._fake_score else {},
        "ema": dict(backend.export_weights(kind=kind, policy="ema").tensors),
        "shards": {n: tuple(p.to_local().shape) for n, p in backend._held.items()} if world > 1 else {},
    }
    if world > 1:
        backend.save(folder / case)
        for _ in range(2):
            backend.train([Job(track=mine, algorithm=algorithm)], progress=0.0)
        result["straight"] = backend.export_weights(kind=kind).checksum
        backend.close()
        again = make_backend(name, case, make_model(case, folder))
        again.load(folder / case)
        result["loaded"] = (again.version, again.export_weights(kind=kind).checksum)
        for _ in range(2):
            again.train([Job(track=mine, algorithm=algorithm)], progress=0.0)
        result["resumed"] = again.export_weights(kind=kind).checksum
        # Weights of its own kind, from another rank's file or backend, are taken whole.
        if kind == "full":
            moved = dataclasses.replace(live, tensors=result["live"])
            again.adopt(moved)
            result["adopted"] = again.export_weights(kind=kind).checksum
        again.close()
    else:
        backend.close()
    return result
