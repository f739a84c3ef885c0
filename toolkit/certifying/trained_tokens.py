"""What is trained: which tokens of the first rows have a loss, and which should."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.certifying.subject import (
    Finding,
    Row,
    Subject,
    broken,
    counted,
    holds,
    not_judged,
    note,
)
from toolkit.records.evidence import IGNORED

LEAK = 1e-4
"""Change of a text's logits, relative to their norm, that is rounding."""

SAME = 0.98
"""Share of labels from which they count as one row's tokens."""


def some_tokens(subject: Subject, rows: list[Row]) -> Finding:
    """Find rows without a token to learn."""
    tokens = sum(len(row.tokens) for row in rows)
    trained = sum(sum(row.trained) for row in rows)
    idle = [row.place for row in rows if not any(row.trained)]
    if idle:
        return broken(
            f"rows have no token to learn: {counted(idle, len(rows))}; all their labels are -100",
            "Look at the mask that the chat template or the collator gives, and whether a prompt "
            "alone fills a row that is cut",
        )
    whole = [row for row in rows if sum(row.trained) == len(row.tokens) - 1]
    prompts = "; prompts are trained too" if len(whole) == len(rows) else ""
    return holds(
        f"{trained / max(1, tokens):.1%} of {tokens:,} tokens in {len(rows)} rows{prompts}"
    )


def stop_token(subject: Subject, rows: list[Row]) -> Finding:
    """Find answers whose stop token is not trained, so that the model never learns to stop."""
    tokens = subject.tokens
    if not subject.stops:
        return not_judged("no tokenizer with a stop token was seen")
    ends = [(row, *end) for row in rows for end in _ends_of_spans(row, subject.stops)]
    known = [end for end in ends if end[0].tokens[end[1]] in subject.stops]
    untrained = [row.place for row, _, is_trained in known if not is_trained]
    if untrained:
        why = ""
        if tokens["pad"] is not None and tokens["pad"] == tokens["eos"]:
            why = "; pad and eos are one token, which a collator masks as padding"
        return broken(
            f"the stop token behind an answer is not trained: {counted(untrained, len(known))}"
            f"{why}",
            "Train the token that ends an answer: give padding a token of its own, and have the "
            "mask take in the end of the turn",
        )
    if known:
        return holds(f"the stop token behind each of {len(known)} answers is trained")
    if all(len(row.tokens) == len(rows[0].tokens) for row in rows):
        return not_judged("all rows are equally long blocks of text, in which nothing ends")
    return note(
        f"no answer of {len(ends)} ends with a stop token, so the model is not taught to stop",
        "Append the tokenizer's eos token to each text that is whole",
    )


def _ends_of_spans(row: Row, stops: set[int]) -> Iterator[tuple[int, bool]]:
    """Yield the place of each answer's last token or the stop behind it, and if it is trained.

    An answer is a span of trained tokens. A template may write a line break behind its stop.
    """
    trained = row.trained
    for at, is_trained in enumerate(trained):
        if not is_trained or (at + 1 < len(trained) and trained[at + 1]):
            continue
        if trained[at - 1] and row.tokens[at] not in stops and row.tokens[at - 1] in stops:
            yield at - 1, True
        elif at + 1 < len(trained):
            following = row.tokens[at + 1]
            last = row.tokens[at]
            yield (at, True) if following == last else (at + 1, False)
        else:
            yield at, True


def bos_once(subject: Subject, rows: list[Row]) -> Finding:
    """Find rows that begin with two tokens of beginning."""
    tokens = subject.tokens
    if not tokens["texts"]:
        return not_judged("no tokenizer was seen")
    if tokens["bos"] is None:
        return holds("the tokenizer has no token of beginning")
    double = [row.place for row in rows if row.tokens[:2] == [tokens["bos"]] * 2]
    if double:
        return broken(
            f"rows begin with the token of beginning twice: {counted(double, len(rows))}",
            "The template writes it and the tokenizer adds it again: pass add_special_tokens=False",
        )
    return holds(f"no row of {len(rows)} begins with it twice")


def padding(subject: Subject, rows: list[Row]) -> Finding:
    """Find padding that has labels."""
    wrong = [row.place for row in rows if row.padding_trained]
    if wrong:
        return broken(
            f"padding is trained: {counted(wrong, len(rows))}",
            "Set the labels of padding to -100, by the attention mask and not by the token's id",
        )
    moved = [row.place for row in rows if row.padding_before and row.labels[:1] != [IGNORED]]
    others = [row for row in rows if not row.padding_before]
    if moved and others and all(row.labels[:1] == [IGNORED] for row in others):
        return note(
            "rows with padding in front are trained from their first token, and of rows without it "
            f"the beginning is masked: {counted(moved, len(rows))}",
            "Count the prompt's tokens from where the row begins, or mask it before it is padded",
        )
    return holds(f"no padding of {len(rows)} rows has a label")


def attention(subject: Subject, rows: list[Row]) -> Finding:
    """Find content that the attention mask leaves out."""
    wrong = [row.place for row in rows if not all(row.attended)]
    if wrong:
        return broken(
            f"tokens within a row are left out of attention: {counted(wrong, len(rows))}",
            "Make the mask by length, not by comparing with the padding token's id",
        )
    return holds(f"{len(rows)} rows are attended to without a gap")


def shifted(subject: Subject, rows: list[Row]) -> Finding:
    """Find labels that the script shifted, though the model shifts them itself."""
    same = following = compared = 0
    for row in rows:
        pairs = [(at, label) for at, label in enumerate(row.labels) if label != IGNORED]
        compared += len(pairs)
        same += sum(row.tokens[at] == label for at, label in pairs)
        following += sum(row.tokens[at + 1 : at + 2] == [label] for at, label in pairs)
    if not compared:
        return not_judged("no token has a label")
    if same >= SAME * compared:
        return holds("labels are the rows' own tokens; the model shifts them")
    if following >= SAME * compared - len(rows):
        return broken(
            "labels are the tokens that follow, and the model shifts them once more: each token is "
            "taught the one after the next",
            "Pass labels that equal input_ids, with -100 where nothing is to be learned",
        )
    return note(
        f"{same / compared:.0%} of the labels are the row's own tokens, "
        f"{following / compared:.0%} those that follow: the script trains something else"
    )


def in_vocabulary(subject: Subject) -> Finding:
    """Find ids that the model has no row for."""
    tokens = subject.tokens
    if not tokens["vocabulary"]:
        return not_judged("the model has no table of tokens")
    largest = max(
        (token for _, batch in subject.batches for row in batch["tokens"] for token in row),
        default=0,
    )
    rows = tokens["vocabulary"]
    if largest >= rows:
        return broken(
            f"id {largest} is read, and the model's table has {rows:,} rows",
            "Call model.resize_token_embeddings(len(tokenizer))",
        )
    return holds(f"ids up to {largest:,} in a table of {rows:,} rows")


def new_tokens(subject: Subject) -> Finding:
    """Find rows that were added to the table of tokens, and that nothing trains."""
    tokens = subject.tokens
    before, rows = tokens["vocabulary_before"], tokens["vocabulary"]
    if not rows:
        return not_judged("the model has no table of tokens")
    if rows <= before:
        return holds("the table has no new rows")
    if not tokens["table_trained"]:
        return broken(
            f"{rows - before:,} new rows of the table of tokens are random and frozen",
            "Train the table: for adapters, name embed_tokens and lm_head in modules_to_save, or "
            "pass trainable_token_indices",
        )
    return holds(f"{rows - before:,} new rows of the table are trained")


def packed_rows(subject: Subject) -> Finding:
    """Find texts of a packed row that read the text in front of them."""
    leaks = [seen["leak"] for seen in subject.many if seen["leak"] is not None]
    if not leaks:
        rows, stops = subject.all_rows, subject.stops
        if rows and stops and not any(stops.intersection(row.tokens[1:-2]) for row in rows):
            return holds(f"no row of {len(rows)} has a second text behind a stop token")
        return not_judged("no row with positions that begin again was seen on every rank")
    if max(leaks) > LEAK:
        return broken(
            f"a text in a packed row moves by {max(leaks):.1%} when the text in front of it is "
            "changed: it reads its neighbour",
            "Pass no attention mask of ones beside position_ids that begin again, or use an "
            "attention that takes the lengths of the texts",
        )
    return holds("a text stays as it is when its neighbour in the row is changed")


def _are_blocks(rows: list[Row], stops: set[int]) -> bool:
    """Whether texts were joined and cut into rows of one length, stop tokens within."""
    longest = max(len(row.tokens) for row in rows)
    shorter = sum(len(row.tokens) < longest for row in rows)  # the rest at the end
    return shorter <= 1 and any(stops.intersection(row.tokens[1:-2]) for row in rows)


def cut_rows(subject: Subject, rows: list[Row]) -> Finding:
    """Find rows that were cut at a length: the longest ones lack the stop that others have."""
    if not subject.stops:
        return not_judged("no tokenizer with a stop token was seen")

    def ended(row: Row) -> bool:
        return any(token in subject.stops for token in row.tokens[-2:])

    longest = max(len(row.tokens) for row in rows)
    if _are_blocks(rows, subject.stops):
        return holds("rows are blocks that texts fill one after the other")
    cut = [row for row in rows if len(row.tokens) == longest and not ended(row)]
    if len(cut) < 2 or not any(map(ended, rows)):
        return holds("no row ends at one length without the stop token that others have")
    return note(
        f"rows end at {longest:,} tokens without a stop token, as where they are cut: "
        f"{counted([row.place for row in cut], len(rows))}",
        "Raise the script's maximal length, or leave these rows out",
    )
