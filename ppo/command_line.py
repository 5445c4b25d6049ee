"""Command line and YAML files: from what a person wrote to a `Config`, or to a one-line refusal."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, get_type_hints

import yaml
from jsonargparse import ArgumentError, ArgumentParser

from ppo.config import Config, InputError, check_value, expected, settings, show, to_yaml
from ppo.prompt_files import read_text

SECTIONS: Mapping[str, Callable[..., Any]] = {
    part.name: get_type_hints(Config)[part.name] for part in fields(Config) if not part.metadata
}
# What other trainers call the same thing: TRL, verl, OpenRLHF, trlX, cleanrl, stable-baselines3.
PEERS = {
    **dict.fromkeys(("lam", "lambd", "lmbda", "lambda"), "ppo.gae_lambda"),
    **dict.fromkeys(("eps_clip", "clip_ratio", "clip_range", "clip_coef"), "ppo.cliprange"),
    **dict.fromkeys(("clip_ratio_high", "eps_clip_high"), "ppo.cliprange_high"),
    **dict.fromkeys(("value_clip", "clip_range_vf"), "ppo.cliprange_value"),
    **dict.fromkeys(("init_kl_coef", "kl_loss_coef", "beta"), "ppo.kl_coef"),
    **dict.fromkeys(("num_ppo_epochs", "num_epochs", "n_epochs"), "ppo.ppo_epochs"),
    "num_mini_batches": "ppo.num_minibatches",
    **dict.fromkeys(("entropy_coeff", "ent_coef"), "ppo.entropy_coef"),
    **dict.fromkeys(("response_length", "max_tokens"), "rollout.max_new_tokens"),
    **dict.fromkeys(("prompt_length", "max_prompt_length"), "rollout.max_prompt_tokens"),
    **dict.fromkeys(("learning_rate", "lr"), "optim.actor_lr"),
    **dict.fromkeys(("bf16", "fp16", "torch_dtype"), "dtype"),
    **dict.fromkeys(("model", "model_name_or_path", "sft_model_path"), "actor"),
    **dict.fromkeys(("dataset", "dataset_name", "train_files"), "prompts"),
}


def parse(argv: Sequence[str]) -> Config:
    """Return the Config of a command line: defaults, then YAML files in order, then options."""
    parser = make_parser()
    files, options, asked = _split(argv)
    if "help" in asked:
        parser.print_help()
        raise SystemExit(0)
    values: dict[str, Any] = {}
    for path in files:
        values |= read_yaml(path)
    values |= {key: _from_text(parser, key, text) for key, text in options.items()}
    config = build(values)
    if "print_config" in asked:
        sys.stdout.write(to_yaml(config))
        raise SystemExit(0)
    return config


def build(values: Mapping[str, Any]) -> Config:
    """Make a Config of dotted keys; what is not given keeps its default."""
    sections = {
        name: section(
            **{k.removeprefix(f"{name}."): v for k, v in values.items() if k.startswith(f"{name}.")}
        )
        for name, section in SECTIONS.items()
    }
    return Config(**{k: v for k, v in values.items() if "." not in k}, **sections)


def make_parser() -> ArgumentParser:
    """Build the parser: it knows each field's type, and its help is the reference of all fields."""
    parser = ArgumentParser(
        prog="python -m ppo.train",
        usage="python -m ppo.train [--config FILE] [--KEY VALUE | --KEY=VALUE ...]",
        description="PPO for language models. Without models and prompts it trains the embedded "
        "demo. Dashes and underscores in KEY are alike.",
        exit_on_error=False,
    )
    parser.add_argument(
        "--config", metavar="FILE", help="YAML file of settings; later files and options win"
    )
    parser.add_argument(
        "--print-config", action="store_true", help="print all settings as YAML and exit"
    )
    groups = {name: parser.add_argument_group(name, cls.__doc__) for name, cls in SECTIONS.items()}
    for key, (declared, hint) in settings().items():
        section, _, name = key.rpartition(".")
        meaning, interval = declared.metadata["meaning"], declared.metadata["interval"]
        (groups[section] if section else parser).add_argument(
            f"--{key}",
            type=hint,
            default=declared.default,
            metavar=name.upper(),
            help=f"{meaning}; in {interval}" if interval else meaning,
        )
    return parser


def read_yaml(path: str) -> dict[str, Any]:
    """Read a file of settings as dotted keys and checked values.

    Beyond YAML 1.1: `1e-4` is a number (YAML 1.2), and a key given twice is an error.
    """
    text = read_text(path)
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        if root is not None and not isinstance(root, yaml.MappingNode):
            raise InputError(f"{path}:1: expected lines of `key: value`")
        return dict(_flatten(loader, root, path, set())) if root else {}
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise InputError(f"{path}:{line}: broken YAML: {error.problem}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise InputError(f"{path}: broken YAML: {error}") from None


def dump(tree: Mapping[str, Any]) -> str:
    """Write nested settings as YAML."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


class _Loader(yaml.SafeLoader):
    pass


class _Dumper(yaml.SafeDumper):
    pass


# For both, so that text such as a folder called 1e5 is quoted when it is written.
for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"),
        list("-+.0123456789"),
    )


def _flatten(
    loader: _Loader, node: yaml.MappingNode, path: str, seen: set[str], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    for key_node, value_node in node.value:
        place = f"{path}:{key_node.start_mark.line + 1}: "
        if not isinstance(key_node, yaml.ScalarNode):
            raise InputError(f"{place}expected lines of `key: value`")
        key = prefix + _spelling(key_node.value)
        if key in seen:
            raise InputError(f"{place}{key} is given twice")
        seen.add(key)
        if key in SECTIONS and isinstance(value_node, yaml.MappingNode):
            yield from _flatten(loader, value_node, path, seen, f"{key}.")
            continue
        try:
            value = loader.construct_object(value_node, deep=True)
            if key in SECTIONS and value is None:  # a section whose lines are all commented out
                continue
            yield _known(key, value), check_value(key, value)
        except ValueError as error:  # ours, or a date such as 2020-13-01
            raise InputError(f"{place}{error}") from None


def _split(argv: Sequence[str]) -> tuple[list[str], dict[str, str], set[str]]:
    """Sort the arguments into YAML files, options with their text, and help or print_config."""
    files: list[str] = []
    options: dict[str, str] = {}
    asked: set[str] = set()
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        name, equals, text = word.removeprefix("--").partition("=")
        key = _spelling(name)
        if word == "-h" or (word.startswith("--") and key in ("help", "print_config")):
            asked.add("help" if word == "-h" else key)
            continue
        if not word.startswith("--"):
            raise InputError(f"unexpected argument {word!r}: settings are given as --KEY VALUE")
        if not equals:
            text = rest.pop(0) if rest and not rest[0].startswith("--") else ""
        if key != "config":
            _known(key, text)
        if not equals and not text:
            raise InputError(f"--{name} needs a value")
        if key == "config":
            files.append(text)
        else:
            options[key] = text
    return files, options, asked


def _spelling(name: str) -> str:
    return name.replace("-", "_")


def _from_text(parser: ArgumentParser, key: str, text: str) -> Any:
    """Read one option's text as its field's type; text stays as it is typed, but for null."""
    hint = settings()[key][1]
    if hint is str or (hint == (str | None) and text != "null"):
        return check_value(key, text)
    try:
        value = parser.parse_args([f"--{key}={text}"])[key]
    except (ArgumentError, ValueError):
        value = text
    return check_value(key, value)


def _known(key: str, value: object) -> str:
    """Return the key, or refuse it with the nearest one that exists."""
    if key in settings():
        return key
    if key in SECTIONS:
        example = next(name for name in settings() if name.startswith(f"{key}."))
        raise InputError(f"{key} is a section of keys such as {example}, got {show(value)}")
    leaf = key.rpartition(".")[2].lower()
    leaves = {name.rpartition(".")[2]: name for name in settings()}
    close = get_close_matches(leaf, leaves, 1) or get_close_matches(key, settings(), 1)
    near = PEERS.get(leaf) or (leaves.get(close[0], close[0]) if close else None)
    hint = f"did you mean {near} ({expected(near)})?" if near else "--help lists every key"
    given = "" if value == "" else f" = {show(value)}"
    raise InputError(f"unknown key {key}{given}: {hint}")
