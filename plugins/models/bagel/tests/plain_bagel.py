"""BAGEL by its formula, one sequence at a time, in the names of a checkpoint's file: both experts compute every token,
and a mask written pair by pair says what each token sees. No code of the plugin."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor


@dataclass
class PlainBagel:
    folder: Path
    weights: dict[str, Tensor] = field(init=False)
    config: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.weights = load_file(self.folder / "ema.safetensors")
        self.config = json.loads((self.folder / "llm_config.json").read_text())
        self.tokenizer = json.loads((self.folder / "tokenizer.json").read_text())

    def token(self, content: str) -> int:
        return next(one["id"] for one in self.tokenizer["added_tokens"] if one["content"] == content)

    def velocity(self, pieces: list[Any], x: Tensor, t: float, places: Tensor) -> Tensor:
        """[n, C] of x [n, C] behind the pieces; places: [n, 2] rows and columns."""
        states, is_gen, last = self.states([*pieces, ("latent", x, t, places)])
        del is_gen
        mine = self.norm(states[last], "language_model.model.norm_moe_gen")
        return self.linear(mine, "llm2vae")

    def logits(self, pieces: list[Any]) -> Tensor:
        """[L, V] after every token."""
        states, _, _ = self.states(pieces)
        return self.linear(self.norm(states, "language_model.model.norm"), "language_model.lm_head")

    def states(self, pieces: list[Any]) -> tuple[Tensor, Tensor, slice]:
        """Pieces: ("text", ids), ("latent", [n, C], t, places [n, 2]), ("feature", [n, V], places)."""
        rows: list[Tensor] = []
        positions: list[int] = []
        gen: list[bool] = []
        image: list[int] = []
        embed = self.weights["language_model.model.embed_tokens.weight"]
        begin, end = embed[self.token("<|vision_start|>")], embed[self.token("<|vision_end|>")]
        position, last = 0, slice(0)
        for number, (kind, *given) in enumerate(pieces):
            if kind == "text":
                for token in given[0]:
                    rows.append(embed[token])
                    positions.append(position)
                    gen.append(False)
                    image.append(-1)
                    position += 1
                continue
            if kind == "latent":
                x, t, places = given
                inside = self.linear(x, "vae2llm") + self.time(t)
                table = self.weights["latent_pos_embed.pos_embed"]
            else:
                x, places = given
                hidden = F.gelu(self.linear(x, "connector.fc1"), approximate="tanh")
                inside = self.linear(hidden, "connector.fc2")
                table = self.weights["vit_pos_embed.pos_embed"]
            side = math.isqrt(len(table))
            inside = inside + torch.stack([table[row * side + column] for row, column in places.tolist()])
            last = slice(len(rows) + 1, len(rows) + 1 + len(inside))
            rows += [begin, *inside, end]
            positions += [position] * (len(inside) + 2)
            gen += [False, *[kind == "latent"] * len(inside), False]
            image += [number] * (len(inside) + 2)
            position += 1
        count = len(rows)
        sees = torch.tensor(
            [[j <= i or (image[i] >= 0 and image[i] == image[j]) for j in range(count)] for i in range(count)]
        )
        x, is_gen, at = torch.stack(rows), torch.tensor(gen)[:, None], torch.tensor(positions)
        for layer in range(self.config["num_hidden_layers"]):
            x = self.layer(x, is_gen, at, sees, f"language_model.model.layers.{layer}")
        return x, is_gen, last

    def layer(self, x: Tensor, is_gen: Tensor, at: Tensor, sees: Tensor, name: str) -> Tensor:
        heads, kv = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        results: list[Tensor] = []
        projected: dict[str, list[Tensor]] = {"q": [], "k": [], "v": []}
        for expert in ("", "_moe_gen"):
            normed = self.norm(x, f"{name}.input_layernorm{expert}")
            for kind, values in projected.items():
                width = heads if kind == "q" else kv
                value = self.linear(normed, f"{name}.self_attn.{kind}_proj{expert}").view(len(x), width, -1)
                values.append(value if kind == "v" else self.norm(value, f"{name}.self_attn.{kind}_norm{expert}"))
        q, k, v = (torch.where(is_gen[..., None], gen, und) for und, gen in projected.values())
        q, k = self.rotate(q, at), self.rotate(k, at)
        outputs: list[Tensor] = []
        for head in range(heads):
            own = head * kv // heads
            scores = q[:, head] @ k[:, own].T / math.sqrt(q.shape[-1])
            outputs.append(scores.masked_fill(~sees, -math.inf).softmax(-1) @ v[:, own])
        attended = torch.cat(outputs, dim=-1)
        for expert in ("", "_moe_gen"):
            y = x + self.linear(attended, f"{name}.self_attn.o_proj{expert}")
            z = self.norm(y, f"{name}.post_attention_layernorm{expert}")
            gate, up = (self.linear(z, f"{name}.mlp{expert}.{part}_proj") for part in ("gate", "up"))
            results.append(y + self.linear(gate * gate.sigmoid() * up, f"{name}.mlp{expert}.down_proj"))
        return torch.where(is_gen, results[1], results[0])

    def rotate(self, x: Tensor, at: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        angle = at[:, None, None] * self.config["rope_theta"] ** (-torch.arange(half) / half)
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)

    def time(self, t: float) -> Tensor:
        angle = t * 10000 ** (-torch.arange(128) / 128)
        hidden = self.linear(torch.cat([angle.cos(), angle.sin()]), "time_embedder.mlp.0")
        return self.linear(hidden * hidden.sigmoid(), "time_embedder.mlp.2")

    def norm(self, x: Tensor, name: str) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"]).sqrt()
        return x / scale * self.weights[f"{name}.weight"]

    def linear(self, x: Tensor, name: str) -> Tensor:
        bias = self.weights.get(f"{name}.bias")
        product = x @ self.weights[f"{name}.weight"].T
        return product if bias is None else product + bias
