"""`unirl show`: one sample of a run with everything that is known about it, or the samples of a step."""

from __future__ import annotations

from pathlib import Path

import click

__all__ = ["command"]


@click.command("show")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--sample", metavar="ID", help="Show this sample, with those that it was made from.")
@click.option("--step", type=click.IntRange(0), help="List the samples of this saved step; the last one by default.")
@click.option("--stage", help="List those of this stage; all stages by default.")
@click.option(
    "--sort",
    default="reward",
    show_default=True,
    metavar="KEY",
    help="List by reward, advantage, length, or a reward or component by its name, such as shapes/color.",
)
@click.option(
    "--limit",
    type=click.IntRange(1),
    default=16,
    show_default=True,
    help="List so many of a stage: the lowest, then the highest.",
)
@click.option(
    "--tokens",
    type=click.IntRange(0),
    default=40,
    show_default=True,
    help="Show so many tokens of a text, from both ends; 0 shows all.",
)
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def command(
    run: Path,
    sample: str | None,
    step: int | None,
    stage: str | None,
    sort: str,
    limit: int,
    tokens: int,
    as_json: bool,
) -> None:
    """Show the samples of RUN, a run folder: scores, advantages, tokens and log-probs, or steps and noise.

    Lists the samples of a step; with --sample, shows one of them and its ancestors up to the prompt. The samples of
    every run.media_every-th step are saved.
    """
    from unirl.core.errors import RunFolderError

    try:
        text = _shown(
            run, sample=sample, step=step, stage=stage, sort=sort, limit=limit, tokens=tokens, as_json=as_json
        )
    except ValueError as error:
        # Events come from other machines and other people.
        raise RunFolderError(f"{run}: it cannot be read as a run: {error}") from error
    click.echo(text, nl=False)


def _shown(
    run: Path,
    *,
    sample: str | None,
    step: int | None,
    stage: str | None,
    sort: str,
    limit: int,
    tokens: int,
    as_json: bool,
) -> str:
    """What the command prints. Raises ValueError for events that are not those of a run."""
    from unirl.core.strict_json import strict_json

    from .facts import sample_facts
    from .listing import step_lists
    from .saved_run import open_run
    from .text import list_text, sample_text

    saved = open_run(run)
    if sample is not None:
        facts = sample_facts(saved, *saved.sample(sample))
        return strict_json(facts, indent=2, ensure_ascii=False) + "\n" if as_json else sample_text(facts, tokens=tokens)
    lists = step_lists(saved, saved.samples(saved.chosen_step(step)), stage=stage, sort=sort)
    if as_json:
        return strict_json(lists, indent=2, ensure_ascii=False) + "\n"
    tables = "\n".join(list_text(each, sort=sort, limit=limit) for each in lists)
    return f"saved steps: {saved.listed_steps}\n\n{tables}\nunirl show {run} --sample ID shows one of them.\n"
