"""PPO-ptx: examples to be imitated, mixed into the updates (Ouyang et al. 2022, eq. 2)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from ppo.batch import Rollout
from ppo.data import left_pad
from ppo.forward import response_logprobs
from ppo.prompt_files import read_conversations
from ppo.schema import InputError
from ppo.sft import Example
from ppo.supervised import right_pad
from ppo.supervised_command import encode_conversations


@dataclass(frozen=True)
class Examples:
    """What `ptx_data` holds, and the random numbers that draw from it."""

    rows: Sequence[Example]
    generator: torch.Generator
    pad_id: int

    def draw(self, count: int) -> Rollout:
        """Draw examples at random, with replacement, as a batch of prompts and responses."""
        picked = torch.randint(len(self.rows), (count,), generator=self.generator).tolist()
        examples = [self.rows[index] for index in picked]
        prompts, prompt_mask = left_pad([example.prompt for example in examples], self.pad_id)
        responses, mask = right_pad([example.response for example in examples], self.pad_id)
        finished = torch.ones(count, dtype=torch.bool)
        return Rollout(prompts, prompt_mask, responses, mask, finished)

    def loss(
        self, policy: nn.Module, responses: int, *, coef: float, fraction: float, impl: str
    ) -> Tensor:
        """Return γ·(−Σ_t log π(x_t | x_<t)/N) over the N response tokens of a fresh draw.

        At temperature 1, whatever the rollout's: the examples were not sampled from this policy.

        Args:
            policy: the actor.
            responses: responses of the minibatch beside which the examples stand.
            coef: γ, `ppo.ptx_coef`.
            fraction: examples for each response, rounded up; `ppo.ptx_fraction`.
            impl: of the operators.
        """
        batch = self.draw(math.ceil(fraction * responses)).to(next(policy.parameters()).device)
        logprobs = response_logprobs(policy, batch, temperature=1.0, impl=impl)
        return -coef * logprobs.sum() / batch.response_mask.sum()


def read_examples(
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    longest: int | None,
    system_prompt: str | None,
    pad_id: int,
    seed: int,
) -> Examples:
    """Read the columns `prompt` and `response`, in the formats of `python -m ppo.sft`.

    Raises:
        InputError: the file is not readable, or a row is longer than `longest` tokens.
    """
    rows = read_conversations(source, "prompt", {"ptx_data": "response"})
    conversations = [row[0] for row in rows]
    examples = encode_conversations(tokenizer, conversations, system_prompt)
    for conversation, example in zip(conversations, examples, strict=True):
        if longest is not None and len(example) > longest:
            raise InputError(
                f"{conversation.prompt.place}: prompt and response of {len(example)} tokens are "
                f"over the actor's {longest} positions (ptx_data)"
            )
    return Examples(examples, torch.Generator().manual_seed(seed), pad_id)
