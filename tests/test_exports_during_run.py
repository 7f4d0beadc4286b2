"""Adapters that are exported while a run trains, against `unirl export` of its checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small_runs import EVALUATED, SMALL, SMALL_TEXT, catalog, copy_up_to, events, plan, run
from unirl.core.match.match import match
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose
from unirl.loop.exports import EXPORTS
from unirl.loop.run import train
from unirl.tools.export.exporting import export

LORA = ("backend.trains=lora", "run.save_every=1", "run.max_steps=3")


def trained(
    folder: Path, *words: str, recipe: str = "quickstart", small: Sequence[str] = SMALL, resume: Path | None = None
) -> Path:
    """A run that records all of its overrides, as an export composes it again."""
    every = (*small, *words, *(() if resume else (f"run.dir={folder}",)))
    return train(compose(recipe, every, catalog=catalog()), catalog=catalog(), resume=resume, overrides=every).folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    (file,) = folder.rglob("*.safetensors")
    return load_file(file)


def assert_exported_alike(run_folder: Path, step: int, to: Path) -> None:
    """The same tensors, bit for bit, as the checkpoint of this step gives."""
    export(run_folder, to, catalog=catalog(), step=step)
    expected, result = weights(to), weights(run_folder / EXPORTS / f"step-{step:06d}")
    assert expected.keys() == result.keys() and expected
    assert all(torch.equal(expected[name], result[name]) for name in expected)
    assert any(bool(value.abs().max() > 0) for name, value in expected.items() if "lora_B" in name)


@pytest.mark.slow
def test_a_run_exports_its_adapters_and_links_to_the_newest_and_the_best(tmp_path: Path) -> None:
    words = (*LORA, *EVALUATED, "eval.every=1", "run.export_every=2", "run.export_best=true", "eval.policy=live")
    folder = trained(tmp_path / "run", *words)
    scores = {event["step"]: event["metrics"]["score_mean"] for event in events(folder, "evaluated") if event["step"]}
    best = [step for step in scores if all(scores[step] > scores[other] for other in scores if other < step)]
    exported = sorted({2, *best})
    assert [event["step"] for event in events(folder, "exported")] == exported
    names = [f"step-{step:06d}" for step in exported]
    assert sorted(path.name for path in (folder / EXPORTS).iterdir()) == sorted([*names, "best", "latest"])
    assert (folder / EXPORTS / "latest").resolve().name == names[-1]
    assert (folder / EXPORTS / "best").resolve().name == f"step-{best[-1]:06d}"
    for step in exported:
        assert_exported_alike(folder, step, tmp_path / f"own-{step}")
    card = (folder / EXPORTS / "latest" / "README.md").read_text()
    assert f"step {exported[-1]}" in card and "Held-out scores" in card
    # A run that goes on from an earlier step knows the best score until then, and exports the same again.
    again = trained(tmp_path, *words, resume=copy_up_to(folder, 2, tmp_path / "again"))
    later = [step for step in exported if step > 2]
    assert [event["step"] for event in events(again, "exported")][-len(later) :] == later or not later


@pytest.mark.slow
def test_a_language_model_is_exported_for_peft(tmp_path: Path) -> None:
    words = ("backend.trains=lora", "run.save_every=1", "run.max_steps=1", "run.export_every=1")
    folder = trained(tmp_path / "run", *words, recipe="quickstart-text", small=SMALL_TEXT)
    assert_exported_alike(folder, 1, tmp_path / "own")
    from peft import AutoPeftModelForCausalLM

    model = AutoPeftModelForCausalLM.from_pretrained(folder / EXPORTS / "latest")
    loaded = {name: value for name, value in model.state_dict().items() if "lora_B" in name}
    assert any(bool(value.abs().max() > 0) for value in loaded.values())


@pytest.mark.slow
def test_an_export_that_fails_is_a_finding_and_the_run_goes_on(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / EXPORTS).write_text("in the way")
    result = run(tmp_path / "run", "backend.trains=lora", "run.max_steps=1", "run.export_every=1")
    assert result.status == "done"
    (text,) = [event["text"] for event in events(result.folder, "finding") if "export" in event["text"]]
    assert text.startswith("run.export_every: step 1 was not exported: ")


@pytest.mark.parametrize(
    ("words", "key", "text"),
    [
        (
            ("run.export_every=5", "backend.trains=full"),
            "run.export_every",
            "backend.trains=full, which trains no adapters",
        ),
        (("run.export_best=true", "data.eval=''"), "run.export_best", "without held-out prompts"),
    ],
)
def test_exports_that_cannot_be_made_are_refused(words: tuple[str, ...], key: str, text: str) -> None:
    (reason,) = match(plan("backend.trains=lora", *words), catalog=catalog()).reasons
    assert reason.key == key and text in reason.text


def test_exports_without_the_tools_say_what_to_install() -> None:
    (reason,) = match(plan("backend.trains=lora", "run.export_every=5"), catalog=Catalog.of({})).reasons
    assert reason.text == "got 5; exports need `pip install unirl-tools`."
