"""What actor, reference and critic see in a rollout before anything trains on it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ppo.batch import Rollout, join, split
from ppo.config import Config
from ppo.forward import ask, state_values, values_after, values_of_tokens
from ppo.learner import Learner
from ppo_kernels import kl_penalty


class Look(NamedTuple):
    """One look at a rollout; all [B,T] but the last."""

    logprobs: Tensor
    entropy: Tensor
    ref_logprobs: Tensor  # 0 where the KL is exact: nothing reads them
    kl: Tensor  # what the penalty charges, before β
    values: Tensor | None
    last_values: Tensor | None  # [B], after the last token


@torch.no_grad()
def look(
    config: Config, actor: Learner, critic: Learner | None, ref: nn.Module, rollout: Rollout
) -> Look:
    """See the rollout through all models, a micro-batch at a time.

    The log-probs come from the forward that trains, not from the sampler's cache, so that the
    first ratio is 1.
    """
    ppo, packed = config.ppo, config.models.packing
    cuts = split(rollout, ppo.micro_batch_size, ppo.micro_batch_tokens, packed=packed)
    rows, parts = zip(
        *((rows, _look(config, actor, critic, ref, part)) for rows, part in cuts), strict=True
    )
    width = rollout.responses.shape[1]
    joined = (
        None
        if column[0] is None
        else join(list(zip(rows, column, strict=True)), width if column[0].dim() == 2 else None)
        for column in zip(*parts, strict=True)
    )
    return Look(*joined)  # type: ignore[arg-type]  # only values can be None


def _look(
    config: Config, actor: Learner, critic: Learner | None, ref: nn.Module, part: Rollout
) -> Look:
    how: dict[str, Any] = {"temperature": config.rollout.temperature, "impl": config.impl}
    exact = config.ppo.kl_estimator == "exact"
    out = ask(
        actor.model,
        part,
        with_entropy=True,
        with_values=critic is not None and critic.on_actor,
        against=ref if exact else None,
        **how,
    )
    assert out.logprobs is not None
    assert out.entropy is not None
    if out.kl is not None:
        ref_logprobs, kl = torch.zeros_like(out.kl), out.kl
    else:
        found = ask(ref, part, **how).logprobs
        assert found is not None
        ref_logprobs = found
        kl = kl_penalty(
            out.logprobs,
            ref_logprobs,
            estimator=config.ppo.kl_estimator,
            response_mask=part.response_mask,
            impl=config.impl,
        )
    values = out.values
    if critic is not None and values is None:
        values = state_values(critic.model, part)
    return Look(
        out.logprobs,
        out.entropy,
        ref_logprobs,
        kl,
        None if values is None else values_of_tokens(values, part),
        None if values is None else values_after(values, part),
    )


@torch.no_grad()
def centre_values(seen: Look, head: nn.Linear, scores: Tensor, mask: Tensor) -> Look:
    """Shift the critic's bias so that its mean over the tokens is the mean score.

    b ← b + (mean of s − mean of V)

    For a fresh head, whose values are near 0, the bias becomes the mean score, as in Ziegler et
    al. 2019, https://github.com/openai/lm-human-preferences.

    Args:
        seen: with values.
        head: the critic's linear layer.
        scores: [B], the shaped scores.
        mask: [B,T] bool, the tokens that count.

    Returns:
        The look as the critic sees it now.
    """
    assert seen.values is not None
    assert seen.last_values is not None
    shift = scores.mean() - seen.values[mask].mean()
    head.bias.add_(shift)
    return seen._replace(
        values=seen.values.add(shift).masked_fill(~mask, 0.0),
        last_values=seen.last_values.add(shift),
    )
