"""The half of the sandbox that runs inside it: the standard library alone, sent to a bare interpreter as source."""
