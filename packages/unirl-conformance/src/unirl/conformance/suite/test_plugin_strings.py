"""That the strings of a plugin's specs lead to what they promise. This imports everything that they name."""

from __future__ import annotations

from unirl.conformance.claims import claim
from unirl.conformance.fixtures.plugin import PluginBench
from unirl.conformance.spec_check import check_spec


@claim("plugin", tier="tiny")
def test_every_string_of_its_specs_resolves(bench: PluginBench) -> None:
    """What the specs name can be imported, is a function that takes what a run gives it, or a config with defaults.

    If it fails: each sentence names the field of the spec and what was found. A function that does not take its
    arguments must follow the signatures in `unirl.core.roles`.
    """
    problems = [
        f"{spec.kind} {spec.name!r}: {problem}"
        for spec in bench.specs
        for problem in check_spec(spec, lambda target, spec=spec: bench.workshop.resolved(bench.found(spec), target))
    ]
    assert not problems, " ".join(problems)
