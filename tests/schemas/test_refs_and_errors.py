"""References cannot leave the store; errors keep code, object and next step across a process
boundary."""

import errno
import pickle

import pyarrow as pa
import pytest

from quiver.schemas import errors, refs
from quiver.schemas.errors import ConfigError
from quiver.schemas.refs import Ref


@pytest.mark.parametrize("text", ["a/rollouts@3", "a/rollouts@latest", "a.b-c_0/policy@prod"])
def test_a_reference_reads_back_as_it_was_written(text):
    assert str(refs.parse(text)) == text


def test_the_run_may_be_left_out():
    assert refs.parse("policy@0", run="arith") == Ref("arith", "policy", 0)
    assert refs.parse("other/policy@0", run="arith") == Ref("other", "policy", 0)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "@",
        "rollouts@1",
        "a/rollouts",
        "a/rollouts@",
        "a/rollout@1",
        "../rollouts@1",
        "/rollouts@1",
        "A/rollouts@1",
        "a\0/rollouts@1",
        "a..b/rollouts@1",
        ".a/rollouts@1",
        "a/rollouts@../x",
        "a/rollouts@-1",
        "a/rollouts@" + "9" * 5000,
        "a" * 65 + "/rollouts@1",
        "ä/rollouts@1",
        "a/rollouts@1\n",
        "a\\b/rollouts@1",
        "~/rollouts@1",
        "a b/rollouts@1",
        "a/rollouts@1 ",
        "a/../b/rollouts@1",
        "a/Rollouts@1",
        "a/rollouts/@1",
        "a/rollouts@1@2",
        "a/rollouts@１",
        "a/rollouts@.prod",
        "a/rollouts@a/b",
        "a/rollouts@a\0",
        "a/rollouts@Prod",
        "a/rollouts@" + "t" * 65,
        "a\u202eb/rollouts@1",
        "store.json/rollouts@1",
        "store.json.copying/rollouts@1",
        "a.tmp/rollouts@1",
        "a/rollouts@prod.tmp",
        "a\x1b[2J/rollouts@1",
        "file:///a/rollouts@1",
    ],
)
def test_hostile_references_are_refused(text):
    with pytest.raises(ConfigError):
        refs.parse(text)


def test_a_misspelt_kind_is_told():
    with pytest.raises(ConfigError, match=r"kind one of .*policy; did you mean rollouts\?"):
        refs.parse("a/rolouts@1")


@pytest.mark.parametrize("version", ["-1", "9" * 20, "٣"])
def test_a_version_of_another_form_is_told(version):
    with pytest.raises(ConfigError) as caught:
        refs.parse(f"a/rollouts@{version}")
    assert caught.value.object == f"reference 'a/rollouts@{version}'"
    assert caught.value.message == "a version is a number of 1 to 12 digits, latest or a tag"
    assert caught.value.next == "quiver ls"


@pytest.mark.parametrize("cls", errors.BY_CODE.values())
def test_errors_survive_pickle_and_json(cls):
    error = cls(
        "arith/rollouts@7", "expected a, found b", state="all is well.", next="quiver verify"
    )
    for copy in (pickle.loads(pickle.dumps(error)), errors.from_dict(error.to_dict())):
        assert type(copy) is cls
        assert str(copy) == str(error)


def test_exit_codes_are_the_documented_ones():
    codes = {cls.code: cls.exit_code for cls in errors.BY_CODE.values()}
    assert codes == {
        "E-INTERNAL": 1, "E-CONFIG": 2, "E-CORRUPT": 3, "E-BUSY": 4, "E-CONFLICT": 4, "E-LINEAGE": 5, "E-EXPIRED": 5,
        "E-SCHEMA": 5, "E-REWARD": 6, "E-REMOTE": 6, "E-RESOURCE": 7, "E-NUMERIC": 8, "E-OUTCOME-UNKNOWN": 9, "E-SECURITY": 10,
    }  # fmt: skip


SEGMENT = "libx.so: failed to map segment from shared object"
PAGE = "\n\nIMPORTANT: PLEASE READ THIS\n\n{}\nOriginal error was: {}\n"
"""Numpy repeats the cause's line under a page of advice."""


def caused(error, cause):
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (MemoryError(), "E-RESOURCE", "MemoryError"),
        (OSError(errno.EROFS, "read-only"), "E-RESOURCE", "OSError"),
        (
            caused(ImportError(PAGE.format("check " * 90, SEGMENT)), ImportError(SEGMENT)),
            "E-RESOURCE",
            f"ImportError: {SEGMENT}",
        ),
        (
            ImportError(PAGE.format("check " * 90, SEGMENT)),
            "E-RESOURCE",
            f"ImportError: Original error was: {SEGMENT}",
        ),
        (RuntimeError("can't start new thread"), "E-RESOURCE", "RuntimeError"),
        (
            pa.ArrowException("Failed to launch worker: Resource temporarily unavailable"),
            "E-RESOURCE",
            "ArrowException",
        ),
        (OSError(errno.ENAMETOOLONG, "File name too long"), "E-CONFIG", "OSError"),
        (KeyError("x"), "E-INTERNAL", "a bug in Quiver: KeyError"),
    ],
)
def test_what_the_system_refuses_is_no_defect_of_ours(error, code, message):
    read = errors.unexpected("quiver", error)
    assert read.code == code and read.message.startswith(message)


def test_foreign_text_can_not_move_the_cursor():
    shown = errors.printable("\x1b[31mred\n" + "x" * 500 + "\ud800")
    assert shown.startswith("\\x1b[31mred\\nxxx")
    assert len(shown) == 200
    assert errors.printable("\ud800") == "\\ud800"


def test_a_shortage_that_was_handled_is_none():
    try:
        try:
            raise BlockingIOError("Resource temporarily unavailable")
        except BlockingIOError:
            raise KeyError("name") from None
    except KeyError as error:
        assert errors.shortage(error) is None
        first, second = MemoryError(), RuntimeError("circle")
        first.__cause__, second.__cause__ = second, first
        assert errors.shortage(second) is first
