"""The table in the README is that of the families that the other tests run, cell by cell."""

from __future__ import annotations

import inspect
from pathlib import Path

import diffusers
from test_diffusers_families import WARNINGS
from tiny_pipelines.families import FAMILIES, REFUSED, Family, class_name
from tiny_pipelines.others import OTHERS

pytestmark = [*WARNINGS]
README = Path(__file__).parents[1] / "README.md"


def batches(family: Family) -> str:
    """`test_rows_of_a_batch...` compares them; `test_a_pipeline_gives...` has what was found at load."""
    if family.is_single:
        return "row by row"
    equal = [
        *(["conditions"] if family.is_ragged else []),
        *([] if family.takes_row_sigmas else ["sigma"]),
        *(["image"] if family.images and not family.is_ragged else []),
    ]
    return f"of equal {' and '.join(equal)}" if equal else "yes"


def images(family: Family) -> str:
    if True not in family.modes:
        return ""
    least = 0 if False in family.modes else 1
    return str(least) if least == family.most_images else f"{least} to {family.most_images}"


def table() -> str:
    head = "| pipeline | loads | LoRA, ratio 1 | bf16 | batches | guidance | videos | images | two ranks |"
    lines = [head, "|" + "---|" * 9]
    for name, family in FAMILIES.items():
        guidance = f"`{family.guidance}`" if family.guided else ""
        cells = [name, "yes", "yes", "yes", batches(family), guidance, "yes" if family.frames > 1 else ""]
        lines.append("| " + " | ".join([*cells, images(family), "yes"]) + " |")
    return "\n".join(lines)


def refusals() -> str:
    return "\n".join(f"| {name} | {why} | {reported} |" for name, (_, reported, why) in REFUSED.items())


def others() -> str:
    lines = ["| others | pipelines |", "|---|---|"]
    for why, names in OTHERS.items():
        lines.append(f"| {why} | {', '.join(name.removesuffix('Pipeline') for name in names)} |")
    return "\n".join(lines)


def is_from_prompts(name: str) -> bool:
    own = getattr(diffusers, name)
    if ".deprecated." in own.__module__ or not name.endswith("Pipeline"):
        return False
    call, parts = (inspect.signature(inspect.unwrap(one)).parameters for one in (own.__call__, own.__init__))
    return "prompt" in call and "transformer" in parts


def test_every_pipeline_of_diffusers_with_prompts_and_a_transformer_is_in_a_table_of_the_readme() -> None:
    """A new release of diffusers adds some: run them, or say why not."""
    exported = {name for name in dir(diffusers) if name.endswith("Pipeline") and is_from_prompts(name)}
    listed = {class_name(name) for name in (*FAMILIES, *REFUSED)}
    more = [name for names in OTHERS.values() for name in names]
    assert not listed & set(more) and len(more) == len(set(more))
    assert exported == listed | set(more)


def test_the_readme_has_the_table_of_what_was_run_and_of_what_is_refused() -> None:
    text = README.read_text()
    assert table() in text
    assert refusals() in text
    assert others() in text


def test_thirty_pipelines_of_twenty_families_were_run() -> None:
    assert len(FAMILIES) >= 30
    assert len({type(family.parts()["transformer"]) for family in FAMILIES.values()}) >= 20
