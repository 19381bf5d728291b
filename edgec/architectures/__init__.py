"""Architectures that edgec builds itself, from a configuration that travels as JSON beside the weights."""
