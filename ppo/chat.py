"""Chat messages to text, by the tokenizer's template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ppo.prompt_files import Message
from ppo.schema import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def with_system(messages: Sequence[Message], system_prompt: str | None) -> list[dict[str, Any]]:
    """The messages, behind the system prompt where they have none of their own."""
    own = bool(messages) and messages[0]["role"] == "system"
    added = [{"role": "system", "content": system_prompt}] if system_prompt and not own else []
    return [*added, *map(dict, messages)]


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, Any]],
    place: str,
    continue_assistant: bool = False,
) -> str:
    """Write messages as text, open for the assistant.

    Raises:
        InputError: there is no chat template, it refuses the messages, or the assistant speaks
            last and `continue_assistant` is off.
    """
    if not tokenizer.chat_template:
        raise InputError(f"{place}: chat messages, but the tokenizer has no chat template")
    open_turn = messages[-1]["role"] == "assistant"
    if open_turn and not continue_assistant:
        raise InputError(
            f"{place}: the last message is the assistant's; "
            "rollout.continue_assistant=true lets the response continue it"
        )
    try:
        return str(
            tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=not open_turn,
                continue_final_message=open_turn,
            )
        )
    except Exception as error:  # a template is a program: it raises what it likes
        raise InputError(f"{place}: the chat template refuses the messages: {error}") from None
