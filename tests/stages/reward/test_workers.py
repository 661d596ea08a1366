"""Worker processes: whatever a function does in a row costs that row alone, nobody is left behind,
and results are the same for any number of workers."""

import datetime
import decimal
import logging
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from quiver.schemas.errors import ConfigError, ResourceError
from quiver.stages.core.run import user_process
from quiver.stages.reward.functions.config import FunctionConfig
from quiver.stages.reward.pool import jobs, pool
from quiver.stages.reward.pool.calls import About
from quiver.stages.reward.pool.pool import Pool
from quiver.stages.reward.pool.scorer import FunctionScorer
from quiver.stages.reward.scoring import Part

FAULTS = '''
import asyncio, ctypes, json, os, re, signal, subprocess, sys, time

def each(do):
    """A function that scores 1, after `do` where a completion says so."""
    def function(completions):
        values = []
        for text in completions:
            found = do() if text == "bad" else 1.0
            values += [found] if found != "nothing" else []
        return values
    return function

def boom():
    raise ValueError("boom")

def deaf():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)

def spin():
    re.match("(a+)+$", "a" * 60 + "b")  # never leaves C code, nor lets go of the interpreter's lock

def segfault():
    ctypes.string_at(0)

def close_everything():
    os.closerange(0, 256)
    time.sleep(0.1)
    return 2.0

def scribble():
    for handle in map(int, os.listdir("/proc/self/fd")):
        try:
            os.write(handle, b"\\0" * 7 + b"\\2{}")
        except OSError:
            pass
    return 2.0

def print_much():
    block = b"x" * (1 << 20)
    for _ in range(256):
        os.write(1, block)
    return 1.0

def fork_and_return():
    os.fork()
    return 1.0

def fork_and_raise():
    if os.fork() == 0:
        raise ValueError("in the copy")
    return 1.0

def daemon():
    """A grandchild in a session of its own, which nobody waits for and which ignores what it may."""
    if os.fork() == 0:
        os.setsid()
        if (pid := os.fork()) == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(600)
        with open(f"daemon-{pid}", "w"):
            os._exit(0)
    os.wait()
    return 1.0

def daemons():
    for _ in range(20):
        daemon()
    return 1.0

def orphan():
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)

def move():
    os.makedirs("elsewhere", exist_ok=True)
    os.chdir("elsewhere")
    os.environ["SPOILED"] = "1"
    return 1.0

raises, nothing = each(boom), each(lambda: None)
short, leaves = each(lambda: "nothing"), each(lambda: os._exit(3))
hangs, hangs_deaf, hangs_in_c = each(lambda: time.sleep(600)), each(deaf), each(spin)
segfaults, kills_itself = each(segfault), each(lambda: os.kill(os.getpid(), signal.SIGKILL))
kills_group, kills_keeper = each(lambda: os.killpg(0, signal.SIGKILL)), each(orphan)
closes, scribbles, prints = each(close_everything), each(scribble), each(print_much)
forks, forks_raising, leaves_daemon, leaves_daemons = map(each, (fork_and_return, fork_and_raise, daemon, daemons))
hoards, moves = each(lambda: float(len(bytearray(1 << 30)) > 0)), each(move)

def execs(completions):
    if os.fork() == 0:
        os.execvp("missing", ["missing"])
    return [float(text) for text in completions]

async def execs_waiting(completions):
    await asyncio.sleep(0)
    return execs(completions)

def answers_twice(completions):
    """In row 3 it answers before the worker does."""
    frame = sys._getframe()
    while completions == ["3"] and "envelope" not in frame.f_locals:
        frame = frame.f_back
    if completions == ["3"]:
        parts = [[0, 99.0, None, None]]
        frame.f_locals["send"]({"parts": parts, "seconds": 0.0, "failure": None})
    return [float(text) for text in completions]

def memory_limit(completions):
    import resource
    return [float(resource.getrlimit(resource.RLIMIT_DATA)[0])] * len(completions)

def oom_score(completions):
    score = subprocess.run(["cat", "/proc/self/oom_score_adj"], capture_output=True).stdout
    return [float(score)] * len(completions)

async def blocks(completions):
    if completions == ["bad"]:
        time.sleep(600)
    await asyncio.sleep(0.01)
    return [1.0]

async def waits(completions):
    await asyncio.sleep(600 if completions == ["bad"] else 0.2)
    return [1.0]

def slow_to_start(completions):
    if not hasattr(slow_to_start, "model"):
        time.sleep(1.0)
        slow_to_start.model = True
    return [1.0] * len(completions)

def slow_row(completions):
    time.sleep(sum(0.4 for text in completions if text == "bad"))
    return [1.0] * len(completions)

def talks(completions):
    print("hello \\x1b[31m" + "x" * 10_000)
    return [1.0] * len(completions)

def process(completions):
    return [float(os.getpid())] * len(completions)

'''
ENDED = "WorkerEnded: its process ended "
LATE = Part(error="TimeoutError: no answer within 1 s")


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory):
    """The working folder, with the functions."""
    patch = pytest.MonkeyPatch()
    path = tmp_path_factory.mktemp("faults")
    (path / "faults.py").write_text(FAULTS)
    patch.chdir(path)
    patch.setattr(jobs, "BATCH_SECONDS", 1.0)
    yield path
    patch.undo()


@pytest.fixture
def empty(folder, monkeypatch, tmp_path):
    """A working folder of its own: `children` and `daemons` see this test's processes only."""
    (tmp_path / "faults.py").write_text(FAULTS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def shared(folder):
    with Pool(2) as made:
        yield made


@pytest.fixture
def one(folder):
    with Pool(1) as made:
        yield made


def scorer(made: Pool, use: str, most: int = 256, notice=lambda *_: None, **options):
    """A function of FAULTS, or of another file, with at most `most` rows a call."""
    use = use if ":" in use else f"faults.py:{use}"
    config = FunctionConfig(use=use, **{"timeout_seconds": 1.0, **options})
    return FunctionScorer(config, made, most, notice)


def score_texts(function: FunctionScorer, texts: list[str], **columns: list) -> list[Part]:
    ids = [f"r{row}" for row in range(len(texts))]
    return function.score({"completions": texts, "rollout_ids": ids, **columns})


def score(made: Pool, use: str, rows: int = 12, bad: int = 5, **options) -> list[Part]:
    """What a function says of `rows` rows, of which row `bad` is bad."""
    texts = ["bad" if row == bad else "good" for row in range(rows)]
    return score_texts(scorer(made, use, **options), texts)


def fine_but(bad: Part) -> list[Part]:
    return [bad if row == 5 else Part(1.0) for row in range(12)]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def children() -> list[int]:
    """Processes of this module's pools, and their children."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command, folder = path.read_bytes(), os.readlink(path.with_name("cwd"))
        except OSError:
            continue
        is_ours = b"run/answering.py" in command and folder == os.getcwd()
        if is_ours and alive(int(path.parent.name)):
            found.append(int(path.parent.name))
    return found


def daemons(folder: Path) -> list[int]:
    return [int(path.name.removeprefix("daemon-")) for path in folder.glob("daemon-*")]


def wait_until(is_so, seconds: float = 30) -> bool:
    deadline = time.monotonic() + seconds
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.02)
    return is_so()


COSTS = {
    "raises": Part(error="ValueError: boom"),
    "leaves": Part(error=f"{ENDED}with exit code 3"),
    "segfaults": Part(error=f"{ENDED}by SIGSEGV"),
    "kills_itself": Part(error=f"{ENDED}by SIGKILL"),
    "kills_group": Part(error=f"{ENDED}by SIGKILL"),
    "kills_keeper": Part(error=f"{ENDED}by SIGKILL"),
    "closes": Part(error=f"{ENDED}with exit code 1"),
    "scribbles": Part(error=f"{ENDED}after an answer that cannot be read"),
    "forks": Part(1.0),
    "forks_raising": Part(1.0),
    "moves": Part(1.0),
}


@pytest.mark.parametrize("fault", COSTS)
def test_a_bad_row_costs_itself_alone(shared, fault):
    parts = [
        part._replace(error=part.error and part.error.partition(" (")[0])
        for part in score(shared, fault)
    ]
    assert parts == fine_but(COSTS[fault])


@pytest.mark.parametrize("use", ["execs", "execs_waiting", "answers_twice"])
def test_only_the_process_that_was_asked_answers_and_once(one, use):
    """A copy of it never does; an answer too many ends it and costs its own row."""
    parts = score_texts(scorer(one, use, most=1), [str(row) for row in range(8)])
    twice = use == "answers_twice"
    assert parts == [Part(99.0 if twice and row == 3 else float(row)) for row in range(8)]


def test_a_call_that_is_done_again_row_by_row_is_told_once(one, caplog):
    causes = {"raises": "ValueError: boom", "leaves": "its process ended", "hangs": "took longer"}
    for fault, why in causes.items():
        caplog.clear()
        function = scorer(one, fault)
        for _ in range(2):
            score_texts(function, ["good"] * 3 + ["bad"])
        (message,) = (text for text in caplog.messages if "one by one" in text)
        assert message.startswith(f"{fault}: a call on ") and why in message


def test_a_row_that_hangs_costs_itself_alone_and_its_time(folder):
    """Five functions at once: by a call that waits, that ignores SIGTERM, that never leaves C code,
    and two async ones."""
    uses = ("hangs", "hangs_deaf", "hangs_in_c", "blocks", "waits")
    with Pool(3) as three, ThreadPoolExecutor(len(uses)) as threads:
        for parts in threads.map(lambda use: score(three, use), uses):
            assert parts == fine_but(LATE)


def test_what_is_printed_is_logged_at_some_length_and_not_kept(shared, caplog):
    with caplog.at_level(logging.INFO, "quiver.stages.reward"):
        assert score(shared, "talks", rows=1) == [Part(1.0)]
    assert caplog.messages[0].startswith("talks: hello \\x1b[31mxxx")
    assert "more" in caplog.messages[-1] and sum(map(len, caplog.messages)) < 3000
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert score(shared, "prints", timeout_seconds=60) == [Part(1.0)] * 12
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024, (
        "KiB, of 256 MiB"
    )


def test_memory_has_a_limit_and_errors_name_the_key_that_raises_it(empty):
    key = "a reward worker may have 0.5 GiB, reward.max_memory_gib"
    (empty / "greedy.py").write_text("x = bytearray(1 << 30)\ndef f(completions): pass\n")
    with Pool(1, memory_gib=0.5) as limited:
        error = score(limited, "hoards")[5].error
        assert error.startswith("MemoryError (faults.py:") and error.endswith(f": {key}")
        assert score(limited, "kills_itself")[5].error == (
            f"{ENDED}by SIGKILL (out of memory? {key})"
        )
        with pytest.raises(ResourceError, match=r"0\.5 GiB") as caught:
            scorer(limited, "greedy.py:f").require([])
    assert caught.value.next == "raise reward.max_memory_gib"


def test_without_a_limit_in_the_recipe_a_worker_has_its_share_of_the_machine(one, shared):
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    alone, half = (score(made, "memory_limit", rows=1)[0].value for made in (one, shared))
    assert half <= alone <= machine / 2
    assert half >= min(4 * 2**30, machine / 2) * (1 - 1e-6), "as float32"


def test_the_kernel_takes_a_worker_and_what_it_starts_before_the_stage(shared):
    own = int(Path("/proc/self/oom_score_adj").read_text())
    assert score(shared, "oom_score", rows=1)[0].value == 900 > own


def test_slow_but_honest_functions_succeed(one, monkeypatch):
    """The first call takes longer than a batch may, and a row much longer than those before it."""
    monkeypatch.setattr(jobs, "BATCH_SECONDS", 0.25)
    assert score(one, "slow_to_start", timeout_seconds=30) == [Part(1.0)] * 12
    assert score(one, "slow_row", rows=24, bad=20, timeout_seconds=30) == [Part(1.0)] * 24


def test_results_do_not_depend_on_the_number_of_workers_or_rows_a_call(folder):
    found = []
    for workers, rows in ((1, 256), (3, 256), (2, 1)):
        with Pool(workers) as some:
            found.append([score(some, use, most=rows) for use in ("short", "leaves")])
    assert found[0] == found[1] == found[2]


def test_work_is_dealt_to_several_processes_where_it_is_worth_it(empty, fresh_python):
    with Pool(2) as two:
        score_texts(scorer(two, "slow_row", most=1, timeout_seconds=30), ["bad"] * 4)
        assert len(children()) >= 4  # two keepers, two workers
        found = score_texts(scorer(two, "process"), ["good"] * 8)
        assert {part.value for part in found} <= set(map(float, children()))


def test_a_call_that_the_pool_itself_fails_is_an_error_and_takes_no_place(one, monkeypatch):
    def broken(*_):
        raise RuntimeError("broken")

    with monkeypatch.context() as patch, ThreadPoolExecutor(1) as thread:
        patch.setattr(pool.FunctionProcess, "log_printed", broken)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="broken"):
                thread.submit(score, one, "raises", rows=1).result(60)
    assert score(one, "raises", rows=1) == [Part(1.0)]


def test_notice_hears_of_failures_at_once_and_can_end_the_scoring(one):
    """The rows after the first failure would take an hour."""
    heard = []

    def notice(*failure):
        heard.append(failure)
        raise KeyError("enough")

    hanging = scorer(one, "hangs", most=1, notice=notice, timeout_seconds=0.5)
    with pytest.raises(KeyError, match="enough"):
        score_texts(hanging, ["bad"] * 4000)
    assert heard == [("hangs", "r0", "TimeoutError: no answer within 0.5 s")]


def test_values_of_columns_arrive_as_they_are(one, folder):
    """Dates, bytes and decimals of the user's columns are no JSON."""
    (folder / "typed.py").write_text(
        "def f(completions, when, raw, price):\n"
        "    return [float(w.year + len(r) + float(p)) for w, r, p in zip(when, raw, price)]\n"
    )
    columns = {"when": [datetime.date(2020, 1, 1)], "raw": [b"ab"]}
    columns["price"] = [decimal.Decimal("0.5")]
    assert score_texts(scorer(one, "typed.py:f"), ["a"], **columns) == [Part(2022.5)]


# -- nobody is left behind


def test_a_closed_pool_leaves_no_process_and_no_thread(empty, fresh_python):
    before = set(threading.enumerate())
    with Pool(2) as two, ThreadPoolExecutor(3) as threads:
        uses = ("raises", "nothing", "kills_keeper")
        *_, parts = threads.map(lambda use: score(two, use), uses)
        assert parts[5].error.startswith(f"{ENDED}by SIGKILL")
        options = {"rows": 1, "bad": 0, "timeout_seconds": 60}  # a call that is late is done again
        assert score(two, "leaves_daemons", **options) == [Part(1.0)]
        found = children() + daemons(empty)
        assert len(daemons(empty)) >= 20 and all(map(alive, found))
    assert not any(map(alive, found)) and children() == []
    assert wait_until(lambda: not set(threading.enumerate()) - before)


def test_a_stage_that_is_interrupted_leaves_nobody(empty, fresh_python):
    """Its lanes are threads that still wait; see `test_subprocesses` for one that is killed."""
    code = """
        from quiver.stages.reward.functions.config import FunctionConfig
        from quiver.stages.reward.pool.scorer import FunctionScorer
        from quiver.stages.reward.pool.pool import Pool
        pool = Pool(2)
        rows = {"completions": ["good", "bad"], "rollout_ids": ["a", "b"]}
        FunctionScorer(FunctionConfig(use="faults.py:leaves_daemon"), pool, 256).score(rows)
        FunctionScorer(FunctionConfig(use="faults.py:hangs_deaf"), pool, 256).score(rows)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    stage = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    wait_until(lambda: daemons(empty))
    time.sleep(0.3)  # now it hangs
    found = children() + daemons(empty)
    assert len(found) >= 3 and all(map(alive, found))
    stage.send_signal(signal.SIGINT)
    stage.wait(20)
    assert wait_until(lambda: not any(map(alive, found))) and children() == []


def test_closing_ends_a_call_that_waits(folder):
    waiting = Pool(1)
    with ThreadPoolExecutor(1) as thread:
        call = thread.submit(score, waiting, "hangs", rows=1, bad=0, timeout_seconds=600)
        time.sleep(0.5)
        waiting.close()
        with pytest.raises(ResourceError, match="were closed"):
            call.result(30)


# -- loading


def test_code_that_can_not_be_loaded_is_one_error_and_not_one_a_row(shared, folder, monkeypatch):
    missing = "cannot be imported: ModuleNotFoundError: No module named 'nonexistent_module'"
    for number, (source, said) in enumerate(
        {
            "import nonexistent_module": missing,
            "import os; os._exit(7)": "its process ended with exit code 7",
            "import sys; sys.exit(7)": "SystemExit: 7",
            "import time; time.sleep(600)": "took longer than 1 s",
            "x = 1": "has no function f",
        }.items()
    ):
        (folder / f"broken{number}.py").write_text(source)
        with monkeypatch.context() as patch, pytest.raises(ConfigError) as caught:
            patch.setattr(user_process, "LOAD_SECONDS", 1.0 if "sleep" in source else 60.0)
            scorer(shared, f"broken{number}.py:f").require([])
        assert said in caught.value.message
    assert score(shared, "nothing", bad=-1) == [Part(1.0)] * 12  # the pool goes on


DIES_AT_FIRST = """
import os, pathlib, signal

with open("imports", "a") as file:
    file.write("i")
if len(pathlib.Path("imports").read_text()) <= {kills}:
    os.kill(os.getpid(), signal.SIGKILL)

def f(completions):
    return [1.0] * len(completions)
"""


ABOUT = About(["completions"], ["completions"], is_async=False)


@pytest.mark.parametrize(("kills", "about"), [(2, None), (2, ABOUT), (1000, None)])
def test_a_process_that_is_killed_while_it_imports_is_tried_again(empty, kills, about):
    """Whether it was to be described or called. Always killed: an error of memory and not of the
    recipe, which no row has."""
    (empty / "dies.py").write_text(DIES_AT_FIRST.format(kills=kills))
    with Pool(1) as one:
        function = scorer(one, "dies.py:f")
        function.about = about
        if kills == 2:
            assert score_texts(function, ["a", "b"]) == [Part(1.0)] * 2
        else:
            why = r"importing it: its process ended by SIGKILL \(out.*3 times in a row"
            with pytest.raises(ResourceError, match=why):
                score_texts(function, ["a", "b"])
    assert (empty / "imports").read_text() == "iii"


def test_code_that_changes_while_it_scores_is_refused(one, folder):
    path = folder / "changing.py"
    path.write_text(
        "import os\ndef f(completions):\n"
        "    return [1.0 if text == 'good' else os._exit(1) for text in completions]\n"
    )
    changing = scorer(one, "changing.py:f")
    changing.require([])
    path.write_text("def f(completions):\n    return [2.0] * len(completions)\n")
    with pytest.raises(ConfigError, match="its file changed meanwhile"):
        score_texts(changing, ["good", "bad", "good"])


POOLS = """
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from .grading import grade_beside

class Text:
    def __init__(self, text):
        self.text = text

def grade(text):
    return float(len(text.text if isinstance(text, Text) else text))

def score(completions, method, kind, beside=False):
    context = multiprocessing.get_context(method)
    function = grade_beside if beside else grade
    if kind == "executor":
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            return list(pool.map(function, completions))
    with context.Pool(1) as pool:
        return pool.map(function, map(Text, completions) if not beside else completions)
"""


@pytest.mark.parametrize(
    ("place", "method", "kind", "beside"),
    [
        ("", "fork", "executor", False),
        ("rewards", "spawn", "executor", False),
        ("package", "spawn", "pool", True),
        ("package", "forkserver", "pool", False),
        ("rewards", "forkserver", "executor", True),
    ],
)
def test_a_function_may_use_pools_of_processes(one, place, method, kind, beside, empty):
    folder = empty / place
    folder.mkdir(exist_ok=True)
    if place == "package":
        (folder / "__init__.py").write_text("")
    (folder / "pools.py").write_text(POOLS)
    (folder / "grading.py").write_text("def grade_beside(text):\n    return 1.0 + len(text)\n")
    use = folder / "pools.py" if place == "rewards" else Path(place, "pools.py")
    arguments = {"method": method, "kind": kind, "beside": beside}
    function = scorer(one, f"{use}:score", timeout_seconds=30, arguments=arguments)
    assert score_texts(function, ["a", "bcd"]) == [Part(1.0 + beside), Part(3.0 + beside)]
