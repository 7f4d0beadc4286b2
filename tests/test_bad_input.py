"""Bad input through the command line: one clear error, the right exit code, no traceback, nothing started.

The inputs and answers are the tables of docs/explanation/bad-input.md.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from bad_input_page import rows
from unirl.core.cli import main
from unirl.core.data.run_data import read_data
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose
from unirl.quickstart import checkpoint_path


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as caught:
        main(["train", *words])
    message = capsys.readouterr().err
    assert message.count("error:") + message.count("Error:") == 1, message
    assert "Traceback" not in message
    code = caught.value.code
    assert isinstance(code, int)
    return code, message


@pytest.mark.parametrize(("words", "says", "code"), rows("Settings"), ids=lambda value: value[:60])
def test_a_mistake_gets_one_clear_error_and_leaves_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, words: str, says: str, code: str
) -> None:
    result, message = refused(capsys, *shlex.split(words))
    assert says in message
    assert result == int(code), message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("name", "text", "says"), rows("Recipes"), ids=lambda value: value[:20])
def test_a_recipe_that_cannot_be_read_names_itself(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str, text: str, says: str
) -> None:
    (tmp_path / name).write_bytes(text.encode("latin-1"))
    code, message = refused(capsys, name)
    assert name in message and says in message
    assert code == 2


@pytest.mark.parametrize(("name", "text", "says"), rows("Prompt files"), ids=lambda value: value[:20])
def test_a_prompt_file_that_cannot_be_used_names_itself(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str, text: str, says: str
) -> None:
    (tmp_path / name).write_text(text)
    code, message = refused(capsys, "quickstart", f"data.train={name}", "data.prompts_per_step=1")
    assert name in message and says in message
    assert code == 2


def test_a_model_folder_that_lacks_a_component_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    import shutil

    shutil.copytree(checkpoint_path(), tmp_path / "broken")
    shutil.rmtree(tmp_path / "broken" / "vae")
    code, message = refused(capsys, "quickstart", "model.path=broken")
    assert "vae" in message
    assert "model.path" in message
    assert code == 2


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("height", "sampling.height"),
        ("negative_prompt", "sampling.negative_prompt"),
        ("max_new_tokens", "sampling.max_new_tokens"),
        ("seed", "run.seed"),
        ("samples_per_prompt", "data.samples_per_prompt"),
    ],
)
def test_a_setting_in_a_row_is_refused_unless_it_is_metadata_or_a_reward_reads_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str, key: str
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "a", "color": "red", "shape": "ring", "place": "left", name: 3}))
    code, message = refused(capsys, "quickstart", "data.train=rows.jsonl", "data.prompts_per_step=1")
    assert f"rows.jsonl:1: {name!r} cannot be set for one row; {key} sets it for all." in message and code == 2
    # Read by a reward, or under `metadata`, it is taken.
    (tmp_path / "mine.py").write_text(f"def score(images, {name}): return [float({name}[0])] * len(images)\n")
    mine = ("+reward@reward.mine=function", "reward.mine.target=mine.py:score")
    small = ["data.train=rows.jsonl", "data.eval=''", "data.prompts_per_step=1"]
    for words in (mine, ()):
        plan = compose("quickstart", [*small, *words], catalog=Catalog.discover(), directory=tmp_path)
        assert read_data(plan).prompts[0].metadata[name] == 3
        row = {"prompt": "a", "metadata": {"color": "red", "shape": "ring", "place": "left", name: 3}}
        file.write_text(json.dumps(row))


def test_a_function_that_needs_metadata_which_the_prompts_lack_is_refused_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text("def score(images, colour, style=None): return [0.0 for _ in images]\n")
    words = ("+reward@reward.mine=function", "reward.mine.target=mine.py:score")
    code, message = refused(capsys, "quickstart", *words)
    assert (
        "got no metadata 'colour', which reward.mine reads; the prompt has ['color', 'place', 'shape']; did you"
        in message
    )
    assert "loading" not in message
    assert code == 2
    (tmp_path / "mine.py").write_text("def score(images, prompt): return [0.0 for _ in images]\n")
    _, message = refused(capsys, "quickstart", *words)
    assert "got no metadata 'prompt'" in message and "did you mean 'prompts'?" in message


@pytest.mark.slow
def test_an_error_of_a_function_names_the_key_that_the_user_gave_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text("def score(images): return [0.0]\n")
    words = ("+reward@reward.mine=function", "reward.mine.target=mine.py:score", "eval=null", "run.max_steps=1")
    code, message = refused(capsys, "quickstart", *words)
    assert "reward.mine: score (" in message and "returned list of 1; expected a list of" in message
    assert code == 1
