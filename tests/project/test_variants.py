"""Wrong variants: one that no check notices is named; of the core, those are compiled again that have changed."""

from __future__ import annotations

from pathlib import Path

import compiled
import pytest
from noticing import assert_noticed

from dps.engine.wire import frames, messages
from dps.engine.wire.frames import Header
from dps.engine.wire.headers import RetireOrigins


@pytest.fixture
def compiler(monkeypatch, tmp_path):
    """A stand-in for the compiler, which writes what it was given; the list of what it was asked to compile."""
    asked = []

    def build(folder):
        files = sorted(path for path in Path(folder, "dps").rglob("*") if path.is_file())
        modules = [path for path in files if path.suffix == ".pyx"]
        asked.append([path.name for path in modules])
        for path in modules:
            path.with_suffix(".test.so").write_text("".join(file.read_text() for file in files))
        return True, ""

    monkeypatch.setattr(compiled, "KEPT", tmp_path / "variants")
    monkeypatch.setattr(compiled.BUILDER, "build", build)
    return asked


def texts_of(modules: list[str]) -> dict[str, str]:
    return {str(path.relative_to(compiled.ROOT)): path.read_text() for path in compiled.sources(modules)}


def name_of(file: str) -> str:
    return str(compiled.FILES[file].relative_to(compiled.ROOT))


def test_a_module_is_made_of_all_that_it_names_and_of_nothing_else():
    names = {path.name for path in compiled.sources(["index"])}
    assert {"index.pyx", "index.pxd", "slots.h", "arrays.pxd"} <= names  # slots.h is named by the declarations only
    assert name_of("mixing.h") in texts_of(["grouping"])  # named by a header
    assert not {"service.pyx", "words.h", "arrays.pyx"} & names


def test_the_same_sources_are_compiled_once(compiler):
    first = compiled.compiled(["index"], texts_of(["index"]))
    assert compiled.compiled(["index"], texts_of(["index"])) == first
    assert compiler == [["index.pyx"]]
    assert [path.name for path in first.iterdir()] == ["index.test.so"]


@pytest.mark.parametrize("file", ["index.pyx", "index.pxd", "slots.h", "arrays.pxd"])
def test_another_text_is_compiled_again(compiler, file):
    texts = texts_of(["index"])
    first = compiled.compiled(["index"], texts)
    second = compiled.compiled(["index"], texts | {name_of(file): texts[name_of(file)] + "\n"})
    assert second != first
    assert len(compiler) == 2
    assert (second / "index.test.so").read_text() != (first / "index.test.so").read_text()


def test_a_variant_that_does_not_compile_is_not_kept(compiler, monkeypatch):
    monkeypatch.setattr(compiled.BUILDER, "build", lambda folder: (False, "index.pyx:1: no"))
    with pytest.raises(AssertionError, match=r"index\.pyx:1: no"):
        compiled.compiled(["index"], texts_of(["index"]))
    assert list(compiled.KEPT.iterdir()) == []


@pytest.mark.thorough
def test_a_build_that_fails_says_why_and_the_next_one_works(tmp_path):
    """Also after the end of the process that builds."""
    builder = compiled.Builder()
    setup = tmp_path / "setup.py"
    setup.write_text("import sys; sys.exit('no compiler is there')")
    assert builder.build(str(tmp_path)) == (False, "no compiler is there\n")
    setup.write_text("print('built')")
    assert builder.build(str(tmp_path)) == (True, "built\n")
    builder.process.kill()
    builder.process.wait()
    assert builder.build(str(tmp_path)) == (True, "built\n")
    builder.end()


def test_only_so_many_are_kept_and_the_last_used_stay(compiler, monkeypatch):
    monkeypatch.setattr(compiled, "MAX_KEPT", 2)
    texts = texts_of(["index"])
    made = []
    for n in range(3):
        made.append(compiled.compiled(["index"], texts | {name_of("slots.h"): f"{n}"}))
        if n == 1:
            compiled.os.utime(made[1], (1, 1))  # as if it was used long ago
    assert set(compiled.KEPT.iterdir()) == {made[0], made[2]}


TOO_SHORT = frames, "padded", "+ 7", "+ 6"


def whole_words() -> None:
    """Of both modules that know the function."""
    assert frames.padded(9) == 16
    assert messages.padded(9) == 16


def test_what_one_check_notices_is_noticed_and_then_put_right() -> None:
    assert_noticed(*TOO_SHORT, lambda: None, whole_words)
    assert_noticed(*TOO_SHORT, lambda: pytest.fail("at once"))
    whole_words()


def test_the_modules_that_have_imported_a_function_get_the_wrong_one_too() -> None:
    places: list[object] = []
    with pytest.raises(pytest.fail.Exception):
        assert_noticed(*TOO_SHORT, lambda: places.extend([frames.padded, messages.padded]))
    assert places[0] is places[1] is not frames.padded


def test_what_no_check_notices_is_named() -> None:
    with pytest.raises(pytest.fail.Exception, match=r"frames\.padded went unnoticed with '\+ 6'"):
        assert_noticed(*TOO_SHORT, lambda: None)


def test_a_text_that_is_gone_is_named() -> None:
    with pytest.raises(AssertionError, match="padded no longer contains 'words"):
        assert_noticed(frames, "padded", "words + 7", "words", whole_words)


def test_a_wrong_text_that_names_what_there_is_not_counts_for_nothing() -> None:
    with pytest.raises(NameError, match="bytes_"):
        assert_noticed(frames, "padded", "nbytes + 7", "bytes_ + 7", whole_words)


def test_a_static_method_stays_one() -> None:
    with pytest.raises(pytest.fail.Exception, match="went unnoticed"):
        assert_noticed(RetireOrigins, "matches", "bool(", "not (", lambda: RetireOrigins(1, 1, 1, 1).matches(Header(0)))
