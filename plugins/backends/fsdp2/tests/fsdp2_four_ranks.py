"""One rank of the four-rank test: `python fsdp2_four_ranks.py RANK STORE FOLDER`. Rank 0 leaves its findings in FOLDER."""

import dataclasses
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from fsdp2_text_toy import make_texts
from fsdp2_toy import SPEC, Clipped, ToyModel, gradients, make_backend, make_track
from unirl.backends.fsdp2.config import AverageConfig, Fsdp2Config, LoraSettings, MeshConfig
from unirl.core.errors import RecipeError, RunFailed
from unirl.core.roles import Job, Losses, LossTerm
from unirl.core.specs.config import TrainConfig
from unirl.core.types.request import TextRequest
from unirl.core.types.sampling import TextSamplingConfig
from unirl.models.hunyuan_video15.config import HunyuanVideo15Config
from unirl.models.hunyuan_video15.model import build as build_joint
from unirl.models.qwen3.config import Qwen3Config
from unirl.models.qwen3.model import build as build_text
from unirl.models.wan.config import Wan21Config, Wan22Config
from unirl.models.wan.model import build as build_video
from unirl.numerics.tokens.rollout import generate_text
from unirl.numerics.train.actions import action_mask

SPLIT = dataclasses.replace(SPEC, tensor_parallel={"blocks.*.up": "colwise", "blocks.*.down": "rowwise"})
EPS = 1e-3
"""Above the rounding of gradients near 0, 1e-7, whose sign would otherwise decide an element of Adam's step."""
FULL = {"trains": "full", "reference_copy": True, "max_grad_norm": 0.05, "eps": EPS}
CASES = {
    # Two copies in two shards each; the layer of LoRA rank 3 does not divide.
    "hsdp": {**FULL, "mesh": MeshConfig(shard=2)},
    "hsdp-lora": {"lora": LoraSettings(rank=3, alpha=6.0), "eps": EPS, "mesh": MeshConfig(shard=2)},
    "tensor": {**FULL, "mesh": MeshConfig(tensor=2)},
    "tensor-alone": {**FULL, "mesh": MeshConfig(tensor=4)},
    "tensor-hsdp": {**FULL, "mesh": MeshConfig(tensor=2, shard=1)},
    # Two pairs of ranks with different rows; the second time with a copy of the weights for each pair.
    "sequence": {**FULL, "mesh": MeshConfig(sequence=2)},
    "sequence-lora": {"lora": LoraSettings(rank=3, alpha=6.0), "eps": EPS, "mesh": MeshConfig(sequence=2, shard=2)},
    # Rows of both experts, which the ranks of a sequence call alike and other ranks in another order.
    "sequence-experts": {**FULL, "mesh": MeshConfig(sequence=2)},
    # Nine tokens, recomputed in the backward pass; and six with texts of several lengths, in the same attention.
    "sequence-odd": {**FULL, "mesh": MeshConfig(sequence=2), "activation_checkpointing": True},
    "sequence-texts": {"lora": LoraSettings(rank=3, alpha=6.0), "eps": EPS, "mesh": MeshConfig(sequence=2)},
    # A language model.
    "sequence-words": {**FULL, "mesh": MeshConfig(sequence=2)},
}


class Reinforce:
    """The loss - log p x advantage over the tokens of a text. `to` is a policy that is not compared."""

    trains_critic = False
    trains_fake_score = False
    separates_steps = False

    def __init__(self, *, to=None):
        pass

    def with_old_log_probs(self, track, replay):
        return track

    def loss_weights(self, track):
        return {"policy": action_mask(track) * track.sample_weights[:, None]}

    def loss(self, track, replay, *, progress):
        values = -replay(track).log_probs * track.rewards[:, None]
        return Losses(terms=[LossTerm(name="policy", values=values, weights=self.loss_weights(track)["policy"])])


def video_model(folder, case="sequence"):
    """The tiny Wan 2.1, 2.2 with its two experts, or HunyuanVideo 1.5: two attention heads. Transformers alone are
    used."""
    if "texts" in case:
        model = build_joint(
            HunyuanVideo15Config(path=str(folder / "hunyuan-video15")), device="cpu", serves=frozenset()
        )
    elif "experts" in case:
        model = build_video(Wan22Config(path=str(folder / "wan22")), device="cpu", serves=frozenset())
    else:
        model = build_video(Wan21Config(path=str(folder / "wan21")), device="cpu", serves=frozenset())
    model.net = model.trainable
    return model


def video_track(model, case="sequence"):
    """Eight rows, sampled with the model as it is: videos of 8 tokens, or 9."""
    generator = torch.Generator().manual_seed(4)
    settings = model.transformer.config
    if "texts" in case:
        lengths, glyphs = torch.tensor([[16], [5]]), torch.tensor([[3], [1]])
        texts = {
            "prompt_embeds": torch.randn(2, 16, settings.text_embed_dim, generator=generator),
            "prompt_mask": torch.arange(16) < lengths,
            "glyph_embeds": torch.randn(2, 3, settings.text_embed_2_dim, generator=generator),
            "glyph_mask": torch.arange(3) < glyphs,
        }
        channels = settings.out_channels
        return make_track(model, shape=(channels, 1, 3 * settings.patch_size, 2 * settings.patch_size), texts=texts)
    texts = {"prompt_embeds": torch.randn(2, 16, settings.text_dim, generator=generator)}
    return make_track(model, shape=(4, 3, 2, 6) if "odd" in case else (4, 2, 4, 4), texts=texts)


def greedy(model):
    """Tokens [2, 6] of a rollout, by every rank."""
    request = TextRequest(
        sampling=TextSamplingConfig(temperature=0.0, max_new_tokens=6),
        prompt_tokens=(torch.arange(5), torch.arange(3)),
        stop_tokens=(),
        seeds=(0, 1),
    )
    return torch.nn.utils.rnn.pad_sequence(list(generate_text(model, request).tokens)).float()


def backend_of(case, folder, *, alone=False):
    settings = {**CASES[case], **({"mesh": MeshConfig()} if alone else {})}
    if "words" in case:
        model = build_text(Qwen3Config(path=str(folder / "qwen3")), device="cpu")
    else:
        model = video_model(folder, case) if "sequence" in case else ToyModel(spec=SPLIT)
    ema = AverageConfig(kind="constant", decay=0.5)
    return make_backend(model, train=TrainConfig(micro_batch_size=2), ema=ema, **settings)


def run(case, folder, *, rank=0, world=1):
    """Samples, gradients, metrics and weights of a rank with its share of eight rows; collective."""
    backend, model = backend_of(case, folder, alone=world == 1)
    copies = 1 if world == 1 else Fsdp2Config(**CASES[case]).copies
    holders = world // copies
    # Videos are sampled by the ranks that share their tokens.
    if "words" in case:
        track, algorithm = make_texts(), Reinforce
        sampled = greedy(model)
    else:
        track, algorithm = video_track(model, case) if "sequence" in case else make_track(ToyModel()), Clipped
        sampled = track.latent.latents
    mine = track.select([row for row in range(8) if row % holders == rank // copies])
    first = gradients(backend, mine, algorithm(to="reference"))
    backend.train([Job(track=mine, algorithm=algorithm(to="ema"))], progress=0.0)
    report = backend.train([Job(track=mine, algorithm=algorithm())], progress=0.0)
    if world > 1:
        backend.save(folder / case)
    live = dict(backend.export_weights(kind="merged").tensors)
    backend.close()
    return {"sampled": sampled, "gradients": first, "metrics": dict(report.only), "live": live}


def refusals(folder, rank):
    """Errors of ranks of one sequence for different rows, fewer tokens than ranks, and too few heads."""
    backend, model = backend_of("sequence", folder)
    track = video_track(model)
    said = {}
    # As a launcher would that counts all ranks as data-parallel ones.
    with pytest.raises(RunFailed) as refused:
        backend.train([Job(track=track.select([rank, rank + 4]), algorithm=Clipped())], progress=0.0)
    said["rows"] = str(refused.value)
    with pytest.raises(RecipeError) as refused:
        model.velocity(torch.zeros(1, 4, 1, 2, 2), torch.ones(1), {"prompt_embeds": torch.zeros(1, 16, 32)})
    said["tokens"] = str(refused.value)
    backend.close()
    with pytest.raises(RecipeError) as refused:
        make_backend(video_model(folder), trains="full", mesh=MeshConfig(sequence=4))
    said["heads"] = str(refused.value)
    return said


def main():
    rank, store, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, 4), rank=rank, world_size=4, timeout=timedelta(seconds=60)
    )
    result = {case: run(case, folder, rank=rank, world=4) for case in CASES}
    result["refusals"] = refusals(folder, rank)
    if rank == 0:
        torch.save(result, folder / "found.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
