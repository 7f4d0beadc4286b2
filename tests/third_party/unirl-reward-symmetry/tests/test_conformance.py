"""The claims of UniRL hold for this plugin, except for the gaps that it declares."""

from __future__ import annotations

from unirl.conformance.run import run_suite
from unirl.conformance.subjects import Selection


def test_every_claim_holds() -> None:
    report = run_suite(Selection(plugins=("unirl-reward-symmetry",)))
    failed = [f"{o.claim} on {o.subject}: {o.reason}" for o in report.outcomes if o.state == "fail"]
    assert not failed, "\n".join(failed)
    assert report.count("pass"), "nothing was tried; is the plugin installed? `pip install --editable .`"
