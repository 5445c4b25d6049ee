"""The embedded demo: its text, its folders, and its two supervised trainings."""

from __future__ import annotations

import io
import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

from ppo.config import InputError
from ppo.demo import build, cache
from ppo.demo.build import DemoFiles, build_demo
from ppo.demo.fragments import CLOSINGS, KINDS, VERDICTS, Moods
from ppo.demo.judge import vader
from ppo.demo.recipe import Settings, write_corpus
from ppo.demo.text import all_prompts, write_response
from ppo.demo.tokenizer import train_tokenizer

TINY = Settings(
    heldout_prompts=8,
    reviews=96,
    heldout_reviews=16,
    pairs=32,
    heldout_pairs=8,
    vocab_size=400,
    hidden_size=16,
    intermediate_size=24,
    heads=2,
    kv_heads=1,
    batch_size=8,
    sft_steps=3,
)


def quiet() -> Console:
    return Console(file=io.StringIO())


def build_tiny(folder: Path, **changes: int) -> DemoFiles:
    return build_demo(folder, console=quiet(), settings=replace(TINY, **changes))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> DemoFiles:
    return build_tiny(tmp_path_factory.mktemp("demo"))


def slots() -> Iterator[tuple[str, Moods]]:
    yield "verdicts", VERDICTS
    yield "closings", CLOSINGS
    for name, kind in KINDS.items():
        yield f"{name} verdicts", kind.verdicts
        yield f"{name} events", kind.events


@pytest.mark.parametrize(("name", "moods"), list(slots()))
def test_every_fragment_reads_as_the_mood_it_is_filed_under(name: str, moods: Moods) -> None:
    def compound(pieces: tuple[str, ...]) -> dict[str, float]:
        return dict(zip(pieces, vader([""] * len(pieces), pieces), strict=True))

    wrong = {piece: x for piece, x in compound(moods.positive).items() if x <= 0.05}
    wrong |= {piece: x for piece, x in compound(moods.negative).items() if x >= -0.05}
    wrong |= {piece: x for piece, x in compound(moods.neutral).items() if abs(x) > 0.05}
    assert wrong == {}, name


@pytest.mark.parametrize("kind", KINDS)
def test_the_parts_of_a_kind_carry_no_mood(kind: str) -> None:
    parts = KINDS[kind].parts
    assert vader([""] * len(parts), parts) == [0.0] * len(parts)


def test_fragments_are_distinct_and_clean() -> None:
    pieces = [piece for _, moods in slots() for piece in moods.all()]
    assert [piece for piece, count in Counter(pieces).items() if count > 1] == []
    assert [piece for piece in pieces if piece != " ".join(piece.split()) or not piece] == []


def test_prompts_are_all_combinations_once() -> None:
    prompts = [prompt.text for prompt in all_prompts()]
    assert len(prompts) == len(set(prompts)) == 5 * 10 * 9 * 6
    assert all(prompt.endswith(" was") and "{" not in prompt for prompt in prompts)


def test_heldout_prompts_occur_in_no_training_text() -> None:
    corpus = write_corpus(TINY)
    heldout = set(corpus.heldout_prompts)
    assert len(heldout) == 8
    used = {review.prompt for review in corpus.reviews} | {pair.prompt for pair in corpus.pairs}
    assert heldout & (used | set(corpus.prompts)) == set()
    assert {review.prompt for review in corpus.heldout_reviews} <= heldout
    assert {pair.prompt for pair in corpus.heldout_pairs} <= heldout


def test_the_text_is_a_function_of_the_seed() -> None:
    assert write_corpus(TINY) == write_corpus(TINY)
    assert write_corpus(TINY) != write_corpus(replace(TINY, seed=1))


def test_text_does_not_touch_the_global_random_state() -> None:
    before = random.getstate()
    write_corpus(TINY)
    assert random.getstate() == before


def test_moods_balance_and_reviews_vary() -> None:
    rng = random.Random(0)
    texts = [write_response(kind, rng) for kind in KINDS for _ in range(1000)]
    scores = vader(texts, texts)
    assert abs(sum(scores) / len(scores)) < 0.05
    assert sum(-0.05 <= score <= 0.05 for score in scores) / len(scores) < 0.2
    assert len(set(texts)) / len(texts) > 0.7


def test_responses_are_sentences_after_a_space() -> None:
    rng = random.Random(0)
    for kind in KINDS:
        for response in (write_response(kind, rng) for _ in range(50)):
            assert response.startswith(" ")
            assert response.endswith(".")
            assert response[1:] == " ".join(response.split())


def test_preferences_put_the_better_response_first() -> None:
    pairs = write_corpus(TINY).pairs
    chosen = vader([p.prompt for p in pairs], [p.chosen for p in pairs])
    rejected = vader([p.prompt for p in pairs], [p.rejected for p in pairs])
    assert min(a - b for a, b in zip(chosen, rejected, strict=True)) >= 0.05


def test_the_judge_reads_the_response_alone() -> None:
    good, bad = vader(["It is awful. It was", "I love it. It was"], [" great.", " awful."])
    assert good > 0.5
    assert bad < -0.4


def test_the_judge_refuses_lists_that_do_not_match() -> None:
    with pytest.raises(ValueError, match=r"^responses must match prompts in number, got 1 for 2$"):
        vader(["a", "b"], ["c"])


def test_every_word_of_the_corpus_is_one_token() -> None:
    corpus = write_corpus(Settings(pairs=1, heldout_pairs=1))
    texts = [row.prompt + row.response for row in corpus.reviews]
    tokenizer = train_tokenizer(texts, vocab_size=2048, max_length=160)
    words = {piece for text in texts for piece in text.replace(",", "").split(" ")[1:]}
    plain = [word.strip(".:") for word in words]
    ids = tokenizer([f" {word}" for word in plain], add_special_tokens=False)["input_ids"]
    assert [word for word, row in zip(plain, ids, strict=True) if len(row) != 1] == []


def test_tokens_of_prompt_and_response_join_without_loss(tiny: DemoFiles) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny.actor)
    prompt, response = "The circus by the lake was", " awful. What a waste."
    joined = tokenizer(prompt + response)["input_ids"]
    alone = tokenizer(response, add_special_tokens=False)["input_ids"]
    assert tokenizer(prompt)["input_ids"] + alone == joined
    assert joined[0] == tokenizer.bos_token_id == 1
    assert tokenizer.decode(alone) == response
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 2)
    assert set(tokenizer("x")) == {"input_ids", "attention_mask"}


def test_the_folders_are_ordinary_hugging_face_ones(tiny: DemoFiles) -> None:
    actor = AutoModelForCausalLM.from_pretrained(tiny.actor)
    ref = AutoModelForCausalLM.from_pretrained(tiny.ref)
    reward_model = AutoModelForSequenceClassification.from_pretrained(tiny.reward_model)
    critic = AutoModelForTokenClassification.from_pretrained(tiny.critic)
    assert actor.state_dict().keys() == ref.state_dict().keys()
    for name, tensor in actor.state_dict().items():
        assert torch.equal(tensor, ref.state_dict()[name])
    assert reward_model.config.num_labels == critic.config.num_labels == 1
    assert torch.equal(reward_model.score.weight, critic.score.weight)
    vocabularies = [
        AutoTokenizer.from_pretrained(folder).get_vocab()
        for folder in (tiny.actor, tiny.ref, tiny.reward_model, tiny.critic)
    ]
    assert all(vocabulary == vocabularies[0] for vocabulary in vocabularies)
    assert len(vocabularies[0]) == actor.config.vocab_size == 400


def test_scores_have_unit_deviation_and_values_their_mean(tiny: DemoFiles) -> None:
    """Scored one by one without padding, where the build scores padded batches."""
    tokenizer = AutoTokenizer.from_pretrained(tiny.actor)
    reward_model = AutoModelForSequenceClassification.from_pretrained(tiny.reward_model)
    critic = AutoModelForTokenClassification.from_pretrained(tiny.critic)
    scores, values = [], []
    for row in write_corpus(TINY).heldout_reviews:
        ids = torch.tensor([[*tokenizer(row.prompt + row.response)["input_ids"], 2]])
        start = len(tokenizer(row.prompt)["input_ids"])
        scores.append(reward_model(ids).logits.item())
        values.extend(critic(ids).logits[0, start - 1 : -1, 0].tolist())
    assert torch.tensor(scores).std().item() == pytest.approx(1.0, abs=1e-4)
    mean = sum(scores) / len(scores)
    assert sum(values) / len(values) == pytest.approx(mean, abs=1e-4)
    assert tiny.figures["reward_model/score_mean"] == pytest.approx(mean, abs=1e-4)


def test_the_data_files_have_their_columns(tiny: DemoFiles) -> None:
    columns = {
        "prompts.jsonl": ["prompt"],
        "prompts_heldout.jsonl": ["prompt"],
        "sft.jsonl": ["prompt", "response"],
        "preferences.jsonl": ["prompt", "chosen", "rejected"],
        "preferences_heldout.jsonl": ["prompt", "chosen", "rejected"],
    }
    counts = [2692, 8, 96, 32, 8]
    for (name, keys), count in zip(columns.items(), counts, strict=True):
        lines = (tiny.prompts.parent / name).read_text(encoding="utf-8").splitlines()
        assert len(lines) == count
        assert {tuple(json.loads(line)) for line in lines} == {tuple(keys)}


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != cache.MANIFEST
    }


def test_a_second_build_has_the_same_bytes(tiny: DemoFiles, tmp_path: Path) -> None:
    torch.rand(3)  # another global state than at the first build
    again = build_tiny(tmp_path)
    assert contents(again.actor.parent) == contents(tiny.actor.parent)


def test_a_build_leaves_the_global_random_state_alone(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    build_tiny(tmp_path)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_finished_build_is_used_without_training(
    tiny: DemoFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("built twice")

    monkeypatch.setattr(build, "_build", fail)
    assert build_tiny(tiny.actor.parents[1]) == tiny


def test_other_settings_get_a_folder_of_their_own(tiny: DemoFiles, tmp_path: Path) -> None:
    other = build_tiny(tmp_path, seed=1)
    assert other.actor.parent.name != tiny.actor.parent.name
    assert contents(other.actor.parent).keys() == contents(tiny.actor.parent).keys()


@pytest.mark.parametrize("damage", ["cut", "missing", "no manifest"])
def test_a_half_written_build_is_replaced(tiny: DemoFiles, tmp_path: Path, damage: str) -> None:
    folder = tmp_path / tiny.actor.parent.name
    weights = build_tiny(tmp_path).actor / "model.safetensors"
    if damage == "cut":
        weights.write_bytes(weights.read_bytes()[:-1])
    elif damage == "missing":
        weights.unlink()
    else:
        (folder / cache.MANIFEST).unlink()
    assert cache.read_manifest(folder) is None
    build_tiny(tmp_path)
    assert contents(folder) == contents(tiny.actor.parent)
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


def test_the_folder_of_a_killed_build_is_ignored(tiny: DemoFiles, tmp_path: Path) -> None:
    stale = tmp_path / f".{tiny.actor.parent.name}.0123abcd" / "actor"
    stale.mkdir(parents=True)
    (stale / "config.json").write_text("{")
    assert contents(build_tiny(tmp_path).actor.parent) == contents(tiny.actor.parent)
    assert stale.is_dir()


def test_an_interrupted_build_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(folder: Path, *_: object) -> None:
        (folder / "actor").mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(build, "_build", interrupt)
    with pytest.raises(KeyboardInterrupt):
        build_tiny(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"^demo_dir: cannot build the demo in .*file: Not a dir"):
        build_tiny(tmp_path / "file")


def test_of_two_builds_at_once_the_first_to_finish_stays(tmp_path: Path) -> None:
    folder = tmp_path / "key"
    with cache.staged(folder) as slow:
        (slow / "who").write_text("slow")
        cache.write_manifest(slow, {})
        with cache.staged(folder) as fast:
            (fast / "who").write_text("fast")
            cache.write_manifest(fast, {})
    assert (folder / "who").read_text() == "fast"
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


def test_progress_is_plain_lines_off_a_terminal(tmp_path: Path) -> None:
    stream = io.StringIO()
    build_demo(tmp_path, console=Console(file=stream, width=40), settings=TINY)
    lines = stream.getvalue().splitlines()
    heads = ("building", "text:", "actor, supervised", "actor:", "reward model, ", "reward model:")
    assert [line.startswith(head) for line, head in zip(lines, heads, strict=True)] == [True] * 6
    assert "\x1b" not in stream.getvalue()


def test_progress_is_a_bar_on_a_terminal(tmp_path: Path) -> None:
    stream = io.StringIO()
    build_demo(tmp_path, console=Console(file=stream, force_terminal=True), settings=TINY)
    assert "3/3" in stream.getvalue()


@pytest.mark.slow
def test_the_full_build_learns(tmp_path: Path) -> None:
    figures = build_demo(tmp_path, console=quiet()).figures
    assert figures["actor/heldout_loss"] <= 0.9
    assert figures["reward_model/heldout_accuracy"] >= 0.88
    assert abs(figures["reward_model/score_mean"]) <= 0.3
    assert figures["reward_model/judge_correlation"] >= 0.85
