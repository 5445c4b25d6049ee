"""Sampling: masks at the EOS, and nothing but the trainer's own settings."""

from __future__ import annotations

import torch
from transformers import GenerationConfig, PreTrainedModel

from ppo.batch import Rollout
from ppo.data import left_pad
from ppo.rollout import Sampling, cut_at_eos, generate, sampling_warning, stop_positions
from tests.ppo.conftest import tiny_tokenizer

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


def always(llama: PreTrainedModel, token: int) -> PreTrainedModel:
    """A model that says one token, whatever came before."""
    with torch.no_grad():
        for parameter in llama.parameters():
            parameter.zero_()
        llama.model.norm.weight.fill_(1.0)
        llama.model.embed_tokens.weight[:, 0] = 1.0
        llama.model.embed_tokens.weight[token, 0] = 100.0
    return llama


def sample_one(model: PreTrainedModel, **changes: object) -> Rollout:
    how = {"max_new_tokens": 4, "temperature": 1.0, "eos_ids": [EOS], "pad_id": PAD, **changes}
    prompts, mask = left_pad([[5, 6], [7]], PAD)
    return generate(model, prompts, mask, Sampling(**how), tiny_tokenizer())


def test_a_stop_string_ends_a_response_and_stays_in_it(llama: PreTrainedModel) -> None:
    rollout = sample_one(always(llama, 9), stop_strings=["w9 w9"])
    assert rollout.responses.tolist() == [[9, 9]] * 2
    assert rollout.finished.tolist() == [True, True]
    rollout = sample_one(llama, stop_strings=["w9"], min_new_tokens=3)
    assert rollout.responses.tolist() == [[9, 9, 9]] * 2
    assert sample_one(llama, stop_strings=["w8"]).finished.tolist() == [False, False]


def test_a_stop_string_in_one_row_leaves_the_others_alone() -> None:
    sampling = Sampling(4, 1.0, [EOS], PAD, stop_strings=["w8 w9"])
    ids = torch.tensor([[7, 8, 9, 10], [9, 8, 7, 6]])
    ends = stop_positions(tiny_tokenizer(), ids, sampling)
    assert ends.tolist() == [[False, False, True, False], [False] * 4]


def test_no_eos_before_the_minimal_length(llama: PreTrainedModel) -> None:
    model = always(llama, EOS)
    assert sample_one(model).response_mask.sum(1).tolist() == [1, 1]
    rollout = sample_one(model, min_new_tokens=3)
    assert EOS not in rollout.responses[:, :3]
    assert rollout.responses[:, 3].tolist() == [EOS, EOS]


def test_a_person_is_told_where_the_sampled_distribution_is_not_the_trained_one() -> None:
    assert sampling_warning(Sampling(4, 0.7, [EOS], PAD, stop_strings=["a"])) is None
    warning = sampling_warning(Sampling(4, 0.7, [EOS], PAD, top_k=5, top_p=0.9))
    assert warning is not None
    assert warning.startswith("rollout.top_k, rollout.top_p: responses come from a narrower")


def test_top_k_of_one_is_greedy(llama: PreTrainedModel) -> None:
    greedy = sample_one(llama, top_k=1).responses
    assert torch.equal(greedy, sample_one(llama, temperature=1e-4).responses)
