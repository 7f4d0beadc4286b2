"""Lets a CUDA build of torchvision be imported with a CPU build of torch.

The wheel's compiled extension cannot be loaded then. torchvision tolerates that, but fails with
`operator torchvision::nms does not exist`, because it registers shapes for two operators that only the extension
declares. This package declares them if the extension is missing. Everything written in Python (transforms, models,
datasets) then works; calling a compiled operator is an error, as torchvision intends.

If the extension loads, nothing changes. Tested with torchvision 0.28 and torch 2.13.
"""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

__all__ = ["watch"]

USER = "torchvision._meta_registrations"
"""Module of torchvision that needs the declarations, imported after the attempt to load the extension."""
SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


def watch() -> None:
    """Declare the operators just before torchvision needs them. Light: imports neither torch nor torchvision."""
    # Python may run the line of a .pth file twice in a virtual environment.
    if not any(isinstance(finder, _Watcher) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watcher())


class _Watcher(MetaPathFinder):
    """Finds no module; it only observes which one is about to be imported."""

    _library: Any = None

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname == USER and self._library is None:
            import torch

            extension = sys.modules["torchvision.extension"]
            if not extension._has_ops():
                # Kept alive: the declarations are removed with it.
                self._library = torch.library.Library("torchvision", "FRAGMENT")
                for schema in SCHEMAS:
                    self._library.define(schema)
        return None
