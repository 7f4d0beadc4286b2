"""BAGEL's texts in vLLM, see `unirl.engines.vllm.bridge.Bridge`: its class of BAGEL, which has the experts of texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from unirl.model_host.model_files import read_json

from ..checkpoint import LANGUAGE, find

__all__ = ["BRIDGE", "BagelInVllm"]


class BagelInVllm:
    def checkpoint(self, model: Any, path: str) -> Path:
        return find(path) if path else model.folder

    def arguments(self, folder: Path) -> dict[str, Any]:
        # As the published code sets them, whatever the file says.
        language = {**read_json(folder / LANGUAGE), "qk_norm": True, "tie_word_embeddings": False}
        overrides = {
            "architectures": ["BagelForConditionalGeneration"],
            "llm_config": language,
            # No ViT: images are refused.
            "visual_und": False,
        }
        return {"hf_overrides": overrides, "language_model_only": True}

    def leaves_out(self, name: str) -> bool:
        return not name.startswith("language_model.") or "moe_gen" in name


BRIDGE = BagelInVllm()
