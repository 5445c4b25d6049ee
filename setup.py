"""Shim for tools that still look for setup.py; all metadata lives in pyproject.toml."""

from setuptools import setup

setup()
