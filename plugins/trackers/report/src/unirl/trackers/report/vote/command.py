"""`unirl vote RUN`, `unirl vote A B`: preferences of a person between two images, or two videos."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from .votes_file import Votes

__all__ = ["vote"]


@click.command()
@click.argument("runs", nargs=-1, metavar="RUN [RUN]", type=click.Path(path_type=Path))
@click.option(
    "--votes",
    "file",
    metavar="FILE",
    default="votes.jsonl",
    show_default=True,
    type=click.Path(path_type=Path),
    help="Append votes to this file, or continue it.",
)
@click.option("--limit", type=click.IntRange(1), help="Votes after which it is done; all pairs without it.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of the order and the sides.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Listen on this address of this machine.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8421, show_default=True, help="Port; 0 takes a free one."
)
@click.option(
    "--result", "voted", metavar="FILE", type=click.Path(path_type=Path), help="Print the result of a file of votes."
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def vote(
    runs: tuple[Path, ...],
    file: Path,
    limit: int | None,
    seed: int,
    host: str,
    port: int,
    voted: Path | None,
    as_json: bool,
) -> None:
    """Vote on pairs of images in a browser, without knowing what made them.

    Of one run: training samples of a prompt and step; the preferences are a prompt file of pairs beside the votes, for
    diffusion-dpo. Of two runs: images or videos of their last evaluations from the same prompt and noise; the result is
    the win rate of the second. Needs no network. Ctrl-C ends it, and the same command continues.
    """
    from unirl.core.cli.output import print_json

    from .result import result_facts, result_lines
    from .votes_file import read_votes

    def show(votes: Votes) -> None:
        if as_json:
            print_json(result_facts(votes))
        else:
            click.echo("\n".join(result_lines(votes)))

    if bool(runs) == (voted is not None) or len(runs) > 2:
        raise click.UsageError("give one run, two runs, or --result FILE.")
    show(read_votes(voted) if voted else _cast(runs, file, limit=limit, seed=seed, host=host, port=port))


def _cast(folders: tuple[Path, ...], file: Path, *, limit: int | None, seed: int, host: str, port: int) -> Votes:
    """Serve the page until Ctrl-C."""
    from unirl.core.errors import RecipeError

    from ..history import read_history
    from .pairs import held_out_pairs, training_pairs
    from .server import start_server
    from .session import VotingSession
    from .votes_file import VotedRun, opened

    histories = [read_history(folder.absolute()) for folder in folders]
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise RecipeError(f"{folders[1]}: got the same run twice, expected two runs, or one.")
    pairs = held_out_pairs(*histories, seed=seed) if histories[1:] else training_pairs(histories[0], seed=seed)
    runs = [VotedRun(folder=run.folder, began=run.sessions[0].began) for run in histories]
    with opened(file, runs, pairs, seed=seed) as votes:
        if votes.num_of_other_images:
            click.echo(
                f"{votes.num_of_other_images} votes are on images that the run does not have any more: they count, and "
                "no pairs are made from them.",
                err=True,
            )
        session = VotingSession(pairs, votes, limit=limit)
        with start_server(session, host=host, port=port) as server:
            state = session.state()
            click.echo(f"{state['done']} of {state['total']} votes    {server.url}    Ctrl-C ends it", err=True)
            try:
                server.serve_forever()
            except KeyboardInterrupt:
                click.echo(f"saved in {' and '.join(map(str, votes.files))}", err=True)
        return votes.votes
