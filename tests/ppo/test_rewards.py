"""Scores: read at the last real token, whatever the padding."""

from __future__ import annotations

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, LlamaForSequenceClassification

from ppo.config import InputError
from ppo.rewards import load_function, score_texts, score_tokens
from tests.ppo.conftest import llama_config, tiny_tokenizer


@pytest.fixture
def reward_model() -> LlamaForSequenceClassification:
    torch.manual_seed(0)
    return LlamaForSequenceClassification(llama_config(num_labels=1)).eval()


def alone(model: LlamaForSequenceClassification, ids: list[int]) -> float:
    """The score by hand: the head on the last hidden state of the unpadded row."""
    hidden = model.model(input_ids=torch.tensor([ids])).last_hidden_state[0, -1]
    return float(model.score.weight[0] @ hidden)


@pytest.mark.parametrize(
    ("ids", "mask", "real"),
    [
        ([5, 6, 0, 0], [1, 1, 0, 0], [5, 6]),
        ([0, 0, 5, 6], [0, 0, 1, 1], [5, 6]),
        ([5, 2, 6, 2, 2], [1, 1, 1, 1, 0], [5, 2, 6, 2]),  # pad = eos inside the text
        ([5, 6, 7, 8], [1, 1, 1, 1], [5, 6, 7, 8]),
    ],
)
@torch.no_grad()
def test_the_score_is_read_at_the_last_attended_token(
    reward_model: LlamaForSequenceClassification,
    ids: list[int],
    mask: list[int],
    real: list[int],
) -> None:
    found = score_tokens(reward_model, torch.tensor([ids]), torch.tensor([mask]).bool())
    assert found.item() == pytest.approx(alone(reward_model, real), abs=1e-5)


@torch.no_grad()
def test_a_model_without_a_pad_token_scores_a_batch(
    reward_model: LlamaForSequenceClassification,
) -> None:
    reward_model.config.pad_token_id = None
    found = score_texts(reward_model, tiny_tokenizer(), ["w5 w6 ", "w7 "], ["w8", "w9"])
    expected = [alone(reward_model, [5, 6, 8]), alone(reward_model, [7, 9])]
    assert found.tolist() == pytest.approx(expected, abs=1e-5)


@torch.no_grad()
def test_an_encoder_scores_with_its_own_pooling() -> None:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        num_labels=1,
    )
    model = BertForSequenceClassification(config).eval()
    found = score_texts(model, tiny_tokenizer(), ["w5 w6 ", "w7 "], ["w8", "w9"])
    one_by_one = [
        score_texts(model, tiny_tokenizer(), [prompt], [response]).item()
        for prompt, response in (("w5 w6 ", "w8"), ("w7 ", "w9"))
    ]
    assert found.tolist() == pytest.approx(one_by_one, abs=1e-5)


@pytest.mark.parametrize("spec", ["no_such_module:f", "math:no_such", "math", "math:pi", ":f"])
def test_a_function_that_cannot_be_imported_is_one_clear_error(spec: str) -> None:
    with pytest.raises(InputError, match=r"^judge: "):
        load_function(spec, "judge")


TEMPLATE = (
    "{% for m in messages %}{{ 'w60' if m.role == 'user' else 'w61' }} {{ m.content }} {% endfor %}"
)


@torch.no_grad()
def test_texts_end_with_the_readers_own_eos_where_the_response_ended(
    reward_model: LlamaForSequenceClassification,
) -> None:
    how = {"finished": [True, False], "batch_size": 1}
    found = score_texts(reward_model, tiny_tokenizer(), ["w5 ", "w5 "], ["w6", "w6"], **how)
    expected = [alone(reward_model, [5, 6, 2]), alone(reward_model, [5, 6])]
    torch.testing.assert_close(found, torch.tensor(expected))


@torch.no_grad()
def test_a_chat_is_read_by_the_readers_own_template(
    reward_model: LlamaForSequenceClassification,
) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    open_turn = [{"role": "user", "content": "w7"}, {"role": "assistant", "content": "w8 "}]
    messages = [[{"role": "user", "content": "w7"}], open_turn, None]
    found = score_texts(reward_model, tokenizer, ["x", "x", "w5 "], ["w9"] * 3, messages=messages)
    rows = [[60, 7, 61, 9], [60, 7, 61, 8, 9], [5, 9]]
    expected = torch.tensor([alone(reward_model, row) for row in rows])
    torch.testing.assert_close(found, expected)


def test_a_text_past_the_readers_positions_is_refused(
    reward_model: LlamaForSequenceClassification,
) -> None:
    with pytest.raises(InputError, match="sample 1 of the batch has 130 tokens"):
        score_texts(reward_model, tiny_tokenizer(), ["w5 ", "w5 " * 129], ["w6", "w6"])
