"""Tests that every engine in a process of its own has to pass, and what they are made of.

An engine's test module imports all of `text_engines` or `latent_engines`: their test functions run there, with the
engine that its conftest starts. Its own tests follow, and last those that end the engine.
"""
