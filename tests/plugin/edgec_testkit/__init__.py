"""Passes and targets for tests."""
