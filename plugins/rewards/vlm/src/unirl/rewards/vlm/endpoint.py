"""A judge behind an OpenAI-compatible endpoint (`POST /chat/completions`): vLLM, SGLang, a hosted API."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import sqlite3
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from unirl.core.errors import RecipeError, RewardFailed

from .config import AnswererConfig
from .question import Question, png_of
from .template import Template

__all__ = ["Endpoint"]

_FIRST_WAIT_S = 0.5
_LONGEST_WAIT_S = 60.0
"""Between tries. An endpoint that asks for more patience than this is taken to be down."""
_BUSY = {408, 409, 425, 429}
"""Statuses besides 5xx after which the same request may succeed."""
_TOP = 20
"""Tokens whose probability is asked for: the most that OpenAI's API and vLLM's defaults give."""
_KEPT_IN_MEMORY = 100_000
"""Answers, of some hundred bytes each."""


class Endpoint:
    """Asks with bounded concurrency, and never the same question twice."""

    def __init__(self, config: AnswererConfig) -> None:
        """Raises RecipeError for an API key that is not in the environment, or a cache that cannot be opened."""
        self._config, self._key = config, f"reward.{config.reward}"
        headers: dict[str, str] = {}
        if config.api_key_env:
            api_key = os.environ.get(config.api_key_env, "")
            if not api_key:
                raise RecipeError(
                    f"{self._key}.api_key_env: the environment variable {config.api_key_env!r} is not set; export the "
                    "API key under this name."
                )
            headers["Authorization"] = f"Bearer {api_key}"
        self._client = httpx.Client(base_url=config.base_url, headers=headers, timeout=config.timeout_s)
        self._answers = _Answers(config.cache, key=f"{self._key}.cache")
        self._num_calls, self._lock = 0, threading.Lock()

    def texts(self, questions: Sequence[Question], *, max_new_tokens: int) -> list[str]:
        return self._replies(questions, {"max_tokens": max_new_tokens}, _text_of)

    def expected(self, questions: Sequence[Question], template: Template) -> list[tuple[float, ...]]:
        raise AssertionError("the config refuses answer=expected with an endpoint")

    def stated(self, questions: Sequence[Question], answers: Sequence[frozenset[str]]) -> list[tuple[float, str]]:
        """As `Answerer` says, of the 20 most probable tokens: another one, or a part of a word, has probability 0."""
        fields = {"max_tokens": 1, "logprobs": True, "top_logprobs": _TOP}
        result: list[tuple[float, str]] = []
        for reply, words in zip(self._replies(questions, fields, _tokens_of), answers, strict=True):
            tokens: list[tuple[float, str]] = [(math.exp(logprob), token) for logprob, token in json.loads(reply)]
            result.append((sum(share for share, token in tokens if token in words), max(tokens)[1]))
        return result

    def plain(self, text: str) -> str:
        """As it is: the endpoint's tokens are not known here."""
        return text

    def close(self) -> None:
        self._client.close()
        self._answers.close()

    def _replies(
        self, questions: Sequence[Question], fields: Mapping[str, Any], read: Callable[[Any], str]
    ) -> list[str]:
        """Result of `read` for the choice in each reply. fields: of the request.

        Raises RewardFailed when the endpoint cannot be reached, refuses, or the calls are spent; answers that came
        before that stay in the cache.
        """
        # Each image once, however many questions show it, and a request's body only while it is asked.
        images = {id(image): png_of(image) for question in questions for image in question.images}
        urls = {name: f"data:image/png;base64,{base64.b64encode(png).decode()}" for name, png in images.items()}
        digests = {name: hashlib.sha256(png).hexdigest() for name, png in images.items()}
        contents = [f"{self._config.base_url}\n{self._body(question, digests, fields)}" for question in questions]
        keys = [hashlib.sha256(content.encode()).hexdigest() for content in contents]
        result = {key: answer for key in set(keys) if (answer := self._answers.get(key)) is not None}
        missing = {key: question for key, question in zip(keys, questions, strict=True) if key not in result}
        stop = threading.Event()
        with ThreadPoolExecutor(self._config.concurrency, thread_name_prefix="judge") as pool:
            asked = {
                pool.submit(self._ask, partial(self._body, question, urls, fields), read, stop): key
                for key, question in missing.items()
            }
            failure: RewardFailed | None = None
            for future in as_completed(asked):
                if future.cancelled():
                    continue
                try:
                    result[asked[future]] = answer = future.result()
                except RewardFailed as error:
                    failure = failure or error
                    stop.set()
                    for other in asked:
                        other.cancel()
                    continue
                if answer:
                    self._answers.put(asked[future], answer)
        if failure is not None:
            raise failure
        return [result[key] for key in keys]

    def _body(self, question: Question, urls: Mapping[int, str], fields: Mapping[str, Any]) -> str:
        """The request as JSON, the same text for the same question. urls: of each image, by its `id`."""
        content: list[dict[str, Any]] = [
            *({"type": "image_url", "image_url": {"url": urls[id(image)]}} for image in question.images),
            {"type": "text", "text": question.text},
        ]
        body = {
            "model": self._config.model,
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
            "seed": self._config.seed,
            **fields,
            **self._config.extra_body,
        }
        return json.dumps({name: value for name, value in body.items() if value is not None}, sort_keys=True)

    def _ask(self, make_body: Callable[[], str], read: Callable[[Any], str], stop: threading.Event) -> str:
        """One answer, after as many tries as it takes."""
        body = make_body()
        where = f"{self._key}: {self._config.base_url}"
        problem, attempt = "", 0
        for attempt in range(self._config.max_retries + 1):
            self._count_call()
            wait_s = min(_FIRST_WAIT_S * 2**attempt, _LONGEST_WAIT_S)
            try:
                response = self._client.post(
                    "chat/completions", content=body, headers={"Content-Type": "application/json"}
                )
            except httpx.RequestError as error:
                problem = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
                if isinstance(error, httpx.TimeoutException):
                    problem += f" (timeout_s = {self._config.timeout_s:g})"
            else:
                if response.status_code == 200:
                    return self._read(response, read, where)
                problem = f"HTTP {response.status_code}: {response.text[:200]}"
                if response.status_code not in _BUSY and response.status_code < 500:
                    raise RewardFailed(f"{where} refused the request with {problem}. {self._hint(response)}")
                asked_s = _retry_after_s(response.headers.get("retry-after", ""))
                wait_s = wait_s if asked_s is None else asked_s
                if wait_s > _LONGEST_WAIT_S:
                    raise RewardFailed(
                        f"{where} asks to wait for {wait_s:g} s, more than {_LONGEST_WAIT_S:g} s, with {problem}."
                    )
            if attempt < self._config.max_retries and stop.wait(wait_s):
                break
        raise RewardFailed(
            f"{where} gave no answer after {attempt + 1} tries; the last one ended in {problem}. Start the endpoint, "
            "or raise timeout_s or max_retries."
        )

    def _read(self, response: httpx.Response, read: Callable[[Any], str], where: str) -> str:
        try:
            return read(response.json()["choices"][0])
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise RewardFailed(
                f"{where} sent a reply without {read.__doc__}: {response.text[:200]!r}. Check that base_url is the "
                "endpoint's root, which mostly ends in /v1, and that the endpoint gives what is asked for."
            ) from error

    def _hint(self, response: httpx.Response) -> str:
        if response.status_code in (401, 403):
            name = self._config.api_key_env
            return f"Check the API key in {name}." if name else "Name the variable of the API key in api_key_env."
        return "Check model, base_url and extra_body."

    def _count_call(self) -> None:
        with self._lock:
            if self._config.max_calls is not None and self._num_calls >= self._config.max_calls:
                raise RewardFailed(
                    f"{self._key}.max_calls: all {self._num_calls} calls of this process are spent, retries included. "
                    "Raise max_calls; with cache=FILE, answered questions cost nothing in the next run."
                )
            self._num_calls += 1


def _text_of(choice: Any) -> str:
    """choices[0].message.content"""
    content, reason = choice["message"]["content"], choice.get("finish_reason")
    return content if isinstance(content, str) and reason != "length" else ""


def _tokens_of(choice: Any) -> str:
    """choices[0].logprobs.content[0].top_logprobs"""
    top: list[Any] = choice["logprobs"]["content"][0]["top_logprobs"]
    if not top:
        raise ValueError("no tokens")
    return json.dumps([[float(one["logprob"]), str(one["token"])] for one in top])


class _Answers:
    """Answers by the content of their request, in memory or in a SQLite file that runs may share."""

    def __init__(self, file: str, *, key: str) -> None:
        path = str(Path(file).expanduser()) if file else ":memory:"
        try:
            # sqlite3 is compiled to lock around each call; autocommit keeps an answer whatever becomes of the run.
            self._db = sqlite3.connect(path, timeout=60, isolation_level=None, check_same_thread=False)
            self._db.execute("CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, answer TEXT NOT NULL)")
        except sqlite3.Error as error:
            raise RecipeError(f"{key}: {path!r} does not open as an SQLite file: {error}.") from error
        self._is_in_memory = not file

    def get(self, key: str) -> str | None:
        row = self._db.execute("SELECT answer FROM answers WHERE key = ?", (key,)).fetchone()
        return None if row is None else row[0]

    def put(self, key: str, answer: str) -> None:
        self._db.execute("INSERT OR REPLACE INTO answers VALUES (?, ?)", (key, answer))
        if self._is_in_memory:
            self._db.execute(
                "DELETE FROM answers WHERE rowid <= (SELECT MAX(rowid) FROM answers) - ?", (_KEPT_IN_MEMORY,)
            )

    def close(self) -> None:
        self._db.close()


def _retry_after_s(header: str) -> float | None:
    """Seconds that a `retry-after` header asks for, given as seconds or as a date; None for neither."""
    try:
        return max(0.0, float(header))
    except ValueError:
        pass
    try:
        at = parsedate_to_datetime(header)
    except ValueError:
        return None
    return max(0.0, (at.replace(tzinfo=at.tzinfo or UTC) - datetime.now(UTC)).total_seconds())
