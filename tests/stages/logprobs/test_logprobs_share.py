"""Two processes score one version of logprobs together: the bytes of one process."""

from dataclasses import replace

from quiver.stages.core.run.runner import Call, find_or_make
from tests.stages.generate.making import random_prompts
from tests.stages.sharing import copy, hashes, require_whole, start
from tests.tiny import make_policy


def test_any_number_scores_what_one_scores(store, tmp_path):
    make_policy(store)
    random_prompts(store, 90)
    config = {"engine": "scripted", "samples_per_prompt": 6, "sampling": {"max_tokens": 8}}
    refs = {"prompts": "tiny/prompts@1", "policy": "tiny/policy@0"}
    find_or_make(Call("generate", config, store.url, refs))
    refs = {"rollouts": "tiny/rollouts@1", "policy": "tiny/policy@0"}
    call = Call("logprobs", {"device": "cpu"}, store.url, refs)
    other = copy(store, tmp_path / "alone")
    alone = find_or_make(replace(call, store=other.url))
    answers = [worker.answer() for worker in start(call, 2)]
    assert [answer["ref"] for answer in answers] == [alone.ref] * 2
    require_whole(store, "tiny", "logprobs")
    assert hashes(store, alone.ref) == hashes(other, alone.ref)
    for name in ("tokens", "packing"):
        assert answers[0]["metrics"][name] == alone.metrics[name]
