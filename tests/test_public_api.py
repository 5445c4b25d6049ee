"""How the package is imported, and what it promises about itself."""

import inspect
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version

import pytest
import torch

import ppo_kernels

FORMS = [
    "from ppo_kernels import gae; gae(x, x)",
    "import ppo_kernels; ppo_kernels.gae(x, x)",
    "import ppo_kernels.gae; ppo_kernels.gae(x, x)",
    "from ppo_kernels.gae import gae; gae(x, x)",
    "import ppo_kernels.gae as gae; gae(x, x)",
    "from ppo_kernels.gae import gae; import ppo_kernels; ppo_kernels.gae(x, x); gae(x, x)",
    "import ppo_kernels.gae, ppo_kernels.whiten, ppo_kernels.reference; ppo_kernels.gae(x, x)",
    "import importlib; importlib.import_module('ppo_kernels.gae').gae(x, x)",
]


def run(code):
    """Run in a fresh process; return what it prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_every_form_of_import_gives_the_function():
    setup = "import torch; x = torch.ones(1, 2)\n"
    forget = "import sys\nfor name in [n for n in sys.modules if n == 'ppo_kernels' or "
    forget += "n.startswith('ppo_kernels.') and '_torch' not in n]: del sys.modules[name]\n"
    run(setup + forget.join(form + "\n" for form in FORMS))


def test_importing_needs_neither_triton_nor_the_trainer():
    heavy = ["triton", "transformers", "accelerate", "ppo", "ppo_kernels._triton"]
    loaded = run(f"import ppo_kernels, sys; print([n for n in {heavy} if n in sys.modules])")
    assert loaded == "[]"


def test_everything_in_all_exists_and_nothing_else_is_exported():
    assert sorted(ppo_kernels.__all__) == ppo_kernels.__all__
    for name in ppo_kernels.__all__:
        assert hasattr(ppo_kernels, name), name
    public = {
        name
        for name, value in vars(ppo_kernels).items()
        if not name.startswith("_") and (inspect.isfunction(value) or inspect.isclass(value))
    }
    assert public - {"PackageNotFoundError", "version"} <= set(ppo_kernels.__all__)


def test_version():
    try:
        assert ppo_kernels.__version__ == version("ppo-kernels")
    except PackageNotFoundError:
        assert ppo_kernels.__version__ == "0+unknown"


OPERATORS = [name for name in ppo_kernels.__all__ if inspect.isfunction(getattr(ppo_kernels, name))]


@pytest.mark.parametrize("name", OPERATORS)
def test_docstring_has_every_part(name):
    operator = getattr(ppo_kernels, name)
    text = inspect.getdoc(operator)
    summary = text.splitlines()[0]
    assert summary.endswith(".")
    assert len(summary) < 100
    for part in ("Args:", "Returns:", "Raises:", "Source:", "http"):
        assert part in text, part
    for argument in inspect.signature(operator).parameters:
        assert f"    {argument}: " in text, argument


@pytest.mark.parametrize("name", OPERATORS)
def test_reference_takes_the_same_arguments_in_the_same_order(name):
    public = inspect.signature(getattr(ppo_kernels, name)).parameters
    spec = inspect.signature(getattr(ppo_kernels.reference, name)).parameters
    positional = [n for n, p in spec.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == [n for n, p in public.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    for argument, parameter in spec.items():
        if parameter.kind is parameter.KEYWORD_ONLY:
            assert public[argument].default == parameter.default, argument
    open_ended = any(p.kind is p.VAR_KEYWORD for p in spec.values())
    missing = set(public) - set(spec) - {"impl", "inplace_backward", "chunk_bytes"}
    assert not missing or open_ended


def test_ignored_token_is_that_of_cross_entropy():
    logits, tokens = torch.randn(3, 5), torch.tensor([1, ppo_kernels.IGNORE_INDEX, 4])
    want = -torch.nn.functional.cross_entropy(logits, tokens, reduction="none")
    torch.testing.assert_close(ppo_kernels.token_logprobs(logits, tokens), want)
