"""Every bit that the compiled loops compute is as golden.json says; a wrong bit or number is noticed. See golden.py."""

from __future__ import annotations

import json
import math

import golden
import initializer_cases
import numpy as np
import oracles
import pytest
import streams
from initializer_cases import mix_only
from oracles import mix, unmix

import dps
from dps.engine.core.portable import logarithm, sine

GOLDEN = golden.read()
FLIPPED = sorted(golden.CASES)[::40]


@pytest.mark.parametrize("name", sorted(golden.CASES))
def test_every_bit_is_the_same(name):
    difference = golden.difference(GOLDEN[name], golden.CASES[name]())
    assert difference is None, f"{name}: {difference}"


def test_the_file_has_every_case_and_no_other():
    assert sorted(golden.CASES) == list(GOLDEN)
    assert golden.FILE.stat().st_size < 200_000


def by_definition(init: dps.Normal | dps.Uniform, key: int) -> float:
    """Column 0 of a row by the definition in dps/engine/state/initializers.py, in Python's own numbers."""
    stream = mix_only(mix_only(init.seed + oracles.GOLDEN & oracles.ALL) ^ key & oracles.ALL)
    first, second = (mix(stream + n * oracles.GOLDEN & oracles.ALL) >> 11 for n in (0, 1))
    _, a, b = init.numbers().tolist()
    if isinstance(init, dps.Uniform):
        return a + (b - a) * (first * 2.0**-53)
    u, v = (first + 1.0) * 2.0**-53, (second + 0.5) * 2.0**-53
    return a + b * (math.sqrt(-2.0 * logarithm(u)) * sine(math.pi * (v - 0.5)))


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("name", ["Uniform seed 7", "Normal seed 7", "Normal small", "Normal large"])
def test_chosen_initial_values_follow_the_definition(name, number):
    """The golden values are those of plain Python, bit by bit; and the keys have the hashes that were chosen."""
    init = initializer_cases.INITIALIZERS[name]
    keys = initializer_cases.keys_with(
        [0, 1, 2**63, 2**64 - 1, *streams.words("chosen", 50).tolist()], number, init.seed
    )
    found = initializer_cases.read(init, "float64", 1, keys)[:, 0]
    assert found.tobytes() == np.array([by_definition(init, key) for key in keys.tolist()]).tobytes()
    if name == "Uniform seed 7" and number == 0:
        assert found[:4].tolist() == [0.0, 0.0, 0.5, 1 - 2**-53]


# ---- wrong variants: each must be noticed ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(golden.VARIANTS))
def test_another_number_gives_another_hash(name):
    assert golden.difference(GOLDEN[name], golden.VARIANTS[name]()) is not None


@pytest.mark.parametrize("name", FLIPPED)
def test_a_flipped_bit_is_noticed_and_placed(name):
    """One bit of one element of one part; the message names the part."""
    results = golden.CASES[name]()
    parts = [part for part, array in results.items() if array.size]
    for part in parts:
        array = results[part].copy()
        octets = array.reshape(-1).view(np.uint8)
        finite = np.flatnonzero(np.isfinite(array.reshape(-1)))  # a NaN with another bit is the same NaN
        element = int(finite[streams.integers(f"{name} {part}", 1, 0, len(finite))[0]])
        octets[element * array.itemsize] ^= 1
        message = golden.difference(GOLDEN[name], {**results, part: array})
        assert message is not None
        assert f"part {part!r}" in message
        assert "rows " in message


def test_what_counts_as_different():
    a = np.array([[1.0, 0.0], [np.nan, 2.0]])
    entry = golden.entry({"a": a})
    other_nan = a.view(np.uint64).copy()
    other_nan[1, 0] ^= 2**63 + 5
    assert golden.difference(entry, {"a": other_nan.view(np.float64)}) is None
    expected = {
        "of shape 4": {"a": a.reshape(-1)},
        "f4 of shape 2x2 instead of f8": {"a": a.astype(np.float32)},
        "it is missing": {"b": a},
        "rows 0 to 0 of 2 differ, its first values were 1 and are -1": {"a": a * [[-1, 1], [1, 1]]},
        "rows 1 to 1 of 2 differ, its first values are the same": {"a": a + np.array([[0, 0], [0, 2**-51]])},
        "all parts look the same": {"a": a, "b": a},
    }
    for words, results in expected.items():
        assert words in golden.difference(entry, results)


def test_the_numbers_are_those_of_splitmix64():
    """Each word is the hash of the one place before it in the sequence; the first two are pinned."""
    words = streams.words("a", 50).tolist()
    assert words[:2] == [4192132519135618423, 5914708556773729588]
    first = unmix(words[0])
    assert words == [mix(first + n * oracles.GOLDEN) for n in range(50)]


def test_the_command_says_what_differs(capsys, monkeypatch, tmp_path):
    changed = {name: dict(case) for name, case in GOLDEN.items()}
    changed["hash"]["edges"] = changed["hash"]["edges"].replace("u8", "u4")
    path = tmp_path / "golden.json"
    path.write_text(json.dumps(changed))
    monkeypatch.setattr(golden, "FILE", path)
    monkeypatch.setattr("sys.argv", ["golden.py", "portable"])
    assert golden.main() == 0
    monkeypatch.setattr("sys.argv", ["golden.py", "hash"])
    assert golden.main() == 1
    assert "hash: part 'edges' of ['edges', 'any']: u8 of shape 12 instead of u4" in capsys.readouterr().out
