"""A small decoder with a trunk and a head, and texts of it."""

from __future__ import annotations

import torch
from torch import nn
from toy_denoiser import Judged, make_steps
from unirl.backends.fsdp2.backend import build
from unirl.backends.fsdp2.config import CriticConfig, Fsdp2Config
from unirl.core.specs.config import TrainConfig
from unirl.core.specs.spec import ModelSpec
from unirl.core.types.inputs import Inputs
from unirl.core.types.track import Status, TextSegment, Track

__all__ = [
    "Judged", "ToyTextModel", "critic_weights", "make_judged", "make_steps", "make_texts",
]  # fmt: skip

SPEC = ModelSpec(
    name="toy-text", summary="Two blocks.", build="", config="", tracks={"text": "text"}, trainable="net",
    lora_targets=("up", "down"), wrap_blocks=("ToyBlock",),
    tensor_parallel={"trunk.blocks.*.up": "colwise", "trunk.blocks.*.down": "rowwise"},
)  # fmt: skip
WIDTH, VOCABULARY = 6, 9


class ToyBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(torch.tanh(self.up(hidden)))


class ToyTrunk(nn.Module):
    """A token and its place: no token sees another, so padding and packing are the same."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(32, WIDTH)
        self.blocks = nn.ModuleList([ToyBlock(), ToyBlock()])

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(tokens) + self.places(positions)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


class ToyLm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = ToyTrunk(), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return self.head(self.trunk(tokens, positions).flatten(0, 1)[index])


class ToyTextModel:
    packs, pad_token, stop_tokens, hidden_size = True, 0, (0,), WIDTH

    def __init__(self, *, seed: int = 0) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.net = ToyLm()
        self.spec, self.device = SPEC, torch.device("cpu")

    @property
    def trainable(self) -> nn.Module:
        return self.net

    @property
    def trunk(self) -> nn.Module:
        return self.net.trunk

    def hidden(self, batch, *, trunk=None):
        return (trunk or self.trunk)(batch.tokens, batch.positions).flatten(0, 1)[batch.target_index]

    def score(self, batch, *, temperature, with_entropy=False):
        scores = torch.log_softmax(self.net(batch.tokens, batch.positions, batch.target_index) / temperature, dim=1)
        entropy = -(scores.exp() * scores).sum(dim=1) if with_entropy else None
        return scores.gather(1, batch.targets[:, None]).squeeze(1), entropy


def make_texts(*, num_rows: int = 8, seed: int = 1) -> Track:
    random = torch.Generator().manual_seed(seed)
    lengths = [2 + (3 * row) % 5 for row in range(num_rows)]
    drawn = [torch.randint(VOCABULARY, (length,), generator=random) for length in lengths]
    segment = TextSegment(prompt_tokens=tuple(tokens[:1] for tokens in drawn), tokens=tuple(drawn))
    return Track(
        name="text",
        sample_ids=tuple(f"s{row}" for row in range(num_rows)),
        group_ids=tuple(f"g{row // 4}" for row in range(num_rows)),
        inputs=Inputs.of_texts(("",) * num_rows),
        metadata=({},) * num_rows,
        segment=segment,
        rewards=torch.randn(num_rows, generator=random),
        sample_weights=torch.ones(num_rows),
        status=(Status.COMPLETED,) * num_rows,
        policy_version=(0,) * num_rows,
    )


def make_judged(
    *, train: TrainConfig | None = None, critic: dict | None = None, steps: int = 10, model=None, **changes
):
    """(backend, model) with a critic, of the text model unless another is given."""
    settings = {"trains": "full", "lr": 1e-2, "max_grad_norm": None, **changes}
    chosen = CriticConfig(**{"lr": 3e-2, "max_grad_norm": None, **(critic or {})})
    model = model or ToyTextModel()
    backend = build(
        Fsdp2Config(critic=chosen, **settings), model=model, train=train or TrainConfig(), steps=steps, seed=3
    )
    return backend, model


def critic_weights(backend) -> dict[str, torch.Tensor]:
    """Whole copies of the critic's weights. Collective."""
    from unirl.train_host.sharding import full

    return {name: full(value) for name, value in backend._critic.tensors().items()}
