"""The program of an answer, and the code that its tests need."""

import textwrap

import pytest

from slipstream.broker.rewards.final_answer import find_program

SOLUTION = "def f(x):\n    return x + 1"


def indented(code: str) -> str:
    return textwrap.indent(code, "    ")


def block(code: str, language: str = "python", indent: str = "") -> str:
    lines = [f"```{language}", *code.split("\n"), "```"]
    return "".join(f"{indent}{line}\n" for line in lines)


@pytest.mark.parametrize(
    ("text", "wanted", "program"),
    [
        (block("a = 1") + "better:\n" + block("b = 1"), "", "b = 1"),
        (block("a = 1") + "which prints\n" + block("3", ""), "", "a = 1"),
        (block("a\nb", ""), "", "a\nb"),
        (block("a", "py"), "", "a"),
        ("no fence", "", None),
        ("```python\nnever closed", "", None),
        (block("a = 1") + "```python\nnever closed", "", "a = 1"),
        (block(SOLUTION) + "For example:\n" + block("print(f(1))"), "f", SOLUTION),
        (block(SOLUTION) + "For example:\n" + block("print(f(1))"), "", SOLUTION),
        (block(SOLUTION) + block(">>> f(1)\n2"), "", SOLUTION),
        (block(SOLUTION) + block("# 1 gives 2"), "", SOLUTION),
        (block(SOLUTION) + block("from solution import f\nprint(f(1))"), "f", SOLUTION),
        (block(SOLUTION, "") + block("print(f(1))"), "f", SOLUTION),
        (block("def f(x): pass") + block(SOLUTION) + block("def g(x): pass"), "f", SOLUTION),
        (block(SOLUTION) + block("def f(x):\n    ..."), "f", SOLUTION),
        (block(SOLUTION) + block('def f(x):\n    """Add one."""'), "f", SOLUTION),
        (block(SOLUTION) + block("def f(x):\n    raise NotImplementedError"), "f", SOLUTION),
        (block(SOLUTION) + block('def f(x):\n    raise NotImplementedError("f")'), "f", SOLUTION),
        (block(SOLUTION) + block("class f:\n    def g(self): pass"), "f", SOLUTION),
        (block(SOLUTION) + block("f = 3\nprint(f)"), "f", SOLUTION),
        (block(SOLUTION) + block("def g(x):\n    f = x\n    return f"), "f", SOLUTION),
        (block(SOLUTION) + block("def g():\n    def f(x): return x\n    return f"), "f", SOLUTION),
        (block(SOLUTION) + block("print([f for f in (1, 2)])"), "f", SOLUTION),
        (block("x = 1") + block("f = lambda x: x + 1", ""), "f", "f = lambda x: x + 1"),
        (block("f: F = lambda x: x") + block("f = 3\nprint(f)"), "f", "f: F = lambda x: x"),
        (block("f = max", "") + block("print(1)"), "f", "f = max"),
        (
            block("if True:\n" + indented(SOLUTION), "") + block("1"),
            "f",
            "if True:\n" + indented(SOLUTION),
        ),
        (
            block("class Solution:\n    def f(self, x): return x") + block("Solution().f(1)"),
            "f",
            "class Solution:\n    def f(self, x): return x",
        ),
        ("1. Do:\n" + block(SOLUTION, indent="   "), "f", SOLUTION),
        ("1. " + block(SOLUTION, indent="   ").lstrip(), "f", SOLUTION),
        ("   ```python\n   x = 1\ny = 2\n   ```", "", "x = 1\ny = 2"),
        ("```python\n    x = 1\n    y = 2\n```", "", "x = 1\ny = 2"),
        ("<answer>```python\na\n```</answer>", "", "a"),
        ("Here:```python\na```\nand", "", "a"),
        ("~~~python\na\n~~~", "", "a"),
        ('````python\ns = """\n```\n"""\n````', "", 's = """\n```\n"""'),
        ('```python\ns = "```"\n```', "", 's = "```"'),
        ("```python\r\na = 1\r\n```\r\n", "", "a = 1"),
        ("```python\na = 1\n   ```", "", "a = 1"),
        ('```python\na = """\n    ```\n"""\n```', "", 'a = """\n    ```\n"""'),
        ('```python\na = """\n\t```\n"""\n```', "", 'a = """\n\t```\n"""'),
        ('  ```python\n  a = """\n      ```\n  """\n  ```', "", 'a = """\n    ```\n"""'),
        ("10. ```python\n    a = 1\n    ```", "", "a = 1"),
        ("    ```python\n    a = 1\n```", "", "a = 1"),
        ("<answer>\n" + block("a = 1") + "</answer>\nSlower:\n" + block("b = 1"), "", "a = 1"),
        ("<answer>" + block(SOLUTION) + "</answer>" + block("def f(x): return 0"), "f", SOLUTION),
        (block("a = 1") + "<answer>It is above.</answer>", "", "a = 1"),
        ("<answer>" + block("a = 1") + "</answer><answer>" + block("b = 1"), "", "a = 1"),
        (
            block("a = 1\n\nif a:\n    print('>')", indent="> "),
            "",
            "a = 1\n\nif a:\n    print('>')",
        ),
        (block("a = 1", indent=">"), "", "a = 1"),
        ("So:\n> > ```python\n> > a = 1\n>>\n> > b = 1\n> > ```", "", "a = 1\n\nb = 1"),
        (block("> a"), "", "> a"),
    ],
)
def test_the_program_is_the_block_that_the_tests_need(text: str, wanted: str, program: str | None):
    assert find_program(text, {wanted} - {""}) == program


@pytest.mark.parametrize(
    "reads",
    [
        "print(int(input()) * 2)",
        "import sys\nprint(int(sys.stdin.read()) * 2)",
        "from sys import stdin\nfor line in stdin: print(int(line) * 2)",
        "print(int(open(0).read()) * 2)",
    ],
)
def test_the_program_is_the_block_that_reads_the_input(reads: str):
    text = block(reads) + "For 3 it does:\n" + block("n = 3\nprint(n * 2)")
    assert find_program(text, reads_input=True) == reads
    assert find_program(text) == "n = 3\nprint(n * 2)"


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("```python\n" * 20_000, None),
        ("~~~a\n```b\n" * 20_000, None),
        ("```" * 100_000, None),
        ("\n".join("`" * n for n in range(3, 500)), ""),
        ("```" + " " * 100_000, None),
        ("```" + " " * 100_000 + "`", None),
        (" " * 100_000 + "x```y z", None),
        ("```" + "a" * 100_000 + "`", None),
        (">" * 100_000 + "```\n" + ">" * 200_000 + "\n```", ">" * 100_000),
        (block("(" * 50_000) + block("-" * 50_000 + "1"), "-" * 50_000 + "1"),
        (block("x = '\0'") + block("x"), "x"),
    ],
    ids=range(11),
)
def test_the_search_for_a_program_among_hostile_fences_ends(text: str, program: str | None):
    assert find_program(text, {"f"}) == program
