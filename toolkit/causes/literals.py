"""Literals of regular expressions: a quick look at a line before the slow one."""

from __future__ import annotations


def literal_of(pattern: str) -> str:
    """Return the longest text that every match of a pattern contains; empty where none is sure.

    Only what stands outside of groups counts, without alternatives and repeated characters.
    """
    runs, depth, index = [""], 0, 0
    while index < len(pattern):
        char = pattern[index]
        index += 1
        if char == "\\":
            escaped = pattern[index]
            index += 1
            if depth or escaped.isalnum():
                runs.append("")
            else:
                runs[-1] += escaped
        elif char == "[":
            index = _end_of_class(pattern, index)
            runs.append("")
        elif char in "()":
            depth += 1 if char == "(" else -1
            runs.append("")
        elif char == "|" and not depth:
            return ""
        elif char in "?*+{":
            runs[-1] = runs[-1][:-1]
            runs.append("")
            index = pattern.index("}", index) + 1 if char == "{" else index
        elif char in "^$.|" or depth:
            runs.append("")
        else:
            runs[-1] += char
    return max(runs, key=len)


def _end_of_class(pattern: str, start: int) -> int:
    """Return the index behind a class of characters that begins before `start`."""
    index = start + (pattern[start] == "^") + 1
    while pattern[index - 1] == "\\" or pattern[index] != "]":
        index += 1
    return index + 1
