"""Sampling: masks at the EOS, and nothing but the trainer's own settings."""

from __future__ import annotations

import torch
from transformers import GenerationConfig, PreTrainedModel

from ppo.data import left_pad
from ppo.rollout import Sampling, cut_at_eos, generate

PAD, EOS = 0, 2


def cut(responses: list[list[int]], eos_ids: list[int], pad: int = PAD):
    ids = torch.tensor(responses)
    prompts = torch.full((len(ids), 1), 5)
    return cut_at_eos(prompts, torch.ones_like(prompts).bool(), ids, eos_ids, pad)


def test_the_eos_counts_and_what_follows_is_padding() -> None:
    rollout = cut([[5, EOS, 9, 9], [5, 6, 7, EOS]], [EOS])
    assert rollout.responses.tolist() == [[5, EOS, PAD, PAD], [5, 6, 7, EOS]]
    assert rollout.response_mask.tolist() == [[True, True, False, False], [True] * 4]
    assert rollout.finished.tolist() == [True, True]


def test_a_response_cut_by_the_limit_keeps_its_last_token_and_is_not_finished() -> None:
    rollout = cut([[5, 6, 8]], [EOS])
    assert rollout.responses.tolist() == [[5, 6, 8]]
    assert rollout.response_mask.all()
    assert rollout.finished.tolist() == [False]


def test_every_id_of_an_eos_list_ends_a_response() -> None:
    rollout = cut([[4, 7, 3, 3]], [7, 9])
    assert rollout.response_mask.tolist() == [[True, True, False, False]]
    assert rollout.finished.tolist() == [True]


def test_a_response_of_padding_only_counts_one_eos_where_pad_is_eos() -> None:
    rollout = cut([[2, 2, 2]], [2], pad=2)
    assert rollout.response_mask.tolist() == [[True, False, False]]


def test_the_models_own_generation_config_stays_out(llama: PreTrainedModel) -> None:
    with torch.no_grad():
        for parameter in llama.parameters():
            parameter.zero_()  # uniform logits: a repeated token is the sampler's doing
    own = GenerationConfig(do_sample=True, top_k=1, top_p=0.001, temperature=0.1, min_p=0.9)
    llama.generation_config = own
    prompts, mask = left_pad([[5, 6]] * 8, PAD)
    torch.manual_seed(0)
    sampling = Sampling(max_new_tokens=6, temperature=1.0, eos_ids=[EOS], pad_id=PAD)
    rollout = generate(llama, prompts, mask, sampling)
    assert len({tuple(row) for row in rollout.responses.tolist()}) == 8
    assert llama.generation_config is own


def test_left_padding_does_not_change_a_greedy_response(gpt2: PreTrainedModel) -> None:
    def sample(rows: list[list[int]]) -> list[list[int]]:
        prompts, mask = left_pad(rows, PAD)
        sampling = Sampling(max_new_tokens=5, temperature=1e-4, eos_ids=[EOS], pad_id=PAD)
        return generate(gpt2, prompts, mask, sampling).responses.tolist()  # τ → 0 is greedy

    together = sample([[7, 8], [3, 4, 5, 6, 7]])
    assert together == sample([[7, 8]]) + sample([[3, 4, 5, 6, 7]])


def test_training_mode_is_restored_and_dropout_is_off_while_sampling(gpt2: PreTrainedModel) -> None:
    prompts, mask = left_pad([[7, 8, 9]], PAD)
    sampling = Sampling(max_new_tokens=8, temperature=1e-4, eos_ids=[EOS], pad_id=PAD)
    expected = generate(gpt2.eval(), prompts, mask, sampling).responses
    found = generate(gpt2.train(), prompts, mask, sampling).responses
    assert gpt2.training
    assert torch.equal(expected, found)
