"""The sessions of a shell in the documentation are what happens: see transcripts.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from transcripts import alike, main, play, steps

ROOT = Path(__file__).parents[2]
PAGES = ["docs/dask.md"]


@pytest.mark.integration
@pytest.mark.processes
@pytest.mark.timeout(400)
@pytest.mark.parametrize("page", PAGES)
def test_a_transcript_is_what_happens(page, tmp_path):
    played = play((ROOT / page).read_text(), tmp_path)
    assert played
    for step, output in played:
        logs = "".join(f"\n{log.name}: {log.read_text()[-2000:]}" for log in tmp_path.glob("*.log"))
        assert list(map(alike, output)) == list(map(alike, step.output)), f"{page}:{step.line}: {step.command}{logs}"


PAGE = """# A
```console
$ cat > a.txt <<END
> 7 rows
>
> END
$ cat a.txt; echo x=$((1 + 1))
7 rows

x=2
```
```bash
not run
```
```console
$ echo one  two 15
wrong
```
"""


def test_steps_of_a_page():
    first, second, third = steps(PAGE)
    assert (first.line, first.command, first.output) == (3, "cat > a.txt <<END\n7 rows\n\nEND", [])
    assert second.output == ["7 rows", "", "x=2"]
    assert (third.line, third.output) == (16, ["wrong"])


def test_a_page_is_played_compared_and_written_anew(tmp_path):
    (_, first), (_, second), (_, third) = play(PAGE, tmp_path)
    assert (first, second, third) == ([], ["7 rows", "", "x=2"], ["one two 15"])
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    main(page, tmp_path)
    assert page.read_text() == PAGE.replace("wrong", "one two 15")


def test_what_counts_as_alike():
    assert alike("2 of 2 servers") != alike("1 of 2 servers")
    assert alike("scheduler tcp://127.0.0.1:8786: 1.25 kiB") == alike("scheduler tcp://127.0.0.1:9: 7 B")
    assert alike("epoch 1: loss 0.4") != alike("epoch 2: loss 0.4")
    assert alike("up     1  2") != alike("up     1  -")
