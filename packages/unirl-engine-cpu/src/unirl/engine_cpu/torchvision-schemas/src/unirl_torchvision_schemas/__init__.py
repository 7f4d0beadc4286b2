"""Lets a torchvision wheel that is linked with CUDA be imported beside a torch without it.

The wheel's compiled half cannot be loaded there. torchvision takes that, and then ends in `operator torchvision::nms
does not exist`, because it gives shapes to two operators that only the compiled half declares. Here they are declared
when that half is found missing. All that is written in Python (transforms, models, datasets) works then; a call of a
compiled operator is an error, as torchvision means it to be.

Where the compiled half loads, nothing is changed. Seen with torchvision 0.28 and torch 2.13.
"""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

__all__ = ["watch"]

USER = "torchvision._meta_registrations"
"""Module of torchvision that needs the declarations, imported after the attempt to load the compiled half."""
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
    """Finds no module; it is told which one is about to be imported."""

    _library: Any = None

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname == USER and self._library is None:
            import torch

            extension = sys.modules["torchvision.extension"]
            if not extension._has_ops():
                # Kept: the declarations go with it.
                self._library = torch.library.Library("torchvision", "FRAGMENT")
                for schema in SCHEMAS:
                    self._library.define(schema)
        return None
