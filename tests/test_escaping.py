"""A name with a line feed in it is shown on one line, and a shell reads back what it was."""

import subprocess

import pytest

from toolkit.escaping import code, one_line, shell_line


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a plain name, é and 模", "a plain name, é and 模"),
        ("a\nb\r\tc", r"a\nb\r\tc"),
        ("\x1b[2J\x07", r"\x1b[2J\x07"),
        ("a\u202egpj\u2028b", r"a\u202egpj\u2028b"),
    ],
)
def test_control_characters_are_spelled_out(text, shown):
    assert one_line(text) == shown


def test_code_in_markdown_is_closed_by_nothing_inside_it():
    assert code("a\nb") == "`a\\nb`"
    assert code("a`b``c") == "``` a`b``c ```"


@pytest.mark.parametrize("word", ["a b", "a\nb", "it's\n\\n", "\x1bé\x7f", "$(x)\t`y`", "\u2028"])
def test_a_command_is_one_line_that_a_shell_reads_back(word):
    line = shell_line(["printf", "%s", word])
    assert len(line.splitlines()) == 1
    assert subprocess.run(["bash", "-c", line], capture_output=True).stdout.decode() == word
