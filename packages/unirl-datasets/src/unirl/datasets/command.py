"""`unirl data`: prompt files from published data sets."""

from __future__ import annotations

from pathlib import Path

import click
from unirl.core.cli.output import console, print_json

from .example import INSTRUCTION
from .sets import SETS, prompt_set

__all__ = ["command"]

_SETS = "\n\n".join(f"\b\n{one.name}\n  {one.summary}" for one in SETS.values())


@click.group("data")
def command() -> None:
    """Make prompt files from published data sets."""


@command.command("convert", epilog=f"Sets:\n\n{_SETS}")
@click.argument("name", metavar="SET")
@click.argument("sources", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--instruction",
    help=f"Appended to every question; may be empty.  [default: {INSTRUCTION}; none for sets of edits]",
)
@click.option("--overwrite", is_flag=True, help="Replace OUT if it exists.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def convert_command(
    name: str, sources: tuple[Path, ...], out: Path, instruction: str | None, overwrite: bool, as_json: bool
) -> None:
    """Convert a published SET from its local files SOURCES (.parquet or .jsonl) to the prompt file OUT.

    Every question is written once, with its answer in the metadata, every instruction of an edit with its source
    image. The report says how many rows were read, written and dropped, and why.
    """
    from .convert import convert

    done = convert(prompt_set(name), sources, out, instruction=instruction, overwrite=overwrite)
    if as_json:
        media = str(done.media) if done.media else None
        print_json(
            {
                "rows_read": done.rows_read,
                "written": done.written,
                "dropped": done.dropped,
                "file": str(done.file),
                "media": media,
            }
        )
        return
    lines = [f"{done.rows_read:>9,} rows read", f"{done.written:>9,} prompts written to {done.file}"]
    lines += [f"{count:>9,} dropped: {reason}" for reason, count in done.dropped.items()]
    lines += [f"          images in {done.media}"] if done.media else []
    for line in lines:
        console().print(line, soft_wrap=True, markup=False)
