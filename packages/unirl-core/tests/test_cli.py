"""The command line: what each command prints, its exit codes, and what it does not import."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from unirl.core.cli import main
from unirl.core.plugins.catalog import Catalog
from unirl.core.plugins.entry_points import COMMANDS_GROUP, entry_points
from unirl.core.recipe.compose import compose
from unirl.core.specs.leaves import leaves
from unirl.core.types.event import Event
from unirl.loop.cli import progress, sweep, train
from unirl.loop.run import RunResult

DATA = "data.train=prompts.txt"
Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(
    toy_catalog: Catalog, toy_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Cli:
    """Run a command with the toy plugin installed: (exit code, stdout, stderr)."""
    monkeypatch.setattr(Catalog, "discover", lambda: toy_catalog)

    def run(*args: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            main(args)
        out = capsys.readouterr()
        assert isinstance(caught.value.code, int)
        return caught.value.code, out.out, out.err

    return run


@pytest.mark.parametrize("args", [["--help"], ["--version"], ["train", "--help"], ["recipes", "--json"]])
def test_help_and_lists_import_nothing_heavy(args: list[str]) -> None:
    code = (
        "import sys\n"
        "from unirl.core.cli import main\n"
        f"try: main({args!r})\n"
        "except SystemExit as stop: assert stop.code == 0, stop.code\n"
        "heavy = {'torch', 'ray', 'hydra', 'omegaconf', 'transformers', 'diffusers', 'rich', 'numpy'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


CORE = {"compose", "plugins", "recipes"}
GREET = """
import click

@click.command(help="Say hello.")
def command():
    click.echo("hello")
"""


@pytest.fixture
def install_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """`install_commands(dist, code, "name", ...)` installs a dist with these commands, each `command` of one module."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(tmp_path))

    def install(dist: str, code: str, *names: str, more: str = "") -> None:
        module = f"planted_{dist.replace('-', '_')}"
        (tmp_path / f"{module}.py").write_text(code, encoding="utf-8")
        info = tmp_path / f"{dist.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: 1.0\n", encoding="utf-8")
        lines = "".join(f"{name} = {module}:command\n" for name in names)
        (info / "entry_points.txt").write_text(f"[unirl.commands]\n{lines}{more}", encoding="utf-8")

    yield install
    for name in set(sys.modules) - before:
        if name.startswith("planted_"):
            del sys.modules[name]


def test_help_shows_the_commands_of_every_dist(cli: Cli, install_commands: Callable[..., None]) -> None:
    install_commands("acme", GREET, "greet")
    code, out, _ = cli("--help")
    rows = dict(line.split(maxsplit=1) for line in out.partition("Commands:")[2].splitlines() if line[2:3].strip())
    assert code == 0 and rows["greet"] == "Say hello." and rows.keys() >= CORE
    assert cli("greet") == (0, "hello\n", "")


def test_help_imports_commands_and_no_plugin(install_commands: Callable[..., None], tmp_path: Path) -> None:
    install_commands("acme", GREET, "greet", more="[unirl.v1]\nacme = planted_plugin\n")
    (tmp_path / "planted_plugin.py").write_text("raise RuntimeError", encoding="utf-8")
    code = (
        "import sys\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "from unirl.core.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "plugins = [name for name in sys.modules if name.rpartition('.')[2] in ('plugin', 'planted_plugin')]\n"
        "assert 'planted_acme' in sys.modules and not plugins, plugins\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("raise RuntimeError('no licence')", "importing 'planted_acme' raised RuntimeError: no licence"),
        ("import planted_gone", "needs 'planted_gone', which is not installed"),
        ("command = 3", "its entry point names 'planted_acme:command', expected a click command."),
    ],
)
def test_a_broken_command_hides_no_other_and_says_why(
    cli: Cli, install_commands: Callable[..., None], code: str, says: str
) -> None:
    install_commands("acme", code, "greet")
    exit_code, _, err = cli("greet")
    assert exit_code == 3 and "error: command 'greet' of acme 1.0: " in err and says in err
    exit_code, out, _ = cli("--help")
    assert exit_code == 0 and "command 'greet' of acme 1.0: " in " ".join(out.split())
    assert all(f"\n  {name} " in out for name in CORE)


def test_two_dists_with_one_command_conflict_only_when_it_is_used(
    cli: Cli, install_commands: Callable[..., None]
) -> None:
    install_commands("acme", GREET, "compose")
    code, _, err = cli("compose", "quickstart")
    assert code == 3 and "error: command 'compose': provided by acme 1.0 and unirl-core " in err
    assert "Uninstall one of them" in err
    assert cli("recipes")[0] == 0
    code, out, _ = cli("--help")
    assert code == 0 and "command 'compose': provided by acme 1.0" in " ".join(out.split())


@pytest.mark.parametrize("name", ["acme", "Acme.Plugin"])
def test_commands_of_a_disabled_plugin_are_not_there(
    cli: Cli, install_commands: Callable[..., None], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    install_commands("acme-plugin", GREET, "greet", more="[unirl.v1]\nacme = planted_plugin\n")
    monkeypatch.setenv("UNIRL_DISABLE", name)
    assert cli("greet")[0] == 2 and "greet" not in cli("--help")[1]


def test_a_misspelt_command_is_wrong_use_and_gets_a_suggestion(cli: Cli) -> None:
    code, _, err = cli("trian", "quickstart")
    assert code == 2 and "did you mean 'train'?" in err


@pytest.fixture
def only_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if no dist but unirl-core was installed."""
    points = [point for point in entry_points(COMMANDS_GROUP) if point.dist == "unirl-core"]
    monkeypatch.setattr("unirl.core.cli.commands.entry_points", lambda group: points)


@pytest.mark.usefixtures("only_core")
def test_a_command_that_is_not_installed_gets_its_install_line(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unirl.core.plugins.dists.installed_version", lambda dist: None)
    code, _, err = cli("conformance", "--plugin", "acme")
    assert code == 3
    assert err == "error: command 'conformance' is not installed. Install it: `pip install unirl-conformance`.\n"
    code, _, err = cli("conformence")
    assert code == 2 and "did you mean 'conformance'?" in err


@pytest.mark.usefixtures("only_core")
def test_an_installed_dist_without_a_known_command_is_to_be_upgraded(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unirl.core.plugins.dists.installed_version", lambda dist: "0.0.1")
    code, _, err = cli("league", "quickstart")
    assert code == 3
    assert err == "error: command 'league': unirl-league 0.0.1 is installed but does not provide it; upgrade it.\n"
    monkeypatch.setenv("UNIRL_DISABLE", "unirl-league")
    assert "its plugin unirl-league is disabled by UNIRL_DISABLE" in cli("league", "quickstart")[2]


def test_compose_shows_every_value_with_its_origin_and_the_verdict(cli: Cli, toy_catalog: Catalog) -> None:
    code, out, _ = cli("compose", "toy/child", DATA)
    plan = compose("toy/child", [DATA], catalog=toy_catalog)

    assert code == 0
    for key in leaves(plan.resolved):
        assert key.endswith(".use") or key in out
    rows = {row.split()[0]: row for row in out.splitlines() if row.strip()}
    assert "8e-05" not in out and "recipe: toy/child.yaml" in rows["sampling.num_inference_steps"]
    assert "command line: data.train=prompts.txt" in rows["data.train"]
    assert "far  (unirl-toy 1.2)" in rows["engine"] and "default: RunConfig" in rows["run.seed"]
    assert f"hash {plan.hash}" in out and "accepted" in out


def test_compose_exits_with_1_and_gives_every_reason_when_the_plan_is_refused(cli: Cli) -> None:
    code, out, _ = cli("compose", "toy/base", DATA, "sampling.eta=0", "train.updates_per_step=999")
    assert code == 1
    assert "refused" in out and "sampling.eta: " in out and "train.updates_per_step: " in out


def test_compose_as_json_is_the_plan(cli: Cli, toy_catalog: Catalog) -> None:
    code, out, _ = cli("compose", "toy/child", DATA, "--json")
    plan = compose("toy/child", [DATA], catalog=toy_catalog)
    data = json.loads(out)

    assert code == 0 and data["accepted"] and data["reasons"] == []
    assert (data["hash"], data["resolved"]) == (plan.hash, plan.resolved)
    assert data["origins"]["sampling.num_inference_steps"] == {"source": "recipe", "detail": "toy/child.yaml"}
    assert {"key": "engine", "kind": "engine", "name": "far", "dist": "unirl-toy", "version": "1.2"} in data["parts"]


@pytest.mark.parametrize("command", ["compose", "train"])
def test_cfg_job_prints_what_hydra_prints(command: str, cli: Cli, toy_catalog: Catalog) -> None:
    resolved = compose("toy/child", [DATA], catalog=toy_catalog).resolved

    code, out, _ = cli(command, "toy/child", DATA, "--cfg", "job", "--resolve")
    assert code == 0 and yaml.safe_load(out) == resolved

    code, out, _ = cli(command, "toy/child", "--cfg", "job")
    assert code == 0 and yaml.safe_load(out)["run"]["max_steps"] == "${data.samples_per_prompt}"
    assert yaml.safe_load(out)["data"]["train"] == "???"

    code, out, _ = cli(command, "toy/child", DATA, "--cfg", "job", "--resolve", "--package", "reward.second")
    assert code == 0 and out.startswith("# @package reward.second\n")
    assert yaml.safe_load(out) == resolved["reward"]["second"]


def test_info_defaults_lists_what_is_merged_in_order(cli: Cli) -> None:
    code, out, _ = cli("compose", "toy/child", "--info", "defaults")
    configs = [line.split()[0] for line in out.splitlines()[2:] if line.strip()]
    assert code == 0
    assert configs == [
        "unirl",
        "model/toy",
        "engine/far",
        "backend/plain",
        "algorithm/grpo-like",
        "sampling/latent",
        "reward/size",
        "toy/base",
        "reward/tone",
        "toy/child",
    ]


@pytest.mark.parametrize(
    ("args", "code", "text"),
    [
        (["compose", "toy/base", DATA, "algorithm.clip=1"], 2, "error: algorithm.clip: "),
        (["compose", "toy/base", DATA, "engine=sglang"], 3, "error: engine 'sglang' "),
        (["compose", "toy/base", "--package", "run"], 2, "need --cfg job"),
        (["compose"], 2, "Missing argument"),
        (["train"], 2, "Name a recipe"),
        (["train", "toy/base", DATA, "sampling.eta=0"], 1, "sampling.eta: "),
        (["train", "--resume", "nowhere"], 1, "nowhere"),
        (["train", "toy/base", "--resume", "x", "-m"], 2, "use only one of them"),
        (["train", "toy/base", "-m", "--cfg", "job"], 2, "remove --multirun"),
        (["train", "toy/base", DATA, "-m", "run.dir=x"], 2, "hydra.sweep.dir"),
    ],
)
def test_errors_are_one_message_without_a_traceback(args: list[str], code: int, text: str, cli: Cli) -> None:
    got, out, err = cli(*args)
    assert (got, out) == (code, "")
    assert text in err and "Traceback" not in err


def test_debug_shows_the_traceback(toy_catalog: Catalog, toy_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Catalog, "discover", lambda: toy_catalog)
    with pytest.raises(Exception, match=r"toy/bsae"):
        main(["--debug", "compose", "toy/bsae"])


def test_recipes_are_listed_by_name(cli: Cli) -> None:
    code, out, _ = cli("recipes", "--json")
    own = [item for item in json.loads(out) if item["from"] == "./recipes"]
    assert code == 0
    assert [item["name"] for item in own] == ["toy/base", "toy/child"]
    code, out, _ = cli("recipes")
    assert code == 0 and "toy/base" in out and "./recipes" in out


def test_resume_takes_recipe_and_overrides_of_the_run_unless_others_are_given(tmp_path: Path) -> None:
    recorded = {"recipe": "toy/base", "overrides": [DATA, "run.stop_at=2"]}
    (tmp_path / "recipe.json").write_text(json.dumps(recorded), encoding="utf-8")
    checkpoint = tmp_path / "checkpoints" / "step-000002"

    assert train._recorded(tmp_path, None, ()) == ("toy/base", (DATA,))
    assert train._recorded(checkpoint, None, ()) == ("toy/base", (DATA,))
    assert train._recorded(tmp_path, "run.max_steps=9", ("run.keep=0",)) == (
        "toy/base",
        (DATA, "run.max_steps=9", "run.keep=0"),
    )
    assert train._recorded(tmp_path, "toy/child", ("run.max_steps=9",)) == ("toy/child", ("run.max_steps=9",))


def test_a_failing_job_does_not_lose_the_others(cli: Cli, toy_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_plan(plan: Any, *, overrides: Any, resume: Any, catalog: Any) -> tuple[RunResult, progress.RunSummary]:
        if plan.run.seed == 2:
            raise RuntimeError("out of memory")
        summary = progress.RunSummary()
        summary.metrics = {"reward_mean": 0.25 * plan.run.seed, "lr": 1.0}
        result = RunResult(folder=Path(plan.run.dir), status="done", step=plan.run.max_steps, resume_command="")
        return result, summary

    monkeypatch.setattr(sweep, "run_plan", run_plan)
    args = ("train", "toy/base", DATA, "run.seed=1,2,3", "sampling.eta=0.7,0", "hydra.sweep.dir=out", "--multirun")
    code, out, _ = cli(*args)

    jobs = json.loads((toy_folder / "out" / "results.json").read_text(encoding="utf-8"))["jobs"]
    assert code == 1
    assert [job["status"] for job in jobs] == ["done", "refused", "failed", "refused", "done", "refused"]
    assert jobs[4]["metrics"] == {"reward_mean": 0.75} and jobs[4]["folder"] == "out/4"
    assert "sampling.eta: " in jobs[1]["error"] and "out of memory" in jobs[2]["error"]
    assert "RuntimeError: out of memory" in (toy_folder / "out" / "2" / "error.txt").read_text(encoding="utf-8")
    table = [line for line in out.splitlines() if line[:1].isdigit()]
    assert len(table) == 6 and "run.seed=3 sampling.eta=0.7" in table[4] and "0.7500" in table[4]
    assert cli(*args)[0] == 2, "a second sweep must not write over the first"


def _events() -> list[Event]:
    def step(number: int, reward: float) -> Event:
        metrics = {"reward_mean": reward, "logp_mismatch_max": 0.0, "clip_fraction": 0.125, "other": 1.0}
        metrics |= {"loss": 0.125, "kl": 1e-3, "grad_norm": 0.5, "lr": 1e-4, "reward/kl": 7.0}
        data = {"metrics": metrics, "phases": {"generate": 3.0, "train": 1.0}, "samples": 12}
        return Event(kind="step", step=number, time=100.0 + 70 * number, data=data)

    start = {"recipe": "toy/base", "plan_hash": "abc", "steps": 2, "predicted": {"image": {"generate_share": 0.5}}}
    return [
        Event(kind="run_started", step=0, time=100.0, data=start),
        Event(kind="evaluated", step=0, data={"metrics": {"score_mean": 0.2}}),
        step(1, 0.25),
        Event(kind="finding", step=1, data={"text": "the reward hardly varies"}),
        step(2, 0.5),
        Event(kind="evaluated", step=2, data={"metrics": {"score_mean": 0.4}}),
        Event(kind="checkpoint_saved", step=2, data={"folder": "step-000002"}),
        Event(kind="run_finished", step=2, data={}),
    ]


def test_what_is_generated_at_the_side_of_training_counts_as_generation() -> None:
    summary = progress.RunSummary()
    *_, step = (event for event in _events() if event.kind == "step")
    metrics = {**step.data["metrics"], "generate_s": 9.0, "train_s": 1.0}
    summary(_events()[0])
    summary(Event(kind="step", step=1, data={"metrics": metrics, "phases": {"wait": 8.0, "train": 1.0}}))
    time, cost = summary.lines()
    assert time == "time      9.0 s in steps: wait 89 %, train 11 %"
    assert cost.startswith("cost      generation is 90% of generation and training; 50% was predicted")


def test_without_a_terminal_each_step_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.show_progress() as listener:
        for event in _events():
            listener(event)
    assert capsys.readouterr().out.splitlines() == [
        "toy/base  2 steps  plan abc",
        "held out after step 0  score_mean 0.2000",
        "step 1/2  reward 0.2500  logp_mismatch 0.0e+00  clipped 12.5%  loss 0.125  kl 1.00e-03  grad norm 5.00e-01  "
        "lr 1.0e-04  3.00 samples/s  4.0 s (generate 3.0, train 1.0)  1 min 10 s left",
        "note: the reward hardly varies",
        "step 2/2  reward 0.5000  logp_mismatch 0.0e+00  clipped 12.5%  loss 0.125  kl 1.00e-03  grad norm 5.00e-01  "
        "lr 1.0e-04  3.00 samples/s  4.0 s (generate 3.0, train 1.0)",
        "held out after step 2  score_mean 0.4000",
        "saved step-000002",
    ]


def test_on_a_terminal_the_bar_follows_the_steps(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "160")
    with progress.show_progress() as listener:
        for event in _events():
            listener(event)
    out = capsys.readouterr().out
    assert "2/2" in out and "reward 0.5000" in out and "note: the reward hardly varies" in out


def test_the_summary_compares_first_and_last_and_predicted_and_measured() -> None:
    summary = progress.RunSummary()
    for event in _events():
        summary(event)
    assert summary.lines() == [
        "held out  score_mean 0.2000 -> 0.4000",
        "time      8.0 s in steps: generate 75 %, train 25 %",
        "cost      generation is 75% of generation and training; 50% was predicted from the number of forwards",
    ]


def test_ranks_of_torchrun_are_refused_with_the_launcher_to_use(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    code, _, err = cli("train", "toy/base", DATA)
    assert code == 2
    assert "one of 2 torchrun processes" in err and "launcher=ray" in err


def test_compose_says_what_it_looked_at_and_what_it_did_not(cli: Cli, toy_folder: Path) -> None:
    _, out, _ = cli("compose", "toy/base", DATA)
    assert "accepted" in out
    assert "not ready here: data.train: prompts.txt: no such prompt file." in out
    assert "not looked at: the weights" in out and "'some/folder'" in out
    _, out, _ = cli("compose", "toy/base", DATA, "model.path=./model", "--json")
    assert json.loads(out)["here"]["problems"] == [
        "data.train: prompts.txt: no such prompt file.",
        "model.path: there is no folder './model'.",
    ]


def test_compose_changed_leaves_the_defaults_out(cli: Cli) -> None:
    _, out, _ = cli("compose", "toy/base", DATA, "--changed")
    assert "sampling.num_inference_steps" in out and "toy/base.yaml" in out
    assert "sampling.eta" not in out and "default: " not in out
