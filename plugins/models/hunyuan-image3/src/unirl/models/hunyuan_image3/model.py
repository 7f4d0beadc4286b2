"""HunyuanImage-3.0 as a text stage and as a diffusion stage of one transformer.

Source: HunyuanImage 3.0 Technical Report, arXiv 2509.23951.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from unirl.core.errors import RecipeError
from unirl.core.types.inputs import Inputs
from unirl.core.types.sampling import LatentSamplingConfig, TextSamplingConfig
from unirl.model_host.lazy_weights import weight_files
from unirl.model_host.model_files import dtype_of, read_json
from unirl.model_host.unified.model import UnifiedModel
from unirl.model_host.unified.sequence import Sampling, check_format, token_ids

from .checkpoint import CONFIG, find, has_template, sizes_of
from .config import HunyuanImageConfig, ImageOptions, TextOptions, resolutions
from .images import Images
from .module import HunyuanImage, Stand, expert_pieces
from .plugin import SPEC
from .sequence import NAMES, Context, Marks, layout, moves

__all__ = ["HunyuanImageModel", "build"]

_TIMESTEPS = 1000


def build(config: HunyuanImageConfig, *, device: Any, lazy: bool = False) -> HunyuanImageModel:
    """The model, its ViT and VAE frozen. Raises RecipeError when the checkpoint or a setting is wrong."""
    return HunyuanImageModel(config, device=torch.device(device), lazy=lazy)


class HunyuanImageModel(UnifiedModel[Images]):
    """Both tracks read one sequence: the system prompt, source images, the prompt's text, the turns. The numbers of
    `Stand` in its tokens stand for timesteps, VAE latents and ViT features.

    Latents: [C, H / 16, W / 16], the VAE's, normalised.
    Conditions: `latents` n times [S, C] and `latent_sizes` n times [K, 2], `features` n times [M, V] and
    `feature_sizes` n times [K, 2], of the K source images; those of an image also have `tokens`, n times [P], the
    sequence. None depends on weights that train.
    """

    spec = SPEC
    images: Images

    def __init__(self, config: HunyuanImageConfig, *, device: torch.device, lazy: bool) -> None:
        folder = find(config.path, revision=config.revision)
        self.sizes, settings = sizes_of(folder), read_json(folder / CONFIG)
        files = weight_files(folder, "model")
        super().__init__(
            config,
            folder=folder,
            files=files,
            make=lambda: HunyuanImage(self.sizes),
            rows=self.sizes.vocab,
            pieces=expert_pieces,
            device=device,
            lazy=lazy,
        )
        self.stand = Stand(self.sizes.vocab)
        self.resolutions = resolutions(settings, self.vocabulary)
        ratios = [f"<img_ratio_{number}>" for number in range(len(self.resolutions.sizes))]
        names = {**NAMES, "size": f"<img_size_{self.resolutions.base}>"}
        names |= {key: getattr(self.tokenizer, f"{kind}_token") for key, kind in (("start", "bos"), ("end", "eos"))}
        ids = token_ids({**names, **{name: name for name in ratios}}, self.vocabulary, folder=folder)
        self.marks = Marks(**{name: ids[name] for name in names}, ratios=tuple(ids[name] for name in ratios))
        self._longest = settings.get("max_position_embeddings", self._longest)
        self._has_roles = has_template(folder)
        vision_dtype, vae_dtype = (
            dtype_of(getattr(config, key), key=f"model.{key}", model=self.spec.name)
            for key in ("vision_dtype", "vae_dtype")
        )
        self.images = Images(
            settings,
            folder=folder,
            files=files,
            resolutions=self.resolutions,
            batch=config.decode_batch,
            dtypes=(vision_dtype, vae_dtype),
            device=device,
        )

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """The end of a text, of a recaption and of an answer: what follows the last two is an image."""
        return self.marks.end, self.marks.recaption_end, self.marks.answer_end

    @property
    def hidden_size(self) -> int:
        return self.sizes.width

    def allowed(self, tokens: Tensor, *, options: Mapping[str, Any]) -> Mapping[int, Tensor]:
        """Where a text begins with a tag, a recaption follows the end of a thought."""
        if not options["begin"]:
            return {}
        ends: list[int] = (tokens == self.marks.think_end).nonzero()[:, 0].tolist()
        return {end + 1: torch.tensor([self.marks.recaption]) for end in ends}

    def velocity(self, x: Tensor, sigma: Tensor, conditions: Mapping[str, Any]) -> Tensor:
        """Velocity x1 - x0 of latents [B, C, h, w], each row behind its own sequence."""
        height, width = x.shape[2:]
        count = height * width
        # The mark after an image sees it, and is seen by nothing.
        tokens, keep = self._behind(conditions["tokens"], [self.stand.time, *[self.stand.noisy] * count])
        positions, blocks = self._layout(tokens, keep)
        sources, own = self._moves(conditions), moves(height, width, count)
        images = {
            **self._sources(conditions),
            "noisy": x,
            "timesteps": _TIMESTEPS * sigma.float(),
            "moves": torch.cat([part for row in sources for part in (*row, own)]).to(self.device),
        }
        with self._precision():
            output: Tensor = self.transformer(
                "velocity", tokens=tokens, keep=keep, positions=positions, blocks=blocks, images=images
            )
        return output.float()

    def latent_shape(self, sampling: LatentSamplingConfig) -> tuple[int, ...]:
        """[C, H / 16, W / 16]. Raises RecipeError for a size without a token of its ratio."""
        for reason in self.resolutions.problems(sampling):
            raise RecipeError(str(reason.under("sampling")))
        return (self.sizes.latent, *(side // self.resolutions.unit for side in (sampling.height, sampling.width)))

    def _sequence(self, inputs: Inputs, row: int, sampling: Sampling) -> Context:
        text, turns = inputs.texts[row], () if inputs.turns is None else inputs.turns[row]
        marks = self.marks
        if isinstance(sampling, TextSamplingConfig):
            check_format(sampling, inputs)
            options, system, chat = TextOptions(**sampling.options), sampling.system_prompt, sampling.chat
        else:
            options, chat = ImageOptions(**sampling.options), True
            system = options.system_prompt
        context = Context(
            marks=marks,
            stand=self.stand,
            tokenize=self._tokenized,
            sizes=self.images.tokens,
            has_roles=self._has_roles and chat,
            begin={"think": [marks.think], "recaption": [marks.recaption]}.get(options.begin, []),
            tokens=[marks.start],
        )
        context.add_system(system)
        context.turn_to("User")
        for ref in inputs.media[row]:
            context.add_image(ref)
        context.tokens += self._tokenized(text)
        if isinstance(options, ImageOptions) and not text:
            context.tokens += [marks.cfg] * options.cfg_tokens
        context.add_turns(turns)
        if isinstance(sampling, LatentSamplingConfig):
            self.latent_shape(sampling)
            ratio = self.resolutions.ratio(sampling.height, sampling.width)
            assert ratio is not None, "sizes without a ratio are refused"
            context.tokens += [marks.answer] if context.has_roles else []
            context.add_size(ratio)
        else:
            context.tokens += context.begin
        return context

    def _layout(self, tokens: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
        return layout(tokens, keep, marks=self.marks, stand=self.stand)

    def _sources(self, conditions: Mapping[str, Any]) -> dict[str, Any]:
        moved = self._moves(conditions) if conditions else []
        if not any(moved):
            return {}
        latents: list[Tensor] = []
        for values, sizes in zip(conditions["latents"], conditions["latent_sizes"], strict=True):
            grids = _pairs(sizes)
            parts = values.split([height * width for height, width in grids])
            latents += [part.T.unflatten(1, grid) for part, grid in zip(parts, grids, strict=True)]
        return {
            "latents": tuple(latents),
            "features": torch.cat([*conditions["features"]]),
            "moves": torch.cat([part for row in moved for part in row]).to(self.device),
        }

    def _moves(self, conditions: Mapping[str, Any]) -> list[list[Tensor]]:
        """Moves of each source image's latents and features, of each row."""
        result: list[list[Tensor]] = []
        for latents, features in zip(conditions["latent_sizes"], conditions["feature_sizes"], strict=True):
            row: list[Tensor] = []
            for grid, seen in zip(_pairs(latents), _pairs(features), strict=True):
                row += [moves(*grid, grid[0] * grid[1]), moves(*seen, self.images.features)]
            result.append(row)
        return result


def _pairs(sizes: Tensor) -> Sequence[tuple[int, int]]:
    return [(int(height), int(width)) for height, width in sizes.tolist()]
