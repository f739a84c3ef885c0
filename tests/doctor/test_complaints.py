"""docs/complaints.md: each public complaint has an answer, and what it names is there."""

import re

from documents import PAGES

from toolkit.causes.table import causes
from toolkit.comparing.parity.gates import GATES
from toolkit.doctor import machine, software, variables
from toolkit.strategies import STRATEGIES

(PAGE,) = (page for page in PAGES if page.path.name == "complaints.md")
ROWS = re.findall(r"^\| (\d+) \| (.+?) \| (.+?) \| (.+?) \|$", PAGE.text, re.MULTILINE)

COMPLAINTS = 44
"""Number of complaints that were collected."""

NAMED = re.compile(r"\b(cause|gate|check|strategy)s? ((?:`[^`]+`(?:, )?)+)")
THREAD = re.compile(r"\[[\w.-]+#(\d+)\]\(https://github\.com/[\w.-]+/[\w.-]+/issues/(\d+)\)")


def source_of_checks():
    modules = (machine, software, variables)
    return "".join(open_text(module.__file__) for module in modules)


def open_text(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


def test_every_complaint_stands_there_once_with_its_threads():
    assert [int(number) for number, *_ in ROWS] == list(range(1, COMPLAINTS + 1))
    for number, _, threads, _ in ROWS:
        links = threads.split(", ")
        matches = [THREAD.fullmatch(link) for link in links]
        assert all(match and match[1] == match[2] for match in matches), number


def test_every_complaint_has_an_answer_and_its_names_are_there():
    known = {
        "cause": {cause.name for cause in causes()},
        "gate": set(GATES),
        "strategy": set(STRATEGIES),
        "check": set(re.findall(r'(?:ok|warn|fail)\(\s*"([^"]+)"', source_of_checks())),
    }
    for number, _, _, answer in ROWS:
        named = NAMED.findall(answer)
        assert named or "](" in answer or "`toolkit " in answer, number
        for kind, names in named:
            assert set(re.findall(r"`([^`]+)`", names)) <= known[kind], (number, kind)


def test_the_words_of_an_answer_are_all_read_as_names():
    """A name behind a comma counts as well, so that no other word hides a missing one."""
    spans = [span for *_, answer in ROWS for span in re.findall(r"`([^`]+)`", answer)]
    names = [
        name
        for *_, answer in ROWS
        for _, listed in NAMED.findall(answer)
        for name in re.findall(r"`([^`]+)`", listed)
    ]
    others = {"auto", "toolkit.train"}
    rest = {span for span in spans if span not in names and not span.startswith("toolkit ")}
    assert rest <= others
    assert len(names) > 50
