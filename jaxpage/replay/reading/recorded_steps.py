"""Describes each step of a log by its records, as the web page shows it: plan, draws, and outcome.

The records alone say this much; which blocks are cached, and when a fork shares which block, only
the engine that runs the log again knows.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from jaxpage.device.inputs import Bucket, BucketMenu
from jaxpage.errors import EventLogError
from jaxpage.replay.log_walk import Walk, num_prompt_tokens
from jaxpage.replay.reading.log_reading import follow_checked, header_of, records_of
from jaxpage.replay.recorder import Record, usual_draws
from jaxpage.step.draft import PLACEHOLDER, chain


class RecordedSteps:
    """Follows the records of a log, and describes its last step.

    Attributes:
        header: The header of the log.
        walk: The requests and their block tables after the last record.
        numbers: The numbers of the requests by id, from 1, in order of arrival.
        ended: The number of the last step that ended.
        step: The description of the last step that was planned; None before the first.
    """

    def __init__(
        self, path: str | os.PathLike[str], text_of: Callable[[int], str] | None = None
    ) -> None:
        """Starts before the first record.

        Args:
            path: The path of the log.
            text_of: Gives the text of a token, which is shown next to its id. None takes the texts
                that the header has, if any.

        Raises:
            EventLogError: The file is no log, has another format, or names no shapes of steps.
        """
        self.header = header_of(path)
        self.walk = Walk()
        self.numbers: dict[str, int] = {}
        self.ended = 0
        self.step: Record | None = None
        self._path = path
        self._texts: dict[str, str] = self.header.get("texts", {})
        self._text_of = text_of
        try:
            self._menu = _read_menu(self.header["engine"]["buckets"])
        except (KeyError, TypeError) as error:
            raise EventLogError(f"the header has no buckets: {error!r}") from error

    def records(self, until: int | None = None) -> Iterator[Record]:
        """Yields the records after the header, up to the end of the step `until`.

        Raises:
            EventLogError: The log is damaged.
        """
        return records_of(self._path, until)

    def follow(self, record: Record) -> None:
        """Takes the next record.

        Raises:
            EventLogError: It does not follow from the records before it.
        """
        follow_checked(self._follow, record)

    def _follow(self, record: Record) -> None:
        self.walk.follow(record)
        match record["event"]:
            case "arrival":
                self._arrive(record)
            case "snapshot":
                self.ended = record["step"]
                for arrival in record["requests"]:
                    self._arrive(arrival)
            case "plan":
                self.step = self._describe_plan(record)
            case "result":
                assert self.step is not None, "a result follows a plan"
                self.ended = record["step"]
                self.step |= self._describe_result(record)
            case "failure":
                assert self.step is not None, "a failure follows a plan"
                self.ended = record["step"]
                self.step["error"] = record.get("error")

    def _arrive(self, arrival: Record) -> None:
        self.numbers[arrival["request_id"]] = len(self.numbers) + 1

    def _describe_plan(self, plan: Record) -> Record:
        drafts = {draft[0]: draft[1:] for draft in plan.get("drafts", ())}
        draws = plan.get("draws", usual_draws(plan))
        bucket = self._choose_bucket(plan["rows"], drafts, len(draws))
        return {
            "step": plan["step"],
            "bucket": [bucket.num_tokens, bucket.num_rows, bucket.max_query_len],
            "kind": bucket.kind,
            "rows": [
                [
                    self.numbers[self.walk.sequences[sequence_id].request_id],
                    sequence_id,
                    start,
                    num_tokens,
                    len(drafts[sequence_id][0]) if sequence_id in drafts else 0,
                ]
                for sequence_id, start, num_tokens in plan["rows"]
            ],
            "num_draws": len(draws),
            "draws": draws,
            "copies": plan.get("copies", []),
            "swap_out": plan.get("swap_out", []),
            "swap_in": plan.get("swap_in", []),
            "preempted": [self.numbers[request_id] for request_id in plan.get("preempted", ())],
            "seconds": None,
            "tables": [
                list(self.walk.sequences[sequence_id].tables[0])
                for sequence_id, _, _ in plan["rows"]
            ],
        }

    def _choose_bucket(
        self, rows: list[list[int]], drafts: dict[int, list[Any]], num_draws: int
    ) -> Bucket:
        multi_step = any(PLACEHOLDER in token_ids for token_ids, *_ in drafts.values())
        return self._menu.choose(
            [num_tokens for _, _, num_tokens in rows],
            num_draws,
            scores=any(self._is_scored(sequence_id, start) for sequence_id, start, _ in rows),
            verifies=bool(drafts) and not multi_step,
            branches=any(map(_branches, drafts.values())),
            multi_step=multi_step,
            takes_vectors=any(self._takes_vectors(*row) for row in rows),
        )

    def _takes_vectors(self, sequence_id: int, start: int, num_tokens: int) -> bool:
        arrival = self.walk.arrivals[self.walk.sequences[sequence_id].request_id]
        return any(
            first < start + num_tokens and start < first + length
            for first, length, *_ in arrival.get("embedded", ())
        )

    def _is_scored(self, sequence_id: int, start: int) -> bool:
        arrival = self.walk.arrivals[self.walk.sequences[sequence_id].request_id]
        requested = arrival.get("params", {}).get("prompt_logprobs")
        return requested is not None and start < num_prompt_tokens(arrival) - 1

    def _describe_result(self, result: Record) -> Record:
        tokens = [self._name(token_id) for token_id in result["tokens"]]
        draws: dict[int, Record] = {
            draw: {"index": draw, "token": token, "rank": 0, "logprob": None, "top": []}
            for draw, token in enumerate(tokens)
        }
        for draw, rank, token_ids, bits in result.get("logprobs", ()):
            logprob, *top = map(_finite, np.array(bits, np.int32).view(np.float32).tolist())
            draws[draw] = {
                "index": draw,
                "token": tokens[draw] if draw < len(tokens) else None,
                "rank": rank,
                "logprob": logprob,
                "top": list(map(list, zip(map(self._name, token_ids[1:]), top, strict=True))),
            }
        accepted = {"accepted": list(map(len, result["paths"]))} if "paths" in result else {}
        return {"results": [draws[draw] for draw in sorted(draws)], **accepted}

    def _name(self, token_id: int | None) -> int | str | None:
        if token_id is None or token_id < 0:
            return token_id
        if self._text_of is not None:
            return f"{token_id}:{self._text_of(token_id)}"
        text = self._texts.get(str(token_id))
        return token_id if text is None else f"{token_id}:{text}"


def _read_menu(fields: list[list[Any]]) -> BucketMenu:
    buckets = [Bucket(*values) for values in fields]
    several = [bucket for bucket in buckets if bucket.num_steps > 1]
    vectors = [bucket for bucket in buckets if bucket.takes_vectors]
    single = [
        bucket
        for bucket in buckets
        if bucket.num_steps == 1 and not bucket.verifies and not bucket.takes_vectors
    ]
    return BucketMenu(
        decode=tuple(bucket for bucket in single if bucket.kind == "decode"),
        chunk=tuple(bucket for bucket in single if bucket.kind == "chunk"),
        verify=tuple(bucket for bucket in buckets if bucket.verifies),
        multi_step=tuple(several),
        vectors=tuple(vectors),
    )


def _branches(draft: list[Any]) -> bool:
    """Returns whether drafts [token ids, parents, distributions] are no chain."""
    token_ids, *more = draft
    return bool(more) and tuple(more[0]) != chain(tuple(token_ids)).parents


def _finite(logprob: float) -> float | None:
    """Returns the log probability, or None where JSON has no number for it."""
    return logprob if math.isfinite(logprob) else None
