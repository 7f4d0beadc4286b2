"""Inputs of HunyuanImage-3.0: the sequence before a text or an image, and the frozen encoders of its images.

The bridge runs it in an engine's environment too, so it imports nothing that trains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from unirl.core.errors import RecipeError
from unirl.core.types.inputs import Inputs
from unirl.core.types.sampling import LatentSamplingConfig, TextSamplingConfig
from unirl.model_host.model_files import read_json
from unirl.model_host.unified.encoder import SequenceEncoder
from unirl.model_host.unified.sequence import Sampling, check_format, token_ids

from .checkpoint import CONFIG, Sizes, has_template
from .config import ImageOptions, TextOptions, resolutions
from .images import Images
from .module import Stand
from .sequence import NAMES, Context, Marks, moves

__all__ = ["Encoder"]


class Encoder(SequenceEncoder[Images]):
    """See `SequenceEncoder`; its conditions are those of `HunyuanImageModel`."""

    def __init__(
        self,
        folder: Path,
        *,
        files: Sequence[Path],
        sizes: Sizes,
        tokenizer: Any,
        batch: int,
        dtypes: tuple[torch.dtype, torch.dtype],
        device: torch.device,
    ) -> None:
        """Arguments as of `Images`. Raises RecipeError, key `model.path`, for a checkpoint that is not whole."""
        settings, vocabulary = read_json(folder / CONFIG), tokenizer.get_vocab()
        self._sizes, self._resolutions = sizes, resolutions(settings, vocabulary)
        ratios = [f"<img_ratio_{number}>" for number in range(len(self._resolutions.sizes))]
        names = {**NAMES, "size": f"<img_size_{self._resolutions.base}>"}
        names |= {key: getattr(tokenizer, f"{kind}_token") for key, kind in (("start", "bos"), ("end", "eos"))}
        ids = token_ids({**names, **{name: name for name in ratios}}, vocabulary, folder=folder)
        self.marks = Marks(**{name: ids[name] for name in names}, ratios=tuple(ids[name] for name in ratios))
        self.stand = Stand(sizes.vocab)
        self._has_roles = has_template(folder)
        images = Images(
            settings,
            folder=folder,
            files=files,
            resolutions=self._resolutions,
            batch=batch,
            dtypes=dtypes,
            device=device,
        )
        longest: int = settings.get("max_position_embeddings", 2**31)
        super().__init__(images=images, tokenizer=tokenizer, longest=longest, dtypes=dtypes, device=device)

    def latent_shape(self, sampling: LatentSamplingConfig) -> tuple[int, ...]:
        """[C, H / 16, W / 16]. Raises RecipeError for a size without a token of its ratio."""
        for reason in self._resolutions.problems(sampling):
            raise RecipeError(str(reason.under("sampling")))
        return (self._sizes.latent, *(side // self._resolutions.unit for side in (sampling.height, sampling.width)))

    def allowed(self, tokens: Tensor, *, options: Mapping[str, Any]) -> Mapping[int, Tensor]:
        """Where a text begins with a tag, a recaption follows the end of a thought."""
        if not options["begin"]:
            return {}
        ends: list[int] = (tokens == self.marks.think_end).nonzero()[:, 0].tolist()
        return {end + 1: torch.tensor([self.marks.recaption]) for end in ends}

    def sequence(self, inputs: Inputs, row: int, sampling: Sampling) -> Context:
        """The sequence of an input, up to what is generated. Raises RecipeError for settings that the format does not
        have."""
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
            tokenize=self.tokenized,
            sizes=self.images.tokens,
            has_roles=self._has_roles and chat,
            begin={"think": [marks.think], "recaption": [marks.recaption]}.get(options.begin, []),
            tokens=[marks.start],
        )
        context.add_system(system)
        context.turn_to("User")
        for ref in inputs.media[row]:
            context.add_image(ref)
        context.tokens += self.tokenized(text)
        if isinstance(options, ImageOptions) and not text:
            context.tokens += [marks.cfg] * options.cfg_tokens
        context.add_turns(turns)
        if isinstance(sampling, LatentSamplingConfig):
            self.latent_shape(sampling)
            ratio = self._resolutions.ratio(sampling.height, sampling.width)
            assert ratio is not None, "sizes without a ratio are refused"
            context.tokens += [marks.answer] if context.has_roles else []
            context.add_size(ratio)
        else:
            context.tokens += context.begin
        return context

    def sources(self, conditions: Mapping[str, Any]) -> tuple[tuple[Tensor, ...], list[list[Tensor]]]:
        """Latents [C, h, w] of each source image in the conditions of a batch, and of each row the moves of every
        image's latents and features."""
        latents: list[Tensor] = []
        moved: list[list[Tensor]] = []
        rows = zip(conditions["latents"], conditions["latent_sizes"], conditions["feature_sizes"], strict=True)
        for values, sizes, seen in rows:
            grids = _pairs(sizes)
            parts = values.split([height * width for height, width in grids])
            latents += [part.T.unflatten(1, grid) for part, grid in zip(parts, grids, strict=True)]
            own: list[Tensor] = []
            for grid, features in zip(grids, _pairs(seen), strict=True):
                own += [moves(*grid, grid[0] * grid[1]), moves(*features, self.images.features)]
            moved.append(own)
        return tuple(latents), moved


def _pairs(sizes: Tensor) -> Sequence[tuple[int, int]]:
    return [(int(height), int(width)) for height, width in sizes.tolist()]
