"""What `toolkit check` finds in the script, its flags and its config, before anything runs."""

from __future__ import annotations

from toolkit.certifying.subject import Finding, Subject, broken, holds, not_judged, note


def read(subject: Subject) -> Finding:
    """Find what the rules say of the script as it stands."""
    if subject.read is None:
        return not_judged("a module was named, and no file")
    by_severity = {
        severity: [one for one in subject.read if one.severity == severity]
        for severity in ("error", "warning", "note")
    }
    worst = next((kind for kind, found in by_severity.items() if found), None)
    if worst is None:
        return holds("no rule of toolkit check finds anything")
    first = by_severity[worst][0]
    plural = {kind: f"{kind}s" if len(found) > 1 else kind for kind, found in by_severity.items()}
    counts = ", ".join(f"{len(of)} {plural[kind]}" for kind, of in by_severity.items() if of)
    words = f"{counts}; the first: {first.file.name}:{first.line}: {first.text}"
    advice = f"{first.fix.rstrip('.')}. All of them: toolkit check FILE --script {first.file.name}"
    return broken(words, advice) if worst == "error" else note(words, advice)
