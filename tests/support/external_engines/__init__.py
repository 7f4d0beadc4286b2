"""Tests that every external engine has to pass, and their fixtures.

An engine's test module imports all of `text_engines` or `latent_engines`: their test functions run there, with the
engine that its conftest starts. Its own tests follow, and last those that end the engine.
"""
