"""A server that speaks as vLLM's does, without a model, and misbehaves on demand.

with FakeVllm(policy) as server:
    server.says = lambda answer, count: {**answer, "model": "another"}
    ... server.url, server.num_rows
"""

from __future__ import annotations

from typing import Any

from quiver.stages.model.checkpoints import model_entry
from tests.stages.reward.fake_server import Asked, FakeServer, reply

WORDS = "the engine core is dead"


def completion(prompt_ids: list[int], seed: int) -> tuple[list[int], list[float]]:
    """Return the answer of the fake model: ids that depend on the seed, and made-up logprobs."""
    ids = [3 + (seed + 7 * place) % 300 for place in range(3 + seed % 3)]
    return ids, [-0.25 * (place + 1) for place in range(len(ids))]


class FakeVllm(FakeServer):
    """One server on a free port, until it is closed."""

    def __init__(self, policy) -> None:
        super().__init__(self._behave)
        self.card = {"id": model_entry("policy", policy).weights, "root": "/models/there"}
        self.card |= {"parent": None, "max_model_len": 256}
        self.labels = ["default"]
        """Labels of the weights of every answer, one for each span of ids."""
        self.probe_logprob = 0.0
        self.says = lambda answer, count: answer
        """Makes what is sent of the answer to a row and the number of rows before it. An int is a
        status, None a reset, bytes and coroutines are as for `FakeServer`."""
        self.bodies: list[dict] = []
        """Requests of rows."""

    @property
    def num_rows(self) -> int:
        return len(self.bodies)

    async def _behave(self, asked: Asked) -> Any:
        if asked.path == "/v1/models":
            return reply({"data": [self.card]})
        if asked.path == "/version":
            return reply({"version": "0.32.0"})
        body = asked.body
        if body["model"] != self.card["id"]:
            answer = 404
        elif allowed := body["sampling_params"].get("allowed_token_ids"):
            answer = self._answer(body, 2 * allowed, 2 * [self.probe_logprob])
        else:
            ids, logprobs = completion(body["token_ids"], body["sampling_params"]["seed"])
            self.bodies.append(body)
            answer = self.says(self._answer(body, ids, logprobs), self.num_rows - 1)
            if hasattr(answer, "__await__"):
                answer = await answer
        if isinstance(answer, int):
            words = f"{WORDS} {asked.headers.get('authorization')}"
            return reply({"error": {"message": words}}, answer)
        return answer if answer is None or isinstance(answer, bytes) else reply(answer)

    def _answer(self, body: dict, ids: list[int], logprobs: list[float]) -> dict:
        content = [
            {"token_id": token_id, "logprob": logprob}
            for token_id, logprob in zip(ids, logprobs, strict=True)
        ]
        choice = {"token_ids": ids, "logprobs": {"content": content}, "finish_reason": "length"}
        choice |= {"weight_versions": [{"version": label} for label in self.labels]}
        return {
            "request_id": f"generate-tokens-{body['request_id']}",
            "model": self.card["id"],
            "usage": {"prompt_tokens": len(body["token_ids"])},
            "choices": [choice],
        }
