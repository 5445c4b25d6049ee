"""Who may import whom: benchmarks, tests -> ppo -> ppo_kernels -> ppo_kernels._triton -> triton."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for package in ("ppo_kernels", "ppo")
    for path in sorted((ROOT / package).rglob("*.py"))
}


def imports_of(source, module, is_package=False):
    """Names of all modules that the source imports, wherever in it, relative ones resolved."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".") if is_package else module.split(".")[:-1]
                parents = parents[: len(parents) - (node.level - 1)]
                base = ".".join([*parents, base]).rstrip(".")
            found |= {base} | {f"{base}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and node.args:
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            first = node.args[0]
            if name in ("import_module", "__import__") and isinstance(first, ast.Constant):
                found.add(first.value)
    return found


def is_in(name, *packages):
    """Whether a module is one of the packages or inside one."""
    return any(name == p or name.startswith(p + ".") for p in packages)


def forbidden_for(module):
    """What a module must not import."""
    barred = ["benchmarks", "tests"]
    if is_in(module, "ppo_kernels"):
        barred += ["ppo", "transformers", "accelerate"]
    if not is_in(module, "ppo_kernels._triton"):
        barred += ["triton"]
    if is_in(module, "ppo"):
        barred += ["ppo_kernels._triton", "ppo_kernels._torch"]
    islands = ["ppo_kernels.reference", "ppo_kernels._torch", "ppo_kernels._triton"]
    stages = ["ppo.rollout", "ppo.rewards", "ppo.update"]
    for group in (islands, stages):
        if is_in(module, *group):
            barred += [other for other in group if not is_in(module, other)]
    return barred


def test_there_is_something_to_look_at():
    assert {"ppo_kernels", "ppo_kernels.reference", "ppo_kernels._torch.logits"} <= set(MODULES)


@pytest.mark.parametrize("module", MODULES)
def test_arrows(module):
    path = MODULES[module]
    found = imports_of(path.read_text(), module, path.name == "__init__.py")
    wrong = {name for name in found if is_in(name, *forbidden_for(module))}
    assert not wrong, f"{module} must not import {sorted(wrong)}"


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("ppo_kernels.gae", "import triton"),
        ("ppo_kernels.gae", "def f():\n    import triton.language as tl"),
        ("ppo_kernels.gae", "import importlib; importlib.import_module('triton')"),
        ("ppo_kernels._torch.gae", "from ppo_kernels import reference"),
        ("ppo_kernels._torch.gae", "from ..reference import gae"),
        ("ppo_kernels.reference", "from ppo_kernels._torch.gae import gae"),
        ("ppo_kernels._triton.gae", "from ppo_kernels._torch import gae"),
        ("ppo_kernels.whiten", "from transformers import AutoModel"),
        ("ppo_kernels.whiten", "import ppo.batch"),
        ("ppo.rollout", "from ppo.update import step"),
        ("ppo.rollout", "from ppo import rewards"),
        ("ppo.rewards", "from . import rollout"),
        ("ppo.update", "from ppo_kernels._triton import losses"),
        ("ppo.train", "import tests.conftest"),
    ],
)
def test_the_rules_find_what_they_forbid(module, line):
    found = imports_of(line, module)
    assert any(is_in(name, *forbidden_for(module)) for name in found)


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("ppo_kernels._triton.gae", "import triton.language as tl"),
        ("ppo_kernels.gae", "from ppo_kernels import reference"),
        ("ppo_kernels._torch.logits", "from ppo_kernels._torch.pieces import Scratch"),
        ("ppo.train", "from ppo import rollout, rewards, update"),
        ("ppo.update", "from ppo_kernels import policy_loss"),
    ],
)
def test_the_rules_allow_what_is_meant(module, line):
    found = imports_of(line, module)
    assert not any(is_in(name, *forbidden_for(module)) for name in found)
