"""Command line and YAML files: from what a person wrote to a `Config`, or to a one-line refusal."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from difflib import get_close_matches
from typing import Any, Generic, TypeVar, get_type_hints

import yaml
from jsonargparse import ArgumentError, ArgumentParser

from ppo.config import Config
from ppo.schema import ANY, InputError, check_value, default_of, expected, settings_of, show
from ppo.tables import read_text

C = TypeVar("C")
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


@dataclass(frozen=True)
class Command(Generic[C]):
    """A program that is run with settings: their dataclass, and what `--help` says first."""

    schema: type[C]
    module: str
    description: str
    peers: Mapping[str, str]
    """Names of the same settings elsewhere, for suggestions."""

    @property
    def settings(self) -> Mapping[str, tuple[Any, Any]]:
        """Map each dotted key to its field and its type."""
        schema: Any = self.schema
        return settings_of(schema)

    @property
    def sections(self) -> Mapping[str, Callable[..., Any]]:
        """Map the name of each group of keys to its dataclass."""
        parts: Any = self.schema
        hints = get_type_hints(parts)
        return {part.name: hints[part.name] for part in fields(parts) if not part.metadata}

    def check(self, key: str, value: object) -> Any:
        """Return the value in the type of this key's field, or raise InputError."""
        return check_value(key, value, *self.settings[key])


TRAIN = Command(
    Config,
    "ppo.train",
    "PPO for language models. Without models and prompts it trains the embedded demo.",
    PEERS,
)


def parse(argv: Sequence[str], command: Command[C]) -> C:
    """Return the settings of a command line: defaults, then YAML files in order, then options."""
    parser = make_parser(command)
    files, options, asked = _split(argv, command)
    if "help" in asked:
        parser.print_help()
        raise SystemExit(0)
    values: dict[str, Any] = {}
    for path in files:
        values |= read_yaml(path, command)
    values |= {key: _from_text(parser, command, key, text) for key, text in options.items()}
    config = build(values, command)
    if "print_config" in asked:
        settings: Any = config
        sys.stdout.write(dump(asdict(settings)))
        raise SystemExit(0)
    return config


def build(values: Mapping[str, Any], command: Command[C]) -> C:
    """Make the settings of dotted keys; what is not given keeps its default."""
    sections = {
        name: section(
            **{k.removeprefix(f"{name}."): v for k, v in values.items() if k.startswith(f"{name}.")}
        )
        for name, section in command.sections.items()
    }
    return command.schema(**{k: v for k, v in values.items() if "." not in k}, **sections)


def make_parser(command: Command[Any]) -> ArgumentParser:
    """Build the parser: it knows each field's type, and its help is the reference of all fields."""
    parser = ArgumentParser(
        prog=f"python -m {command.module}",
        usage=f"python -m {command.module} [--config FILE] [--KEY VALUE | --KEY=VALUE ...]",
        description=f"{command.description} Dashes and underscores in KEY are alike.",
        exit_on_error=False,
    )
    parser.add_argument(
        "--config", metavar="FILE", help="YAML file of settings; later files and options win"
    )
    parser.add_argument(
        "--print-config", action="store_true", help="print all settings as YAML and exit"
    )
    groups = {
        name: parser.add_argument_group(name, cls.__doc__) for name, cls in command.sections.items()
    }
    for key, (declared, hint) in command.settings.items():
        section, _, name = key.rpartition(".")
        meaning, interval = declared.metadata["meaning"], declared.metadata["interval"]
        (groups[section] if section else parser).add_argument(
            f"--{key}",
            type=hint,
            default=default_of(declared),
            metavar=name.upper(),
            help=f"{meaning}; in {interval}" if interval not in ("", ANY) else meaning,
        )
    return parser


def read_yaml(path: str, command: Command[Any]) -> dict[str, Any]:
    """Read a file of settings as dotted keys and checked values.

    Beyond YAML 1.1: `1e-4` is a number (YAML 1.2), and a key given twice is an error.
    """
    text = read_text(path)
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        if root is not None and not isinstance(root, yaml.MappingNode):
            raise InputError(f"{path}:1: expected lines of `key: value`")
        return dict(_flatten(loader, command, root, path, set())) if root else {}
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
    loader: _Loader,
    command: Command[Any],
    node: yaml.MappingNode,
    path: str,
    seen: set[str],
    prefix: str = "",
) -> Iterator[tuple[str, Any]]:
    for key_node, value_node in node.value:
        place = f"{path}:{key_node.start_mark.line + 1}: "
        if not isinstance(key_node, yaml.ScalarNode):
            raise InputError(f"{place}expected lines of `key: value`")
        key = prefix + _spelling(key_node.value)
        if key in seen:
            raise InputError(f"{place}{key} is given twice")
        seen.add(key)
        if key in command.sections and isinstance(value_node, yaml.MappingNode):
            yield from _flatten(loader, command, value_node, path, seen, f"{key}.")
            continue
        try:
            value = loader.construct_object(value_node, deep=True)
            if (
                key in command.sections and value is None
            ):  # a section whose lines are all commented out
                continue
            yield _known(command, key, value), command.check(key, value)
        except ValueError as error:  # ours, or a date such as 2020-13-01
            raise InputError(f"{place}{error}") from None


def _split(
    argv: Sequence[str], command: Command[Any]
) -> tuple[list[str], dict[str, str], set[str]]:
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
            _known(command, key, text)
        if not equals and not text:
            raise InputError(f"--{name} needs a value")
        if key == "config":
            files.append(text)
        else:
            options[key] = text
    return files, options, asked


def _spelling(name: str) -> str:
    return name.replace("-", "_")


def _from_text(parser: ArgumentParser, command: Command[Any], key: str, text: str) -> Any:
    """Read one option's text as its field's type; text stays as it is typed, but for null."""
    hint = command.settings[key][1]
    if hint is str or (hint == (str | None) and text != "null"):
        return command.check(key, text)
    try:
        value = parser.parse_args([f"--{key}={text}"])[key]
    except (ArgumentError, ValueError):
        value = text
    return command.check(key, value)


def _known(command: Command[Any], key: str, value: object) -> str:
    """Return the key, or refuse it with the nearest one that exists."""
    settings = command.settings
    if key in settings:
        return key
    if key in command.sections:
        example = next(name for name in settings if name.startswith(f"{key}."))
        raise InputError(f"{key} is a section of keys such as {example}, got {show(value)}")
    leaf = key.rpartition(".")[2].lower()
    leaves = {name.rpartition(".")[2]: name for name in settings}
    close = get_close_matches(leaf, leaves, 1) or get_close_matches(key, settings, 1)
    near = command.peers.get(leaf) or (leaves.get(close[0], close[0]) if close else None)
    hint = "--help lists every key"
    if near:
        hint = f"did you mean {near} ({expected(*settings[near])})?"
    given = "" if value == "" else f" = {show(value)}"
    raise InputError(f"unknown key {key}{given}: {hint}")
