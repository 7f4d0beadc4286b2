"""`unirl compose`: refusals, files of checkpoints, and code that settings name, of which foreign code needs a flag."""

from __future__ import annotations

import ast
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from unirl.core.cli import main
from unirl.core.errors import RecipeError
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose
from unirl.core.specs.leaves import leaves
from unirl.loop.run_folder import write_recipe
from unirl.quickstart import checkpoint_path, text_checkpoint_path

CATALOG = Catalog.discover()
ROOT = Path(__file__).parents[1]
FUNCTION = ("quickstart", "+reward@reward.mine=function")
TEXT = ("quickstart-text", "+reward@reward.mine=unit-tests", "data.eval=null")


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "own"
    folder.mkdir()
    for place in (tmp_path, folder):
        (place / "light.py").write_text("raise SystemExit('it ran')\ndef score(images): return [0.0] * len(images)\n")
    (folder / "link.py").symlink_to(tmp_path / "light.py")
    monkeypatch.chdir(folder)
    return folder


def composed(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    with pytest.raises(SystemExit):
        main(["compose", *words, "--json"])
    return json.loads(capsys.readouterr().out)


REFUSED = (
    "reward.mine.target=my_reward.py",
    "reward.mine.target=:score",
    "reward.mine.target=a:b:c",
    "sampling.eta=-1",
)


@pytest.mark.parametrize("word", REFUSED)
def test_after_a_refusal_nothing_else_is_computed(capsys: pytest.CaptureFixture[str], word: str) -> None:
    refused = composed(capsys, *FUNCTION, word)
    assert (refused["accepted"], refused["here"]) == (False, None)
    assert {reason["key"] for reason in refused["reasons"]} == {word.partition("=")[0]}


@pytest.mark.parametrize("words", [("quickstart", "algorithm.clip=1"), ("quickstat",), ("quickstart", "--jsn")])
def test_json_is_printed_for_errors_too(capsys: pytest.CaptureFixture[str], words: tuple[str, ...]) -> None:
    (key,) = composed(capsys, *words)
    assert key == "error"


@pytest.mark.parametrize(
    ("disabled", "says"),
    [
        ((), "; launcher=ray has it ("),
        (("unirl-launcher-ray",), "; launcher=ray may have it, install it: `pip install unirl-launcher-ray` ("),
    ],
)
def test_a_setting_of_another_launcher_names_that_launcher(disabled: tuple[str, ...], says: str) -> None:
    with pytest.raises(RecipeError) as caught:
        compose("quickstart", ["launcher.train_ranks=2"], catalog=Catalog.discover(disabled=disabled))
    assert str(caught.value) == (
        "launcher.train_ranks: LocalConfig has no such key. It has offload_idle"
        f"{says}command line: launcher.train_ranks=2)."
    )


def changed(folder: Path, to: Path, file: str, **values: Any) -> Path:
    """A copy of a checkpoint with other settings in one of its files."""
    shutil.copytree(folder, to)
    content = json.loads((to / file).read_text())
    (to / file).write_text(json.dumps({**content, **values}))
    return to


FILES = {
    "quantized text": ("config.json", {"quantization_config": {"quant_method": "gptq"}}, "is quantized with gptq"),
    "larger tokenizer": ("tokenizer_config.json", {"pad_token": "[PAD]"}, "has the token '[PAD]' with id 284"),
    "quantized images": (
        *("transformer/config.json", {"quantization_config": {"quant_method": "bitsandbytes"}}),
        "is quantized with bitsandbytes",
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_a_checkpoint_is_refused_for_what_its_files_say(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str
) -> None:
    file, values, says = FILES[name]
    is_text = "/" not in file
    base = text_checkpoint_path() if is_text else checkpoint_path()
    folder = changed(base, tmp_path / "base", file, **values)
    refused = composed(capsys, "quickstart-text" if is_text else "quickstart", f"model.path={folder}")
    assert [reason["key"] for reason in refused["reasons"]] == ["model.path"]
    assert says in refused["reasons"][0]["text"]


@pytest.mark.parametrize(
    ("recipe", "target", "near"), [("quickstart-text", "self_attn.q_prj", "q_proj"), ("quickstart", "to_qq", "to_q")]
)
def test_lora_targets_that_match_no_weight_are_refused(
    capsys: pytest.CaptureFixture[str], recipe: str, target: str, near: str
) -> None:
    words = (recipe, "backend.trains=lora", f"backend.lora.targets=[{near},{target}]")
    (reason,) = composed(capsys, *words)["reasons"]
    assert reason["key"] == "backend.lora.targets"
    assert reason["text"].startswith(f"{target!r} matches no layer in the weights of") and near in reason["text"]
    assert composed(capsys, *words[:2], f"backend.lora.targets=[{near}]")["accepted"]


def test_the_output_projection_takes_no_adapter(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("quickstart-text", "backend.trains=lora", "backend.lora.targets=[q_proj,lm_head]")
    (reason,) = composed(capsys, *words)["reasons"]
    assert reason["key"] == "backend.lora.targets" and reason["text"].startswith("got 'lm_head', but log-probs are")


def test_a_target_that_is_a_weight_of_another_module_is_refused_by_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """The files have its last component; only the module says that no layer has all of it."""
    words = ("quickstart-text", "backend.trains=lora", "backend.lora.targets=[attention.q_proj]")
    assert composed(capsys, *words)["accepted"]
    with pytest.raises(SystemExit) as caught:
        main(["plan", *words])
    said = capsys.readouterr().err
    assert caught.value.code == 2
    assert "backend.lora.targets: 'attention.q_proj' matches no linear layer of Qwen3ForCausalLM. Nearest: " in said


FOREIGN = [
    ("reward.mine.target", (*FUNCTION, "reward.mine.target=subprocess:getoutput")),
    ("reward.mine.target", (*FUNCTION, "reward.mine.target=../light.py:score")),
    ("reward.mine.target", (*FUNCTION, "reward.mine.target=link.py:score")),
    ("reward.mine.target", (*FUNCTION, "reward.mine.target=unirl.core.plugins.catalog:import_module")),
    ("reward.mine.target", (*FUNCTION, "reward.mine.target=unirl.rewards.rules.function:did_you_mean")),
    ("sampling.kernel", ("quickstart", "sampling.kernel=antigravity:Kernel")),
    ("eval.sampling.guidance_mode", ("quickstart", "+eval.sampling.guidance_mode=antigravity:Guidance")),
    ("model.trust_remote_code", ("quickstart-text", "model=causal-lm", "model.trust_remote_code=true")),
    ("model.trust_remote_code", ("quickstart-vl", "model=vlm", "model.trust_remote_code=true")),
    ("reward.mine.command", (*TEXT, "reward.mine.isolation=command", "reward.mine.command=[sh,-c,id]")),
    ("reward.mine.isolation", (*TEXT, "reward.mine.isolation=none", "reward.mine.network=unisolated")),
    ("reward.mine.serve", ("quickstart", "+reward@reward.mine=remote", "reward.mine.serve=../a.yaml")),
    ("engine.env_dir", ("quickstart-text", "engine=vllm", "engine.env_dir=/srv")),
    ("engine.extra.trust_remote_code", ("quickstart-text", "engine=vllm", "+engine.extra.trust_remote_code=true")),
    ("engine.extra.worker_cls", ("quickstart-text", "engine=vllm", "+engine.extra.worker_cls=evil.Worker")),
    ("launcher.environment.PYTHONPATH", ("quickstart", "launcher=ray", "+launcher.environment.PYTHONPATH=evil")),
    ("engine.environment.LD_PRELOAD", ("quickstart-text", "engine=vllm", "+engine.environment.LD_PRELOAD=evil.so")),
    ("engine.extra.args", ("quickstart-text", "engine=vllm", "+engine.extra.args={a: [{trust_remote_code: true}]}")),
]


@pytest.mark.parametrize(("key", "words"), FOREIGN, ids=lambda value: value if isinstance(value, str) else value[-1])
def test_foreign_code_is_listed_and_refused_without_the_flag(
    capsys: pytest.CaptureFixture[str], key: str, words: tuple[str, ...]
) -> None:
    refused = composed(capsys, *words)
    assert {one["key"]: one["is_foreign"] for one in refused["code"]}[key]
    assert key in {reason["key"] for reason in refused["reasons"]}
    assert all("--allow-code" in reason["text"] for reason in refused["reasons"])
    if not key.startswith(("sampling", "eval")):
        # A class that cannot be imported is refused for that, with the flag.
        allowed = composed(capsys, *words, "--allow-code")
        assert allowed["code"] == refused["code"]
        assert not any("--allow-code" in reason["text"] for reason in allowed["reasons"])


@pytest.mark.parametrize(
    "target", ["light.py:score", "unirl.rewards.rules.function:mean_red", "unirl.quickstart.naming:color_and_shape"]
)
def test_code_of_plugins_and_of_the_own_folder_is_listed_and_runs(
    capsys: pytest.CaptureFixture[str], own_folder: Path, target: str
) -> None:
    plan = composed(capsys, *FUNCTION, f"reward.mine.target={target}")
    (code,) = plan["code"]
    assert code["key"] == "reward.mine.target" and not code["is_foreign"]
    assert not any("--allow-code" in reason["text"] for reason in plan["reasons"])


def test_an_environment_in_the_own_folder_is_not_the_users_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the standard library is below the current folder."""
    monkeypatch.chdir("/")
    (code,) = composed(capsys, *FUNCTION, "reward.mine.target=subprocess:getoutput")["code"]
    assert code["is_foreign"]


@pytest.mark.parametrize("command", [("train",), ("train", "--multirun"), ("plan",)])
def test_every_command_that_takes_a_recipe_refuses(
    capsys: pytest.CaptureFixture[str], own_folder: Path, command: tuple[str, ...]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*command, *FUNCTION, "reward.mine.target=../light.py:score"])
    said = capsys.readouterr()
    assert caught.value.code == 1 and "--allow-code" in said.out + said.err and "it ran" not in said.out + said.err


def test_a_run_of_someone_else_is_not_resumed_without_the_flag(
    capsys: pytest.CaptureFixture[str], own_folder: Path
) -> None:
    folder = own_folder / "runs" / "theirs"
    folder.mkdir(parents=True)
    recorded = {"recipe": FUNCTION[0], "overrides": [FUNCTION[1], "reward.mine.target=../light.py:score"]}
    (folder / "recipe.json").write_text(json.dumps(recorded))
    with pytest.raises(SystemExit):
        main(["train", "--resume", str(folder)])
    assert "reward.mine.target" in (said := capsys.readouterr().err) and "--allow-code" in said


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("reward.mine.target=light.py:score", "reward.mine.target"),
        ("data.train=prompts.txt", "data.train"),
        ("model.path=checkpoint", "model.path"),
    ],
)
def test_a_run_that_was_started_elsewhere_says_where_its_relative_paths_begin(
    capsys: pytest.CaptureFixture[str],
    own_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    override: str,
    key: str,
) -> None:
    (own_folder / "prompts.txt").write_text("a ring\n" * 16)
    (own_folder / "checkpoint").mkdir()
    plan = compose(FUNCTION[0], [*FUNCTION[1:], "reward.mine.target=light.py:score", override], catalog=CATALOG)
    folder, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    write_recipe(folder, plan, [FUNCTION[1], override], hashes={} if key == "model.path" else {key: ""})
    monkeypatch.chdir(elsewhere)
    with pytest.raises(SystemExit):
        main(["train", "--resume", str(folder)])
    assert capsys.readouterr().err == (
        f"error: {key}: {leaves(plan.resolved)[key]!r} is not in {elsewhere}. This run was started in {own_folder}, where "
        f"relative paths of its recipe begin. Resume it from there: `cd {own_folder}`.\n"
    )


def test_every_load_of_a_checkpoint_says_whether_its_code_may_run() -> None:
    """Without `trust_remote_code`, transformers asks on the terminal. `GenerationConfig`, which has no code, keeps what
    it is given."""
    calls: list[str] = []
    for folder in ("packages", "plugins", "benchmarks"):
        for file in (ROOT / folder).rglob("*.py"):
            if {"tests", ".venv", "build"} & {*file.relative_to(ROOT).parts}:
                continue
            for node in ast.walk(ast.parse(file.read_bytes())):
                if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                    continue
                owner = ast.unparse(node.func.value)
                if node.func.attr != "from_pretrained" or owner in ("generation", "DiffGenerator"):
                    continue
                names = [keyword.arg for keyword in node.keywords]
                calls.append(f"{file}:{node.lineno}" if "trust_remote_code" not in names else "")
    assert len(calls) > 50
    assert [call for call in calls if call] == []


@pytest.mark.parametrize(
    ("recipe", "word", "advice"),
    [
        ("quickstart-enhancer", "model.writer=qwen3", "model@model.writer=qwen3"),
        ("quickstart-enhancer", "sampling.image=text", "sampling@sampling.image=text"),
        ("quickstart-enhancer", "engine.image=vllm-omni", "engine@engine.image=vllm-omni"),
        ("quickstart", "reward.shapes=3", "reward@reward.shapes=NAME"),
        ("quickstart", "tracker.report=wandb", "tracker@tracker.report=wandb"),
    ],
)
def test_a_value_in_place_of_a_section_says_how_a_part_is_chosen(recipe: str, word: str, advice: str) -> None:
    key, _, value = word.partition("=")
    shown = value if value.isdigit() else repr(value)
    with pytest.raises(RecipeError) as caught:
        compose(recipe, [word], catalog=CATALOG)
    assert str(caught.value) == f"{key}: got {shown}, expected settings. To choose a part, write `{advice}`."
