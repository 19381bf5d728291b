"""A client process of test_load_from_processes.py: several requests at a time, and what came back, as JSON on stdout.

python -m tests.reference.load_client URL NUMBER
"""

from __future__ import annotations

import json
import random
import sys
from concurrent.futures import ThreadPoolExecutor

import openai

AT_A_TIME, REQUESTS = 4, 10
BEGINNINGS = ("", "The quick brown fox jumps over the lazy dog, and then it ", "Once upon a time ")


def asked(number: int) -> list[tuple[str, int]]:
    """(prompt, tokens of the answer); prompts of all clients share beginnings."""
    draw = random.Random(number)
    return [
        (draw.choice(BEGINNINGS) + "".join(draw.choices("abcdefgh ", k=draw.randrange(1, 40))), draw.randrange(1, 30))
        for _ in range(REQUESTS)
    ]


def main(url: str, number: int) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)

    def ask(index: int, prompt: str, tokens: int) -> tuple[str, int, str]:
        stream = index % 2 == 0
        answer = client.completions.create(
            model="tiny-llama",
            prompt=prompt,
            max_tokens=tokens,
            temperature=0,
            stream=stream,
            extra_body={"ignore_eos": True},
        )
        text = "".join(c.choices[0].text for c in answer) if stream else answer.choices[0].text  # type: ignore[union-attr]
        return prompt, tokens, text

    with ThreadPoolExecutor(AT_A_TIME) as pool:
        done = list(pool.map(lambda job: ask(job[0], *job[1]), enumerate(asked(number))))
    print(json.dumps(done))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
