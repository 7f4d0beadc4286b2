"""External engines: started once for the claims of a row, as new for each, and ended for certain."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from unirl.conformance.claims import all_claims
from unirl.conformance.doubles.model_state import mix_modes
from unirl.conformance.doubles.requests import make_request
from unirl.conformance.doubles.weight_updates import full_update, perturb
from unirl.conformance.part_factory import PartFactory
from unirl.conformance.run import run_suite
from unirl.conformance.subjects import Selection
from unirl.conformance.verdicts import Record

sys.path.insert(0, str(Path(__file__).parent))

from conformance_mutants import engine_apart

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

CATALOG = "conformance_mutants.engine_apart:catalog"
OWN = ("closing-leaves-nothing-running-and-may-be-done-twice", "the-same-seeds-give-the-same-texts")
"""Claims that ask for a separate engine."""
CLAIMS = (
    *OWN,
    # Whose texts those that ask for their own compare with.
    "texts-of-a-group-differ",
    "every-text-comes-back-with-its-lineage",
    "full-weights-are-used-for-sampling",
    "an-adapter-is-sampled-with-at-its-scale",
    "sampling-does-not-modify-torch-or-the-model",
    "a-round-trains-adapters",
    "second-rollout-is-made-with-the-new-weights",
)


@pytest.fixture(autouse=True)
def starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "starts"
    file.touch()
    monkeypatch.setenv(engine_apart.STARTS, str(file))
    return file


def noted(starts: Path) -> list[tuple[int, int]]:
    """Process of the claims, and that of the engine, of every start."""
    return [(int(line.split()[0]), int(line.split()[1])) for line in starts.read_text().splitlines()]


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def gone(pids: list[int], *, within_s: float) -> bool:
    end = time.monotonic() + within_s
    while any(alive(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.05)
    return not any(alive(pid) for pid in pids)


class Row:
    """An engine with its model, and a request."""

    def __init__(self, factory: PartFactory) -> None:
        self.factory, self.record = factory, Record()
        result = {part.spec.kind: part for part in factory.catalog.parts() if part.spec.kind in ("engine", "model")}
        self.engine_found, self.model_found = result["engine"], result["model"]
        self.model: Any = factory.model(self.model_found)
        sampling = factory.text_sampling(self.model_found, temperature=0.0)
        self.request = make_request(self.model, sampling, track="text")

    def engine(self, *, own: bool = False) -> Any:
        return self.factory.engines.open(
            self.engine_found,
            self.factory.config(self.engine_found),
            of=self.model_found,
            model=self.model,
            device="cpu",
            record=self.record,
            own=own,
        )

    def texts(self, engine: Any) -> list[list[int]]:
        return [row.tolist() for row in engine.generate(self.request).text.tokens]


@pytest.fixture
def row(tmp_path: Path) -> Iterator[Row]:
    factory = PartFactory(engine_apart.catalog(), tmp_path)
    yield Row(factory)
    factory.close()


def test_an_engine_is_started_once_and_is_as_new_whatever_was_done_with_it(row: Row, starts: Path) -> None:
    with row.engine() as first:
        version, texts = first.version, row.texts(first)
        trained: Any = row.factory.fresh_model(row.model_found)
        perturb(trained, seed=1)
        first.load_weights(full_update(trained, version=9))
        assert row.texts(first) != texts
    with row.engine() as second:
        assert second is first and second.version == version and row.texts(second) == texts
    assert len(noted(starts)) == 1 and not row.record.numbers


def test_an_engine_of_latents_is_shared_in_the_same_way(tmp_path: Path, starts: Path) -> None:
    report = run_suite(
        Selection(kinds=("engine",), claims=("full-weights-are-used-for-sampling", "sigmas-are-echoed-bit-for-bit")),
        catalog="conformance_mutants.engine_apart:catalog_of_latents",
    )
    assert {outcome.state for outcome in report.outcomes} == {"pass"}
    assert all(not number.name.startswith("engine started") for o in report.outcomes for number in o.numbers)
    assert len(noted(starts)) == 1


def test_one_that_was_closed_or_damaged_is_not_lent_again(row: Row, starts: Path) -> None:
    with row.engine() as first:
        first.close()
    with row.engine() as second:
        assert second is not first
        # Weights that come go elsewhere from now on: what it samples from stays what it is.
        perturb(second._model, seed=1)
        second.write_full = lambda update: dict(update.tensors)
    with row.engine() as third:
        assert third is not second and second.is_closed
    assert [number.value for number in row.record.numbers] == [1, 2]
    assert len(noted(starts)) == 3


def test_a_claim_that_asks_for_its_own_gets_a_new_one_that_nobody_gets_afterwards(row: Row) -> None:
    with row.engine() as shared:
        pass
    with row.engine(own=True) as own:
        # There may be memory for one alone.
        assert own is not shared and shared.is_closed and not own.is_closed
    assert own.is_closed
    with row.engine() as later:
        assert later is not own


def test_an_engine_that_changes_the_model_that_it_was_built_with_fails_the_claim(row: Row) -> None:
    models: list[Any] = []
    build = engine_apart.Apart.__init__

    def keep(self: Any, config: Any, *, model: Any) -> None:
        models.append(model)
        build(self, config, model=model)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_apart.Apart, "__init__", keep)
        with row.engine():
            pass
        mix_modes(row.model)
        # As an engine does that restores the training mode of the whole.
        with (
            pytest.raises(AssertionError, match=r"'apart' changed the model .*: the training mode of submodules"),
            row.engine(),
        ):
            models[0].trainable.eval()
        row.model.trainable.eval()
        with row.engine(own=True):
            assert models[-1] is row.model
    assert len(models) == 2


def test_claims_of_a_row_pass_on_one_engine_with_one_more_for_each_that_asks(starts: Path) -> None:
    assert {claim.name for claim in all_claims(["engine", "cell"]) if claim.own_engine} == set(OWN)
    report = run_suite(Selection(kinds=("engine", "cell"), claims=CLAIMS), catalog=CATALOG)
    tried = {(o.claim, o.state) for o in report.outcomes}
    assert {claim for claim, state in tried if state == "pass"} == set(CLAIMS), tried
    assert not report.count("fail") and not report.count("not run")
    assert len(noted(starts)) == 1 + len(OWN)
    assert gone([pid for _, pid in noted(starts)], within_s=0)


def script(*args: str) -> subprocess.Popen[bytes]:
    """A separate run over the same claims."""
    code = (
        "import sys\n"
        "from unirl.conformance.run import run_suite\n"
        "from unirl.conformance.subjects import Selection\n"
        f"selection = Selection(kinds=('engine', 'cell'), claims={CLAIMS!r})\n"
        f"report = run_suite(selection, catalog={CATALOG!r}, pytest_args=sys.argv[1:])\n"
        "sys.exit(report.exit_code)"
    )
    here = str(Path(__file__).parent)
    return subprocess.Popen(
        [sys.executable, "-c", code, *args],
        env={**os.environ, "PYTHONPATH": here},
        cwd=here,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )


def test_in_parallel_the_claims_of_an_engine_stay_in_one_process(starts: Path) -> None:
    assert script("-n", "2").wait(timeout=200) == 0
    assert len(noted(starts)) == 1 + len(OWN) and len({host for host, _ in noted(starts)}) == 1


def test_nothing_is_left_of_an_engine_when_the_run_is_killed(starts: Path) -> None:
    run = script()
    try:
        deadline = time.monotonic() + 100
        while not noted(starts) and run.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        assert run.poll() is None, "the run ended before it could be killed"
    finally:
        os.kill(run.pid, signal.SIGKILL)
        run.wait()
    engines = [pid for _, pid in noted(starts)]
    # Its guard looks every tenth of a second.
    assert engines and gone(engines, within_s=10)
