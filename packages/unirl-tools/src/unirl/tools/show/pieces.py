"""The text of single tokens, by the tokenizer of the checkpoint that a stage was generated with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from unirl.core.errors import RecipeError, RunFolderError

from ..local_checkpoint import local_checkpoint
from .saved_run import SavedRun

__all__ = ["TokenTexts"]


@dataclass(frozen=True, kw_only=True)
class TokenTexts:
    """Token -> its text, special tokens included."""

    tokenizer: Any
    problem: str | None = None
    """Why there is no tokenizer; every text is then None."""

    def __call__(self, token: int) -> str | None:
        return None if self.tokenizer is None else self.tokenizer.decode([token], skip_special_tokens=False)

    @classmethod
    def of(cls, run: SavedRun, stage: str) -> TokenTexts:
        """Those of a stage's model. Reads local files alone: the run may be of another machine."""
        from unirl.model_host.tokens.causal_lm_files import load_tokenizer

        model = run.resolved.section("model")
        learner = run.stages[stage].text("learner") if stage in run.stages else ""
        model = model.section(learner) if learner in model.values else model
        path = model.text("path", default="")
        try:
            folder = local_checkpoint(path, revision=model.optional_text("revision"), beside=run.started_in)
            if folder is None:
                return cls(tokenizer=None, problem=f"{path or 'the checkpoint'} is not on this machine")
            return cls(tokenizer=load_tokenizer(folder))
        except (RecipeError, RunFolderError) as error:
            return cls(tokenizer=None, problem=str(error))
