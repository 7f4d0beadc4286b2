"""Inputs of BAGEL: the sequence before a text or an image, and the frozen encoders of its images.

The bridge runs it in an engine's environment too, so it imports nothing that trains.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from unirl.core.errors import RecipeError
from unirl.core.types.inputs import Inputs
from unirl.core.types.sampling import LatentSamplingConfig, TextSamplingConfig
from unirl.model_host.model_files import read_json
from unirl.model_host.unified.encoder import SequenceEncoder
from unirl.model_host.unified.sequence import Sampling, check_format, token_ids

from .checkpoint import CONFIG, LANGUAGE, Sizes
from .config import ImageOptions, TextOptions, image_sizes
from .images import Images
from .sequence import Context, Marks

__all__ = ["Encoder"]

_NAMES = {"start": "im_start", "end": "im_end", "image_start": "vision_start", "image_end": "vision_end"}


class Encoder(SequenceEncoder[Images]):
    """See `SequenceEncoder`; its conditions are those of `BagelModel`."""

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
        settings, names = read_json(folder / CONFIG), {key: f"<|{name}|>" for key, name in _NAMES.items()}
        ids = token_ids(names, tokenizer.get_vocab(), folder=folder)
        self.marks = Marks(**ids, latent=sizes.vocab, feature=sizes.vocab + 1)
        self._sizes, self._image_sizes = sizes, image_sizes(settings)
        images = Images(
            folder,
            files=files,
            sizes=sizes,
            images=self._image_sizes,
            patch=settings.get("latent_patch_size", 2),
            batch=batch,
            dtypes=dtypes,
            device=device,
        )
        longest: int = read_json(folder / LANGUAGE).get("max_position_embeddings", 2**31)
        super().__init__(images=images, tokenizer=tokenizer, longest=longest, dtypes=dtypes, device=device)

    def latent_shape(self, sampling: LatentSamplingConfig) -> tuple[int, ...]:
        """[p p C, H / 16, W / 16]. Raises RecipeError, with the nearest size that fits, for any other."""
        for reason in self._image_sizes.problems(sampling):
            raise RecipeError(str(reason.under("sampling")))
        return (self._sizes.latent, *self._image_sizes.latent(sampling))

    def sequence(self, inputs: Inputs, row: int, sampling: Sampling) -> Context:
        """The sequence of an input, up to what is generated. Raises RecipeError for settings that the format does not
        have."""
        text, turns = inputs.texts[row], () if inputs.turns is None else inputs.turns[row]
        context = Context(marks=self.marks, tokenize=self.tokenized, sizes=self.images.tokens)
        with_latents, chat = True, True
        is_text = isinstance(sampling, TextSamplingConfig)
        if is_text:
            check_format(sampling, inputs)
            system, chat = sampling.system_prompt, sampling.chat
            with_latents = TextOptions(**sampling.options).sources == "all"
        else:
            system = ImageOptions(**sampling.options).system_prompt
        context.add_text(system)
        for ref in inputs.media[row]:
            context.add_image(ref, with_latents=with_latents)
        if chat:
            context.add_text(text)
        else:
            context.tokens += self.tokenized(text)
        context.add_turns(turns, with_latents=with_latents)
        if is_text and chat:
            context.tokens.append(self.marks.start)
        return context
