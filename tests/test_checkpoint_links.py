"""Checkpoints of someone else: links out of their folder are refused by name and never exported; chat templates end."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from checkpoints import as_hub_id
from transformers import AutoModelForObjectDetection
from unirl.core.cli import main
from unirl.core.errors import RecipeError
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose
from unirl.core.types.inputs import Inputs
from unirl.core.types.sampling import LatentSamplingConfig, TextSamplingConfig
from unirl.engine_host.checkpoint_folder import diffusers_folder, transformers_folder
from unirl.engine_host.config import ExternalConfig
from unirl.loop.build import build_parts
from unirl.loop.run import train
from unirl.new.generic import generic_model
from unirl.quickstart import checkpoint_path
from unirl.rewards.clip_family.files import find_folder
from unirl.rewards.detect.checkpoint import load
from unirl.rewards.text.config import RewardModelConfig
from unirl.rewards.text.reward_model import RewardModel
from unirl.rewards.vlm.config import Hpsv3Config, JudgeConfig
from unirl.rewards.vlm.local import LocalJudge
from unirl.rewards.vlm.preference import build_hpsv3
from unirl.tools.export.exporting import export
from unirl.tools.plan import hollow

SECRET = "-----BEGIN OPENSSH PRIVATE KEY-----"
RUN = ("backend.trains=lora", "run.max_steps=1", "run.media_every=0", "run.threads=1", "data.prompts_per_step=2")
SMALL = (*RUN, "data.samples_per_prompt=2", "advantage.constant_reward=skip", "eval.every=0", "~tracker.report")


def planned(folder: Path) -> None:
    with hollow.hollow(ExternalConfig(), key="path", folder=folder):
        raise AssertionError("the folder was opened")


READERS: dict[str, Callable[[Path], Any]] = {
    "model": lambda folder: compose_and_build("quickstart", folder),
    "language model": lambda folder: compose_and_build("quickstart-text", folder),
    "engine of texts": lambda folder: transformers_folder(PRODUCT, ExternalConfig(path=str(folder)), MODEL),
    "engine of images": lambda folder: diffusers_folder(
        PRODUCT, ExternalConfig(path=str(folder)), MODEL, architecture="StableDiffusion3Pipeline"
    ),
    "unirl new": generic_model,
    "unirl plan": planned,
    "clip": lambda folder: find_folder(str(folder), key="reward.clip.path", example="acme/clip"),
    "detect": lambda folder: load(
        str(folder), key="reward.geneval.path", auto=AutoModelForObjectDetection, kinds=["x"], device="cpu"
    ),
    "reward-model": lambda folder: RewardModel(RewardModelConfig(path=str(folder)), device="cpu"),
    "judge": lambda folder: LocalJudge(JudgeConfig(model=str(folder)), device="cpu"),
    "hpsv3": lambda folder: build_hpsv3(
        Hpsv3Config(model=str(folder), instruction=str(folder.parent / "instruction.txt")), device="cpu"
    ),
}
PRODUCT: Any = SimpleNamespace(title="An engine")
MODEL: Any = SimpleNamespace(trainable=None, spec=SimpleNamespace(inputs={}))


def compose_and_build(recipe: str, folder: Path) -> None:
    catalog = Catalog.discover()
    build_parts(compose(recipe, [f"model.path={folder}"], catalog=catalog), catalog=catalog, rewards="none")


@pytest.mark.parametrize("reader", READERS)
def test_every_reader_of_checkpoints_refuses_a_link_out_of_one_by_name(tmp_path: Path, reader: str) -> None:
    (tmp_path / "key").write_text(SECRET)
    (tmp_path / "instruction.txt").write_text("How good is it? {prompt} <|Reward|>")
    folder = tmp_path / "one"
    folder.mkdir()
    for name in ("config.json", "model_index.json"):
        (folder / name).write_text("{}")
    weights = "HPSv3.safetensors"
    (folder / weights).symlink_to(tmp_path / "key")
    with pytest.raises(RecipeError, match=rf"{weights}' is a link out of the checkpoint's folder") as caught:
        READERS[reader](folder)
    assert SECRET not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("merge", [False, True])
def test_a_key_that_a_license_links_to_is_not_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], merge: bool
) -> None:
    base, run, to = tmp_path / "base", tmp_path / "run", tmp_path / "out"
    shutil.copytree(checkpoint_path(), base)
    catalog = Catalog.discover()
    words = [*SMALL, f"model.path={base}", f"run.dir={run}"]
    train(compose("quickstart", words, catalog=catalog), catalog=catalog, overrides=words)
    (tmp_path / "id_rsa").write_text(SECRET)
    (base / "LICENSE.txt").symlink_to(tmp_path / "id_rsa")
    with pytest.raises(SystemExit) as caught:
        main(["export", str(run), "--to", str(to), *(["--merge"] if merge else [])])
    assert caught.value.code == 2
    message = " ".join(capsys.readouterr().err.split())
    assert f"model.path: '{base / 'LICENSE.txt'}' is a link out of the checkpoint's folder" in message
    assert not to.exists() and SECRET not in message
    (base / "LICENSE.txt").unlink()
    (base / "LICENSE.txt").write_text("mine")
    # As the hub's cache has it.
    (base / "LICENSE.txt").rename(base / "text")
    (base / "LICENSE.txt").symlink_to("text")
    export(run, to, catalog=catalog, merge=merge)
    assert (to / "LICENSE.txt").read_text() == "mine" and not (to / "LICENSE.txt").is_symlink()


@pytest.mark.slow
def test_a_checkpoint_of_the_hubs_cache_is_trained_planned_and_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files are links to blobs beside the snapshot."""
    name, run, to = as_hub_id(checkpoint_path(), tmp_path / "hub", monkeypatch), tmp_path / "run", tmp_path / "out"
    (snapshot,) = (tmp_path / "hub" / "models--acme--tiny" / "snapshots").iterdir()
    assert (snapshot / "model_index.json").is_symlink()
    catalog = Catalog.discover()
    words = [*SMALL, f"model.path={name}", f"run.dir={run}"]
    train(compose("quickstart", words, catalog=catalog), catalog=catalog, overrides=words)
    export(run, to, catalog=catalog, merge=True)
    files = {path.relative_to(snapshot) for path in snapshot.rglob("*") if path.is_file()}
    assert {path.relative_to(to) for path in to.rglob("*") if path.is_file()} == files
    assert not any(path.is_symlink() for path in to.rglob("*"))
    with hollow.hollow(ExternalConfig(path=str(snapshot)), key="path", folder=snapshot) as config:
        assert config.path == str(snapshot)


def encoded(name: str, folder: Path, part: str, template: str) -> None:
    """Encode a prompt with the miniature of a model whose chat template is this one."""
    catalog = Catalog.discover()
    spec: Any = catalog.get("model", name).spec
    catalog.resolve(spec.tiny.write)(folder, seed=0)
    settings = folder / part / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "chat_template": template}))
    (folder / part / "chat_template.jinja").write_text(template)
    sampling: Any = TextSamplingConfig if "text" in spec.tracks else LatentSamplingConfig
    config = catalog.resolve(spec.config)(path=str(folder), **({} if "text" in spec.tracks else {"dtype": "float32"}))
    model: Any = catalog.resolve(spec.build)(config, device="cpu")
    prompt = Inputs(ids=("a",), prompts=("a cat",), texts=("a cat",), media=((),))
    if sampling is TextSamplingConfig:
        model.prompt_tokens(prompt, sampling=sampling(**spec.tiny.sampling))
    else:
        model.encode(prompt, sampling=sampling(**spec.tiny.sampling))


@pytest.mark.parametrize(
    ("name", "part"),
    [*((name, "") for name in ("qwen3", "causal-lm")), *((name, "tokenizer") for name in ("z-image", "flux2-klein"))],
)
@pytest.mark.parametrize("bomb", ["{% for i in range(10**9) %}{% endfor %}", "{{ 'x' * 10**9 }}"])
def test_a_chat_template_without_end_is_refused_where_it_is_rendered(
    tmp_path: Path, name: str, part: str, bomb: str
) -> None:
    started = time.thread_time()
    with pytest.raises(RecipeError, match=r"chat template fails: (Range too big|it repeats a value to more than)"):
        encoded(name, tmp_path, part, f"{bomb}enable_thinking" if not part else bomb)
    assert time.thread_time() - started < 20


def test_a_template_that_a_pipeline_renders_itself_is_refused_too(tmp_path: Path) -> None:
    """The checks when the checkpoint is loaded see nothing of it: it waits for the prompt."""
    from unirl.models.hunyuan_video15 import tiny

    source = tmp_path / "plain"
    tiny.write(source, seed=0)
    plain = (source / "tokenizer" / "chat_template.jinja").read_text()
    with pytest.raises(RecipeError, match="chat template fails: it repeats a value to more than"):
        encoded(
            "hunyuan-video15",
            tmp_path / "own",
            "tokenizer",
            "{% if 'cat' in messages|tojson %}{{ 'x' * 10**9 }}{% endif %}" + plain,
        )
