"""Answers of the Responses API: the items that parts of a text make, and the events that tell of them."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from pytriton.openai._texts import Part

Event = dict[str, Any]


class Output:
    """The items of an answer, which grow with each part.

    Thoughts, texts and refusals follow each other, so one item ends when another begins. Calls of tools may alternate,
    so they end with the answer.
    """

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._calls: dict[int, dict[str, Any]] = {}

    @property
    def thoughts(self) -> str:
        """The thoughts of the model."""
        found = [item for item in self.items if item["type"] == "reasoning"]
        return "".join(part["text"] for item in found for part in item["content"])

    def add(self, part: Part) -> Iterator[Event]:
        """Add a part, and yield its events, without their numbers."""
        if part.reasoning:
            yield from self._say("reasoning", "reasoning_text", "text", part.reasoning)
        if part.text or part.logprobs:
            yield from self._say("message", "output_text", "text", part.text, list(part.logprobs))
        if part.refusal:
            yield from self._say("message", "refusal", "refusal", part.refusal)
        for call in part.calls:
            yield from self._call(call)

    def end(self, *, is_whole: bool) -> Iterator[Event]:
        """End all items, and yield the events."""
        status = "completed" if is_whole else "incomplete"
        if not self.items:
            # An empty answer is an empty message.
            yield from self._say("message", "output_text", "text", "")
        yield from self._close(status)
        for item in self._calls.values():
            item["status"] = status
            place = {"item_id": item["id"], "output_index": self.items.index(item)}
            told = {"name": item["name"], "arguments": item["arguments"]}
            yield {"type": "response.function_call_arguments.done", **place, **told}
            yield _item_event("done", place["output_index"], item)

    def _say(
        self, kind: str, part_kind: str, field: str, text: str, logprobs: list[Any] | None = None
    ) -> Iterator[Event]:
        item = self._open
        if item is None or item["type"] != kind:
            yield from self._close("completed")
            item = self._begin(kind)
            yield _item_event("added", len(self.items) - 1, item)
        content: list[dict[str, Any]] = item["content"]
        if not content or content[-1]["type"] != part_kind:
            yield from self._close_part()
            content.append({"type": part_kind, field: ""})
            if part_kind == "output_text":
                content[-1] |= {"annotations": [], "logprobs": []}
            yield {"type": "response.content_part.added", **self._place, "part": {**content[-1]}}
        content[-1][field] += text
        told: Event = {"type": f"response.{part_kind}.delta", **self._place, "delta": text}
        if part_kind == "output_text":
            content[-1]["logprobs"] += logprobs or []
            told["logprobs"] = logprobs or []
        if text or logprobs:
            yield told

    def _call(self, delta: Mapping[str, Any]) -> Iterator[Event]:
        index, function = delta["index"], delta["function"]
        if index not in self._calls:
            yield from self._close("completed")
            item = self._begin("function_call")
            self._open = None
            item |= {"call_id": delta["id"], "name": function["name"], "arguments": ""}
            self._calls[index] = item
            yield _item_event("added", len(self.items) - 1, item)
        item = self._calls[index]
        if function["arguments"]:
            item["arguments"] += function["arguments"]
            place = {"item_id": item["id"], "output_index": self.items.index(item)}
            yield {"type": "response.function_call_arguments.delta", **place, "delta": function["arguments"]}

    def _begin(self, kind: str) -> dict[str, Any]:
        prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc"}[kind]
        item: dict[str, Any] = {"id": f"{prefix}_{uuid.uuid4().hex}", "type": kind, "status": "in_progress"}
        if kind == "message":
            item |= {"role": "assistant", "content": []}
        elif kind == "reasoning":
            item |= {"summary": [], "content": []}
        self.items.append(item)
        self._open = item
        return item

    def _close(self, status: str) -> Iterator[Event]:
        item = self._open
        if item is None:
            return
        yield from self._close_part()
        item["status"] = status
        self._open = None
        yield _item_event("done", self.items.index(item), item)

    def _close_part(self) -> Iterator[Event]:
        item = self._open
        if item is None or not item["content"]:
            return
        part = item["content"][-1]
        field = "refusal" if part["type"] == "refusal" else "text"
        told = {"logprobs": part["logprobs"]} if part["type"] == "output_text" else {}
        yield {"type": f"response.{part['type']}.done", **self._place, field: part[field], **told}
        yield {"type": "response.content_part.done", **self._place, "part": {**part}}

    @property
    def _place(self) -> dict[str, Any]:
        """The place of the open part."""
        item = self._open
        if item is None:
            return {}
        at = max(0, len(item["content"]) - 1)
        return {"item_id": item["id"], "output_index": self.items.index(item), "content_index": at}


def _item_event(what: str, index: int, item: Mapping[str, Any]) -> Event:
    # A copy, because the item goes on to grow.
    copy = {**item, **({"content": [{**part} for part in item["content"]]} if "content" in item else {})}
    return {"type": f"response.output_item.{what}", "output_index": index, "item": copy}
