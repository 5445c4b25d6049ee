"""Prompts and conversations from files and data sets, each with the place it came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ppo.schema import InputError
from ppo.tables import Row, kind, read_rows

Message: TypeAlias = Mapping[str, Any]
Content: TypeAlias = str | tuple[Message, ...]

HUMAN, ASSISTANT = "\n\nHuman:", "\n\nAssistant:"


@dataclass(frozen=True)
class Prompt:
    """A prompt: text, or chat messages with `role` and `content`."""

    content: Content
    place: str = ""
    """Where it was read, for messages: `FILE:LINE`."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """The other columns of its row, for reward functions."""


@dataclass(frozen=True)
class Conversation:
    """A prompt and one response to it."""

    prompt: Prompt
    response: str


def read_prompts(source: str, column: str = "prompt") -> list[Prompt]:
    """Read the prompts of a file, a data set folder or a hub id, in their order.

    `ppo.tables.read_rows` lists the formats. A cell is text or a list of chat messages. In a column
    called `chosen` it is a whole conversation, and the prompt is what stands before the last turn
    of the assistant: of an HH-RLHF transcript up to and including its last "\\n\\nAssistant:". An
    empty prompt is no error here: `encode_prompts` decides.

    Args:
        source: path or hub id.
        column: name of the column that holds the prompts.

    Raises:
        InputError: `FILE:LINE: ...`, for whatever cannot be read as a prompt for each row.
    """
    prompts = []
    for row in read_rows(source, column):
        extra = {name: value for name, value in row.values.items() if name != column}
        if column == "chosen":
            content, _ = _whole_conversation(row, column)
        else:
            content = _content(row.cell(column), column, row.place)
        prompts.append(Prompt(content, row.place, extra))
    return prompts


def read_conversations(
    source: str, prompt_column: str, response_columns: Mapping[str, str]
) -> list[tuple[Conversation, ...]]:
    """Read rows of one or several responses, each with its prompt.

    A response is text or a list with one message of the assistant, and the prompt is in its own
    column. Or the response's cell holds the whole conversation, as a list of more messages or as
    an HH-RLHF transcript, and is split before the last turn of the assistant.

    Args:
        source: as for `read_prompts`.
        prompt_column: name of the column of the prompts; it may be absent from whole conversations.
        response_columns: settings that name the columns of the responses -> those names.

    Returns:
        For each row a conversation per response column, in their order.

    Raises:
        InputError: `FILE:LINE: ...`, for whatever cannot be read as a conversation.
    """
    key, first = next(iter(response_columns.items()))
    return [
        tuple(_conversation(row, prompt_column, *item) for item in response_columns.items())
        for row in read_rows(source, first, key)
    ]


def _conversation(row: Row, prompt_column: str, key: str, column: str) -> Conversation:
    cell = row.cell(column, key)
    if _is_whole(cell):
        content, response = _whole_conversation(row, column)
    else:
        content = _content(row.cell(prompt_column), prompt_column, row.place)
        response = _response(cell, column, row.place)
    return Conversation(Prompt(content, row.place), response)


def _is_whole(cell: Any) -> bool:
    if isinstance(cell, str):
        return cell.startswith(HUMAN)
    return isinstance(cell, list) and len(cell) > 1


def _whole_conversation(row: Row, column: str) -> tuple[Content, str]:
    """Split a conversation before the last turn of the assistant."""
    cell = row.cell(column)
    if isinstance(cell, list):
        messages = _messages(cell, column, row.place)
        if len(messages) > 1:
            return messages[:-1], _response(cell[-1:], column, row.place)
    elif isinstance(cell, str) and cell.startswith(HUMAN) and ASSISTANT in cell:
        end = _text(cell, column, row.place).rindex(ASSISTANT) + len(ASSISTANT)
        return cell[:end], cell[end:]
    raise InputError(
        f"{row.place}: {column} must be a whole conversation, chat messages or a transcript "
        rf"'\n\nHuman: ... \n\nAssistant: ...', got {_excerpt(cell)}"
    )


def _response(cell: Any, column: str, place: str) -> str:
    if not isinstance(cell, list):
        return _text(cell, column, place)
    (message,) = _messages(cell, column, place)
    if message["role"] != "assistant":
        raise InputError(
            f"{place}: the last message of {column} must be the assistant's, "
            f"got role {message['role']!r}"
        )
    return str(message["content"])


def _content(value: Any, column: str, place: str) -> Content:
    return (
        _messages(value, column, place) if isinstance(value, list) else _text(value, column, place)
    )


def _messages(value: Sequence[Any], column: str, place: str) -> tuple[Message, ...]:
    if not value:
        raise InputError(f"{place}: {column} holds no messages")
    for number, message in enumerate(value, 1):
        where = f"message {number} of {column}"
        if not isinstance(message, dict):
            raise InputError(f"{place}: {where} must be an object, got {kind(message)}")
        for name in ("role", "content"):
            if name not in message:
                found = ", ".join(map(str, message)) or "nothing"
                raise InputError(f"{place}: {where} has no {name!r}; found {found}")
            _text(message[name], f"{name} of {where}", place)
    return tuple(value)


def _text(value: Any, column: str, place: str) -> str:
    if not isinstance(value, str):
        raise InputError(f"{place}: {column} must be text, got {kind(value)}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise InputError(f"{place}: {column} holds half of a surrogate pair") from None
    return value


def _excerpt(cell: Any) -> str:
    if isinstance(cell, list):
        return f"{len(cell)} message{'' if len(cell) == 1 else 's'}"
    if isinstance(cell, str):
        return repr(cell if len(cell) <= 60 else f"{cell[:57]}...")
    return kind(cell)
