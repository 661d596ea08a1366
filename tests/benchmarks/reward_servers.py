"""How fast rows are scored over HTTP: python -m tests.benchmarks.reward_servers

1,000 rows, one a request, 64 at a time, on a loopback server in another process that answers each
in 50 ms. The server's own waiting is 16 rounds of 50 ms, 0.8 s; the rest is the client's. Goal: at
most 1.5 s.
"""

import argparse
import asyncio
import json
import multiprocessing
import time

from quiver.stages.reward.servers.config import ServerConfig
from quiver.stages.reward.servers.scorer import ServerScorer
from tests.stages.reward.fake_server import FakeServer, reply

ROWS, SECONDS = 1000, 0.05


def serve(pipe) -> None:
    """Answer each request after 50 ms, until the other end of the pipe says so."""

    async def score(asked):
        await asyncio.sleep(SECONDS)
        return reply({"rewards": [0.5]})

    with FakeServer(score) as server:
        pipe.send(server.url)
        pipe.recv()


def main() -> None:
    """Print one JSON object a round."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the rows")
    count = ROWS // 10 if parser.parse_args().quick else ROWS
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs,), daemon=True)
    child.start()
    scorer = ServerScorer(
        ServerConfig(dialect="openrlhf", batch_rows=1, urls=[ours.recv()], concurrency=64)
    )
    rows = [str(row) for row in range(count)]
    batch = {
        "prompts": rows,
        "completions": ["word " * 100] * count,
        "rollout_ids": rows,
        "completion_ids": [list(range(100))] * count,
        "finish_reason": ["stop"] * count,
    }
    for _ in range(3):
        start = time.perf_counter()
        parts = scorer.score(batch)
        seconds = time.perf_counter() - start
        assert [part.value for part in parts] == [0.5] * count
        print(json.dumps({"rows": count, "seconds": round(seconds, 3), "goal": 1.5}))
    ours.send("done")
    child.join(10)


if __name__ == "__main__":
    main()
