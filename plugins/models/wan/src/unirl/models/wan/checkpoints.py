"""The checkpoints of each of the Wan models, told apart by their JSON files. Imports no torch, so that recipes are
checked with it too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unirl.core.errors import RecipeError
from unirl.core.limits import Reason
from unirl.model_host.model_files import read_json

__all__ = ["WAN21", "WAN21_I2V", "WAN22", "WAN22_I2V", "WanCheckpoints"]

_FROM_TEXT, _FROM_FRAME = "WanPipeline", "WanImageToVideoPipeline"


@dataclass(frozen=True, kw_only=True)
class WanCheckpoints:
    """The checkpoints of one of the models."""

    model: str
    """Name of the model in recipes."""
    title: str
    """Name of the model in errors."""
    from_frame: bool
    """Whether videos begin with a given first frame."""
    experts: tuple[str, ...]
    """Transformers: one in Wan 2.1, two in Wan 2.2."""
    other: str
    """Name of the model for the other task, with the same experts."""
    example: str
    """A hub id of one."""

    @property
    def pipeline(self) -> str:
        """Name of diffusers' class."""
        return _FROM_FRAME if self.from_frame else _FROM_TEXT

    @property
    def siblings(self) -> Mapping[str, str]:
        """Name of the class for the other task -> the model that loads its checkpoints."""
        return {_FROM_TEXT if self.from_frame else _FROM_FRAME: self.other}

    def check(self, folder: Path, index: Mapping[str, Any]) -> None:
        """Raise RecipeError, key `model.path`, for a checkpoint of another task or generation. index: content of
        `model_index.json`."""
        if misfit := self._misfit(folder, index):
            raise RecipeError(f"model.path: {misfit}")

    def problems(self, path: str) -> Iterator[Reason]:
        """The same as a reason to refuse a recipe, for a checkpoint in a local folder."""
        folder = Path(path).expanduser()
        files = [folder / "model_index.json", *(folder / part / "config.json" for part in self.experts)]
        if not files[0].is_file():
            return
        index = read_json(files[0])
        kind = str(index.get("_class_name"))
        if kind in self.siblings:
            text = f"got a checkpoint of {kind!r}, expected one of {self.pipeline!r}. Choose model={self.other}, or "
            yield Reason(key=".path", text=f"{text}another checkpoint.")
        # Loading reports what is missing.
        elif all(file.is_file() for file in files) and (misfit := self._misfit(folder, index)):
            yield Reason(key=".path", text=misfit)

    def _misfit(self, folder: Path, index: Mapping[str, Any]) -> str:
        """Why the checkpoint is not one of this model; empty if it is."""
        purpose = "image to video" if self.from_frame else "text to video"
        is_22 = len(self.experts) > 1
        end = f"; expected {'the two experts of Wan 2.2' if is_22 else 'Wan 2.1'} for {purpose}, such as "
        end += f"{self.example!r}."
        if index.get("expand_timesteps"):
            # The noise of a step and its log-prob would have to leave that frame out.
            frame = ", whose first frame is a part of the latents at timestep 0" if self.from_frame else ""
            return f"{str(folder)!r} is a Wan 2.2 of one expert, by its expand_timesteps{frame}{end}"
        if not is_22 and index.get("boundary_ratio"):
            return f"{str(folder)!r} is a checkpoint for Wan 2.2, by its boundary_ratio{end}"
        for part in self.experts:
            if not index.get(part) or index[part][0] is None:
                return f"{str(folder)!r} has no {part} by its model_index.json{end}"
            settings = read_json(folder / part / "config.json")
            if other := self._other_purpose(settings, mask_channels=_mask_channels(folder)):
                return f"{str(folder)!r} is a checkpoint for {other}{end}"
        boundary = index.get("boundary_ratio")
        if is_22 and not (isinstance(boundary, int | float) and 0 < boundary < 1):
            return (
                f"{str(folder)!r} has boundary_ratio {boundary!r} in its model_index.json, the sigma at which the "
                "experts change; expected a number between 0 and 1. Fetch the checkpoint again."
            )
        return ""

    def _other_purpose(self, settings: Mapping[str, Any], *, mask_channels: int) -> str:
        """The purpose of a transformer that does not fit, and the key that shows it; empty if it fits."""
        given, result = settings.get("in_channels", 16), settings.get("out_channels", 16)
        features = [key for key in ("image_dim", "added_kv_proj_dim") if settings.get(key)]
        if not self.from_frame:
            by = f"in_channels = {given}" if given != result else ""
            by = features[0] if features else by
            return f"image to video, by its {by}" if by else ""
        if given == result:
            return f"text to video, by its in_channels = {given}"
        # Noise, the mask, and the first frame.
        if given != 2 * result + mask_channels:
            return f"another condition than a first frame, by its in_channels = {given} of {result} out_channels"
        if settings.get("pos_embed_seq_len"):
            return "a first and a last frame, by its pos_embed_seq_len"
        if features and len(self.experts) > 1:
            return f"Wan 2.1, by its {features[0]}"
        return ""


def _mask_channels(folder: Path) -> int:
    """Channels of the mask of given frames: one for each frame in a latent frame, 4 in the published checkpoints."""
    file = folder / "vae" / "config.json"
    return int(read_json(file).get("scale_factor_temporal", 4)) if file.is_file() else 4


_ONE, _TWO = ("transformer",), ("transformer", "transformer_2")
WAN21 = WanCheckpoints(
    model="wan21",
    title="Wan 2.1",
    from_frame=False,
    experts=_ONE,
    other="wan21-i2v",
    example="Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
)
WAN21_I2V = WanCheckpoints(
    model="wan21-i2v",
    title="Wan 2.1 I2V",
    from_frame=True,
    experts=_ONE,
    other="wan21",
    example="Wan-AI/Wan2.1-I2V-14B-480P-Diffusers",
)
WAN22 = WanCheckpoints(
    model="wan22",
    title="Wan 2.2",
    from_frame=False,
    experts=_TWO,
    other="wan22-i2v",
    example="Wan-AI/Wan2.2-T2V-A14B-Diffusers",
)
WAN22_I2V = WanCheckpoints(
    model="wan22-i2v",
    title="Wan 2.2 I2V",
    from_frame=True,
    experts=_TWO,
    other="wan22",
    example="Wan-AI/Wan2.2-I2V-A14B-Diffusers",
)
