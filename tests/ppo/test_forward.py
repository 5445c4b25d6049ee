"""Forward passes: aligned with the tokens, blind to padding."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from ppo.batch import Rollout
from ppo.critic import Critic
from ppo.data import left_pad
from ppo.forward import ask, response_logprobs, response_values
from ppo.policy import Policy

HOW = {"temperature": 0.7, "impl": "torch"}


def rollout(prompts: list[list[int]], responses: list[list[int]], extra_pads: int = 0) -> Rollout:
    ids, mask = left_pad([[0] * extra_pads + row for row in prompts], 0)
    mask = mask & (ids != 0)
    width = max(map(len, responses))
    tokens = torch.tensor([row + [0] * (width - len(row)) for row in responses])
    counts = torch.tensor([[True] * len(row) + [False] * (width - len(row)) for row in responses])
    return Rollout(ids, mask, tokens, counts, counts[:, -1])


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_logprobs_are_the_models_own(name: str, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(name)
    batch = rollout([[5, 6, 7]], [[8, 9, 10]])
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[5, 6, 7, 8, 9, 10]])).logits.double() / 0.7
        found, entropy, *_ = ask(Policy(model), batch, with_entropy=True, **HOW)
    log_p = logits.log_softmax(-1)[0, 2:5]
    torch.testing.assert_close(found[0].double(), log_p[range(3), [8, 9, 10]], atol=1e-5, rtol=0)
    torch.testing.assert_close(
        entropy[0].double(), -(log_p.exp() * log_p).sum(-1), atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("pads", [1, 3, 8])
def test_left_padding_changes_nothing(name: str, pads: int, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(name)
    torch.manual_seed(2)
    critic = Critic(model.base_model, torch.nn.Linear(32, 1))
    plain, padded = (rollout([[5, 6, 7]], [[8, 9]], extra_pads=n) for n in (0, pads))
    with torch.no_grad():
        for forward in (
            lambda batch: response_logprobs(Policy(model), batch, **HOW),
            lambda batch: response_values(critic, batch),
        ):
            torch.testing.assert_close(forward(plain), forward(padded), atol=1e-5, rtol=0)


def test_a_row_in_a_batch_equals_the_row_alone(gpt2: PreTrainedModel) -> None:
    prompts, responses = [[5, 6], [3, 4, 5, 6, 7]], [[8, 9, 11], [10]]
    with torch.no_grad():
        together = response_logprobs(Policy(gpt2), rollout(prompts, responses), **HOW)
        first = response_logprobs(Policy(gpt2), rollout(prompts[:1], responses[:1]), **HOW)
        second = response_logprobs(Policy(gpt2), rollout(prompts[1:], responses[1:]), **HOW)
    torch.testing.assert_close(together[:1], first, atol=1e-5, rtol=0)
    torch.testing.assert_close(together[1:, :1], second, atol=1e-5, rtol=0)
    assert together[1, 1:].tolist() == [0.0, 0.0]


def test_gradients_of_logprobs_equal_those_of_log_softmax(llama: PreTrainedModel) -> None:
    batch = rollout([[5, 6, 7]], [[8, 9]])
    response_logprobs(Policy(llama), batch, **HOW).sum().backward()
    found = {name: p.grad.clone() for name, p in llama.named_parameters()}
    llama.zero_grad()
    logits = llama(input_ids=torch.tensor([[5, 6, 7, 8, 9]])).logits[0, 2:4] / 0.7
    logits.log_softmax(-1)[range(2), [8, 9]].sum().backward()
    for name, parameter in llama.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, atol=1e-6, rtol=1e-4)
