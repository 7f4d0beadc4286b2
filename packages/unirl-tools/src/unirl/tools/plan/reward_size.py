"""Bytes that a reward holds on its device, from the names and shapes in its checkpoints."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open

if TYPE_CHECKING:
    from unirl.core.specs.memory import RewardProcesses
    from unirl.core.specs.part_config import RewardConfig
    from unirl.core.specs.plan import Choice, Plan, Stage
    from unirl.core.specs.spec import RewardSpec

__all__ = ["RewardMemory", "device_bytes"]


class RewardMemory:
    """Weights of the rewards of a plan, by the devices that they are on."""

    def __init__(self, plan: Plan, stage: Stage, pools: Sequence[RewardProcesses]) -> None:
        """pools: the launcher's reward processes; none where the process that trains scores."""
        self._plan, self._stage, self._pools = plan, stage, pools
        self._bytes = {name: device_bytes(choice) for name, choice in plan.rewards.items()}

    def workers(self) -> list[tuple[RewardProcesses, dict[str, int]]]:
        """The reward processes that hold weights on a device, with the bytes of each reward, by its key."""
        items = [(pool, self._items(pool.rewards)) for pool in self._pools if pool.device != "none"]
        return [(pool, held) for pool, held in items if held]

    def beside(self) -> dict[str, int]:
        """Those in processes that share the device of a train rank."""
        return self._items([name for pool in self._pools if pool.device == "shared" for name in pool.rewards])

    def on_train_device(self) -> dict[str, int]:
        """`beside`, and those that a train rank builds: all where it scores, else those with a gradient in the loss."""
        own = list(self._bytes) if not self._pools else [name for name in self._stage.rewards if self._is_in_loss(name)]
        result = self.beside()
        for key, held in self._items(own).items():
            result[key] = result.get(key, 0) + held
        return result

    def notes(self) -> list[str]:
        """What is not counted."""
        choices = self._plan.rewards
        unknown = [choice.key for name, choice in choices.items() if self._bytes[name] is None]
        result = [f"weights of {', '.join(unknown)}, which cannot be read on this machine"] if unknown else []
        if any(self._bytes[name] != 0 for name in self._stage.rewards if self._is_in_loss(name)):
            result.append("activations of rewards whose gradient the loss takes")
        return result

    def _is_in_loss(self, name: str) -> bool:
        return self._stage.needs.reward == "differentiable" and bool(self._plan.rewards[name].config.weight)

    def _items(self, names: Sequence[str]) -> dict[str, int]:
        return {self._plan.rewards[name].key: held for name in names if (held := self._bytes.get(name))}


def device_bytes(choice: Choice[RewardSpec, RewardConfig]) -> int | None:
    """Weights of a reward on its device: every element of its checkpoints, in the dtype that it loads them in. 0 for a
    reward that computes on the CPU; None where a checkpoint cannot be read on this machine."""
    with choice.attributed():
        weights = choice.config.device_weights()
    total = 0
    for key, dtype in weights.items():
        try:
            files = _files(str(getattr(choice.config, key.removeprefix("."))))
            if not (files and dtype):
                return None
            total += sum(map(_elements, files)) * getattr(torch, dtype).itemsize
        except (OSError, RuntimeError, ValueError, SafetensorError, pickle.UnpicklingError):
            # Loading reports a damaged file.
            return None
    return total


def _files(path: str) -> list[Path]:
    """Files with weights of a file, a folder, or a hub id in the local cache, which may be `owner/name/file`."""
    place = Path(path).expanduser()
    if path and not place.exists() and path.count("/"):
        owner, name, *inside = path.split("/")
        try:
            place = Path(snapshot_download(f"{owner}/{name}", local_files_only=True)).joinpath(*inside)
        except (OSError, ValueError):
            return []
    if place.is_file():
        return [place]
    for index in place.glob("*.safetensors.index.json"):
        places: Mapping[str, str] = json.loads(index.read_text(encoding="utf-8")).get("weight_map", {})
        return [place / name for name in sorted(set(places.values()))]
    if found := sorted(place.glob("*.safetensors")):
        whole = place / "model.safetensors"
        return [whole] if whole in found else found
    pickled = [file for ending in ("bin", "pt", "pth") for file in place.rglob(f"*.{ending}")]
    return [max(pickled, key=lambda file: file.stat().st_size)] if pickled else []


def _elements(file: Path) -> int:
    if file.suffix == ".safetensors":
        with safe_open(file, framework="np") as opened:
            return sum(math.prod(opened.get_slice(name).get_shape()) for name in opened.keys())  # noqa: SIM118
    load = cast(Any, torch.load)
    state = load(file, map_location="meta", weights_only=True, mmap=True)
    values = state.get("state_dict", state).values()
    return sum(value.numel() for value in values if isinstance(value, torch.Tensor))
