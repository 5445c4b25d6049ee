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
from ppo.prompt_files import read_prompts

Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Put text or bytes in a file of this name and return its path."""

    def build(name: str, content: str | bytes) -> str:
        raw = content if isinstance(content, bytes) else content.encode()
        (tmp_path / name).write_bytes(raw)
        return str(tmp_path / name)

    return build


def refusal(source: str, column: str = "prompt") -> str:
    with pytest.raises(InputError) as caught:
        read_prompts(source, column)
    (line,) = str(caught.value).splitlines()
    return line


@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
def test_a_bom_is_no_part_of_the_first_record(write: Write, bom: bytes) -> None:
    lines = bom + b'{"prompt":"a"}\n{"prompt":"b"}\n'
    assert read_prompts(write("p.jsonl", lines)) == ["a", "b"]
    assert read_prompts(write("p.csv", bom + b"prompt\na\nb\n")) == ["a", "b"]
    assert read_prompts(write("p.txt", bom + b"a\nb\n")) == ["a", "b"]
    assert read_prompts(write("p.json", bom + b'{"prompt":["a","b"]}')) == ["a", "b"]


@pytest.mark.parametrize("name", ["p.jsonl", "p.NDJSON"])
def test_unicode_line_separators_do_not_end_a_record(write: Write, name: str) -> None:
    text = "one\u2028two\u2029three\u0085four"
    lines = f'{{"prompt":"{text}"}}\n{{"prompt":"x"}}'
    assert len(lines.splitlines()) == 5  # what a reader with splitlines() would see
    assert read_prompts(write(name, lines)) == [text, "x"]
    assert read_prompts(write("p.txt", f"{text}\nx")) == [text, "x"]
    assert read_prompts(write("p.csv", f"prompt\n{text}\nx")) == [text, "x"]


def test_crlf_and_blank_lines(write: Write) -> None:
    file = write("p.jsonl", b'{"prompt":"a"}\r\n\r\n{"prompt":"b\\r\\nc"}\r\n')
    assert read_prompts(file) == ["a", "b\r\nc"]
    file = write("p.jsonl", b'{"prompt":"a"}\r\n\r\n{"prompt":3}\r\n')
    assert refusal(file) == f"{file}:3: prompt must be text, got 3"
    assert read_prompts(write("p.txt", b"a\r\n\r\n b \r\n")) == ["a", " b "]


def test_csv_with_quotes_commas_and_lines_inside_a_cell(write: Write) -> None:
    file = write("p.csv", 'id,prompt\r\n1,"a, ""b""\r\nc"\r\n\r\n2,d\r\n')
    assert read_prompts(file) == ['a, "b"\r\nc', "d"]
    assert [prompt.place for prompt in read_prompts(file)] == [  # type: ignore[attr-defined]
        f"{file}:2",
        f"{file}:5",
    ]


def test_json_by_rows_and_by_columns(write: Write) -> None:
    rows = [{"q": "a", "id": 1}, {"q": "b\n", "id": 2}]
    assert read_prompts(write("p.json", json.dumps(rows)), "q") == ["a", "b\n"]
    columns = {"id": [1, 2], "q": ["a", "b\n"]}
    assert read_prompts(write("p.json", json.dumps(columns, indent=1)), "q") == ["a", "b\n"]


@given(st.lists(st.text(), min_size=1))
def test_any_text_survives_jsonl(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str]
) -> None:
    file = tmp_path_factory.mktemp("any") / "p.jsonl"
    lines = [json.dumps({"prompt": text}, ensure_ascii=False) for text in texts]
    file.write_bytes("\n".join(lines).encode())
    assert read_prompts(str(file)) == texts


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


def test_chat_messages_are_refused_rather_than_emptied(write: Write) -> None:
    file = write("p.jsonl", '{"q":[{"role":"user","content":"hi"}]}')
    assert refusal(file, "q") == (
        f"{file}:1: q must be text, got a list; render chat messages with the chat template first"
    )


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
        prompts = read_prompts(source, "text")
        assert prompts == ["a", "b"]
        assert prompts[1].place == f"{source}: row 2"  # type: ignore[attr-defined]
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
