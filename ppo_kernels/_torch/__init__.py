"""Lean eager implementations for any device, where `reference.py` costs too much."""
