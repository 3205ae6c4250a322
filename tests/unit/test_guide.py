"""What tests/support/guide.py takes from a page, and how it does what the page says."""

from pathlib import Path

import pytest

from tests.support.guide import GuideFailedError, Step, blocks, follow, steps

PAGE = """# Guide

```bash
outside
```

## Sums

Write `sums.py`:

```python
# no heading
print(1)
```

### Settings

1. In a list, `a.toml` is not meant; `run.toml`:

   ```toml
   [run]
     steps = 1
   ```

Add to `run.toml` on `head`:

```toml
[eval]
```

```bash
python sums.py
slipstream run
```

It looks like `that.txt`:

```
shown only
```

```toml
[unnamed]
```

## Next

```bash
too far
```
"""


@pytest.fixture
def page(tmp_path: Path) -> Path:
    path = tmp_path / "guide.md"
    path.write_text(PAGE)
    return path


def test_a_named_block_is_a_file_a_bash_block_commands_and_the_others_nothing(page: Path):
    assert steps(blocks(page, "Sums")) == [
        Step("# no heading\nprint(1)\n", "Sums", "sums.py"),
        Step("[run]\n  steps = 1\n", "Settings", "run.toml"),
        Step("[eval]\n", "Settings", "run.toml", is_added=True),
        Step("python sums.py\nslipstream run\n", "Settings"),
    ]


def test_a_step_that_fails_is_named_with_what_was_printed(tmp_path: Path):
    ways = [
        Step("echo one\n"),
        Step("echo two\nfalse | cat\necho three\n", "Second"),
        Step("echo\n"),
    ]
    with pytest.raises(GuideFailedError, match=r"Second: exit code 1 of\necho two") as failed:
        follow(ways, tmp_path)
    assert "one" in str(failed.value)
    assert "three" not in str(failed.value).partition("=== step 1")[2]
