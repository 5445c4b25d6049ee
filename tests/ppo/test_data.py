"""Encoded prompts, the order of the epochs, padding."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from ppo.config import InputError
from ppo.data import EncodedPrompts, encode_prompts, left_pad, prompt_batches, read_prompts
from ppo.prompt_files import Prompt

Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Put text or bytes in a file of this name and return its path."""

    def build(name: str, content: str | bytes) -> str:
        raw = content if isinstance(content, bytes) else content.encode()
        (tmp_path / name).write_bytes(raw)
        return str(tmp_path / name)

    return build


BOS, EOS = 1, 2


def make_tokenizer(template: str = "$A", **special: Any) -> PreTrainedTokenizerFast:
    """Words w3 to w9 are ids 3 to 9; the template says what the tokenizer adds."""
    words = ["<pad>", "<bos>", "<eos>", *(f"w{i}" for i in range(3, 10))]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="w3"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[("<bos>", BOS), ("<eos>", EOS)]
    )
    names = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", **special}
    return PreTrainedTokenizerFast(tokenizer_object=inner, **names)


def encode(
    tokenizer: PreTrainedTokenizerFast, *prompts: str | Prompt, limit: int = 512
) -> list[list[int]]:
    return encode_all(tokenizer, prompts, limit).rows


def encode_all(
    tokenizer: PreTrainedTokenizerFast,
    prompts: Sequence[Any],
    limit: int,
    long_prompts: Any = "error",
    **how: Any,
) -> EncodedPrompts:
    prompts = [prompt if isinstance(prompt, Prompt) else Prompt(prompt) for prompt in prompts]
    return encode_prompts(tokenizer, prompts, limit, long_prompts, "here", **how)


@pytest.mark.parametrize("template", ["$A", "<bos> $A", "<bos> $A <eos>", "$A <eos>"])
@pytest.mark.parametrize("text", ["w5 w6", "<bos> w5 w6", "<bos> <bos> w5 w6", "w5 w6 <eos>"])
def test_one_bos_and_no_closing_eos_whoever_adds_them(template: str, text: str) -> None:
    assert encode(make_tokenizer(template), text) == [[1, 5, 6]]


@pytest.mark.parametrize("template", ["$A", "$A <eos>", "$A <eos> <eos>"])
def test_no_bos_where_the_tokenizer_has_none(template: str) -> None:
    assert encode(make_tokenizer(template, bos_token=None), "w5 w6") == [[5, 6]]


def test_bos_and_eos_may_be_the_same_token() -> None:
    tokenizer = make_tokenizer(bos_token="<eos>")
    assert encode(tokenizer, "w5", "w5 <eos>", "w5 <eos> w6", "") == [
        [2, 5],
        [2, 5],
        [2, 5, 2, 6],
        [2],
    ]


def test_an_empty_prompt_is_bos_alone() -> None:
    assert encode(make_tokenizer(), "w5", "", "   ") == [[1, 5], [1], [1]]
    assert encode(make_tokenizer("<bos> $A <eos>"), "") == [[1]]


@pytest.mark.parametrize("blank", ["", "   "])
def test_an_empty_prompt_without_bos_is_refused_by_its_line(write: Write, blank: str) -> None:
    lines = ['{"prompt":"w5"}', "", json.dumps({"prompt": blank}), '{"prompt":"w6"}']
    file = write("p.jsonl", "\n".join(lines))
    with pytest.raises(InputError) as caught:
        encode(make_tokenizer(bos_token=None), *read_prompts(file))
    assert (
        str(caught.value) == f"{file}:3: empty prompt, and the tokenizer has no BOS to start from"
    )


def test_a_prompt_of_nothing_but_what_is_taken_off_is_empty() -> None:
    with pytest.raises(InputError, match=r"^here: row 1: empty prompt"):
        encode(make_tokenizer(bos_token=None), "<eos>")


def test_whitespace_is_an_empty_prompt_even_where_it_has_an_id() -> None:
    tokenizer = make_tokenizer(bos_token=None)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Split("w", "isolated")
    assert tokenizer("   ")["input_ids"] == [3]
    with pytest.raises(InputError, match=r"^here: row 2: empty prompt"):
        encode(tokenizer, "w5", "   ")


def test_nothing_is_cut_or_padded_even_if_the_tokenizer_was_saved_so() -> None:
    tokenizer = make_tokenizer(model_max_length=2)
    tokenizer.backend_tokenizer.enable_truncation(2)
    tokenizer.backend_tokenizer.enable_padding(length=8)
    assert encode(tokenizer, "w9 w8 w7 w6 w5", "w3") == [[1, 9, 8, 7, 6, 5], [1, 3]]


def test_a_prompt_at_the_limit_stays_and_one_over_it_is_named(write: Write) -> None:
    tokenizer = make_tokenizer(bos_token=None)
    assert encode(tokenizer, "w3 w4 w5 w6", limit=4) == [[3, 4, 5, 6]]
    file = write("p.txt", "w3\n\nw3 w4 w5 w6 w7 w8\nw3 w4 w5 w6 w7\n")
    with pytest.raises(InputError) as caught:
        encode(tokenizer, *read_prompts(file), limit=4)
    assert str(caught.value) == (
        f"{file}:3: prompt of 6 tokens is over the limit of 4 (rollout.max_prompt_tokens); "
        "2 of 3 prompts are; rollout.long_prompts=drop leaves them out"
    )


def test_the_limit_counts_bos() -> None:
    with pytest.raises(
        InputError, match=r"^here: row 2: prompt of 3 tokens is over the limit of 2"
    ):
        encode(make_tokenizer(), "w5", "w5 w6", limit=2)


def test_long_prompts_are_dropped_and_counted() -> None:
    tokenizer = make_tokenizer(bos_token=None)
    encoded = encode_all(tokenizer, ["w3 w4", "w5", "w6 w7 w8", "w9"], 1, "drop")
    assert (encoded.rows, encoded.kept, encoded.dropped) == ([[5], [9]], [1, 3], 2)
    with pytest.raises(InputError) as caught:
        encode_all(tokenizer, ["w3 w4"], 1, "drop")
    assert str(caught.value) == (
        "here: row 1: prompt of 2 tokens is over the limit of 1 (rollout.max_prompt_tokens); "
        "1 of 1 prompts are"
    )


@pytest.mark.parametrize(
    ("limit", "bos", "rows"),
    [
        (4, None, [[5, 6, 7, 8], [9]]),
        (3, None, [[6, 7, 8], [9]]),
        (1, None, [[8], [9]]),
        (4, "<bos>", [[1, 6, 7, 8], [1, 9]]),
        (2, "<bos>", [[1, 8], [1, 9]]),
        (1, "<bos>", [[1], [1]]),
    ],
)
def test_long_prompts_keep_bos_and_their_last_tokens(
    limit: int, bos: str | None, rows: list[list[int]]
) -> None:
    tokenizer = make_tokenizer(bos_token=bos)
    encoded = encode_all(tokenizer, ["w3 w4 w5 w6 w7 w8", "w9"], limit, "truncate")
    assert (encoded.rows, encoded.kept, encoded.dropped) == (rows, [0, 1], 0)
    assert encoded.truncated == (2 if limit == 1 and bos else 1)


def test_the_other_columns_stay_with_their_prompts(write: Write) -> None:
    rows = [{"prompt": "w3 w4", "id": 1}, {"prompt": "w5", "id": 2}]
    file = write("p.jsonl", "\n".join(map(json.dumps, rows)))
    encoded = encode_all(make_tokenizer(bos_token=None), read_prompts(file), 1, "drop")
    assert (encoded.rows, encoded.extra) == ([[5]], [{"id": 2}])


def chat(*turns: tuple[str, str]) -> Prompt:
    return Prompt(tuple({"role": role, "content": content} for role, content in turns))


# the roles are w3 (user), w4 (assistant), w9 (system); a turn ends with EOS
TEMPLATE = (
    "{% for m in messages %}{{ {'user': 'w3', 'assistant': 'w4', 'system': 'w9'}[m.role] }} "
    "{{ m.content }} <eos> {% endfor %}{% if add_generation_prompt %}w4{% endif %}"
)
ASK = chat(("user", "w5 w6"))


@pytest.mark.parametrize("start", ["", "<bos> ", "<bos> <bos> "])
@pytest.mark.parametrize("post", ["$A", "<bos> $A", "<bos> $A <eos>"])
def test_a_chat_ends_with_the_header_and_starts_with_the_template_s_bos(
    start: str, post: str
) -> None:
    tokenizer = make_tokenizer(post)
    tokenizer.chat_template = start + TEMPLATE
    begin = [1] if start else []
    assert encode(tokenizer, ASK) == [[*begin, 3, 5, 6, 2, 4]]
    # beside a text, which has its BOS from the rule for texts
    assert encode(tokenizer, "w7", ASK, "w8") == [[1, 7], [*begin, 3, 5, 6, 2, 4], [1, 8]]


def test_a_template_without_header_keeps_the_eos_of_the_turn() -> None:
    tokenizer = make_tokenizer("<bos> $A <eos>")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}<eos>{% endfor %}"
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    assert encode(tokenizer, ASK) == [[5, 6, 2]]


def test_the_assistant_s_turn_is_continued_or_refused() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    open_turn = chat(("user", "w5"), ("assistant", "w7 w8"))
    with pytest.raises(InputError) as caught:
        encode(tokenizer, ASK, open_turn)
    assert str(caught.value) == (
        "here: row 2: the last message is the assistant's; "
        "rollout.continue_assistant=true lets the response continue it"
    )
    encoded = encode_all(tokenizer, [ASK, open_turn], 99, continue_assistant=True)
    assert encoded.rows == [[3, 5, 6, 2, 4], [3, 5, 2, 4, 7, 8]]


def test_a_system_prompt_goes_where_there_is_none() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    own = chat(("system", "w7"), ("user", "w5"))
    encoded = encode_all(tokenizer, [ASK, own], 99, system_prompt="w8")
    assert encoded.rows == [[9, 8, 2, 3, 5, 6, 2, 4], [9, 7, 2, 3, 5, 2, 4]]
    with pytest.raises(InputError, match=r"^here: row 2: system_prompt needs chat messages, got t"):
        encode_all(tokenizer, [ASK, "w5"], 99, system_prompt="w8")


def test_the_limit_counts_the_template() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "<bos> " + TEMPLATE
    assert encode_all(tokenizer, [ASK], 6).rows == [[1, 3, 5, 6, 2, 4]]
    with pytest.raises(
        InputError, match=r"^here: row 1: prompt of 6 tokens is over the limit of 5"
    ):
        encode_all(tokenizer, [ASK], 5)
    assert encode_all(tokenizer, [ASK], 4, "truncate").rows == [[1, 6, 2, 4]]


@pytest.mark.parametrize(
    ("template", "line"),
    [
        (None, "chat messages, but the tokenizer has no chat template"),
        (
            "{{ raise_exception('no such role') }}",
            "the chat template refuses the messages: no such",
        ),
        ("{% if %}", "the chat template refuses the messages: "),
    ],
)
def test_what_cannot_be_rendered_is_one_line(template: str | None, line: str) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(InputError) as caught:
        encode(tokenizer, "w5", ASK)
    assert str(caught.value).startswith(f"here: row 2: {line}")


def test_no_texts_are_refused() -> None:
    with pytest.raises(InputError, match=r"^here: no prompts in it$"):
        encode(make_tokenizer())


def first(number: int, *args: int, **kwargs: int) -> list[list[int]]:
    return list(islice(prompt_batches(*args, **kwargs), number))


@pytest.mark.parametrize("stop", [0, 3, 5, 7, 10])
def test_resuming_gives_the_batches_of_an_uninterrupted_run(stop: int) -> None:
    whole = first(15, 10, 2, 0)
    assert whole[stop:] == first(15 - stop, 10, 2, 0, start=stop)


@pytest.mark.parametrize(("count", "size"), [(10, 2), (10, 3), (10, 10), (3, 8), (1, 4), (7, 5)])
def test_each_index_comes_once_in_every_epoch(count: int, size: int) -> None:
    batches = first(3 * count, count, size, 4)
    assert {len(batch) for batch in batches} == {size}
    stream = [index for batch in batches for index in batch]
    for start in range(0, len(stream), count):
        assert sorted(stream[start : start + count]) == list(range(count))


def test_each_epoch_and_each_seed_has_an_order_of_its_own() -> None:
    orders = [batch for seed in range(3) for batch in first(5, 20, 20, seed)]
    assert len({tuple(order) for order in orders}) == 15
    assert tuple(range(20)) not in {tuple(order) for order in orders}


def test_the_order_is_fixed_for_good() -> None:
    """A resume under another Python must find the same batches."""
    torch.manual_seed(5)  # and no global generator has a say
    assert first(2, 5, 5, 0) == first(2, 5, 5, 0)
    # the ranks of random() after random.seed("0 0"): .35 .81 .91 .17 .44 .32 .19 .69
    assert first(1, 8, 8, 0) == [[3, 6, 5, 0, 4, 7, 1, 2]]


def test_permutations_are_even() -> None:
    places = torch.zeros(4, 4)
    for seed in range(4000):
        for place, index in enumerate(next(prompt_batches(4, 4, seed))):
            places[place, index] += 1
    assert (places / 4000 - 0.25).abs().max() < 0.035  # 5 standard deviations


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"count": 0}, "count must be at least 1, got 0"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"start": -1}, "start must be at least 0, got -1"),
    ],
)
def test_sizes_are_checked_before_the_first_batch(changes: dict[str, int], line: str) -> None:
    with pytest.raises(ValueError, match=f"^{line}$"):
        prompt_batches(**{"count": 4, "batch_size": 2, "seed": 0, "start": 0, **changes})


def test_rows_are_padded_on_the_left() -> None:
    input_ids, attention_mask = left_pad([[5, 6, 7], [8], []], pad_id=9)
    assert input_ids.tolist() == [[5, 6, 7], [9, 9, 8], [9, 9, 9]]
    assert attention_mask.tolist() == [[True] * 3, [False, False, True], [False] * 3]
    assert (input_ids.dtype, attention_mask.dtype) == (torch.int64, torch.bool)


def test_a_pad_token_inside_a_prompt_is_attended() -> None:
    assert left_pad([[9, 5], [6]], pad_id=9)[1].tolist() == [[True, True], [False, True]]


@pytest.mark.parametrize(("rows", "shape"), [([], (0, 0)), ([[], []], (2, 0))])
def test_nothing_to_pad(rows: list[list[int]], shape: tuple[int, int]) -> None:
    input_ids, attention_mask = left_pad(rows, pad_id=0)
    assert (input_ids.shape, attention_mask.shape) == (shape, shape)
