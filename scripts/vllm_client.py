"""Ask a served vLLM with the OpenAI client: URL QUESTION ... Run by the Python that has vLLM."""

from __future__ import annotations

import sys

from openai import OpenAI


def main(url: str, questions: list[str]) -> None:
    """Print the start of every answer; an empty one is a failure."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    model = client.models.list().data[0].id
    for question in questions:
        messages = [{"role": "user", "content": question}]
        reply = client.chat.completions.create(
            model=model, messages=messages, temperature=0, max_tokens=48
        )
        text = reply.choices[0].message.content or ""
        if not text.strip():
            raise SystemExit(f"no answer to {question!r}")
        print(f"{question} -> {text[:60]!r}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
