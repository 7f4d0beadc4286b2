"""Names that UniRL's process, the server and its worker share."""

from __future__ import annotations

__all__ = ["ANSWER", "BRIDGE_VARIABLE", "CALL", "MODEL_ID", "SETTINGS_VARIABLE"]

BRIDGE_VARIABLE = "UNIRL_SGLANG_BRIDGE"
"""Environment variable with the bridge, read by the plugin in SGLang's processes."""
SETTINGS_VARIABLE = "UNIRL_SGLANG_SETTINGS"
"""Environment variable with the bridge's settings, as JSON."""
CALL = "unirl_call"
"""Key of a request's extras: a method of the pipeline, and its arguments."""
ANSWER = "unirl_answer"
"""Key of an output's usage: the return value."""
MODEL_ID = "unirl-rollouts"
"""SGLang's `model_id` of the bridge's pipeline."""
