"""Rewards from functions and services: what they get, what they may say, and how they fail."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from ppo.config import InputError
from ppo.reward_sources import RewardUnavailable, load_reward_functions

HERE = __name__
Answer = tuple[int, str]


def length(prompts: list[str], responses: list[str]) -> list[float]:
    return [float(len(response)) for response in responses]


def bonus(prompts: list[str], responses: list[str], answer: list[int]) -> list[float | None]:
    return [None if value is None else float(value) for value in answer]


def everything(prompts: list[str], responses: list[str], **columns: list[Any]) -> list[float]:
    return [float(len(columns))] * len(prompts)


def picky(prompts: list[str], responses: list[str]) -> list[float]:
    if "bad" in responses:
        raise KeyError("bad")
    return [0.0] * len(responses)


def crowd(prompts: list[str], responses: list[str]) -> list[float]:
    if len(responses) > 1:
        raise RuntimeError("too many")
    return [0.0]


def short(prompts: list[str], responses: list[str]) -> list[float]:
    return [0.0]


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """This module under a name that `module:function` can give."""
    import sys

    monkeypatch.setitem(sys.modules, "rewards_of_test", sys.modules[HERE])


def local(name: str, weight: float = 1.0) -> Any:
    (found,) = load_reward_functions(
        {f"rewards_of_test:{name}": weight}, timeout=1, retries=0
    ).values()
    return found


def test_a_function_gets_what_it_asks_for() -> None:
    prompts, responses, columns = ["p", "q"], ["ab", "c"], {"answer": [3, None], "more": [1, 2]}
    assert local("length")(prompts, responses, columns).scores.tolist() == [2.0, 1.0]
    found = local("bonus", 0.5)
    assert (found.name, found.weight) == ("bonus", 0.5)
    scores = found(prompts, responses, columns)
    assert scores.scores.tolist() == [3.0, 0.0]
    assert scores.applies.tolist() == [True, False]
    assert local("everything")(prompts, responses, columns).scores.tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("picky", r"failed for sample 1 of the batch \(prompt 'second'\): KeyError: 'bad'"),
        ("crowd", "failed for the batch of 2, though for none of its samples alone: RuntimeError"),
        ("short", "reward 'short' must give 2 scores, got 1"),
        ("bonus", r"asks for the columns \['answer'\], and the prompts have none"),
    ],
)
def test_a_failing_function_is_named_with_the_sample(name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        local(name)(["first", "second\nline"], ["good", "bad"], {})


def test_names_are_unique() -> None:
    with pytest.raises(InputError, match="two rewards are called 'length'"):
        load_reward_functions(
            {"rewards_of_test:length": 1.0, "http://length": 1.0}, timeout=1, retries=0
        )
    with pytest.raises(InputError, match="reward_functions: cannot import 'no_such:thing'"):
        load_reward_functions({"no_such:thing": 1.0}, timeout=1, retries=0)


@pytest.fixture
def service() -> Iterator[Callable[[list[Answer]], tuple[str, list[Any]]]]:
    """A server that gives these answers in turn; returns its URL and what it was asked."""
    servers = []

    def start(answers: list[Answer]) -> tuple[str, list[Any]]:
        asked: list[Any] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                status, text = answers[min(len(asked), len(answers) - 1)]
                asked.append(json.loads(body))
                self.send_response(status)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_: object) -> None:
                pass

        server = HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}/score", asked

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def ask(url: str, retries: int = 0) -> list[float]:
    (found,) = load_reward_functions({url: 1.0}, timeout=5, retries=retries).values()
    scores: list[float] = found(["p", "q"], ["a", "b"], {"answer": [1, 2]}).scores.tolist()
    return scores


def test_a_service_is_asked_in_json_and_asked_again(service: Any) -> None:
    url, asked = service([(503, ""), (429, ""), (200, '{"scores": [0.5, -1]}')])
    assert ask(url, retries=3) == [0.5, -1.0]
    assert asked[2] == {
        "prompts": ["p", "q"],
        "responses": ["a", "b"],
        "columns": {"answer": [1, 2]},
    }
    assert len(asked) == 3


def test_a_service_that_never_answers_stops_the_run_with_its_name(service: Any) -> None:
    url, asked = service([(500, "")])
    with pytest.raises(RewardUnavailable, match=f"reward {url} did not answer in 2 attempts"):
        ask(url, retries=1)
    assert len(asked) == 2
    with pytest.raises(RewardUnavailable, match="did not answer in 1 attempts"):
        ask("http://127.0.0.1:9/score")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((400, "no"), "answered with status 400"),
        ((200, "<html>"), 'must answer {"scores": ...}, got b'),
        ((200, '{"score": 1}'), "must answer"),
        ((200, '{"scores": [1]}'), "must give 2 scores, got 1"),
        ((200, '{"scores": [1, NaN]}'), "must be finite, got nan for sample 1"),
        ((200, '{"scores": [1, "2"]}'), "must be a number or None, got str for sample 1"),
    ],
)
def test_a_wrong_answer_is_not_asked_for_again(service: Any, answer: Answer, message: str) -> None:
    url, asked = service([answer])
    with pytest.raises(InputError) as caught:
        ask(url, retries=3)
    assert message.split("...")[0].rstrip("]}").rstrip() in str(caught.value)
    assert len(asked) == 1
