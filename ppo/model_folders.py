"""Model folders and hub ids: reading them, with errors that name the setting."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from ppo.schema import InputError


def read_config(key: str, source: str) -> PretrainedConfig:
    """Read `config.json`; the setting `key` names the source in errors."""
    folder = Path(source)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise InputError(f"{key}: {source} is not a model folder (it has no config.json)")
    if not folder.exists() and (source.startswith((".", "/", "~")) or source.count("/") > 1):
        raise InputError(f"{key}: no such folder: {source}")
    if folder.is_file():
        raise InputError(f"{key}: {source} is a file, expected a model folder or a hub id")
    try:
        loaded: PretrainedConfig = AutoConfig.from_pretrained(source)
        return loaded
    except (OSError, ValueError, json.JSONDecodeError) as error:
        raise InputError(f"{key}: cannot load {source!r}: {_first_line(error)}") from None


def load_model(auto: Any, key: str, source: str, **kwargs: Any) -> Any:
    """Load a model in evaluation mode, through this Auto class."""
    try:
        return auto.from_pretrained(source, **kwargs).eval()  # eval: PPO runs without dropout
    except Exception as error:
        raise InputError(f"{key}: cannot load {source!r}: {_first_line(error)}") from error


def load_tokenizer(key: str, source: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model folder."""
    try:
        return AutoTokenizer.from_pretrained(source)
    except Exception as error:
        raise InputError(f"{key}: no tokenizer in {source!r}: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
