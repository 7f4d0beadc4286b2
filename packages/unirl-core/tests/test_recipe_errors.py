"""Error messages for a wrong recipe or override: one message, the key first, what to do last."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from unirl.core.errors import PluginBroken, PluginNotFound, PluginNotInstalled, RecipeError
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose
from unirl.core.recipe.env_resolver import env
from unirl.core.specs.plan import Plan

DATA = "data.train=prompts.txt"


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["algorithm.clip_rnage=1"], ["algorithm.clip_rnage: ", "did you mean algorithm.clip_range?", "command line"]),
        (["+algorithm.clip_rnage=1"], ["algorithm.clip_rnage: ", "did you mean 'clip_range'?"]),
        (["engine=near", "engine.url=x"], ["engine.url: ", "It has batch; engine=far has it (command line"]),
        (["clip_range=1"], ["clip_range: ", "did you mean 'algorithm.clip_range'?"]),
        (["enginee=far"], ["enginee: ", "did you mean 'engine'?"]),
        (["algorithm.clip_range=much"], ["algorithm.clip_range: ", "'much'", "Float", "algorithm.clip_range=much"]),
        (["backend.optimizer.betas=3"], ["backend.optimizer.betas: ", "list"]),
        (["run=3"], ["run: ", "RunConfig"]),
        (["model.path=null"], ["model.path: "]),
        (["model={pth: 3}"], ["model.pth: ", "did you mean model.path?"]),
        (
            ["eval.sampling.num_inference_steps=3"],
            ["eval.sampling.num_inference_steps: ", "`+eval.sampling.num_inference_steps=...`"],
        ),
        (
            ["+eval.sampling.num_inference_stepz=3"],
            [
                "eval.sampling.num_inference_stepz: ",
                "did you mean eval.sampling.num_inference_steps?",
                "(command line: +eval.sampling.num_inference_stepz=3)",
            ],
        ),
        (
            ["+eval.sampling.num_inference_steps=few"],
            [
                "eval.sampling.num_inference_steps: ",
                "'few'",
                "Integer",
                "(command line: +eval.sampling.num_inference_steps=few)",
            ],
        ),
        (["+eval.sampling.schedule=3"], ["eval.sampling", "ScheduleConfig", "+eval.sampling.schedule=3)"]),
        (["model.use=pair"], ["model.use: ", "instead of setting `use`", "`model=pair`"]),
        (["reward.size.use=tone"], ["reward.size.use: ", "`reward@reward.size=tone`"]),
        (["reward.sise.weight=2"], ["reward.sise: ", "did you mean 'size'?", "`+reward@reward.sise=NAME`"]),
        (["+reward.third.weight=2"], ["reward.third: ", "`+reward@reward.third=NAME`"]),
        (["+reward=tone"], ["reward: ", "`/reward@reward.tone: tone`"]),
        (["tracker=notes"], ["tracker: ", "chooses none"]),
        (["~engine"], ["no engine is chosen", "`- /engine: NAME`"]),
        (["sampling=latnet"], ["sampling: ", "'latnet'", "did you mean 'latent'?"]),
        (["run.seed=1,2"], ["run.seed: ", "--multirun", "run.seed=[1,2]"]),
        (["run.seed=range(1,3)"], ["run.seed: ", "--multirun"]),
        (["run.seed=[1"], ["run.seed=[1: not an override"]),
        (["justtext"], ["justtext: not an override"]),
        (["data.train=~/p.jsonl"], ["the value contains ~, ", "'data.train=\"~/p.jsonl\"'"]),
        (["run.name=é=1"], ["the value contains é =, ", "'run.name=\"é=1\"'"]),
        (["hydra.run.dir=x"], ["hydra.run.dir: ", "`run.dir`"]),
        (["hydra/launcher=joblib"], ["hydra/launcher: ", "no effect"]),
        (["run.name=${asset:quickstrat,x}"], ["run.name: ", "'quickstrat'", "did you mean 'quickstart'?"]),
        (["run.name=${asset:nowhere,x}"], ["run.name: ", "no installed package provides the asset 'nowhere'"]),
        (["run.name=${asset:quickstart,missing.txt}"], ["run.name: ", "unirl-quickstart", "has no 'missing.txt'"]),
        (["run.name=${runn.seed}"], ["run.name: ", "'runn.seed' not found"]),
    ],
)
def test_a_wrong_override_says_which_and_what_to_do(
    overrides: list[str], parts: list[str], toy_catalog: Catalog, toy_folder: Path
) -> None:
    with pytest.raises(RecipeError) as caught:
        compose("toy/base", [DATA, *overrides], catalog=toy_catalog)
    text = str(caught.value)
    assert all(part in text for part in parts), text
    assert "\n" not in text
    assert caught.value.exit_code == 2


def test_an_unknown_part_gets_the_catalogs_own_message(toy_catalog: Catalog, toy_folder: Path) -> None:
    with pytest.raises(PluginNotFound) as expected:
        toy_catalog.get("engine", "sglang")
    with pytest.raises(PluginNotFound) as caught:
        compose("toy/base", [DATA, "engine=sglang"], catalog=toy_catalog)
    assert str(caught.value) == str(expected.value)


def test_all_missing_values_are_named_at_once(toy_catalog: Catalog, toy_folder: Path) -> None:
    recipe = toy_folder / "recipes" / "toy" / "base.yaml"
    recipe.write_text(recipe.read_text(encoding="utf-8").replace("model: {path: some/folder}\n", ""), encoding="utf-8")
    with pytest.raises(RecipeError, match=r"^data\.train, model\.path: .* add data\.train=\.\.\. model\.path=\.\.\.$"):
        compose("toy/base", catalog=toy_catalog)


def test_an_unknown_recipe_lists_those_there_are(toy_catalog: Catalog, toy_folder: Path) -> None:
    with pytest.raises(RecipeError, match=r"'toy/bsae' was not found; did you mean 'toy/base'\?.*toy/child"):
        compose("toy/bsae", catalog=toy_catalog)
    with pytest.raises(RecipeError, match=r"\./none\.yaml: no such recipe file"):
        compose("./none.yaml", catalog=toy_catalog)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (
            "algorithm: {clip_rnage: 1}",
            ["algorithm.clip_rnage: ", "did you mean algorithm.clip_range?", "toy/mine.yaml"],
        ),
        ("algorithn: {clip_range: 1}", ["algorithn: ", "did you mean 'algorithm'?", "toy/mine.yaml"]),
        ("run: {max_steps: many}", ["run.max_steps: ", "'many'", "Integer", "toy/mine.yaml"]),
        ("model: {use: pair}", ["model.use: ", "instead of setting `use`"]),
        ("reward: {third: {weight: 2}}", ["reward.third: ", "no reward is chosen"]),
        ("run: {max_steps: 1", ["mine.yaml:", "not valid YAML"]),
    ],
)
def test_a_mistake_in_a_file_names_the_file_or_the_key(
    text: str, parts: list[str], toy_catalog: Catalog, toy_folder: Path
) -> None:
    file = toy_folder / "recipes" / "toy" / "mine.yaml"
    file.write_text(f"defaults: [base, _self_]\n{text}\n", encoding="utf-8")
    with pytest.raises(RecipeError) as caught:
        compose("toy/mine", [DATA], catalog=toy_catalog)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


@pytest.mark.parametrize(
    ("defaults", "message"),
    [
        ("[/model: toy, _self_]", r"`- /unirl`, the schema of a recipe, is missing"),
        ("[base, /unirl, _self_]", r"must come only once, as the first entry"),
        (
            "[bsae, _self_]",
            r"toy/mine\.yaml: its defaults list names 'toy/bsae', which was not found; did you mean 'toy/base'",
        ),
        ("[mine, _self_]", r"includes itself"),
        ("[/unirl, model: toy, _self_]", r"parts need a slash: `- /model: toy`"),
        ("[base, /tracker: notes, _self_]", r"tracker 'notes' .* choose it as `/tracker@tracker\.notes: notes`"),
    ],
)
def test_a_wrong_defaults_list_says_how_it_should_read(
    defaults: str, message: str, toy_catalog: Catalog, toy_folder: Path
) -> None:
    file = toy_folder / "recipes" / "toy" / "mine.yaml"
    items = "\n".join(f"  - {item.strip()}" for item in defaults.strip("[]").split(","))
    file.write_text(f"defaults:\n{items}\n", encoding="utf-8")
    with pytest.raises(RecipeError, match=message):
        compose("toy/mine", [DATA], catalog=toy_catalog)


def test_a_spec_whose_config_is_no_part_config_is_broken(
    toy_catalog: Catalog, toy_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Catalog, "resolve", lambda self, target: int)
    with pytest.raises(PluginBroken, match=r"unirl-toy 1\.2.*inherits unirl\.core\.specs\.part_config\.RewardConfig"):
        compose("toy/base", [DATA], catalog=toy_catalog)


def test_a_quoted_value_is_taken_as_the_message_says(toy_catalog: Catalog, toy_folder: Path) -> None:
    assert compose("toy/base", [DATA, 'run.name="é=1"'], catalog=toy_catalog).run.name == "é=1"


BOMB = "a0: &a0 [1, 1]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 60))


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"run: {name: \xff}", "not UTF-8 text (byte 12)"),
        (b"\x00\x01", "not valid YAML"),
        (BOMB.encode(), "its aliases stand for 100000 values or more"),
        (b"a: &a [*a]", "its aliases stand for 100000 values or more"),
        (b"[" * 20_000, "nested too deeply"),
        (b"#" * (2**20 + 1), "got 1048577 bytes"),
        (b"defaults: [/unirl]\nhydra: {job: {chdir: true}}", "hydra.job: this Hydra setting has no effect"),
    ],
    ids=["not UTF-8", "binary", "bomb", "circle", "deep", "long", "hydra"],
)
def test_a_recipe_file_that_cannot_be_read_says_why_at_once(
    content: bytes, says: str, toy_catalog: Catalog, toy_folder: Path
) -> None:
    file = toy_folder / "recipes" / "toy" / "broken.yaml"
    file.write_bytes(content)
    with pytest.raises(RecipeError) as caught:
        compose("toy/broken", [DATA], catalog=toy_catalog)
    assert says in str(caught.value) and "broken.yaml" in str(caught.value)
    assert compose("toy/base", [DATA], catalog=toy_catalog).recipe == "toy/base", "others go on"


def test_a_recipe_cannot_copy_a_secret_into_the_records_of_a_run(
    toy_catalog: Catalog, toy_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACME_API_KEY", "sk-123")
    monkeypatch.setenv("ACME_USER", "ada")
    with pytest.raises(RecipeError, match=r"run\.name: \$\{oc\.env:ACME_API_KEY\} looks like a secret") as caught:
        compose("toy/base", [DATA, "run.name=${oc.env:ACME_API_KEY}"], catalog=toy_catalog)
    assert "sk-123" not in str(caught.value)
    assert compose("toy/base", [DATA, "run.name=${oc.env:ACME_USER}"], catalog=toy_catalog).run.name == "ada"
    assert compose("toy/base", [DATA, "run.name=${oc.env:ACME_NONE,bob}"], catalog=toy_catalog).run.name == "bob"


SECRETS = (
    *("DB_PASS", "DBPASS", "SSHPASS", "PASS", "PASS_2", "PGPASSWORD", "SMTP_PASSWD", "GPG_PASSPHRASE", "MYSQL_PWD"),
    *("GITHUB_PAT", "SENTRY_DSN", "AWS_CREDENTIALS", "GCP_CREDENTIAL", "DB_CREDS", "REDISCLI_AUTH", "OAUTH_HEADER"),
    *("PRIVATE", "SSH_PRIVATE", "ACME_COOKIE", "FLASK_SESSION", "PHPSESSIONID_SESSIONID", "HF_TOKEN", "GITHUBTOKEN"),
    *("API_TOKENS", "APIKEY", "AWS_SECRET_ACCESS_KEY", "SLACK_WEBHOOK_URL", "AZURE_CONNECTION_STRING", "AUTH_JWT"),
    *("db_pass", "dbPassword", "githubPat", "acme-auth", "acme.pat"),
)
PLAIN = (
    *("PATH", "PYTHONPATH", "PWD", "OLDPWD", "NUM_PASSES", "PATTERN", "PATIENCE", "PASSENGER", "COMPASS_URL", "COMPAT"),
    *("GIT_AUTHOR_NAME", "TOKENIZERS_PARALLELISM", "HOME", "USER", "SLURM_JOB_ID", "CUDA_VISIBLE_DEVICES"),
)


def test_secrets_are_told_by_the_words_of_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*SECRETS, *PLAIN):
        monkeypatch.setenv(name, "value")
    for name in SECRETS:
        with pytest.raises(RecipeError, match=rf"^\$\{{oc\.env:{re.escape(name)}\}} looks like a secret"):
            env(name)
        with pytest.raises(RecipeError, match="looks like a secret"):
            env(name, "default")
    assert [env(name) for name in PLAIN] == ["value"] * len(PLAIN)


@pytest.mark.parametrize("url", ["postgres://ada:s3cret@host/db", "redis://:s3cret@host", "see https://a:s3cret@b"])
def test_a_url_with_a_password_is_a_secret_under_any_name(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("DATABASE_URL", url)
    with pytest.raises(RecipeError, match="DATABASE_URL} is a URL with a password") as caught:
        env("DATABASE_URL")
    assert "s3cret" not in str(caught.value)
    for plain in ("postgres://host:5432/db", "https://host/a:b@c", "git@host:repository", ""):
        monkeypatch.setenv("DATABASE_URL", plain)
        assert env("DATABASE_URL") == plain


def test_null_switches_off(toy_catalog: Catalog, toy_folder: Path) -> None:
    words = [DATA, "data.eval=held.txt", "+tracker@tracker.notes=notes", "+reward@reward.second=tone"]

    def plan(*more: str) -> Plan:
        return compose("toy/base", [*words, *more], catalog=toy_catalog)

    assert (plan().data.eval, list(plan().trackers), list(plan().rewards)) == (
        "held.txt",
        ["notes"],
        ["size", "second"],
    )
    assert plan("data.eval=null").data.eval is None
    assert plan("eval=null").data.eval is None
    assert plan("tracker=null").trackers == {}
    assert plan("tracker.notes=null").trackers == {}
    assert list(plan("reward.second=null").rewards) == ["size"]


def test_all_parts_that_are_not_installed_are_in_one_install_line(toy_catalog: Catalog, toy_folder: Path) -> None:
    entries = (
        "  - /unirl\n  - /model: sd3\n  - /engine: trainside # here\n  - /backend: fsdp2\n  - /algorithm: flow-grpo\n"
    )
    text = f"defaults:\n{entries}  - /sampling: latent\n  - /reward@reward.size: size\n  - _self_\n"
    (toy_folder / "recipes" / "toy" / "whole.yaml").write_text(text)
    with pytest.raises(PluginNotInstalled) as caught:
        compose("toy/whole", [DATA], catalog=toy_catalog)
    assert "pip install unirl-model-sd3 unirl-engine-trainside unirl-backend-fsdp2 unirl-algo-flow-grpo`" in str(
        caught.value
    )
