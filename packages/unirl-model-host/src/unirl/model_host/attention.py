"""Implementations of attention by the names that diffusers and transformers give them, and why one cannot be used here.

Imports neither library: recipes are checked with it, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from typing import TYPE_CHECKING

from unirl.core.limits import Reason

if TYPE_CHECKING:
    from unirl.core.specs.part_config import PartConfig
    from unirl.core.specs.plan import Plan, Stage

__all__ = ["OF_DIFFUSERS", "OF_TRANSFORMERS", "Attention", "attention_problems", "is_flash"]


@dataclass(frozen=True, kw_only=True)
class Attention:
    """An implementation of attention."""

    dist: str = ""
    """The package that it needs besides torch, as pip names it."""
    has_gradient: bool = True


_TORCH = Attention()
_HUB = Attention(dist="kernels")
_HUB_FORWARD, _SAGE = Attention(dist="kernels", has_gradient=False), Attention(dist="sageattention", has_gradient=False)

OF_DIFFUSERS: Mapping[str, Attention] = {
    "native": _TORCH,
    "_native_cudnn": _TORCH,
    "_native_efficient": _TORCH,
    "_native_flash": _TORCH,
    "_native_math": _TORCH,
    "_native_npu": Attention(dist="torch-npu"),
    "_native_xla": Attention(dist="torch-xla"),
    "flex": _TORCH,
    "flash": Attention(dist="flash-attn"),
    "flash_varlen": Attention(dist="flash-attn"),
    "flash_hub": _HUB,
    "flash_varlen_hub": _HUB,
    # An operator of diffusers without a backward pass; `_flash_3_hub` has one.
    "_flash_3": Attention(dist="flash-attn-3", has_gradient=False),
    "_flash_varlen_3": Attention(dist="flash-attn-3"),
    "_flash_3_hub": _HUB,
    "_flash_3_varlen_hub": _HUB,
    "flash_4_hub": _HUB,
    "aiter_fa2_hub": _HUB_FORWARD,
    "xformers": Attention(dist="xformers"),
    "sage": _SAGE,
    "sage_varlen": _SAGE,
    "_sage_qk_int8_pv_fp8_cuda": _SAGE,
    "_sage_qk_int8_pv_fp8_cuda_sm90": _SAGE,
    "_sage_qk_int8_pv_fp16_cuda": _SAGE,
    "_sage_qk_int8_pv_fp16_triton": _SAGE,
    "sage_hub": _HUB_FORWARD,
    "sage_blackwell_hub": _HUB_FORWARD,
}
"""Names of `set_attention_backend` (diffusers 0.40 to 0.42)."""

OF_TRANSFORMERS: Mapping[str, Attention] = {
    "sdpa": _TORCH,
    "eager": _TORCH,
    "flash_attention_2": Attention(dist="flash-attn"),
    # Without their package transformers takes a kernel of the hub, that of 3 without a backward pass.
    "flash_attention_3": Attention(dist="flash-attn-3"),
    "flash_attention_4": Attention(dist="flash-attn-4"),
    "flex_attention": _TORCH,
    "kernels-community/flash-attn2": _HUB,
    "kernels-community/flash-attn3": _HUB,
    "kernels-community/flash-attn4": _HUB,
    "kernels-community/vllm-flash-attn3": _HUB_FORWARD,
}
"""Names of `attn_implementation` (transformers 5.12 to 5.22), with kernels of the hub."""

_BATCH_INVARIANT = ("auto", "sdpa", "eager", "native", "_native_math")


def attention_problems(
    config: PartConfig, name: str | None, known: Mapping[str, Attention], *, plan: Plan | None, stage: Stage | None
) -> Iterator[Reason]:
    """Why attention of this name cannot be used here: unknown to the library, not installed, without a backward pass in
    a model that trains, or in a batch-invariant run that does not check it.

    config: of the model, whose setting `attention` it is; None is the library's choice.  known: the library's names.
    """
    if name is None:
        return
    trains = stage is not None and stage.backend is not None and stage.model.config is config
    usable = [one for one, its in known.items() if (its.has_gradient or not trains) and _is_installed(its.dist)]
    text, advice = "", f"or use one of {', '.join(usable)}."
    if name not in known:
        text = f"got {name!r}, expected one of {', '.join(known)}."
    elif trains and not known[name].has_gradient:
        text = f"got {name!r}, which has no backward pass, but the model trains. Leave it out, {advice}"
    elif not _is_installed(known[name].dist):
        text = f"got {name!r}, which needs {known[name].dist}, but that is not installed. Install it, {advice}"
    elif plan is not None and plan.run.batch_invariant and name not in _BATCH_INVARIANT:
        usable = [one for one in known if one in _BATCH_INVARIANT]
        text = f"got {name!r} with run.batch_invariant, which checks torch's alone. Use one of {', '.join(usable)}."
    if text:
        yield Reason(key=".attention", text=text)


def is_flash(name: str) -> bool:
    """Whether attention of transformers of this name leaves padding out and takes packed rows by their offsets."""
    return "flash" in name


def _is_installed(dist: str) -> bool:
    try:
        return not dist or bool(distribution(dist))
    except PackageNotFoundError:
        return False
