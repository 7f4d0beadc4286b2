"""Defaults of optional methods: what a part that inherits its role does without implementing them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from unirl.core.errors import PluginBroken, RecipeError
from unirl.core.roles import Algorithm, Backend, DiffusionModel, Losses, TextModel


def bare(role: type[Any], *, name: str = "acme") -> Any:
    """A part that has of its role what it inherits, and a spec."""
    methods = dict.fromkeys(role.__abstractmethods__, lambda self, *args, **settings: None)
    part = type("Acme", (role,), methods)()
    part.spec = SimpleNamespace(name=name)
    return part


@pytest.mark.parametrize(
    ("role", "method", "arguments", "promised_by"),
    [
        (DiffusionModel, "fill", ({},), "models with the capability 'lazy-build' do"),
        (TextModel, "verify", (), "models whose spec states `verifies_values` do"),
        (TextModel, "split_sequence", (None,), "models whose spec states `splits_sequence` do"),
        (Backend, "hold_frozen", (None,), "backends with the capability 'lazy-build' do"),
        (Backend, "with_values", (None,), "backends with the capability 'critic' do"),
        (Algorithm, "after_anchor", (None, None), "algorithms with `trains_critic` do"),
        (Algorithm, "critic_weights", (None,), "algorithms with `trains_critic` do"),
    ],
)
def test_a_promised_method_that_is_absent_names_the_part_and_the_promise(
    role: type[Any], method: str, arguments: tuple[Any, ...], promised_by: str
) -> None:
    kind = promised_by.partition("s ")[0]
    owner = "model 'acme'" if kind == "model" else kind
    with pytest.raises(PluginBroken) as caught:
        getattr(bare(role), method)(*arguments)
    assert str(caught.value) == (
        f"{owner}: Acme does not implement {method}(), as {promised_by}. Implement it, or change the spec."
    )


def test_media_and_critic_losses_take_settings_by_name() -> None:
    with pytest.raises(PluginBroken, match=r"Acme does not implement conditions\(\), as models whose spec states `inp"):
        bare(TextModel).conditions(None, sampling=None)
    with pytest.raises(PluginBroken, match=r"Acme does not implement critic_loss\(\), as algorithms with `trains_cri"):
        bare(Algorithm).critic_loss(None, None, progress=0.0)


def test_a_model_that_another_part_asks_too_much_of_is_refused_as_a_choice() -> None:
    with pytest.raises(RecipeError, match=r"got 'acme', .*latents_of\(\); expected one that encodes stored samples"):
        bare(DiffusionModel).latents_of(None)
    with pytest.raises(RecipeError, match=r"got 'acme', .*completion_tokens\(\); .* to read stored completions"):
        bare(TextModel).completion_tokens([])
    for ask in (
        lambda model: model.output_head(None),
        lambda model: model.divergence(None, teacher=None, kind="jensen", beta=0.5, top_k=None, temperature=1.0),
    ):
        with pytest.raises(RecipeError, match=r"got a Acme, .*as student and as teacher.*algorithm\.kl_coef of grpo"):
            ask(bare(TextModel))


def test_an_algorithm_without_a_state_or_a_critic_has_none() -> None:
    algorithm = bare(Algorithm)
    assert algorithm.state() == algorithm.end_step({"loss": 1.0}) == {}
    assert not algorithm.trains_critic
    with pytest.raises(ValueError, match="Acme keeps no state, got kl_coef"):
        algorithm.load_state({"kl_coef": 0.1})


def test_a_part_that_lacks_a_method_of_its_role_cannot_be_made() -> None:
    class Half(Algorithm):
        def loss(self, track: Any, forward: Any, *, progress: float) -> Losses:
            return Losses(terms=())

    with pytest.raises(TypeError, match=r"abstract class Half .*advantages.*loss_weights"):
        Half()  # type: ignore[abstract]
