"""Operators of PPO for language models: drop-in functions over tensors, Triton where it helps.

`ppo_kernels/README.md` has the table of operators; `reference.py` is their specification.
"""

from importlib.metadata import PackageNotFoundError, version

from ppo_kernels.categorical_kl import categorical_kl
from ppo_kernels.gae import gae
from ppo_kernels.kl_penalty import kl_penalty
from ppo_kernels.linear_categorical_kl import linear_categorical_kl
from ppo_kernels.linear_ppo_loss import linear_ppo_loss
from ppo_kernels.linear_token_logprobs import (
    linear_token_logprobs,
    linear_token_logprobs_and_entropy,
)
from ppo_kernels.moments import combine_moments, masked_moments
from ppo_kernels.outputs import (
    LinearPPOLoss,
    PolicyLoss,
    PPOAdvantages,
    PPOLoss,
    TokenStatistics,
    ValueLoss,
)
from ppo_kernels.policy_loss import policy_loss
from ppo_kernels.ppo_advantages import ppo_advantages
from ppo_kernels.ppo_loss import ppo_loss
from ppo_kernels.reference import IGNORE_INDEX
from ppo_kernels.token_logprobs import token_logprobs, token_logprobs_and_entropy
from ppo_kernels.token_rewards import token_rewards
from ppo_kernels.token_statistics import token_statistics
from ppo_kernels.token_weights import token_weights
from ppo_kernels.value_loss import value_loss
from ppo_kernels.whiten import whiten

try:
    __version__ = version("ppo-kernels")
except PackageNotFoundError:  # run from a checkout that is not installed
    __version__ = "0+unknown"

__all__ = [
    "IGNORE_INDEX",
    "LinearPPOLoss",
    "PPOAdvantages",
    "PPOLoss",
    "PolicyLoss",
    "TokenStatistics",
    "ValueLoss",
    "__version__",
    "categorical_kl",
    "combine_moments",
    "gae",
    "kl_penalty",
    "linear_categorical_kl",
    "linear_ppo_loss",
    "linear_token_logprobs",
    "linear_token_logprobs_and_entropy",
    "masked_moments",
    "policy_loss",
    "ppo_advantages",
    "ppo_loss",
    "token_logprobs",
    "token_logprobs_and_entropy",
    "token_rewards",
    "token_statistics",
    "token_weights",
    "value_loss",
    "whiten",
]
