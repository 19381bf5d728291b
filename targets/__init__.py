"""Targets: Program → Artifact. Installed as `edgec.targets`; each module registers one (edgec/registry.py)."""
