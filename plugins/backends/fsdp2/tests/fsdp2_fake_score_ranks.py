"""One rank of the two-rank test of fake scores: `python fsdp2_fake_score_ranks.py RANK STORE FOLDER`."""

from fsdp2_toy import ToyModel, make_backend, make_track
from rank_processes import save_found
from unirl.backends.fsdp2.config import FakeScoreConfig
from unirl.conformance.doubles.ppo import FakeScorePPO
from unirl.core.roles import Job
from unirl.core.specs.config import TrainConfig

ROWS = ([0, 1, 2, 3], [4, 5, 6, 7]), ([0, 1, 2, 4, 5], [3, 6, 7])
CASES = {
    "full": {"trains": "full"},
    "each-micro": {"trains": "full", "defer_gradient_sync": False},
    # Wrapped by FSDP, and each rank with the adapters whole.
    "lora": {},
    "lora-replicated": {"mesh": "replicas"},
}


def run(case, rows, *, folder):
    """Weights of the policy and the fake score after two updates, and the metrics of the second."""
    from unirl.backends.fsdp2.config import MeshConfig

    settings = dict(CASES[case])
    if settings.pop("mesh", None) and folder is not None:
        settings["mesh"] = MeshConfig(shard=1)
    # With eps 1 a step is linear in the gradient; Adam would divide small elements, and so their rounding, by their size.
    fake = FakeScoreConfig(lr=1.0, max_grad_norm=None, steps_per_update=2)
    backend, _ = make_backend(train=TrainConfig(micro_batch_size=2), eps=1.0, fake_score=fake, **settings)
    track = make_track(ToyModel()).select(rows)
    for _ in range(2):
        report = backend.train([Job(track=track, algorithm=FakeScorePPO())], progress=0.0)
    result = weights_of(backend)
    if folder is not None:
        backend.save(folder)
    backend.close()
    return {**result, "metrics": dict(report.only)}


def weights_of(backend):
    kind = backend._config.trains
    return {policy: dict(backend.export_weights(policy=policy, kind=kind).tensors) for policy in ("live", "fake")}


def find(rank, folder):
    return {
        (case, number): run(case, rows[rank], folder=folder / f"{case}-{number}")
        for case in CASES
        for number, rows in enumerate(ROWS)
    }


def main():
    save_found(find, ranks=2)


if __name__ == "__main__":
    main()
