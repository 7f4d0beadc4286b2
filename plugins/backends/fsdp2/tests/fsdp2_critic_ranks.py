"""One rank of the two-rank test of critics: `python fsdp2_critic_ranks.py RANK STORE FOLDER`."""

from fsdp2_text_toy import Judged, ToyTextModel, critic_weights, make_judged, make_steps, make_texts
from fsdp2_toy import ToyModel
from rank_processes import save_found
from unirl.core.roles import Job
from unirl.core.specs.config import TrainConfig

ROWS = ([0, 1, 2, 3], [4, 5, 6, 7]), ([0, 1, 2, 4, 5], [3, 6, 7])
# With eps 1 a step is linear in the gradient; Adam would divide small elements, and so their rounding, by their size.
LINEAR = {"eps": 1.0, "critic": {"lr": 1.0}}
CASES = {
    "full": LINEAR,
    "each-micro": {**LINEAR, "defer_gradient_sync": False},
    # Both ranks hold halves of the layers and the same rows.
    "tensor": {**LINEAR, "mesh": "tensor"},
    "latents": {**LINEAR, "kind": "latents"},
    "latents-lora": {**LINEAR, "kind": "latents", "trains": "lora"},
}


def parts_of(case):
    """The settings of a case without what only chooses its parts, a function that makes its model, and its track."""
    settings = {name: value for name, value in CASES[case].items() if name not in ("kind", "mesh")}
    if CASES[case].get("kind") == "latents":
        return settings, ToyModel, make_steps()
    return settings, ToyTextModel, make_texts()


def run(case, rows, *, folder):
    from unirl.backends.fsdp2.config import MeshConfig

    settings, make_model, track = parts_of(case)
    if "mesh" in CASES[case]:
        settings["mesh"] = MeshConfig(tensor=2)
        rows = list(range(8))
    backend, _ = make_judged(train=TrainConfig(micro_batch_size=2), model=make_model(), **settings)
    track = track.select(rows)
    backend.train([Job(track=track, algorithm=Judged())], progress=0.0)
    report = backend.train([Job(track=track, algorithm=Judged())], progress=0.0)
    backend.save(folder)
    kind = settings.get("trains", "full")
    result = {"critic": critic_weights(backend), "live": dict(backend.export_weights(kind=kind).tensors)}
    backend.close()
    return {**result, "metrics": dict(report.only)}


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
