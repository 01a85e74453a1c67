"""The parser of libsvm's and libffm's text: it reads what is there, and nothing beside it, whatever the text is."""

import numpy as np
import pytest

from dps.errors import InputError
from dps.kernels.loops.lines import parse

TEXTS = {False: b"1 0:0.5 3:-2e-3 # more\n\n-1 qid:7 2:1e2\r\n  0\t1:+.25", True: b"1 0:0:0.5 2:3:-2\n-1 1:2:1e2\n"}


@pytest.mark.parametrize("with_fields", [False, True])
def test_damaged_text_is_read_or_refused(with_fields):
    rng, refused, lines = np.random.default_rng(0), 0, []
    for _ in range(3000):
        text = bytearray(TEXTS[with_fields])
        for place in rng.integers(len(text), size=rng.integers(1, 4)):
            text[place] = rng.choice(np.frombuffer(b"0123456789:. \n#-+eEq\x00\xff", np.uint8))
        text = bytes(text[: rng.integers(len(text) + 1)])
        try:
            y, indptr, features, fields, values = parse(text, with_fields, 0, 4, 3)
        except InputError as error:
            refused += 1
            lines.append((error.args[1], text.count(b"\n") + 1))
            continue
        assert len(indptr) == len(y) + 1
        assert indptr[0] == 0
        assert indptr[-1] == len(features) == len(values)
        assert (np.diff(indptr) >= 0).all()
        assert ((features >= 0) & (features < 4)).all()
        assert len(fields) == (len(features) if with_fields else 0)
        assert ((fields >= 0) & (fields < 3)).all()
        assert np.isfinite(y).all()
        assert np.isfinite(values).all()
    assert 100 < refused < 2900
    assert all(1 <= line <= count for line, count in lines)


@pytest.mark.parametrize("text", [b"1 0:", b"1 0:2", b"1 0:0:1 2:"])
def test_a_pair_that_ends_early_is_refused(text):
    """The arrays have room for as many entries as there are pairs of colons, and this one has but one colon."""
    with pytest.raises(InputError, match="is no field:feature:value"):
        parse(text, True, 0, 4, 3)
