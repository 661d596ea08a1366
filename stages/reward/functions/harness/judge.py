"""Judge a program by its tests. `code` passes this source to `run_program`, so it uses the standard
library only.

    judge          has the tests, never runs a line of the program, and alone can write the verdict
    └── candidate  has its own interpreter and the program, but no test; the judge asks it over a
                   pipe to load the program, for a function, for its value

So `assert f(2) == 4` compares plain values here, even if the program changed `==`, builtins or its
own exit. The program may call the functions that a test hands it, and can do nothing else to
this process.

Stdin: JSON `{"programs", "text", "calls", "entry", "seconds", "all", "candidate"}`. The programs
are the preamble and the completion's; the tests are `text` or `calls`; `candidate` is the text of
candidate.py. Stdout: before the program is loaded, the number of tests (or why there are none);
then one 1 or 0 per test, as each ends. Verdicts that are missing at the end count as failed.
"""

import ast
import builtins
import json
import os
import signal
import sys
import types
from functools import partial


class TimeUp(BaseException):
    """The time of a test is up."""


def main():
    """Judge the job on stdin."""
    sys.set_int_max_str_digits(0)
    job = json.loads(sys.stdin.buffer.read())
    out = os.dup(1)
    os.dup2(2, 1)  # so that the output of tests is no verdict
    signal.signal(signal.SIGALRM, ring)
    judge(job, lambda text: os.write(out, text.encode()))
    sys.stderr.flush()
    os._exit(0)


def ring(number, frame):
    raise TimeUp


def judge(job, say):
    """Run the tests of a job; `say` takes the verdicts as text."""
    try:
        steps, names = plan_statements(job)
        if job["calls"]:
            steps = [(partial(compare_value, *call), True) for call in job["calls"]]
        num_tests = sum(is_test for _, is_test in steps)
        if not num_tests:
            raise ValueError(
                "the tests hold no assert, no function test_… and no call of a function of theirs"
            )
    except (SyntaxError, ValueError) as error:
        say(f"{type(error).__name__}: {error}".replace("\n", " ") + "\n")
        return
    say(f"{num_tests}\n")
    wire = start_program(job["candidate"])
    space = {"__name__": "__tests__"}
    passed, in_time = attempt(job["seconds"], enter, wire, job, names, space)
    for step, is_test in steps if passed else ():
        passed, in_time = attempt(job["seconds"], step, space)
        passed = passed and not wire.ended  # a test may catch any exception
        if is_test:
            say("01"[passed])
        if not in_time or wire.ended or (job["all"] and is_test and not passed):
            break


def start_program(source):
    """Start a process that has the text of candidate.py, two pipes and nothing else of this
    process. Returns the wire to it."""
    candidate = types.ModuleType("candidate")
    exec(compile(source, "candidate.py", "exec"), candidate.__dict__)
    read, their_write = os.pipe()
    their_read, write = os.pipe()
    for handle in (their_read, their_write):
        os.set_inheritable(handle, True)
    options = ["-S"] if sys.flags.no_site else []
    pipes = [str(their_read), str(their_write)]
    command = [sys.executable, *options, "-c", source, *pipes]
    actions = [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0), (os.POSIX_SPAWN_DUP2, 2, 1)]
    os.posix_spawn(command[0], command, os.environ, file_actions=actions)
    os.close(their_read)
    os.close(their_write)
    operations = {
        "iter": iter,
        "next": next,
        "hash": id,
        "call": lambda f, args, kwargs: [f(*args, **kwargs), [None] * len(args)],
    }
    return candidate.Wire(read, write, operations, passing=(candidate.Ended, TimeUp))


def enter(wire, job, names, space):
    """Load the program and give the tests the names that they use of it. They may also import it as
    `solution`."""
    preamble, source = job["programs"]
    if preamble:
        wire.ask("prepare", preamble)
    wire.ask("load", source)
    space |= wire.ask("names", sorted(names))
    if job["entry"]:
        space["candidate"] = space[job["entry"]] = wire.ask("entry", job["entry"])

    def attribute(name):
        members = wire.ask("names", [name])
        if name not in members:
            raise AttributeError(name)
        return members[name]

    sys.modules["solution"] = types.ModuleType("solution")
    sys.modules["solution"].__getattr__ = attribute


def attempt(seconds, step, *arguments):
    """Run a step. Returns whether it passed, and whether it ended in time."""
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        step(*arguments)
        return True, True
    except TimeUp:
        return False, False
    except BaseException as error:
        print(f"{type(error).__name__}: {str(error)[:500]}", file=sys.stderr)
        return False, True
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def compare_value(args, right, space):
    """Assert that a call returns one of the right values; lists and tuples are equal."""
    value = same(space["candidate"](*args))
    assert any(value == same(expected) for expected in right), "another value was expected"


def same(plain):
    if isinstance(plain, list | tuple):
        return [same(member) for member in plain]
    if isinstance(plain, dict):
        return {key: same(member) for key, member in plain.items()}
    return plain


def plan_statements(job):
    """Plan the steps: the top-level statements in order, then the functions test_… that they do not
    call themselves, then check(entry).

    A step counts as a test if it is such a function or check, or a statement that holds an assert
    or calls a function of the tests' own.
    """
    tree = ast.parse(job["text"])
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    steps = []
    called = set()
    for node in tree.body:
        code = compile(ast.Module([node], []), "<tests>", "exec")
        is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        name = getattr(node.value.func, "id", None) if is_call else None
        called.add(name)
        defines = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        asserts = not defines and any(isinstance(child, ast.Assert) for child in ast.walk(node))
        steps.append((partial(exec, code), asserts or name in functions))
    for name, node in functions.items():
        if name.startswith("test_") and name not in called and not node.args.args:
            steps.append((lambda space, name=name: space[name](), True))
    if job["entry"] and "check" in functions and "check" not in called:
        steps.append((lambda space: space["check"](space["candidate"]), True))
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return steps, names - set(dir(builtins))


if __name__ == "__main__":
    main()
