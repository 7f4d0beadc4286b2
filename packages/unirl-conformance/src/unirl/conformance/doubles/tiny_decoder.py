"""A decoder of some ten thousand weights in plain torch: what algorithms, backends and engines are tried on with text.

It has what real ones have, at a size where a forward takes a millisecond: attention with a key-value cache, padded and
packed batches, a chat template with a switch, blocks that are wrapped one by one, projections that LoRA adapts, dropout
that has to be off. Log-probs come from a plain `log_softmax`, so that shared code can be held against them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from unirl.core.errors import RecipeError
from unirl.core.limits import limit
from unirl.core.roles import DivergenceKind, OutputHead, TextModel, TokenBatch
from unirl.core.specs.capability import Cap
from unirl.core.specs.part_config import PartConfig
from unirl.core.specs.spec import Miniature, ModelSpec
from unirl.core.types.inputs import Inputs
from unirl.core.types.sampling import TextSamplingConfig
from unirl.numerics.tokens.divergence import token_divergence

__all__ = [
    "RULED",
    "SPEC",
    "VOCABULARY",
    "DecoderOptions",
    "TextNet",
    "TinyDecoder",
    "TinyDecoderConfig",
    "build",
    "build_ruled",
    "write",
]

WIDTH, HEADS = 16, 2
END, PAD, SYSTEM, USER, ASSISTANT, NO_THOUGHT = range(256, 262)
"""Tokens after the 256 bytes: what ends a text, what fills up, and those of the chat template."""
VOCABULARY = 262
WEIGHTS_FILE = "tiny-decoder.safetensors"

Cache = tuple[tuple[Tensor, Tensor], ...]
"""Keys and values [B, L, WIDTH] of each block."""


@dataclass
class TinyDecoderConfig(PartConfig):
    path: str = "???"
    """Folder that `write` filled."""


@dataclass
class DecoderOptions:
    """`sampling.options` of the decoder's texts, where its spec is `RULED`."""

    sharpness: float = limit(1.0, above=0)
    """Factor of all logits, before the temperature."""
    form: bool = False
    """Texts have a form: one of the letters a, b and c, a colon, any token, then d or e after an a, else f."""


SPEC = ModelSpec(
    name="tiny-decoder",
    summary="A decoder of some ten thousand weights, for trying engines, algorithms and backends",
    build=f"{__name__}:build",
    config=f"{__name__}:TinyDecoderConfig",
    capabilities={Cap.TEXT_STAGE, Cap.LORA, Cap.OBSERVATIONS},
    tracks={"text": "text"},
    trainable="net",
    lora_targets=("mixed", "out", "up", "down"),
    wrap_blocks=("TextBlock",),
    tiny=Miniature(write=f"{__name__}:write", sampling={"max_new_tokens": 8}, lora_layers=8, wrap_blocks=2),
    reference="the formulas of its docstrings",
)
RULED = replace(
    SPEC,
    name="ruled-decoder",
    build=f"{__name__}:build_ruled",
    options={"text": f"{__name__}:DecoderOptions"},
    token_options=frozenset({"text"}),
    restricts=frozenset({"text"}),
)
"""The decoder with options that its logits depend on, and with tokens that it restricts."""


class TextBlock(nn.Module):
    """Attention over what is visible, then a mixture of each token's features."""

    def __init__(self) -> None:
        super().__init__()
        self.mixed = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(
        self, hidden: Tensor, visible: Tensor, past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """hidden: [B, L, WIDTH].  visible: [B, L, past + L] bool.  Returns hidden, and the keys and values of all."""
        query, key, value = self.mixed(hidden).chunk(3, dim=2)
        if past is not None:
            key, value = torch.cat([past[0], key], dim=1), torch.cat([past[1], value], dim=1)
        heads = [part.unflatten(2, (HEADS, -1)).transpose(1, 2) for part in (query, key, value)]
        likeness = heads[0] @ heads[1].transpose(2, 3) / math.sqrt(WIDTH / HEADS)
        weights = likeness.masked_fill(~visible[:, None], -torch.inf).softmax(dim=3)
        hidden = hidden + self.out((weights @ heads[2]).transpose(1, 2).flatten(2))
        return hidden + self.down(torch.tanh(self.up(hidden))), (key, value)


class TextNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([TextBlock(), TextBlock()])
        self.dropout = nn.Dropout(0.5)
        self.leave = nn.Linear(WIDTH, VOCABULARY)
        with torch.no_grad():
            self.leave.weight.normal_(std=0.4)
            # So that some texts end before their limit.
            self.leave.bias[END] = 3.0

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        visible: Tensor,
        *,
        index: Tensor | None,
        cache: Cache | None,
        is_hidden: bool = False,
        end: Callable[[Tensor, Tensor], Any] | None = None,
    ) -> tuple[Any, Cache]:
        """Logits [T, VOCABULARY] at `index` into the flattened [B * L], or [B, VOCABULARY] at the last of each row.

        tokens, positions: [B, L].  visible: [B, L, cached + L].  is_hidden: states [T, WIDTH] instead of logits.
        end: what it makes of states and projection instead of logits; the bias is a column of the projection.
        """
        hidden, kept = self.enter(tokens) + _waves(positions), list[tuple[Tensor, Tensor]]()
        for number, block in enumerate(self.blocks):
            hidden, past = block(hidden, visible, None if cache is None else cache[number])
            kept.append(past)
        chosen = hidden[:, -1] if index is None else hidden.flatten(0, 1)[index]
        states = self.dropout(chosen)
        if end is not None:
            projection = torch.cat([self.leave.weight, self.leave.bias[:, None]], dim=1)
            return end(torch.cat([states, torch.ones_like(states[:, :1])], dim=1), projection), tuple(kept)
        return states if is_hidden else self.leave(states), tuple(kept)


class TinyDecoder(TextModel):
    """A `unirl.core.roles.TextModel`. Tokens are the bytes of UTF-8, and a few special ones."""

    spec: ModelSpec = SPEC
    net_class: type[TextNet] = TextNet

    def __init__(self, *, seed: int = 0, device: Any = "cpu", spec: ModelSpec | None = None) -> None:
        """spec: `RULED`, or that of the class."""
        self.spec = spec or type(self).spec
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            self.net = self.net_class().eval()
        self.device = torch.device(device)
        self.net.to(self.device)

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        return (END,)

    @property
    def pad_token(self) -> int:
        return PAD

    @property
    def packs(self) -> bool:
        return True

    @property
    def trainable(self) -> nn.Module:
        return self.net

    @property
    def trunk(self) -> nn.Module:
        """The whole net: its output projection is left out of the forward."""
        return self.net

    @property
    def hidden_size(self) -> int:
        return WIDTH

    @property
    def vocabulary(self) -> dict[str, int]:
        """Bytes as hexadecimal digits, and the tokens after them."""
        return {f"{token:02x}": token for token in range(VOCABULARY)}

    def prompt_tokens(self, inputs: Inputs, *, sampling: TextSamplingConfig) -> list[Tensor]:
        """The bytes of each prompt; with `chat` between the roles, after the bytes of the system prompt."""
        if not sampling.chat and (sampling.system_prompt or sampling.thinking is not None):
            raise RecipeError("sampling.chat: without a template there is no system prompt and no switch; unset them.")
        rows = [self._chat(prompt, sampling) if sampling.chat else [*prompt.encode()] for prompt in inputs.texts]
        for prompt, row in zip(inputs.texts, rows, strict=True):
            if not row:
                raise RecipeError(f"data: prompt {prompt!r} has no token to go on from; write something.")
        return [torch.tensor(row, dtype=torch.int64) for row in rows]

    def observation_tokens(
        self, texts: Sequence[str], *, after: Sequence[Tensor], role: str, sampling: TextSamplingConfig
    ) -> list[Tensor]:
        """An end where there is none, then the bytes between roles; without `chat` the bytes alone. Roles are one."""
        result: list[Tensor] = []
        for text, completion in zip(texts, after, strict=True):
            end = [] if len(completion) and int(completion[-1]) == END else [END]
            row = [*end, *self._chat(text, replace(sampling, system_prompt=""))] if sampling.chat else [*text.encode()]
            result.append(torch.tensor(row, dtype=torch.int64))
        return result

    def texts(self, tokens: Sequence[Tensor]) -> list[str]:
        return [bytes(token for token in row.tolist() if token < END).decode(errors="replace") for row in tokens]

    def score(
        self, batch: TokenBatch, *, temperature: float, with_entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        scores = self.log_distributions(batch, temperature=temperature)
        log_probs = scores.gather(1, batch.targets.to(self.device)[:, None]).squeeze(1)
        finite = scores.masked_fill(scores == -torch.inf, 0.0)
        return log_probs, -(scores.exp() * finite).sum(dim=1) if with_entropy else None

    def hidden(self, batch: TokenBatch, *, trunk: nn.Module | None = None) -> Tensor:
        net = self.net if trunk is None else trunk
        return net(*self.layout(batch), index=batch.target_index.to(self.device), cache=None, is_hidden=True)[0].float()

    @torch.no_grad()
    def output_head(self, batch: TokenBatch) -> OutputHead:
        hidden, weight = self._ended(batch, lambda hidden, weight: (hidden, weight))
        return OutputHead(hidden=hidden, weight=weight)

    def divergence(
        self,
        batch: TokenBatch,
        *,
        teacher: OutputHead,
        kind: DivergenceKind,
        beta: float,
        top_k: int | None,
        temperature: float,
    ) -> tuple[Tensor, Tensor]:
        settings: dict[str, Any] = {"kind": kind, "beta": beta, "top_k": top_k, "temperature": temperature}
        targets = batch.targets.to(self.device)

        def compared(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
            # In chunks: of a batch, some have a few rows and the last one fewer.
            return token_divergence(
                hidden, weight, targets, teacher=teacher, chunk=7, allowed=batch.allowed, **settings
            )

        return self._ended(batch, compared)

    def log_distributions(self, batch: TokenBatch, *, temperature: float) -> Tensor:
        """[T, VOCABULARY] log-probs of every token at each target's position; -inf for those not allowed."""
        logits, _ = self.net(*self.layout(batch), index=batch.target_index.to(self.device), cache=None)
        logits = logits.float() * batch.options.get("sharpness", 1.0)
        if batch.allowed:
            is_out = torch.zeros_like(logits, dtype=torch.bool)
            for place, ids in batch.allowed.items():
                is_out[place] = True
                is_out[place, ids.to(self.device)] = False
            logits = logits.masked_fill(is_out, -torch.inf)
        return torch.log_softmax(logits / temperature, dim=1)

    def _ended(self, batch: TokenBatch, end: Callable[[Tensor, Tensor], Any]) -> Any:
        sharpness: float = batch.options.get("sharpness", 1.0)

        def scaled(hidden: Tensor, weight: Tensor) -> Any:
            return end(hidden * sharpness, weight)

        return self.net(*self.layout(batch), index=batch.target_index.to(self.device), cache=None, end=scaled)[0]

    def layout(self, batch: TokenBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens and positions [B, L] of a batch, and what is visible from where [B, L, L]."""
        tokens, positions = batch.tokens.to(self.device), batch.positions.to(self.device)
        # Padded: samples are rows. Packed: one begins where positions begin again.
        sample = (positions == 0).cumsum(dim=1)
        visible = (sample[:, :, None] == sample[:, None]) & (positions[:, :, None] >= positions[:, None])
        return tokens, positions, visible

    @torch.no_grad()
    def next_logits(
        self,
        tokens: Tensor,
        *,
        positions: Tensor,
        attention_mask: Tensor,
        cache: Cache | None,
        options: Mapping[str, Any] | None = None,
    ) -> tuple[Tensor, Cache]:
        length, total = tokens.shape[1], attention_mask.shape[1]
        place = torch.arange(total, device=self.device)
        own = place[total - length :, None]
        # Padding attends to itself: a softmax over nothing is NaN.
        visible = ((place <= own) & attention_mask.to(self.device)[:, None]) | (place == own)
        logits, kept = self.net(tokens.to(self.device), positions.to(self.device), visible, index=None, cache=cache)
        return logits.float() * (options or {}).get("sharpness", 1.0), kept

    def allowed(self, tokens: Tensor, *, options: Mapping[str, Any]) -> dict[int, Tensor]:
        """See `DecoderOptions.form`."""
        if not options["form"]:
            return {}
        result = {0: b"abc", 1: b":"}
        if len(tokens):
            result[3] = b"de" if int(tokens[0]) == ord("a") else b"f"
        return {place: torch.tensor([*ids]) for place, ids in result.items() if place <= len(tokens)}

    def select_cache(self, cache: Cache, rows: Tensor) -> Cache:
        there = rows.to(self.device)
        return tuple((key[there], value[there]) for key, value in cache)

    def _chat(self, prompt: str, sampling: TextSamplingConfig) -> list[int]:
        system = [SYSTEM, *sampling.system_prompt.encode()] if sampling.system_prompt else []
        return [*system, USER, *prompt.encode(), ASSISTANT, *([NO_THOUGHT] if sampling.thinking is False else [])]


def build(config: TinyDecoderConfig, *, device: Any) -> TinyDecoder:
    return _loaded(config, device=device, spec=SPEC)


def build_ruled(config: TinyDecoderConfig, *, device: Any) -> TinyDecoder:
    return _loaded(config, device=device, spec=RULED)


def _loaded(config: TinyDecoderConfig, *, device: Any, spec: ModelSpec) -> TinyDecoder:
    model = TinyDecoder(device=device, spec=spec)
    model.net.load_state_dict(load_file(Path(config.path) / WEIGHTS_FILE))
    return model


def write(folder: Path, *, seed: int) -> None:
    """Write random weights; same seed, same bytes."""
    save_file(TinyDecoder(seed=seed).net.state_dict(), Path(folder) / WEIGHTS_FILE)


def _waves(positions: Tensor) -> Tensor:
    """[B, L] -> [B, L, WIDTH] sines and cosines of wave lengths from 6 to 6,000 tokens."""
    rates = 10.0 ** -torch.linspace(0, 3, WIDTH // 2, device=positions.device)
    angles = positions[:, :, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=2)
