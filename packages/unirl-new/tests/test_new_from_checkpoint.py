"""Files that `unirl new model --from` writes for a checkpoint, its refusals, and whether they work when installed."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from packaging.requirements import Requirement
from tokenizers.processors import TemplateProcessing
from unirl.conformance.report.file import load
from unirl.conformance.results import Outcome
from unirl.core.cli import main
from unirl.model_host.tokens.miniature import save_random
from unirl.models.causal_lm import tiny as causal_lm
from unirl.models.diffusers import tiny as diffusers
from unirl.models.sd3 import tiny as sd3
from unirl.models.vlm import tiny as vlm
from unirl.new.miniature import write_language_model, write_pipeline
from unirl.new.vocabulary import SMALL

ROOT = Path(__file__).parents[3]
# What is written imports what fits the checkpoint.

WRITERS: dict[str, Callable[..., None]] = {
    "llama": causal_lm.write,
    "qwen-vl": vlm.write,
    "sd3": sd3.write,
    "flux": diffusers.write,
}
"""A language model, one that sees images, a pipeline whose calls are plain, and one that packs its latents."""


def new(*words: object, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code and stderr of `unirl new`."""
    with pytest.raises(SystemExit) as caught:
        main(["new", *map(str, words)])
    assert isinstance(caught.value.code, int)
    return caught.value.code, capsys.readouterr().err


@pytest.fixture(scope="module")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of the plugin that is written for a checkpoint."""
    made: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            WRITERS[name](folder / "checkpoint", seed=0)
            with pytest.raises(SystemExit) as caught:
                main(["new", "model", f"my-{name}", "--from", str(folder / "checkpoint"), "--into", str(folder)])
            assert caught.value.code == 0
            made[name] = folder / f"unirl-model-my-{name}"
        return made[name]

    return of


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("name", WRITERS)
def test_what_is_written_is_formatted_linted_and_has_no_weights(plugins: Callable[[str], Path], name: str) -> None:
    folder = plugins(name)
    for words in (["check"], ["format", "--check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *words, "--no-cache", folder], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    package = folder / "src" / f"my_{name.replace('-', '_')}_model"
    for path in folder.rglob("*"):
        assert path.suffix not in (".safetensors", ".bin"), path
        if path.is_file() and path.suffix in (".py", ".md", ".toml") and "miniature" not in path.parts:
            assert not re.search(r"\{\{|\{%", path.read_text()), path
    assert (package / "miniature").is_dir()


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("name", WRITERS)
def test_every_package_that_is_imported_is_required(plugins: Callable[[str], Path], name: str) -> None:
    folder = plugins(name)
    sources = "".join(path.read_text() for path in (folder / "src").rglob("*.py"))
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    required = {Requirement(line).name for line in project["dependencies"]}
    # Plugins lie in `unirl.models`; conformance is for their tests.
    imported = set(re.findall(r"^\s*from unirl\.(\w+)", sources, flags=re.MULTILINE)) - {"models", "conformance"}
    assert imported and {f"unirl-{package.replace('_', '-')}" for package in imported} <= required


@pytest.mark.slow
@pytest.mark.nightly
def test_what_is_written_is_typed(plugins: Callable[[str], Path], tmp_path: Path) -> None:
    roots = [{"root": str(plugins(name)), "extraPaths": [str(plugins(name) / "src")]} for name in WRITERS]
    settings = {
        "executionEnvironments": roots,
        "include": [each["root"] for each in roots],
        "typeCheckingMode": "standard",
        "pythonVersion": "3.11",
    }
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    done = subprocess.run(
        [sys.executable, "-m", "pyright", "--project", tmp_path, "--pythonpath", sys.executable],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
@pytest.mark.nightly
def test_the_spec_states_what_the_generic_plugin_found(plugins: Callable[[str], Path]) -> None:
    llama = (plugins("llama") / "src/my_llama_model/plugin.py").read_text()
    for layer in ("q_proj", "k_proj", "v_proj", "o_proj"):
        assert f'"self_attn.{layer}",' in llama
    # Two blocks with four of them each.
    assert "lora_layers=8," in llama and 'wrap_blocks=("LlamaDecoderLayer",),' in llama
    seen = (plugins("qwen-vl") / "src/my_qwen_vl_model/plugin.py").read_text()
    assert 'inputs={"text": {"condition": "needs"}},' in seen and "image_text_parity" in seen
    # Eight layers, then seven: of the last block the text's output is dropped, and its queries with it.
    plain = (plugins("sd3") / "src/my_sd3_model/plugin.py").read_text()
    assert 'idle_layers=("transformer_blocks.1.attn.add_q_proj",),' in plain and "lora_layers=15," in plain
    config = plugins("sd3") / "src/my_sd3_model/miniature/transformer/config.json"
    assert json.loads(config.read_text())["dual_attention_layers"] == [], "as in the checkpoint"
    assert '"FluxTransformerBlock",' in (plugins("flux") / "src/my_flux_model/plugin.py").read_text()


@pytest.mark.slow
@pytest.mark.nightly
def test_plain_calls_are_written_out_and_others_are_pinned(plugins: Callable[[str], Path]) -> None:
    plain = (plugins("sd3") / "src/my_sd3_model/model.py").read_text()
    # As plugins/models/sd3 has them.
    for line in (
        "timestep=sigma.float() * 1000.0,",
        'pooled_projections=conditions["pooled_projections"].to(dtype),',
        '"encoder_hidden_states": result[0],',
    ):
        assert line in plain
    assert "unirl-model-diffusers" not in (plugins("sd3") / "pyproject.toml").read_text()
    readme = (plugins("flux") / "README.md").read_text()
    assert "because it packs latents into tokens" in readme
    assert "| `timestep` | `sigma.float()`, [2] float32 |" in readme and "| `img_ids` |" in readme
    assert "unirl-model-diffusers" in (plugins("flux") / "pyproject.toml").read_text()


@pytest.fixture(scope="module")
def installed(
    plugins: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[list[str]], tuple[Outcome, ...]]:
    """All of them installed from their wheels, beside each other: results of their tests as [name, outcome, failure],
    and the outcomes of their claims. In one process, which imports once what they all need."""
    place = tmp_path_factory.mktemp("installed")
    uv = shutil.which("uv") or str(ROOT / ".uv-bin/bin/uv")
    folders = [plugins(name) for name in WRITERS]
    for folder in folders:
        done = run(uv, "build", "--wheel", "--quiet", "--out-dir", place / "wheels", cwd=folder)
        assert done.returncode == 0, done.stderr
    for wheel in (place / "wheels").glob("*.whl"):
        zipfile.ZipFile(wheel).extractall(place / "site")
    done = run(sys.executable, "-c", TRIED, *folders, site=place / "site", cwd=place)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((place / "tests.json").read_text()), load(place / "conformance.json").outcomes


TRIED = """
import json
import sys
from pathlib import Path

import pytest
from unirl.conformance.report.file import to_json
from unirl.conformance.run import run_suite
from unirl.conformance.subjects import Selection

tests = []


class Noting:
    def pytest_runtest_logreport(self, report):
        if report.when == "call" or not report.passed:
            tests.append([report.nodeid, report.outcome, report.longreprtext])


folders = [Path(word) for word in sys.argv[1:]]
words = ["-q", "-p", "no:cacheprovider", "--import-mode=importlib", "-W", "error", "-c", "/dev/null"]
words += ["--ignore-glob", "/*test_conformance.py", "--rootdir", str(folders[0].parents[1])]
status = pytest.main([*words, *(str(folder / "tests") for folder in folders)], plugins=[Noting()])
assert status in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED), status
report = run_suite(Selection(plugins=tuple(folder.name for folder in folders), kinds=("plugin", "model")))
Path("tests.json").write_text(json.dumps(tests))
Path("conformance.json").write_text(to_json(report))
"""


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", WRITERS)
def test_what_is_written_passes_its_tests_and_the_claims_about_its_kind(
    plugins: Callable[[str], Path], name: str, installed: tuple[list[list[str]], tuple[Outcome, ...]]
) -> None:
    """Installed from its wheel. Its combinations with engines and algorithms are those of any model."""
    folder = plugins(name)
    tests, claims = installed
    own = [test for test in tests if folder.name in Path(test[0]).parts]
    assert own and [test for test in own if test[1] != "passed"] == []
    outcomes = [one for one in claims if {folder.name, f"my-{name}"} & set(one.subject.split("+"))]
    assert [(one.claim, one.reason) for one in outcomes if one.state in ("fail", "not run")] == []
    passed = {one.claim for one in outcomes if one.state == "pass"}
    is_text = name in ("llama", "qwen-vl")
    parity = "log-probs-are-those-of-the-reference" if is_text else "final-latents-are-those-of-the-reference-pipeline"
    assert parity in passed and "gradient-reaches-every-layer-that-lora-adapts" in passed


def run(*words: object, site: Path | None = None, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "UV_OFFLINE": "1"}
    if site is not None:
        environment["PYTHONPATH"] = str(site)
    return subprocess.run(
        [*map(str, words)], cwd=cwd, env=environment, capture_output=True, text=True, timeout=800, check=False
    )


WIDE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "sliding_window": 512,
    "layer_types": [*["sliding_attention"] * 5, "full_attention"],
}


def test_a_miniature_is_small_and_keeps_kinds_of_layers_and_special_tokens(tmp_path: Path) -> None:
    tokenizer = wide_tokenizer()
    assert len(tokenizer) > SMALL
    config = transformers.Gemma3TextConfig(
        **WIDE, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, bos_token_id=tokenizer.bos_token_id
    )
    save_random(tmp_path / "wide", transformers.Gemma3ForCausalLM, config, tokenizer, seed=0)
    write_language_model(tmp_path / "wide", tmp_path / "small", level="widths")
    small = json.loads((tmp_path / "small/config.json").read_text())
    assert small["layer_types"] == ["sliding_attention", "full_attention"] and small["num_hidden_layers"] == 2
    assert (small["hidden_size"], small["num_attention_heads"], small["num_key_value_heads"]) == (64, 4, 2)
    # Shorter than a prompt, so that the window matters.
    assert small["sliding_window"] == 8
    few = transformers.AutoTokenizer.from_pretrained(tmp_path / "small")
    # 256 bytes and the four special tokens.
    assert len(few) == small["vocab_size"] == 260
    assert few.convert_ids_to_tokens(small["eos_token_id"]) == "<|im_end|>"
    text = "Ein Kreis, größer als 3 cm: ○"
    tokens = few(text)["input_ids"]
    assert len(tokens) == 1 + len(text.encode()) and few.decode(tokens, skip_special_tokens=True) == text
    assert few.convert_ids_to_tokens(tokens[0]) == few.bos_token == "<s>"


def test_a_miniature_of_a_pipeline_fits_its_text_encoders_and_keeps_its_latents(tmp_path: Path) -> None:
    diffusers.write(tmp_path / "whole", seed=0)
    wide = {
        "text_encoder": {"hidden_size": 768, "projection_dim": 768, "num_hidden_layers": 12, "num_attention_heads": 12},
        "text_encoder_2": {"d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_heads": 64, "num_layers": 24},
        "transformer": {
            **{"joint_attention_dim": 4096, "pooled_projection_dim": 768, "num_attention_heads": 24},
            **{"attention_head_dim": 128, "num_layers": 19, "num_single_layers": 38, "axes_dims_rope": [16, 56, 56]},
        },
    }
    for part, values in wide.items():
        place = tmp_path / "whole" / part / "config.json"
        place.write_text(json.dumps({**json.loads(place.read_text()), **values}))
    write_pipeline(tmp_path / "whole", tmp_path / "small", level="widths")
    clip, t5, flux = (json.loads((tmp_path / "small" / part / "config.json").read_text()) for part in wide)
    assert flux["joint_attention_dim"] == t5["d_model"] == 64 and flux["pooled_projection_dim"] == clip["hidden_size"]
    assert (flux["num_layers"], flux["num_single_layers"], flux["num_attention_heads"]) == (2, 2, 2)
    # Positions are along dims of a head, so heads keep their size.
    assert flux["attention_head_dim"] == sum(flux["axes_dims_rope"]) == 128 and flux["in_channels"] == 16
    assert not list((tmp_path / "small").rglob("*.safetensors"))


def wide_tokenizer() -> Any:
    """Byte-level BPE with merges, a start token before every text, and a chat template."""
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=3000,
        special_tokens=["<s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator([f"{n:x}{n * 7919:o} word{n}" for n in range(3000)], trainer)
    inner.add_special_tokens(list(causal_lm.SPECIAL))
    inner.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", inner.token_to_id("<s>"))])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token="<s>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=causal_lm.CHAT_TEMPLATE,
    )


def test_folders_that_are_no_checkpoint_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder, says in (
        (tmp_path / "nowhere", "there is no folder"),
        (tmp_path / "empty", "no model_index.json and no config.json"),
        (tmp_path / "broken", "cannot be read as a JSON object"),
    ):
        if folder.name != "nowhere":
            folder.mkdir()
        if folder.name == "broken":
            (folder / "config.json").write_text("{")
        code, err = new("model", "mine", "--from", folder, "--into", tmp_path / "out", capsys=capsys)
        assert code == 2 and "--from" in err and says in err
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_that_the_generic_plugin_refuses_is_refused_with_its_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    diffusers.write(tmp_path / "epsilon", seed=0)
    scheduler = {"_class_name": "DDIMScheduler", "prediction_type": "epsilon"}
    (tmp_path / "epsilon/scheduler/scheduler_config.json").write_text(json.dumps(scheduler))
    causal_lm.write(tmp_path / "cut", seed=0)
    (tmp_path / "cut/model.safetensors").unlink()
    for name, generic, says in (
        ("epsilon", "diffusers", "its model predicts the noise, expected a flow-matching model"),
        ("cut", "causal-lm", "it does not load"),
    ):
        code, err = new("model", "mine", "--from", tmp_path / name, "--into", tmp_path / "out", capsys=capsys)
        assert code == 2 and f"--from: model={generic} refuses it. model.path:" in err and says in err
    assert not (tmp_path / "out").exists()


def test_taken_folders_bad_names_and_other_kinds_are_refused_before_anything_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "unirl-model-mine").mkdir()
    nowhere = tmp_path / "nowhere"
    for words, says in (
        (("model", "mine"), "is there already, and nothing in it is overwritten"),
        (("model", "My_Model"), "did you mean 'my-model'?"),
        (("model", "sd3"), "model 'sd3' is installed here"),
        (("reward", "mine"), "only models are written from a checkpoint"),
    ):
        code, err = new(*words, "--from", nowhere, "--into", tmp_path, capsys=capsys)
        assert code == 2 and says in err, err


@pytest.mark.parametrize(
    "name",
    [
        *("LlamaForCausalLM", "Gemma3ForCausalLM", "DeepseekV3ForCausalLM", "Qwen3MoeForCausalLM", "GptOssForCausalLM"),
        *("Qwen3VLForConditionalGeneration", "Gemma3ForConditionalGeneration", "LlavaForConditionalGeneration"),
    ],
)
def test_architectures_of_their_published_sizes_become_small_ones_that_can_be_built(name: str, tmp_path: Path) -> None:
    """Without values: of sizes that do not fit each other the module could not be made."""
    cls: Any = getattr(transformers, name)
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole/config.json").write_text(json.dumps(cls.config_class().to_dict(), default=str))
    write_language_model(tmp_path / "whole", tmp_path / "small", level="widths")
    settings = json.loads((tmp_path / "small/config.json").read_text())
    with torch.device("meta"):
        model = cls(cls.config_class.from_dict(settings))
    tables = [part for part in model.modules() if isinstance(part, (torch.nn.Embedding, torch.nn.Linear))]
    # But for the vocabulary, which is the tokenizer's.
    largest = model.config.get_text_config().vocab_size
    sizes = [part.weight.numel() for part in tables if largest not in part.weight.shape]
    assert sum(sizes) < 2_000_000 and model.config.get_text_config().num_hidden_layers == 2
