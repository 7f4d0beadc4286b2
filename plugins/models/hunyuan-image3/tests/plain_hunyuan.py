"""HunyuanImage-3.0 by its formula, one sequence at a time, in the names of a checkpoint's file and in fp64: every token
runs through its experts alone, and a mask written pair by pair says what each token sees. No code of the plugin."""

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
class PlainHunyuan:
    folder: Path
    wrong: str = ""
    """A mistake to make, to see that the miniature shows it."""
    weights: dict[str, Tensor] = field(init=False)
    config: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        stored = load_file(self.folder / "model.safetensors")
        self.weights = {name: value.double() for name, value in stored.items()}
        self.config = json.loads((self.folder / "config.json").read_text())
        self.tokenizer = json.loads((self.folder / "tokenizer.json").read_text())
        self.special = {one["content"]: one["id"] for one in self.tokenizer["added_tokens"]}

    def ids(self, *parts: str) -> list[int]:
        """Special tokens by their names; of other parts the letters."""
        letters: dict[str, int] = self.tokenizer["model"]["vocab"]
        byte = {" ": "Ġ", "\n": "Ċ"}
        result: list[int] = []
        for part in parts:
            result += [self.special[part]] if part in self.special else [letters[byte.get(one, one)] for one in part]
        return result

    def velocity(self, pieces: list[Any], x: Tensor, sigma: float) -> Tensor:
        """[C, h, w] at x [C, h, w] behind the pieces, whose last mark is that of the ratio."""
        time = sigma if self.wrong == "sigma in [0, 1]" else 1000 * sigma
        states = self.states([*pieces, ("noisy", x.double(), time)])
        if self.wrong == "norm before the image head":
            states = self.norm(states, "model.ln_f")
        grid = states[-x[0].numel() :].T.reshape(1, -1, *x.shape[1:])
        grid = self.residual(grid, self.time(time, "time_embed_2"), "final_layer.model.0")
        name = "final_layer.model.1"
        hidden = F.silu(self.group_norm(grid, f"{name}.0"))
        return self.conv(hidden, f"{name}.2")[0]

    def logits(self, pieces: list[Any]) -> Tensor:
        """[L, V] after every token."""
        return self.linear(self.norm(self.states(pieces), "model.ln_f"), "lm_head")

    def states(self, pieces: list[Any]) -> Tensor:
        """Pieces: ("text", ids); ("source", latents [C, h, w], features [n, V], rows, columns of patches, end);
        ("noisy", x [C, h, w], t)."""
        rows: list[Tensor] = []
        places: list[tuple[int, int]] = []
        image: list[int] = []
        embed = self.weights["model.wte.weight"]

        def text(ids: list[int], number: int = -1) -> None:
            for token in ids:
                places.append((len(rows), len(rows)))
                rows.append(embed[token])
                image.append(number)

        def timestep(t: float) -> None:
            places.append((len(rows), len(rows)))
            rows.append(self.time(t, "timestep_emb"))
            image.append(-1)

        def grid(values: Tensor, height: int, width: int, number: int) -> None:
            start = len(rows)
            for at in range(len(values)):
                row, column = divmod(at, width)
                if self.wrong == "one dimension" or at >= height * width:
                    places.append((start + at, start + at))
                else:
                    # Halves are cut off.
                    y = int(start + (width * height - height) / 2 + row)
                    x = int(start + (width * height - width) / 2 + column)
                    places.append((y, x))
                rows.append(values[at])
                image.append(number)

        def patches(x: Tensor, t: float) -> Tensor:
            hidden = self.conv(x[None], "patch_embed.model.0")
            hidden = self.residual(hidden, self.time(t, "time_embed"), "patch_embed.model.1")
            return hidden[0].flatten(1).T

        for number, (kind, *given) in enumerate(pieces):
            if kind == "text":
                text(given[0])
            elif kind == "source":
                latents, features, high, wide, end = given
                timestep(0.0)
                grid(patches(latents.double(), 0.0), latents.shape[1], latents.shape[2], number)
                text(self.ids("<joint_img_sep>"), number)
                hidden = F.gelu(self.linear(features.double(), "vision_aligner.layers.0"))
                grid(self.linear(hidden, "vision_aligner.layers.2"), high, wide, number)
                text(end)
            else:
                x, t = given
                timestep(t)
                grid(patches(x, t), x.shape[1], x.shape[2], number)
        count = len(rows)
        sees = torch.tensor(
            [[j <= i or (image[i] >= 0 and image[i] == image[j]) for j in range(count)] for i in range(count)]
        )
        x = torch.stack(rows)
        for layer in range(self.config["num_hidden_layers"]):
            name = f"model.layers.{layer}"
            x = x + self.attention(self.norm(x, f"{name}.input_layernorm"), places, sees, f"{name}.self_attn")
            normed = self.norm(x, f"{name}.post_attention_layernorm")
            x = x + torch.stack([self.mixture(token, f"{name}.mlp", layer) for token in normed])
        return x

    def attention(self, x: Tensor, places: list[tuple[int, int]], sees: Tensor, name: str) -> Tensor:
        heads, keys = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        width, shared = self.config["attention_head_dim"], heads // keys
        flat = self.linear(x, f"{name}.qkv_proj")
        outputs: list[Tensor] = []
        for head in range(heads):
            own, place = divmod(head, shared)
            first = own * (shared + 2)
            at = [first + place, first + shared, first + shared + 1]
            if self.wrong == "queries, keys, values after each other":
                at = [head, heads + own, heads + keys + own]
            q, k, v = (flat[:, one * width : (one + 1) * width] for one in at)
            q, k = (self.placed(one, places, f"{name}.{norm}_layernorm") for one, norm in ((q, "query"), (k, "key")))
            scores = (q @ k.T / math.sqrt(width)).masked_fill(~sees, -math.inf)
            outputs.append(scores.softmax(-1) @ v)
        return self.linear(torch.cat(outputs, dim=-1), f"{name}.o_proj")

    def placed(self, x: Tensor, places: list[tuple[int, int]], norm: str) -> Tensor:
        """Turned by its place, then normalised."""
        if self.wrong == "norm before the rotation":
            return self.turned(self.norm(x, norm), places)
        return self.norm(self.turned(x, places), norm)

    def turned(self, x: Tensor, places: list[tuple[int, int]]) -> Tensor:
        half = x.shape[-1] // 2
        result = x.clone()
        for token, place in enumerate(places):
            for pair in range(half):
                # Rows and columns in turns.
                angle = place[pair % 2] * self.config["rope_theta"] ** (-pair / half)
                a, b = x[token, pair], x[token, pair + half]
                result[token, pair] = a * math.cos(angle) - b * math.sin(angle)
                result[token, pair + half] = b * math.cos(angle) + a * math.sin(angle)
        return result

    def mixture(self, token: Tensor, name: str, layer: int) -> Tensor:
        """Of one token [D]."""
        probabilities = self.linear(token, f"{name}.gate.wg").softmax(-1)
        weights, experts = probabilities.topk(self.config["moe_topk"][layer])
        if self.wrong != "weights of experts as they are":
            weights = weights / weights.sum()
        result = self.mlp(token, f"{name}.shared_mlp")
        for weight, expert in zip(weights, experts.tolist(), strict=True):
            result = result + weight * self.mlp(token, f"{name}.experts.{expert}")
        return result

    def mlp(self, x: Tensor, name: str) -> Tensor:
        up, gate = self.linear(x, f"{name}.gate_and_up_proj").chunk(2, -1)
        if self.wrong == "gate first":
            up, gate = gate, up
        return self.linear(up * gate * gate.sigmoid(), f"{name}.down_proj")

    def residual(self, x: Tensor, time: Tensor, name: str) -> Tensor:
        hidden = self.conv(F.silu(self.group_norm(x, f"{name}.in_layers.0")), f"{name}.in_layers.2")
        scale, shift = self.linear(time * time.sigmoid(), f"{name}.emb_layers.1")[None, :, None, None].chunk(2, 1)
        hidden = self.group_norm(hidden, f"{name}.out_layers.0") * (1 + scale) + shift
        hidden = self.conv(F.silu(hidden), f"{name}.out_layers.3")
        skip = f"{name}.skip_connection"
        return hidden + (self.conv(x, skip) if f"{skip}.weight" in self.weights else x)

    def time(self, t: float, name: str) -> Tensor:
        angle = t * 10000 ** (-torch.arange(128, dtype=torch.float64) / 128)
        hidden = self.linear(torch.cat([angle.cos(), angle.sin()]), f"{name}.mlp.0")
        return self.linear(F.gelu(hidden), f"{name}.mlp.2")

    def norm(self, x: Tensor, name: str) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"]).sqrt()
        return x / scale * self.weights[f"{name}.weight"]

    def group_norm(self, x: Tensor, name: str, eps: float = 1e-5) -> Tensor:
        return F.group_norm(x, 32, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"], eps)

    def conv(self, x: Tensor, name: str) -> Tensor:
        weight = self.weights[f"{name}.weight"]
        apply = F.conv3d if weight.ndim == 5 else F.conv2d
        return apply(x, weight, self.weights[f"{name}.bias"], padding=weight.shape[-1] // 2)

    def linear(self, x: Tensor, name: str) -> Tensor:
        bias = self.weights.get(f"{name}.bias")
        product = x @ self.weights[f"{name}.weight"].T
        return product if bias is None else product + bias

    # The VAE.

    def encoded(self, image: Tensor) -> Tensor:
        """Mean of the posterior [C, h, w], normalised, of an image [3, H, W] in [-1, 1]."""
        x = self.conv(image.double()[None, :, None].repeat(1, 1, 4, 1, 1), "vae.encoder.conv_in")
        for level in range(5):
            x = self.block(x, f"vae.encoder.down.{level}.block.0")
            if level < 4:
                frames = 2 if level >= 2 else 1
                folded = cells(x, frames)
                own = cells(self.conv(x, f"vae.encoder.down.{level}.downsample.conv"), frames)
                x = own + folded.view(1, own.shape[1], -1, *folded.shape[2:]).mean(2)
        x = self.middle(x, "vae.encoder.mid")
        end = self.conv(F.silu(self.group_norm(x, "vae.encoder.norm_out", 1e-6)), "vae.encoder.conv_out")
        end = end + x.view(1, end.shape[1], -1, *x.shape[2:]).mean(2)
        return end[0, : end.shape[1] // 2, 0] * self.config["vae"]["scaling_factor"]

    def decoded(self, latents: Tensor) -> Tensor:
        """Image [3, H, W] of normalised latents [C, h, w]."""
        z = latents.double()[None, :, None] / self.config["vae"]["scaling_factor"]
        x = self.conv(z, "vae.decoder.conv_in")
        x = self.middle(x + repeated(z, x.shape[1]), "vae.decoder.mid")
        for level in range(5):
            for number in range(2):
                x = self.block(x, f"vae.decoder.up.{level}.block.{number}")
            if level < 4:
                frames = 2 if level < 2 else 1
                more = self.conv(x, f"vae.decoder.up.{level}.upsample.conv")
                x = spread(more, frames) + spread(repeated(x, more.shape[1]), frames)
        end = self.conv(F.silu(self.group_norm(x, "vae.decoder.norm_out", 1e-6)), "vae.decoder.conv_out")
        return end[0, :, -1]

    def block(self, x: Tensor, name: str) -> Tensor:
        hidden = self.conv(F.silu(self.group_norm(x, f"{name}.norm1", 1e-6)), f"{name}.conv1")
        return x + self.conv(F.silu(self.group_norm(hidden, f"{name}.norm2", 1e-6)), f"{name}.conv2")

    def middle(self, x: Tensor, name: str) -> Tensor:
        x = self.block(x, f"{name}.block_1")
        normed = self.group_norm(x, f"{name}.attn_1.norm", 1e-6)
        q, k, v = (self.conv(normed, f"{name}.attn_1.{part}")[0].flatten(1).T for part in "qkv")
        seen = (q @ k.T / math.sqrt(q.shape[1])).softmax(-1) @ v
        x = x + self.conv(seen.T.reshape(x.shape), f"{name}.attn_1.proj_out")
        return self.block(x, f"{name}.block_2")


def repeated(x: Tensor, channels: int) -> Tensor:
    """Each channel, as often as makes this many."""
    return torch.stack([x[:, at * x.shape[1] // channels] for at in range(channels)], dim=1)


def cells(x: Tensor, frames: int) -> Tensor:
    """The elements of each cell, frame by frame, row by row, column by column, as channels."""
    parts = [x[:, :, f::frames, row::2, column::2] for f in range(frames) for row in range(2) for column in range(2)]
    return torch.cat(parts, dim=1)


def spread(x: Tensor, frames: int) -> Tensor:
    """The inverse of `cells`."""
    batch, channels, depth, height, width = x.shape
    result = x.new_zeros(batch, channels // (4 * frames), depth * frames, 2 * height, 2 * width)
    parts = iter(x.chunk(4 * frames, dim=1))
    for f in range(frames):
        for row in range(2):
            for column in range(2):
                result[:, :, f::frames, row::2, column::2] = next(parts)
    return result
