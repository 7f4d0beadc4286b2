"""Shared by tests of token algorithms: a tiny language model, and losses of given numbers."""
