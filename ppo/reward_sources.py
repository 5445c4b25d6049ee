"""Reward functions: `module:function` in this process, or a service behind a URL."""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import urllib3

from ppo.reward_shaping import SourceScores, read_scores
from ppo.rewards import load_function
from ppo.schema import InputError

Columns = Mapping[str, Sequence[Any]]
Ask = Callable[[list[str], list[str], Columns], Any]
RETRIED = (429, 500, 502, 503, 504)


class RewardUnavailable(InputError):
    """A reward service did not answer, however often it was asked."""


@dataclass(frozen=True)
class RewardFunction:
    """A reward with its weight; called with prompts, responses and the prompt file's columns."""

    name: str
    weight: float
    ask: Ask

    def __call__(self, prompts: list[str], responses: list[str], columns: Columns) -> SourceScores:
        """Score a batch.

        Raises:
            InputError: the function fails, or returns what `read_scores` refuses.
        """
        figures = self.ask(prompts, responses, columns)
        try:
            return read_scores(figures, self.name, len(prompts))
        except (ValueError, TypeError) as error:
            raise InputError(error) from error


def load_reward_functions(
    functions: Mapping[str, float], *, timeout: float, retries: int
) -> dict[str, RewardFunction]:
    """Map the name of each reward to its function: the last part of `module:function` or the URL.

    Args:
        functions: "module:function" or URL -> weight.
        timeout: seconds that a URL has to answer.
        retries: further attempts at a URL.

    Raises:
        InputError: a function cannot be imported, or two have the same name.
    """
    found: dict[str, RewardFunction] = {}
    for source, weight in functions.items():
        if source.startswith(("http://", "https://")):
            parts = urlsplit(source)
            name, ask = (
                f"{parts.netloc}{parts.path}".rstrip("/"),
                _service(source, timeout, retries),
            )
        else:
            name, ask = source.rpartition(":")[2], _local(source)
        if name in found or name == "model":
            raise InputError(
                f"reward_functions: two rewards are called {name!r}"
                if name in found
                else "reward_functions: the name 'model' is the reward model's"
            )
        found[name] = RewardFunction(name, weight, ask)
    return found


def _local(source: str) -> Ask:
    if os.getcwd() not in sys.path:  # an installed command does not put it there
        sys.path.insert(0, os.getcwd())
    function: Callable[..., Any] = load_function(source, "reward_functions")
    parameters = inspect.signature(function).parameters.values()
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    names = {parameter.name for parameter in parameters}
    needed = {
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    }

    def call(prompts: list[str], responses: list[str], columns: Columns) -> Any:
        missing = needed - {"prompts", "responses"} - columns.keys()
        if missing:
            raise InputError(
                f"reward {source!r} asks for the columns {sorted(missing)}, and the prompts have "
                f"{sorted(columns) or 'none'}"
            )
        given = {k: list(v) for k, v in columns.items() if takes_all or k in names}
        return function(prompts=prompts, responses=responses, **given)

    def ask(prompts: list[str], responses: list[str], columns: Columns) -> Any:
        try:
            return call(prompts, responses, columns)
        except InputError:
            raise
        except Exception as error:
            place = _culprit(call, prompts, responses, columns)
            raise InputError(
                f"reward {source!r} failed for {place}: {type(error).__name__}: {error}"
            ) from error

    return ask


def _culprit(call: Ask, prompts: list[str], responses: list[str], columns: Columns) -> str:
    """Which sample a function fails on, found by asking for each alone."""
    for index, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        row = {name: [column[index]] for name, column in columns.items()}
        try:
            call([prompt], [response], row)
        except Exception:
            first = (prompt.strip().splitlines() or [""])[0][:80]
            return f"sample {index} of the batch (prompt {first!r})"
    return f"the batch of {len(prompts)}, though for none of its samples alone"


def _service(url: str, timeout: float, retries: int) -> Ask:
    """POST {"prompts", "responses", "columns"} as JSON; the answer is {"scores": [...]}."""
    policy = urllib3.Retry(
        total=retries,
        backoff_factor=0.5,
        status_forcelist=RETRIED,
        allowed_methods=None,
        respect_retry_after_header=True,
    )
    pool = urllib3.PoolManager(timeout=urllib3.Timeout(total=timeout), retries=policy)

    def ask(prompts: list[str], responses: list[str], columns: Columns) -> Any:
        body = {
            "prompts": prompts,
            "responses": responses,
            "columns": {name: list(column) for name, column in columns.items()},
        }
        try:
            answer = pool.request("POST", url, json=body)
        except TypeError as error:
            raise InputError(f"reward {url}: the columns do not fit into JSON: {error}") from error
        except urllib3.exceptions.HTTPError as error:
            raise RewardUnavailable(
                f"reward {url} did not answer in {retries + 1} attempts: {error}"
            ) from error
        if answer.status != 200:
            raise RewardUnavailable(f"reward {url} answered with status {answer.status}")
        try:
            return json.loads(answer.data)["scores"]
        except (ValueError, KeyError, TypeError):
            raise InputError(
                f'reward {url} must answer {{"scores": [...]}}, got {answer.data[:80]!r}'
            ) from None

    return ask
