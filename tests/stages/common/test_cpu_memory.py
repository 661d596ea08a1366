"""The memory that vLLM's cache is taken from, by the files of Linux's NUMA nodes."""

from __future__ import annotations

import os

import pytest

from quiver.stages.common.models.vllm_env import cpu_cache_bytes, free_bytes

CONFIG = {
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_size": 576,
}
MEMINFO = """Node {node} MemTotal:       {total} kB
Node {node} MemFree:        {free} kB
Node {node} MemUsed:        5000 kB
Node {node} Active(file):     30 kB
Node {node} Inactive(file):   20 kB
Node {node} HugePages_Total:     0
"""


def write_nodes(folder, *nodes):
    for number, (total, free) in enumerate(nodes):
        (folder / f"node{number}").mkdir(parents=True)
        text = MEMINFO.format(node=number, total=total, free=free)
        (folder / f"node{number}" / "meminfo").write_text(text)
    return folder


@pytest.mark.parametrize(
    ("nodes", "kilobytes"),
    [
        ([(9000, 800)], 850),
        ([(9000, 800), (9000, 700)], 750),
        ([(9000, 800), (0, 0)], 850),  # a node without memory
    ],
)
def test_the_fullest_node_decides(tmp_path, nodes, kilobytes):
    assert free_bytes(write_nodes(tmp_path, *nodes)) == kilobytes * 1024


def test_without_nodes_it_is_the_machines(tmp_path):
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < free_bytes(tmp_path) <= pages


def test_a_cache_holds_all_sequences_or_what_there_is_room_for():
    token = 2 * 30 * 3 * 64 * 4
    assert cpu_cache_bytes(CONFIG, 96, 100, 4) == 100 * token * (96 + 32)
    most = cpu_cache_bytes(CONFIG, 4000, 10**6, 4)
    assert most <= free_bytes() and most >= token * 4032
