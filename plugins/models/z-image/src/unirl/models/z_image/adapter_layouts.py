"""Names of adapted layers of Z-Image in ComfyUI, which fuses attention, and in musubi-tuner, which does not."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unirl.core.specs.spec import AdapterNames

__all__ = ["FUSED", "SPLIT"]

_OTHERS: AdapterNames = {
    name: (name,)
    for name in ("{}.feed_forward.w1", "{}.feed_forward.w2", "{}.feed_forward.w3", "{}.adaLN_modulation.0")
}

FUSED: AdapterNames = {
    "{}.attention.qkv": tuple(f"{{}}.attention.to_{part}" for part in "qkv"),
    "{}.attention.out": ("{}.attention.to_out.0",),
    **_OTHERS,
}
SPLIT: AdapterNames = {"{}.attention.{}": ("{}.attention.{}",), **_OTHERS}
