"""A thin PPO trainer for Hugging Face language models: `python -m ppo.train`.

`ppo/README.md` has the loop in maths, a line for each metric, and the implementation details.
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("ppo-kernels")
except PackageNotFoundError:  # run from a checkout that was never installed
    __version__ = "0.0.0"
