"""Published sets of questions with checkable answers, as prompt files."""
