"""Rows of files and data sets, as they were written, each with the place it came from."""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ppo.schema import InputError, show


@dataclass(frozen=True)
class Row:
    """One row; `place` says where it was read, for messages: `FILE:LINE`."""

    place: str
    values: Mapping[str, Any]

    def cell(self, column: str, key: str = "prompt_column") -> Any:
        """Return a column's value; `key` is the setting that names the column.

        Raises:
            InputError: the row has no such column; the message says what it has.
        """
        if column not in self.values:
            hint = _instead(self.values, column, key)
            raise InputError(f"{self.place}: no column {column!r}{hint}")
        return self.values[column]


def read_rows(source: str, column: str, key: str = "prompt_column") -> list[Row]:
    """Read the rows of a file, a data set folder or a hub id, in their order.

    Files are UTF-8, with or without BOM: .jsonl and .ndjson (an object a line), .json (a list of
    objects, or an object of columns), .csv (with a header), .txt (a prompt a line, no columns),
    .parquet. Blank lines are skipped. Parquet, folders and hub ids need `datasets`, and their
    split `train` is read.

    Args:
        source: path or hub id.
        column: a column that every row must have.
        key: the setting that names this column, for messages.

    Raises:
        InputError: `FILE:LINE: ...`, for whatever cannot be read as rows with this column.
    """
    suffix = Path(source).suffix.lower()
    folder = os.path.isdir(source)
    if suffix in READERS and not folder:
        rows = list(READERS[suffix](read_text(source), column, key, source))
    elif suffix == ".parquet" or folder or _is_hub_id(source):
        rows = list(_read_dataset(source, column, key))
    elif os.path.exists(source):
        known = ", ".join([*READERS, ".parquet"])
        raise InputError(f"{source}: unknown kind of prompt file, expected one of {known}")
    else:
        raise InputError(f"{source}: no such file")
    if not rows:
        raise InputError(f"{source}: no prompts in it")
    return rows


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


def kind(value: Any) -> str:
    """Name a value for a message: `a list`, `text`, `null`, `3`."""
    names = {dict: "an object", list: "a list", str: "text", bool: show(value)}
    return names.get(type(value), show(value))


def _read_jsonl(text: str, column: str, key: str, source: str) -> Iterator[Row]:
    # Not splitlines(): U+2028, U+2029 and U+0085 may stand inside a JSON string.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            item = _parse(line, source, number)
            yield _row(item, column, key, f"{source}:{number}")


def _read_json(text: str, column: str, key: str, source: str) -> Iterator[Row]:
    if not text.strip():
        return
    tree = _parse(text, source, 1)
    if isinstance(tree, dict):
        values = _row(tree, column, key, source).cell(column)
        if not isinstance(values, list):
            raise InputError(f"{source}: {column} must be a list of texts, got {kind(values)}")
        lists = {name: value for name, value in tree.items() if isinstance(value, list)}
        for name, value in lists.items():
            if len(value) != len(values):
                raise InputError(
                    f"{source}: {name} has {len(value)} values, {column} has {len(values)}"
                )
        tree = [dict(zip(lists, items, strict=True)) for items in zip(*lists.values(), strict=True)]
    elif not isinstance(tree, list):
        raise InputError(f"{source}: expected a list of objects, got {kind(tree)}")
    for number, item in enumerate(tree, 1):
        yield _row(item, column, key, f"{source}: row {number}")


def _read_csv(text: str, column: str, key: str, source: str) -> Iterator[Row]:
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
                for name in filter(None, header):
                    if header.count(name) > 1:
                        raise InputError(f"{place}: column {name} is there {header.count(name)}x")
                _row(dict.fromkeys(header), column, key, place)
            elif len(cells) != len(header):
                raise InputError(f"{place}: {len(cells)} cells, the header has {len(header)}")
            else:
                yield Row(place, dict(zip(header, cells, strict=True)))
    except csv.Error as error:
        raise InputError(f"{source}:{last_line + 1}: broken CSV: {error}") from None


def _read_txt(text: str, column: str, key: str, source: str) -> Iterator[Row]:
    if column != "prompt":
        raise InputError(f"{source}: a .txt file has no columns, so no {column!r} ({key})")
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield Row(f"{source}:{number}", {column: line.removesuffix("\r")})


READERS: Mapping[str, Callable[[str, str, str, str], Iterator[Row]]] = {
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".txt": _read_txt,
}


def _read_dataset(source: str, column: str, key: str) -> Iterator[Row]:
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
        # A table without the wanted column is refused below, before its cells are read.
        cells = [list(table[name]) for name in columns] if column in columns else []
    except Exception as error:  # whatever the library, the network or the files do
        raise InputError(f"{source}: cannot load the data set: {error}") from None
    _row(dict.fromkeys(columns), column, key, source)
    for number, items in enumerate(zip(*cells, strict=True), 1):
        yield Row(f"{source}: row {number}", dict(zip(columns, items, strict=True)))


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


def _row(item: Any, column: str, key: str, place: str) -> Row:
    """Make a row of an object; refuse one without the wanted column and name what it has."""
    if not isinstance(item, dict):
        raise InputError(f"{place}: expected an object with {column!r}, got {kind(item)}")
    row = Row(place, item)
    row.cell(column, key)
    return row


def _instead(columns: Iterable[str], column: str, key: str) -> str:
    found = list(columns)
    if not found:
        return ", it is empty"
    (nearest,) = get_close_matches(column, found, 1, cutoff=0.0)
    return f"; found {', '.join(found)}; nearest is {nearest} (set {key})"
