"""Questions as a checkpoint reads them, through its processor and chat template."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoImageProcessor, AutoProcessor, AutoTokenizer
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING
from transformers.utils.hub import cached_file
from unirl.core.errors import RewardFailed
from unirl.model_host.chat_templates import render_chat
from unirl.model_host.model_files import read_json

from .question import Question

__all__ = ["Chat", "missing_weights"]


class Chat:
    """One user turn for each question: its images, then its text."""

    def __init__(self, path: str, *, key: str, device: Any, dtype: torch.dtype, control_tokens: Sequence[str] = ()):
        """path: folder or hub id of the checkpoint; one of texts alone has no processor but its tokenizer.
        control_tokens: refused in questions besides the checkpoint's own.

        Raises OSError, ValueError or KeyError for a checkpoint that is not whole.
        """
        self._path, self._key, self._device, self._dtype = path, key, device, dtype
        self.processor = _load_processor(path)
        self.tokenizer: Any = getattr(self.processor, "tokenizer", self.processor)
        self._reads_images = self.tokenizer is not self.processor
        self.control_tokens = (*self.tokenizer.all_special_tokens, *control_tokens)
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token

    def check(self, text: str) -> None:
        """Raises RewardFailed for a text with a control token: it could write the answer."""
        special = next((word for word in self.control_tokens if word in text), None)
        if special is not None:
            raise RewardFailed(
                f"{self._key}: the question {text[:200]!r} holds {special!r}, a control token of {self._path!r}. Take "
                "it out of the prompt."
            )

    def inputs(self, questions: Sequence[Question], *, opening: str = "") -> Any:
        """Model inputs of the questions, padded on the left: every row ends where its answer begins.

        opening: how each answer begins.
        """
        chats: list[Any] = []
        for question in questions:
            shown = [{"type": "image"} for _ in question.images]
            parts = [*shown, {"type": "text", "text": question.text}] if self._reads_images else question.text
            chats.append([{"role": "user", "content": parts}])
        texts = [
            render_chat(self.processor, chat, key=f"{self._key}.model", add_generation_prompt=True) for chat in chats
        ]
        images = [list(question.images) for question in questions]
        begins: str | None = self.tokenizer.bos_token
        inputs = self.processor(
            text=[text + opening for text in texts],
            **({"images": images} if any(images) else {}),
            # A template that writes the first token itself is not given it twice.
            add_special_tokens=begins is None or not texts[0].startswith(begins),
            padding=True,
            padding_side="left",
            return_tensors="pt",
        )
        # A tokenizer's result has no floats to convert, nor a place for their dtype.
        return inputs.to(self._device, self._dtype) if self._reads_images else inputs.to(self._device)


def missing_weights(names: Sequence[str]) -> str:
    """The first of these names, and how many more there are."""
    return f"{names[0]!r}{f' and {len(names) - 1} more' if names[1:] else ''}"


def _load_processor(path: str) -> Any:
    """The checkpoint's processor, for images alone, which are resized by Pillow.

    A processor of videos needs torchvision, and no judge is given one: videos are sent as frames.
    """
    cls: Any = PROCESSOR_MAPPING.get(type(AutoConfig.from_pretrained(path, trust_remote_code=False)), None)
    if cls is None or "video_processor" not in cls.get_attributes():
        return AutoProcessor.from_pretrained(path, trust_remote_code=False)

    class WithoutVideos(cls):
        def check_argument_for_proper_class(self, argument_name: str, argument: object) -> Any:
            if argument_name == "video_processor" and argument is None:
                return None
            return super().check_argument_for_proper_class(argument_name, argument)

    tokenizer: Any = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    # Older checkpoints have a template of the processor beside the tokenizer's, which may know no images.
    file = cached_file(path, "chat_template.json", _raise_exceptions_for_missing_entries=False)
    chat_template = read_json(Path(file))["chat_template"] if file else tokenizer.chat_template
    return WithoutVideos(
        image_processor=AutoImageProcessor.from_pretrained(path, backend="pil", trust_remote_code=False),
        tokenizer=tokenizer,
        video_processor=None,
        chat_template=chat_template,
    )
