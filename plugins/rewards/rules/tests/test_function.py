"""A function as a reward: what it is given, what it may return, and how its mistakes are named."""

from __future__ import annotations

import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest
import torch
from unirl.core.errors import RecipeError, RewardFailed, UniRLError
from unirl.core.roles import ScoreInput, Scores
from unirl.core.types.inputs import Inputs
from unirl.core.types.media import Media
from unirl.rewards.rules.config import FunctionConfig
from unirl.rewards.rules.function import build
from unirl.rewards.rules.function_target import Target, problems, required_columns

TEXTS = Media(kind="text", values=("four", "6"))


def samples(
    *, metadata: tuple[dict[str, Any], ...] = ({"answer": "4"}, {"answer": "6"}), media: Media = TEXTS
) -> ScoreInput:
    return ScoreInput(
        sample_ids=("a", "b"),
        group_ids=("g", "g"),
        inputs=Inputs.of_texts(["2 + 2?", "3 + 3?"]),
        metadata=metadata,
        media=media,
    )


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    # Loading a file appends its folder.
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path / "mine.py"


def scored(file: Path, code: str, given: ScoreInput | None = None) -> Scores:
    file.write_text(dedent(code))
    return build(FunctionConfig(target=f"{file.name}:score"), device="cpu").score(given or samples())


def test_a_function_of_trl_gets_prompts_completions_and_columns_by_name(file: Path) -> None:
    code = """
        def score(prompts, completions, **kwargs):
            assert prompts == ["2 + 2?", "3 + 3?"] and completions == ["four", "6"], (prompts, completions)
            assert kwargs == {"answer": ["4", "6"]}, kwargs
            return [1.0 if text == answer else 0.0 for text, answer in zip(completions, kwargs["answer"])]
    """
    scores = scored(file, code)
    assert scores.values.tolist() == [0.0, 1.0] and scores.values.dtype == torch.float32 and not scores.parts


def test_a_function_gets_only_what_it_names(file: Path) -> None:
    assert scored(file, "def score(answer): return [float(a) for a in answer]").values.tolist() == [4.0, 6.0]


def test_images_are_pil_images_of_the_rounded_pixels(file: Path) -> None:
    images = torch.zeros(2, 3, 4, 6)
    images[0, 0] = 1.0
    code = """
        def score(images):
            assert all(type(image).__name__ == "Image" and image.mode == "RGB" for image in images)
            assert [image.size for image in images] == [(6, 4), (6, 4)]
            return [image.getpixel((0, 0))[0] for image in images]
    """
    assert scored(file, code, samples(media=Media(kind="image", values=images))).values.tolist() == [255.0, 0.0]


def test_videos_are_lists_of_pil_images(file: Path) -> None:
    videos = (torch.zeros(2, 3, 4, 4), torch.ones(5, 3, 4, 4))
    code = "def score(videos): return [len(v) + v[-1].getpixel((0, 0))[2] / 255 for v in videos]"
    assert scored(file, code, samples(media=Media(kind="video", values=videos, rate=8.0))).values.tolist() == [2.0, 6.0]


def test_a_function_that_draws_on_an_image_leaves_the_sample_as_it_is(file: Path) -> None:
    images = torch.zeros(2, 3, 4, 4)
    code = "def score(images):\n    [i.putpixel((0, 0), (255, 255, 255)) for i in images]\n    return [0.0, 1.0]"
    scored(file, code, samples(media=Media(kind="image", values=images)))
    assert not images.any()


@pytest.mark.parametrize("reply", ["[0, 1]", "(0.0, True)", "np.array([0.0, 1.0])", "torch.tensor([0.0, 1.0])"])
def test_a_list_an_array_and_a_tensor_of_numbers_are_scores(file: Path, reply: str) -> None:
    code = f"import numpy as np, torch\ndef score(prompts): return {reply}"
    assert scored(file, code).values.tolist() == [0.0, 1.0]


def test_numbers_of_numpy_and_torch_in_a_list_are_scores(file: Path) -> None:
    code = "import numpy as np, torch\ndef score(prompts): return [np.float32(0.5), torch.tensor(2)]"
    assert scored(file, code).values.tolist() == [0.5, 2.0]


REPLIES = {
    "None": "returned None; expected a list of 2 numbers, one per sample, in their order",
    "0.5": "returned float 0.5; expected a list of 2 numbers",
    "[1.0]": "returned list of 1; expected a list of 2 numbers",
    "[1.0, None]": r"returned None for sample 'b' \(prompt '3 \+ 3\?'\).*return 0.0",
    "['1', 2]": "returned str '1' for sample 'a'; expected a number",
    "__import__('torch').zeros(2, 1)": r"returned Tensor of shape \[2, 1\]; expected a list of 2 numbers",
}


@pytest.mark.parametrize("reply", REPLIES)
def test_another_reply_is_refused_with_the_function_its_file_and_line(file: Path, reply: str) -> None:
    with pytest.raises(RewardFailed, match=rf"^reward.function: score \({file}:2\) {REPLIES[reply]}"):
        scored(file, f"# A comment.\ndef score(prompts): return {reply}")


@pytest.mark.parametrize(("bad", "says"), [("1 / 0", "ZeroDivisionError: division by zero"), ("exit(0)", "SystemExit")])
def test_an_error_inside_names_the_innermost_line_of_the_file(file: Path, bad: str, says: str) -> None:
    code = f"def helper():\n    return {bad}\ndef score(prompts): return helper()"
    with pytest.raises(RewardFailed, match=rf"score \({file}:3\) raised {says}.* \({file}:2\)"):
        scored(file, code)


def test_a_parameter_that_no_sample_has_is_refused_with_what_there_is(file: Path) -> None:
    with pytest.raises(RewardFailed, match=r"takes 'answr', .* it has prompts, completions, answer; did you mean"):
        scored(file, "def score(answr): return [0, 1]")


def test_a_column_that_one_prompt_lacks_is_none_where_a_default_or_all_columns_allow_it(file: Path) -> None:
    given = samples(metadata=({"answer": "4"}, {}))
    for parameters in ("answer=None", "**columns"):
        value = "answer" if "answer" in parameters else "columns['answer']"
        assert scored(file, f"def score({parameters}): return [float(a or 0) for a in {value}]", given).values[1] == 0
    with pytest.raises(RewardFailed, match="takes 'answer', which sample 'b'"):
        scored(file, "def score(answer): return [0, 1]", given)


def test_a_file_may_import_its_neighbours_and_is_found_from_another_folder(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "neighbour_of_mine.py").write_text("VALUE = 7.0")
    file.write_text("from neighbour_of_mine import VALUE\ndef score(prompts): return [VALUE, 0]")
    config = FunctionConfig(target="mine.py:score")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert build(config, device="cpu").score(samples()).values.tolist() == [7.0, 0.0]


def test_a_changed_file_is_run_again(file: Path) -> None:
    assert scored(file, "def score(prompts): return [0, 1]").values.tolist() == [0.0, 1.0]
    assert scored(file, "def score(prompts): return [0, 2]").values.tolist() == [0.0, 2.0]


def test_a_function_of_an_installed_module_is_found() -> None:
    given = samples(media=Media(kind="image", values=torch.ones(2, 3, 4, 4)))
    reward = build(FunctionConfig(target="unirl.rewards.rules.function:mean_red"), device="cpu")
    assert reward.score(given).values.tolist() == [1.0, 1.0]


def test_the_motion_of_a_video_is_the_mean_difference_of_its_frames() -> None:
    still, flicker = torch.zeros(3, 3, 4, 4), torch.tensor([0.0, 1.0, 0.8])[:, None, None, None].expand(3, 3, 4, 4)
    reward = build(FunctionConfig(target="unirl.rewards.rules.function:mean_motion"), device="cpu")
    # Steps of 1 and of 0.2; a single frame does not move.
    assert reward.score(
        samples(media=Media(kind="video", values=(still, flicker), rate=8.0))
    ).values.tolist() == pytest.approx([0.0, 0.6])
    assert reward.score(
        samples(media=Media(kind="video", values=(still[:1], flicker), rate=8.0))
    ).values.tolist() == pytest.approx([0.0, 0.6])


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("", "got '', expected `file.py:function` or `package.module:function`"),
        ("mine.py", "got 'mine.py', expected"),
        ("gone.py:score", "importing .*gone.py raised FileNotFoundError"),
        ("absent:score", "ModuleNotFoundError: No module named 'absent'. A file is named with its ending"),
        ("mine.py:scor", "mine.py has no function 'scor'; did you mean 'score'"),
        ("mine.py:VALUE", "mine.py:VALUE is int 3; expected a function"),
        ("mine.py:later", r"later \(.*mine.py:3\) is async; expected a plain function"),
        ("mine.py:positional", "has positional-only parameters"),
    ],
)
def test_a_target_that_is_no_function_is_refused_when_it_is_built(file: Path, target: str, says: str) -> None:
    file.write_text(
        "VALUE = 3\ndef score(prompts): ...\nasync def later(prompts): ...\ndef positional(prompts, /): ...\n"
    )
    with pytest.raises(RecipeError, match=f"^reward.function.target: .*{says}"):
        build(FunctionConfig(target=target), device="cpu")


@pytest.mark.parametrize(("code", "says"), [("1 / 0", "mine.py:1 raised ZeroDivisionError"), ("exit(0)", "SystemExit")])
def test_a_file_that_fails_when_it_is_run_is_named_with_its_line(file: Path, code: str, says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        scored(file, code)


SEEN = {
    "def scor(images): ...": "has no function 'score'; did you mean 'scor'?",
    "x = 1": "has no function 'score'; it has none.",
    "def score(images) return": r"mine.py:1 is not valid Python: expected ':'",
    "async def score(images): ...": "is async; expected a plain function",
    "def score(completions): ...": "takes 'completions'; this recipe generates 'images'.",
    "def score(images, completions=None): ...": "",
    "def score(prompts, images, **metadata): ...": "",
    "from elsewhere import score": "",
    "from elsewhere import *": "",
    "score = partial(print, 1)": "",
}


@pytest.mark.parametrize("code", SEEN)
def test_what_can_be_seen_without_running_the_file_is_refused_early(file: Path, code: str) -> None:
    file.write_text(code)
    result = " ".join(problems(Target(str(file), "score"), medium="image"))
    assert SEEN[code].replace("\\", "") in result if SEEN[code] else result == ""


COLUMNS = {
    "def score(images, caption, *, place, style=None, **metadata): ...": ["caption", "place"],
    "def score(prompts, images, videos, completions): ...": [],
    "@cached\ndef score(images, caption): ...": [],
    "from elsewhere import score": [],
    "def (": [],
}


@pytest.mark.parametrize("code", COLUMNS)
def test_the_metadata_that_a_function_needs_is_read_off_its_signature(file: Path, code: str) -> None:
    file.write_text(code)
    assert required_columns(Target(str(file), "score")) == COLUMNS[code]


def test_a_module_is_found_without_importing_its_package(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = file.parent / "planted_package"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    (folder / "scores.py").write_text("def score(images, caption): ...")
    monkeypatch.syspath_prepend(str(file.parent))
    target = Target("planted_package.scores", "score")
    assert target.file == folder / "scores.py"
    assert required_columns(target) == ["caption"]
    assert [Target(name, "score").file for name in ("planted_package.gone", "gone", "__main__x")] == [None] * 3
    assert problems(Target("planted_package.scores", "scor"), medium="image")[0].endswith("did you mean 'score'?")


def test_pixels_that_are_not_numbers_are_refused_before_the_function_sees_them(file: Path) -> None:
    with pytest.raises(UniRLError, match="NaN"):
        scored(
            file,
            "def score(images): return [0, 1]",
            samples(media=Media(kind="image", values=torch.full((2, 3, 4, 4), np.nan))),
        )
