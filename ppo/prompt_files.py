"""Prompts from files and data sets, as they were written, each with the place it came from."""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ppo.config import InputError, show


class Prompt(str):
    """The text of a prompt; `place` says where it was read, for messages: `FILE:LINE`."""

    place: str

    def __new__(cls, text: str, place: str = "") -> Prompt:
        prompt = super().__new__(cls, text)
        prompt.place = place
        return prompt


def read_prompts(source: str, column: str = "prompt") -> list[str]:
    """Read the prompts of a file, a data set folder or a hub id, in their order.

    Files are UTF-8, with or without BOM: .jsonl and .ndjson (an object a line), .json (a list of
    objects, or an object of columns), .csv (with a header), .txt (a prompt a line, no columns),
    .parquet. Blank lines are skipped. Parquet, folders and hub ids need `datasets`, and their
    split `train` is read. An empty prompt is no error here: `encode_prompts` decides.

    Args:
        source: path or hub id.
        column: name of the column that holds the text.

    Raises:
        InputError: `FILE:LINE: ...`, for whatever cannot be read as a text for each row.
    """
    suffix = Path(source).suffix.lower()
    folder = os.path.isdir(source)
    if suffix in READERS and not folder:
        rows = list(READERS[suffix](read_text(source), column, source))
    elif suffix == ".parquet" or folder or _is_hub_id(source):
        rows = list(_read_dataset(source, column))
    elif os.path.exists(source):
        known = ", ".join([*READERS, ".parquet"])
        raise InputError(f"{source}: unknown kind of prompt file, expected one of {known}")
    else:
        raise InputError(f"{source}: no such file")
    if not rows:
        raise InputError(f"{source}: no prompts in it")
    return [_text(value, column, place) for place, value in rows]


def read_text(path: str) -> str:
    """Read a whole UTF-8 file, without BOM; line ends stay as they are."""
    try:
        raw = Path(path).read_bytes()
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot read it: {error}") from None
    try:
        return raw.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        utf16 = raw.startswith((b"\xff\xfe", b"\xfe\xff"))
        raise InputError(
            f"{path}:{line}: not UTF-8 (byte 0x{raw[error.start]:02x} at offset {error.start})"
            f"{'; it looks like UTF-16' if utf16 else ''}"
        ) from None


def _read_jsonl(text: str, column: str, source: str) -> Iterator[tuple[str, Any]]:
    # Not splitlines(): U+2028, U+2029 and U+0085 may stand inside a JSON string.
    for number, line in enumerate(text.split("\n"), 1):
        place = f"{source}:{number}"
        if line.strip():
            yield place, _cell(_parse(line, source, number), column, place)


def _read_json(text: str, column: str, source: str) -> Iterator[tuple[str, Any]]:
    if not text.strip():
        return
    tree = _parse(text, source, 1)
    if isinstance(tree, dict):
        tree = _cell(tree, column, source)
        if not isinstance(tree, list):
            raise InputError(f"{source}: {column} must be a list of texts, got {_kind(tree)}")
        yield from ((f"{source}: row {row}", value) for row, value in enumerate(tree, 1))
    elif isinstance(tree, list):
        for row, item in enumerate(tree, 1):
            place = f"{source}: row {row}"
            yield place, _cell(item, column, place)
    else:
        raise InputError(f"{source}: expected a list of objects, got {_kind(tree)}")


def _read_csv(text: str, column: str, source: str) -> Iterator[tuple[str, Any]]:
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    header: list[str] = []
    last_line = 0
    try:
        for cells in reader:
            place, last_line = f"{source}:{last_line + 1}", reader.line_num
            if not cells:
                continue
            if not header:
                header = cells
                if header.count(column) > 1:
                    raise InputError(f"{place}: column {column} is there {header.count(column)}x")
                _cell(dict.fromkeys(header), column, place)
            elif len(cells) != len(header):
                raise InputError(f"{place}: {len(cells)} cells, the header has {len(header)}")
            else:
                yield place, cells[header.index(column)]
    except csv.Error as error:
        raise InputError(f"{source}:{last_line + 1}: broken CSV: {error}") from None


def _read_txt(text: str, column: str, source: str) -> Iterator[tuple[str, Any]]:
    if column != "prompt":
        raise InputError(f"{source}: a .txt file has no columns, so no {column!r} (prompt_column)")
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield f"{source}:{number}", line.removesuffix("\r")


READERS: Mapping[str, Callable[[str, str, str], Iterator[tuple[str, Any]]]] = {
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".txt": _read_txt,
}


def _read_dataset(source: str, column: str) -> Iterator[tuple[str, Any]]:
    path = Path(source)
    if path.suffix.lower() == ".parquet" and not path.exists():
        raise InputError(f"{source}: no such file")
    try:
        import datasets
    except ImportError:
        what = "reading it" if path.exists() else "no such file; a data set of the hub"
        raise InputError(f"{source}: {what} needs `pip install ppo-kernels[data]`") from None
    try:
        if path.is_file():
            table = datasets.load_dataset("parquet", data_files=source, split="train")
        elif (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
            table = datasets.load_from_disk(source)
            if isinstance(table, dict) and "train" not in table:
                raise InputError(f"no split train; found {', '.join(table)}")
            table = table["train"] if isinstance(table, dict) else table
        else:
            table = datasets.load_dataset(source, split="train")
        columns = list(table.column_names)
        values = list(table[column]) if column in columns else []
    except Exception as error:  # whatever the library, the network or the files do
        raise InputError(f"{source}: cannot load the data set: {error}") from None
    _cell(dict.fromkeys(columns), column, source)
    yield from ((f"{source}: row {row}", value) for row, value in enumerate(values, 1))


def _is_hub_id(source: str) -> bool:
    return re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", source) is not None and not os.path.exists(source)


def _parse(text: str, source: str, first_line: int) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        raise InputError(
            f"{source}:{line}: broken JSON: {error.msg} (column {error.colno})"
        ) from None
    except (ValueError, RecursionError) as error:  # a number of 5000 digits, 5000 brackets
        raise InputError(f"{source}:{first_line}: broken JSON: {error}") from None


def _cell(row: Any, column: str, place: str) -> Any:
    """Return the wanted column of a row; refuse a row without it and name what it has."""
    if not isinstance(row, dict):
        raise InputError(f"{place}: expected an object with {column!r}, got {_kind(row)}")
    if column not in row:
        raise InputError(f"{place}: no column {column!r}{_instead(row, column)}")
    return row[column]


def _instead(columns: Iterable[str], column: str) -> str:
    found = list(columns)
    if not found:
        return ", it is empty"
    (nearest,) = get_close_matches(column, found, 1, cutoff=0.0)
    return f"; found {', '.join(found)}; nearest is {nearest} (set prompt_column)"


def _text(value: Any, column: str, place: str = "") -> Prompt:
    if not isinstance(value, str):
        chat = "; render chat messages with the chat template first"
        raise InputError(
            f"{place}: {column} must be text, got {_kind(value)}"
            f"{chat if isinstance(value, list) else ''}"
        )
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise InputError(f"{place}: {column} holds half of a surrogate pair") from None
    return Prompt(value, place)


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: show(value)}
    return names.get(type(value), show(value))
