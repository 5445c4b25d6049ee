"""Prompt files: every kind, every way of being broken, each refusal with its file and line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppo.config import InputError
from ppo.prompt_files import Conversation, Prompt, read_conversations, read_prompts

Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Put text or bytes in a file of this name and return its path."""

    def build(name: str, content: str | bytes) -> str:
        raw = content if isinstance(content, bytes) else content.encode()
        (tmp_path / name).write_bytes(raw)
        return str(tmp_path / name)

    return build


def texts_of(source: str, column: str = "prompt") -> list[Any]:
    return [prompt.content for prompt in read_prompts(source, column)]


def refusal(source: str, column: str = "prompt") -> str:
    with pytest.raises(InputError) as caught:
        read_prompts(source, column)
    (line,) = str(caught.value).splitlines()
    return line


@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
def test_a_bom_is_no_part_of_the_first_record(write: Write, bom: bytes) -> None:
    lines = bom + b'{"prompt":"a"}\n{"prompt":"b"}\n'
    assert texts_of(write("p.jsonl", lines)) == ["a", "b"]
    assert texts_of(write("p.csv", bom + b"prompt\na\nb\n")) == ["a", "b"]
    assert texts_of(write("p.txt", bom + b"a\nb\n")) == ["a", "b"]
    assert texts_of(write("p.json", bom + b'{"prompt":["a","b"]}')) == ["a", "b"]


@pytest.mark.parametrize("name", ["p.jsonl", "p.NDJSON"])
def test_unicode_line_separators_do_not_end_a_record(write: Write, name: str) -> None:
    text = "one\u2028two\u2029three\u0085four"
    lines = f'{{"prompt":"{text}"}}\n{{"prompt":"x"}}'
    assert len(lines.splitlines()) == 5  # what a reader with splitlines() would see
    assert texts_of(write(name, lines)) == [text, "x"]
    assert texts_of(write("p.txt", f"{text}\nx")) == [text, "x"]
    assert texts_of(write("p.csv", f"prompt\n{text}\nx")) == [text, "x"]


def test_crlf_and_blank_lines(write: Write) -> None:
    file = write("p.jsonl", b'{"prompt":"a"}\r\n\r\n{"prompt":"b\\r\\nc"}\r\n')
    assert texts_of(file) == ["a", "b\r\nc"]
    file = write("p.jsonl", b'{"prompt":"a"}\r\n\r\n{"prompt":3}\r\n')
    assert refusal(file) == f"{file}:3: prompt must be text, got 3"
    assert texts_of(write("p.txt", b"a\r\n\r\n b \r\n")) == ["a", " b "]


def test_csv_with_quotes_commas_and_lines_inside_a_cell(write: Write) -> None:
    file = write("p.csv", 'id,prompt\r\n1,"a, ""b""\r\nc"\r\n\r\n2,d\r\n')
    assert texts_of(file) == ['a, "b"\r\nc', "d"]
    assert [prompt.place for prompt in read_prompts(file)] == [f"{file}:2", f"{file}:5"]
    assert [prompt.extra for prompt in read_prompts(file)] == [{"id": "1"}, {"id": "2"}]


def test_json_by_rows_and_by_columns(write: Write) -> None:
    rows = [{"q": "a", "id": 1}, {"q": "b\n", "id": 2}]
    assert texts_of(write("p.json", json.dumps(rows)), "q") == ["a", "b\n"]
    columns = {"id": [1, 2], "q": ["a", "b\n"]}
    assert texts_of(write("p.json", json.dumps(columns, indent=1)), "q") == ["a", "b\n"]


@given(st.lists(st.text(), min_size=1))
def test_any_text_survives_jsonl(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str]
) -> None:
    file = tmp_path_factory.mktemp("any") / "p.jsonl"
    lines = [json.dumps({"prompt": text}, ensure_ascii=False) for text in texts]
    file.write_bytes("\n".join(lines).encode())
    assert texts_of(str(file)) == texts


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ('{"prompt":"a"}\n{"prompt":\n', ":2: broken JSON: Expecting value (column 11)"),
        ('\n["a"]\n', ":2: expected an object with 'prompt', got a list"),
        ('"a"\n', ":1: expected an object with 'prompt', got text"),
        ('{"prompt":null}\n', ":1: prompt must be text, got null"),
        ('{"prompt":true}\n', ":1: prompt must be text, got true"),
        ('{"prompt":{}}\n', ":1: prompt must be text, got an object"),
        ('{"prompt":"\\ud800"}\n', ":1: prompt holds half of a surrogate pair"),
        ('{"prompt":"a"}{"prompt":"b"}', ":1: broken JSON: Extra data (column 15)"),
        (b'{"prompt":"a"}\n{"prompt":"\xff"}', ":2: not UTF-8 (byte 0xff at offset 26)"),
        (b"\xef\xbb\xbf\n\n\xe9", ":3: not UTF-8 (byte 0xe9 at offset 5)"),
        ("a".encode("utf-16"), ":1: not UTF-8 (byte 0xff at offset 0); it looks like UTF-16"),
        ("", ": no prompts in it"),
        ("\r\n \n", ": no prompts in it"),
        ("{}\n", ":1: no column 'prompt', it is empty"),
    ],
)
def test_broken_jsonl_names_the_file_and_line(
    write: Write, content: str | bytes, line: str
) -> None:
    file = write("p.jsonl", content)
    assert refusal(file) == file + line


def test_json_beyond_the_limits_of_the_parser_is_one_line_too(write: Write) -> None:
    for content in ("[" * 100_000, '{"prompt":' + "9" * 5000 + "}"):
        file = write("p.jsonl", content)
        assert refusal(file).startswith(f"{file}:1: broken JSON: ")


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("p.json", '[\n{"prompt":"a"},\n]', ":3: broken JSON: Expecting value (column 1)"),
        ("p.json", "3", ": expected a list of objects, got 3"),
        ("p.json", '{"prompt":"a"}', ": prompt must be a list of texts, got text"),
        ("p.json", '[{"prompt":"a"},3]', ": row 2: expected an object with 'prompt', got 3"),
        ("p.json", '{"prompt":["a",1]}', ": row 2: prompt must be text, got 1"),
        ("p.json", " \n", ": no prompts in it"),
        ("p.json", "[]", ": no prompts in it"),
        ("p.csv", "", ": no prompts in it"),
        ("p.csv", "prompt\n", ": no prompts in it"),
        ("p.csv", "id,prompt\n1,a\n2,b,c\n", ":3: 3 cells, the header has 2"),
        ("p.csv", "id,prompt\n1\n", ":2: 1 cells, the header has 2"),
        ("p.csv", "prompt,prompt\na,b\n", ":1: column prompt is there 2x"),
        ("p.csv", 'prompt\na\n"b\n', ":3: broken CSV: unexpected end of data"),
        ("p.txt", "\n", ": no prompts in it"),
    ],
)
def test_broken_files_of_other_kinds(write: Write, name: str, content: str, line: str) -> None:
    file = write(name, content)
    assert refusal(file) == file + line


@pytest.mark.parametrize(
    ("name", "content", "place"),
    [
        ("p.jsonl", '{"prompt":"a","id":0}\n\n{"text":"a","id":1}\n', ":3"),
        ("p.json", '[{"text":"a","id":1}]', ": row 1"),
        ("p.json", '{"text":["a"],"id":[1]}', ""),
        ("p.csv", "\ntext,id\na,1\n", ":2"),
    ],
)
def test_a_missing_column_says_wanted_found_and_nearest(
    write: Write, name: str, content: str, place: str
) -> None:
    file = write(name, content)
    assert refusal(file) == (
        f"{file}{place}: no column 'prompt'; found text, id; nearest is text (set prompt_column)"
    )


def test_a_column_setting_that_nothing_uses_is_refused(write: Write) -> None:
    file = write("p.txt", "a\n")
    assert refusal(file, "q") == f"{file}: a .txt file has no columns, so no 'q' (prompt_column)"


def test_json_columns_of_different_lengths_are_refused(write: Write) -> None:
    file = write("p.json", '{"prompt":["a","b"],"id":[1],"version":3}')
    assert refusal(file) == f"{file}: id has 1 values, prompt has 2"


def lines(*rows: Any) -> str:
    return "".join(f"{json.dumps(row)}\n" for row in rows)


SYSTEM, USER = {"role": "system", "content": "s"}, {"role": "user", "content": "u"}
GOOD, BAD = {"role": "assistant", "content": "g"}, {"role": "assistant", "content": "b"}


def test_chat_messages_and_the_other_columns(write: Write) -> None:
    file = write("p.jsonl", lines({"q": [SYSTEM, USER], "answer": 7}, {"q": [USER]}))
    assert read_prompts(file, "q") == [
        Prompt((SYSTEM, USER), f"{file}:1", {"answer": 7}),
        Prompt((USER,), f"{file}:2"),
    ]


@pytest.mark.parametrize(
    ("cell", "line"),
    [
        ([], "prompt holds no messages"),
        (["hi"], "message 1 of prompt must be an object, got text"),
        (
            [USER, {"from": "a", "value": "b"}],
            "message 2 of prompt has no 'role'; found from, value",
        ),
        ([{"role": "user"}], "message 1 of prompt has no 'content'; found role"),
        (
            [{"role": "user", "content": [1]}],
            "content of message 1 of prompt must be text, got a list",
        ),
    ],
)
def test_broken_messages(write: Write, cell: Any, line: str) -> None:
    file = write("p.jsonl", lines({"prompt": cell}))
    assert refusal(file) == f"{file}:1: {line}"


TALK = "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:"


def test_a_transcript_is_a_prompt_up_to_its_last_assistant_turn(write: Write) -> None:
    row = {"chosen": f"{TALK} yes", "rejected": f"{TALK} no"}
    file = write("p.jsonl", lines(row, {"chosen": [USER, GOOD, USER, BAD], "rejected": ""}))
    assert texts_of(file, "chosen") == [TALK, (USER, GOOD, USER)]
    # in any other column a prompt is taken as it stands
    file = write("q.jsonl", lines({"prompt": f"{TALK} I"}, {"prompt": [USER, GOOD]}))
    assert texts_of(file) == [f"{TALK} I", (USER, GOOD)]


def test_chosen_responses_are_no_prompts(write: Write) -> None:
    must = (
        r"chosen must be a whole conversation, chat messages or a transcript "
        r"'\n\nHuman: ... \n\nAssistant: ...', got "
    )
    for cell, got in (("w" * 70, f"'{'w' * 57}...'"), ([GOOD], "1 message"), (3, "3")):
        file = write("p.jsonl", lines({"prompt": "a", "chosen": cell}))
        assert refusal(file, "chosen") == f"{file}:1: {must}{got}"
    file = write("p.jsonl", lines({"chosen": [GOOD, USER]}))
    assert refusal(file, "chosen") == (
        f"{file}:1: the last message of chosen must be the assistant's, got role 'user'"
    )


def pairs_of(file: str) -> list[tuple[Conversation, ...]]:
    return read_conversations(
        file, "prompt", {"chosen_column": "chosen", "rejected_column": "rejected"}
    )


@pytest.mark.parametrize(
    ("row", "prompt", "good", "bad"),
    [
        ({"prompt": "p", "chosen": " g", "rejected": " b"}, "p", " g", " b"),
        ({"prompt": "p", "chosen": [GOOD], "rejected": [BAD]}, "p", "g", "b"),
        ({"prompt": [USER], "chosen": [GOOD], "rejected": "b"}, (USER,), "g", "b"),
        ({"prompt": "u", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, (USER,), "g", "b"),
        ({"chosen": f"{TALK} g", "rejected": f"{TALK} b"}, TALK, " g", " b"),
    ],
)
def test_the_forms_of_a_preference(
    write: Write, row: Any, prompt: Any, good: str, bad: str
) -> None:
    file = write("p.jsonl", lines(row))
    asked = Prompt(prompt, f"{file}:1")
    assert pairs_of(file) == [(Conversation(asked, good), Conversation(asked, bad))]


def test_a_preference_without_a_column(write: Write) -> None:
    for row, column, key in (
        ({"chosen": "a", "rejected": "b"}, "prompt", "prompt_column"),
        ({"prompt": "p", "rejected": "b"}, "chosen", "chosen_column"),
        ({"prompt": "p", "chosen": "a"}, "rejected", "rejected_column"),
    ):
        file = write("p.jsonl", lines(row))
        with pytest.raises(InputError) as caught:
            pairs_of(file)
        assert str(caught.value).startswith(f"{file}:1: no column '{column}'; found ")
        assert str(caught.value).endswith(f" (set {key})")


def test_what_is_no_file(write: Write, tmp_path: Path) -> None:
    assert refusal("nowhere.jsonl") == "nowhere.jsonl: no such file"
    assert refusal("nowhere.parquet") == "nowhere.parquet: no such file"
    assert refusal("x" * 5000) == "x" * 5000 + ": no such file"
    assert refusal("a\0.jsonl").endswith("cannot read it: embedded null byte")
    file = write("p.xml", "<a/>")
    kinds = ".jsonl, .ndjson, .json, .csv, .txt, .parquet"
    assert refusal(file) == f"{file}: unknown kind of prompt file, expected one of {kinds}"


class Table(dict[str, list[Any]]):
    """Columns, as much of a data set as is used."""

    @property
    def column_names(self) -> list[str]:
        return list(self)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """A `datasets` whose table has columns text and id; returns the calls made to it."""
    calls: list[tuple[Any, ...]] = []
    table = Table(text=["a", "b"], id=[1, 2])

    def load_dataset(*args: Any, **kwargs: Any) -> Table:
        calls.append((*args, kwargs))
        if args[0] == "org/broken":
            raise RuntimeError("no network\nretried 5 times")
        return table

    def load_from_disk(path: str) -> dict[str, Table]:
        calls.append((path,))
        return {"test" if path.endswith("heldout") else "train": table}

    module = SimpleNamespace(load_dataset=load_dataset, load_from_disk=load_from_disk)
    monkeypatch.setitem(sys.modules, "datasets", module)
    return calls


def test_parquet_folders_and_hub_ids(
    write: Write, tmp_path: Path, library: list[tuple[Any, ...]]
) -> None:
    file = write("p.parquet", b"PAR1")
    (tmp_path / "saved").mkdir()
    write("saved/dataset_dict.json", "{}")
    for source in (file, "org/name", str(tmp_path), str(tmp_path / "saved")):
        assert read_prompts(source, "text") == [
            Prompt("a", f"{source}: row 1", {"id": 1}),
            Prompt("b", f"{source}: row 2", {"id": 2}),
        ]
    assert library == [
        ("parquet", {"data_files": file, "split": "train"}),
        ("org/name", {"split": "train"}),
        (str(tmp_path), {"split": "train"}),
        (str(tmp_path / "saved"),),
    ]


@pytest.mark.usefixtures("library")
def test_data_set_faults_are_one_line(write: Write, tmp_path: Path) -> None:
    file = write("p.parquet", b"PAR1")
    assert refusal(file) == (
        f"{file}: no column 'prompt'; found text, id; nearest is text (set prompt_column)"
    )
    assert refusal(file, "id") == f"{file}: row 1: id must be text, got 1"
    (tmp_path / "heldout").mkdir()
    write("heldout/dataset_dict.json", "{}")
    assert refusal(str(tmp_path / "heldout")) == (
        f"{tmp_path}/heldout: cannot load the data set: no split train; found test"
    )
    assert refusal("org/broken") == (
        "org/broken: cannot load the data set: no network retried 5 times"
    )


def test_without_the_library_the_extra_is_named(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    file = write("p.parquet", b"PAR1")
    assert refusal(file) == f"{file}: reading it needs `pip install ppo-kernels[data]`"
    assert refusal("org/name") == (
        "org/name: no such file; a data set of the hub needs `pip install ppo-kernels[data]`"
    )
