"""`unirl export`: the weights of a run as diffusers, transformers, peft, ComfyUI or kohya's tools load them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
from unirl.core.cli.discovery import allow_code_option

if TYPE_CHECKING:
    from .adapters import Layout

__all__ = ["command"]


@click.command("export")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--to", required=True, type=click.Path(path_type=Path), help="Folder to write; it must not exist.")
@click.option("--merge", is_flag=True, help="Fold the LoRA adapters into the base weights and write all components.")
@click.option("--step", type=click.IntRange(0), help="Step of the checkpoint; the last one by default.")
@click.option(
    "--policy",
    type=click.Choice(["live", "ema"]),
    default="live",
    show_default=True,
    help="The trained weights, or their moving average.",
)
@click.option("--model", help="Which model, in a run that trains several.")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    help="Dtype of the exported weights; by default float32 for adapters, else that of the base checkpoint.",
)
@click.option(
    "--layout",
    type=click.Choice(["diffusers", "peft", "comfy", "kohya", "original"]),
    help="Names of the adapters' layers; by default diffusers for its pipelines, and peft for language models.",
)
@click.option("--push", metavar="OWNER/NAME", help="Upload it to this repository of the Hugging Face Hub.")
@click.option("--public", is_flag=True, help="With --push, make a new repository public; it is private otherwise.")
@allow_code_option
def command(
    run: Path,
    to: Path,
    merge: bool,
    step: int | None,
    policy: str,
    model: str | None,
    dtype: str | None,
    layout: Layout | None,
    push: str | None,
    public: bool,
) -> None:
    """Export a checkpoint of RUN, a run folder, with a model card.

    LoRA adapters are written alone, for `load_lora_weights` of diffusers, for peft, or in another --layout; with
    --merge, and after full training, a complete checkpoint is written, for `from_pretrained`. Runs on the CPU.
    """
    from unirl.core.cli.discovery import discover

    from .exporting import export
    from .push import check_push
    from .push import push as upload

    if public and push is None:
        raise click.UsageError(
            "--public says who may see what --push uploads; give --push OWNER/NAME, or leave it out."
        )
    if push is not None:
        check_push(push)
    source = export(
        run,
        to,
        catalog=discover(),
        merge=merge,
        step=step,
        policy="ema" if policy == "ema" else "live",
        model=model,
        dtype=dtype,
        layout=layout,
        name=push,
    )
    content = "adapters" if source.has_adapters and not merge else "a complete checkpoint"
    sys.stdout.write(f"exported  {content} of step {source.checkpoint.step}\nfolder    {to}\n")
    if push is not None:
        sys.stdout.write(f"pushed    {upload(to, push, public=public, step=source.checkpoint.step)}\n")
