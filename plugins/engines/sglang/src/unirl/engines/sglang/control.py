"""Keys for the server's calls of the worker inside SGLang's requests."""

from __future__ import annotations

__all__ = ["ANSWER", "BRIDGE_VARIABLE", "CALL"]

BRIDGE_VARIABLE = "UNIRL_SGLANG_BRIDGE"
"""Environment variable with the bridge, read by the plugin in SGLang's processes."""
CALL = "unirl_call"
"""Key of a request's extras: a method of the pipeline, and its arguments."""
ANSWER = "unirl_answer"
"""Key of an output's usage: the return value."""
