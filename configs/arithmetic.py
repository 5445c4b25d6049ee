"""Sums as prompts, and a reward that checks the answer.

`python configs/arithmetic.py > sums.jsonl` writes the prompts; the reward function is
`configs.arithmetic:correct`, run from the folder above.
"""

from __future__ import annotations

import json
import random
import re


def correct(prompts: list[str], responses: list[str], answer: list[int]) -> list[float]:
    """Return 1 where the last number of the response is the answer, else 0."""
    return [
        float(_last_number(text) == right) for text, right in zip(responses, answer, strict=True)
    ]


def _last_number(text: str) -> int | None:
    numbers = re.findall(r"-?\d+", text)
    return int(numbers[-1]) if numbers else None


def main(count: int = 2000, seed: int = 0) -> None:
    """Print prompts with their answers as JSON lines."""
    draw = random.Random(seed)
    for _ in range(count):
        a, b = draw.randint(10, 99), draw.randint(10, 99)
        print(json.dumps({"prompt": f"Question: What is {a} + {b}?\nAnswer:", "answer": a + b}))


if __name__ == "__main__":
    main()
