"""The certificate: one page, one JSON and a few lines, made from the findings alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypedDict

from toolkit.certifying.checks import PLACES
from toolkit.certifying.subject import ANSWERS, Answer, Check, Finding, Subject, worst_first
from toolkit.files import write_text
from toolkit.records.json_files import write_json
from toolkit.redaction import redact
from toolkit.tables.grid import Section
from toolkit.tables.markdown import bullets, document, escaped, fenced
from toolkit.tables.terminal import print_line

if TYPE_CHECKING:
    from markupsafe import Markup
    from rich.console import Console

PAGE: Final = "certificate"

SHOWN_ROWS: Final = 3
ROWS_TITLE: Final = "Rows as they are trained"


class Judged(TypedDict):
    group: str
    check: str
    answer: Answer
    words: str
    advice: str
    where: str
    """File and line of the script that made or called what is broken; empty where not known."""


class Certificate(TypedDict):
    """`certificate.json`."""

    schema: int
    script: list[str]
    config: str
    num_processes: int
    rehearsal: bool
    steps: int
    shrunk: str
    """What was made small, in words; empty where the script's own model was trained."""

    answer: Answer
    """The worst of the checks."""

    checks: list[Judged]
    rows: list[list[tuple[str, bool]]]
    """The first rows, as pieces of text and whether they are trained; empty with --no-rows."""

    environment: dict[str, Any]


def judged(found: Sequence[tuple[Check, Finding]], subject: Subject) -> list[Judged]:
    """Return the findings as they stand in the file."""
    places = subject.many[0]["places"] if subject.many else {}

    def where(check: Check, finding: Finding) -> str:
        place = check.place or PLACES.get(check.group)
        if finding.answer != "broken" or finding.where or place is None:
            return finding.where
        return places.get(place) or places.get("prepare", "")

    return [
        Judged(
            group=check.group,
            check=check.name,
            answer=finding.answer,
            words=redact(finding.words),
            advice=finding.advice,
            where=where(check, finding),
        )
        for check, finding in found
    ]


def pieces(subject: Subject) -> list[list[tuple[str, bool]]]:
    """Return the first rows as pieces of text, each trained or not; empty without a tokenizer."""
    shown: list[list[tuple[str, bool]]] = []
    texts = subject.tokens["texts"] if subject.many else {}
    for row in subject.rows[:SHOWN_ROWS] if texts else ():
        joined: list[tuple[str, bool]] = []
        for token, is_trained in zip(row.tokens, row.trained, strict=True):
            text = redact(texts.get(str(token), "?"))
            if joined and joined[-1][1] == is_trained:
                joined[-1] = (joined[-1][0] + text, is_trained)
            else:
                joined.append((text, is_trained))
        shown.append(joined)
    return shown


def verdict(certificate: Certificate) -> str:
    """Return the certificate in one sentence."""
    counts = dict.fromkeys(ANSWERS, 0)
    for check in certificate["checks"]:
        counts[check["answer"]] += 1
    names = [check["check"] for check in certificate["checks"] if check["answer"] == "broken"]
    rest = f"{counts['holds']} hold, {counts['note']} noted, {counts['not judged']} not judged"
    if names:
        return f"Broken: {', '.join(names)}. Of {len(certificate['checks'])} checks {rest}."
    return f"Nothing is broken: of {len(certificate['checks'])} checks {rest}."


def with_place(check: Judged) -> str:
    """Return the words of a check with the line of the script to look at."""
    where = check["where"]
    return f"{check['words']} ({where})" if where not in check["words"] else check["words"]


def sections(certificate: Certificate) -> list[Section]:
    """Return a table for each group of checks, and the first rows."""
    groups = dict.fromkeys(check["group"] for check in certificate["checks"])
    return [
        Section(
            header=("check", "verdict", "found"),
            rows=[
                (check["check"], check["answer"], with_place(check))
                for check in sorted(
                    (one for one in certificate["checks"] if one["group"] == group),
                    key=lambda one: worst_first(one["answer"]),
                )
            ],
            notes=[
                f"{check['check']}: {check['advice']}."
                for check in certificate["checks"]
                if check["group"] == group and check["advice"]
            ],
            title=group,
            id=group.lower().replace(" ", "-"),
            words=("found", "verdict"),
        )
        for group in groups
    ]


def rows_as_text(certificate: Certificate) -> Section:
    """Return the first rows for Markdown, trained tokens between brackets."""
    rows = [
        "".join(f"⟦{text}⟧" if trained else text for text, trained in row)
        for row in certificate["rows"]
    ]
    text = "\n\n".join(["Trained tokens stand between ⟦ and ⟧.", *map(fenced, rows)])
    return Section(text if rows else "", title=ROWS_TITLE if rows else "")


def rows_as_html(certificate: Certificate) -> Markup:
    """Return the first rows for the page, trained tokens marked."""
    from markupsafe import Markup

    rows = Markup("").join(
        Markup('<p class="row">{}</p>\n').format(
            Markup("").join(
                Markup("<mark>{}</mark>" if trained else "{}").format(text) for text, trained in row
            )
        )
        for row in certificate["rows"]
    )
    if not rows:
        return rows
    return Markup('<section id="rows">\n<h2>{}</h2>\n<p>Marked: trained.</p>\n{}</section>').format(
        ROWS_TITLE, rows
    )


def write(certificate: Certificate, folder: Path) -> list[Path]:
    """Write the page as HTML and Markdown, and the JSON."""
    from toolkit.tables.page import render_page

    first, *others = certificate["script"]
    name = others[0] if first == "-m" and others else Path(first).name
    title = f"{name} under {certificate['config']}"
    said = escaped(verdict(certificate))
    shrunk = escaped(certificate["shrunk"])
    broken = bullets(
        f"{check['check']}: {with_place(check)}. {check['advice']}."
        for check in certificate["checks"]
        if check["answer"] == "broken"
    )
    parts = sections(certificate)
    kind = "Certificate · rehearsal on the CPU" if certificate["rehearsal"] else "Certificate"
    versions = ", ".join(
        f"{name} {version}" for name, version in certificate["environment"]["versions"].items()
    )
    page = render_page(
        title,
        kind=kind,
        tab=title,
        head={"verdict": said, "broken": broken, "shrunk": shrunk},
        parts=[parts[0], rows_as_html(certificate), *parts[1:]],
        foot=f"Made from certificate.json. {escaped(versions)}",
    )
    files = {
        f"{PAGE}.html": page,
        f"{PAGE}.md": document(
            [f"# {escaped(title)}", said, broken, shrunk], [*parts, rows_as_text(certificate)]
        ),
    }
    for name, text in files.items():
        write_text(folder / name, text)
    write_json(folder / f"{PAGE}.json", {**certificate})
    return [folder / name for name in (*files, f"{PAGE}.json")]


def print_certificate(certificate: Certificate, *, console: Console) -> None:
    """Print the checks that did not hold, with advice, and the verdict."""
    for check in sorted(certificate["checks"], key=lambda one: worst_first(one["answer"])):
        if check["answer"] == "holds":
            continue
        print_line(f"{check['answer']}: {check['check']}: {with_place(check)}", console=console)
        if check["advice"]:
            print_line(f"  {check['advice']}.", console=console)
    for line in filter(None, (certificate["shrunk"], verdict(certificate))):
        print_line(line, console=console)
