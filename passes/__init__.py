"""Passes: Model → Model. Installed as `edgec.passes`; each module registers one (edgec/registry.py)."""
