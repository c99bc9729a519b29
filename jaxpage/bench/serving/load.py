"""Sends requests to a server at their times, with a limit on how many run at once."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from tqdm import tqdm

from jaxpage.bench.serving.http_client import Client, TimedAnswer
from jaxpage.bench.workloads import WorkItem


@dataclass(frozen=True)
class Endpoint:
    """Holds a model of a server, with the fields of the body that only some servers know."""

    client: Client
    model: str
    extensions: dict[str, Any] = field(default_factory=dict)

    def body(self, item: WorkItem, prompt: Sequence[int]) -> dict[str, Any]:
        """Returns the body of a request for greedy decoding.

        The output has a fixed length if the server has a field for that.
        """
        requested = {
            "model": self.model,
            "prompt": list(prompt),
            "max_tokens": item.num_output_tokens,
            "temperature": 0,
        }
        return {**requested, **self.extensions}


class Load:
    """Runs a workload once.

    Args:
        endpoint: The model that gets the requests.
        work: The requests.
        arrivals: The seconds from the beginning to each arrival. A later round of a chat ignores it
            and follows the answer before it.
        maximum: The most requests at a time.
        whole: A place is used again only when all places are free, as in an engine with static
            batches.
        is_closed: A request is due when it gets a place, not when it arrives.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        work: Sequence[WorkItem],
        arrivals: Sequence[float],
        maximum: int | None,
        *,
        whole: bool = False,
        is_closed: bool = False,
    ) -> None:
        self._endpoint = endpoint
        self._work = work
        self._arrivals = arrivals
        self._places = Places(maximum or len(work), whole=whole)
        self.is_closed = is_closed
        self._salt = (
            uuid.uuid4().hex if endpoint.extensions else None
        )  # with its own salt, no run finds another's prefixes in the server's cache
        self._title = "Static batches" if whole else "Requests"
        self._sent: list[tuple[int, ...]] = [()] * len(work)  # the prompts as they were sent

    async def run(self) -> tuple[list[TimedAnswer], float]:
        """Sends all requests; returns the answers and the time of the beginning."""
        start = perf_counter()
        tasks: list[asyncio.Task[TimedAnswer]] = []
        with tqdm(total=len(self._work), desc=self._title, unit="request", disable=None) as bar:
            for index in range(len(self._work)):
                tasks.append(asyncio.ensure_future(self._run_request(index, start, tasks)))
                tasks[-1].add_done_callback(lambda _: bar.update())
            answers = await asyncio.gather(*tasks)
        return answers, start

    async def _run_request(
        self, index: int, start: float, tasks: Sequence[asyncio.Task[TimedAnswer]]
    ) -> TimedAnswer:
        item = self._work[index]
        prompt = item.prompt_token_ids
        due = start + self._arrivals[index]
        if item.after is None:
            await asyncio.sleep(due - perf_counter())
        else:
            before = await tasks[item.after]
            prompt = self._next_prompt(item, before)
            due = before.ended
        await self._places.take()
        try:
            if self.is_closed:
                due = perf_counter()
            self._sent[index] = prompt
            body = self._endpoint.body(item, prompt)
            return await self._endpoint.client.complete(
                {**body, **({"cache_salt": self._salt} if self._salt else {})}, due
            )
        finally:
            self._places.give_back()

    def _next_prompt(self, item: WorkItem, before: TimedAnswer) -> tuple[int, ...]:
        """Returns the prompt of a chat's next round: the last prompt, its answer and a new message.

        The prompt of the workload is returned if the server does not say which tokens it answered.
        """
        assert item.after is not None
        last = self._work[item.after]
        if len(before.token_ids) != last.num_output_tokens:
            return item.prompt_token_ids
        length = len(last.prompt_token_ids) + last.num_output_tokens
        return (*self._sent[item.after], *before.token_ids, *item.prompt_token_ids[length:])


class Places:
    """Gives a limited number of places to requests, first come, first served."""

    def __init__(self, number: int, *, whole: bool) -> None:
        self._number = number
        self._whole = whole
        self._taken = 0
        self._waiting: list[asyncio.Future[None]] = []

    async def take(self) -> None:
        """Waits for a place."""
        place = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        if not self._whole or not self._taken:
            # Requests that come at the same time are admitted together.
            asyncio.get_running_loop().call_soon(self._admit)
        await place

    def give_back(self) -> None:
        """Frees a place, and gives it to the next request."""
        self._taken -= 1
        self._admit()

    def _admit(self) -> None:
        if self._whole and self._taken:
            return
        while self._waiting and self._taken < self._number:
            self._taken += 1
            self._waiting.pop(0).set_result(None)
