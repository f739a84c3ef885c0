"""Scripts that are sound, in the way of the examples of their libraries: nothing is broken.

`benchmarks/certify_sound.py` has sixteen of them under four strategies.
"""

import runpy

import pytest
from certificates import broken
from places import ROOT

from toolkit.certifying import trained_tokens
from toolkit.certifying.subject import Row, Subject

SOUND = ROOT / "benchmarks" / "sound_scripts"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a tiny model and rows."""
    folder = tmp_path_factory.mktemp("made")
    runpy.run_path(str(SOUND / "make_tiny.py"))["make"](folder)
    return folder


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        pytest.param("loop_accumulate", "text", marks=pytest.mark.short),
        # Its head is new, from no seed of the script's.
        pytest.param("trl_reward", "preferences", marks=pytest.mark.sweep),
        ("trl_dpo", "preferences"),
        ("run_clm", "text"),
        pytest.param("peft_trainer", "prompts", marks=pytest.mark.sweep),
        pytest.param("streaming", "text", marks=pytest.mark.sweep),
    ],
)
def test_a_sound_script_is_not_blamed(name, rows, made, certificate_of, tmp_path):
    flags = ["--model", made / "model", "--data", made / f"{rows}.jsonl"]
    flags += [] if name.startswith("loop") else ["--output_dir", tmp_path]
    checks, _, said = certificate_of(SOUND / f"{name}.py", *flags, strategy="zero3")
    assert broken(checks) == set(), said
    assert checks["first step"]["answer"] == "holds", said
    assert checks["logged loss"]["answer"] == (
        "not judged" if name.startswith("loop") else "holds"
    ), said


def test_tokens_counted_on_all_ranks_are_not_held_against_one(made, certificate_of, tmp_path):
    flags = ["--model", made / "model", "--data", made / "chat.jsonl", "--output_dir", tmp_path]
    checks, _, said = certificate_of(SOUND / "counted_loop.py", *flags)
    assert broken(checks) == set(), said
    assert "one process counts others" in checks["first step"]["words"]


def test_our_own_training_is_held_to_the_same_checks(certificate_of):
    checks, folder, said = certificate_of(
        "-m", "toolkit.train", "--max_steps", 4, strategy="fsdp", hide_rows=True
    )
    assert broken(checks) == set(), said
    for name in ("first step", "logged loss", "clipping", "tokens to learn", "each row once"):
        assert checks[name]["answer"] == "holds", said
    assert (folder / "one" / "saved").is_dir()


STOP, END_OF_LINE = 7, 8


def row(*tokens, learned=0, **changes):
    return Row(
        **{"rank": 0, "step": 1, "number": 0, "padding_before": 0, "padding_trained": 0} | changes,
        tokens=list(tokens),
        labels=[-100] * learned + list(tokens)[learned:],
        attended=[1] * len(tokens),
        has_labels=True,
    )


@pytest.fixture
def subject(tmp_path):
    """A subject whose tokenizer has one stop token, and no rows."""
    tokens = {"stops": [STOP], "pad": 0, "eos": STOP, "bos": None, "texts": {}}
    seen = {"tokens": tokens, "batches": [], "leak": None}
    return Subject(many=[seen], folder=tmp_path, notes=[])


def test_rows_that_are_cut_are_noted_and_blocks_are_not(subject):
    cut = [row(1, 2, 3, 4, 5, 6), row(2, 3, 4, 5, 6, 1), row(1, 2, STOP)]
    assert trained_tokens.cut_rows(subject, cut).answer == "note"
    blocks = [row(1, 2, STOP, 4, 5, 6), row(2, 3, 4, 5, 1, STOP), row(4, STOP, 1, 2, 3, 4)]
    assert trained_tokens.cut_rows(subject, blocks).answer == "holds"
    assert trained_tokens.cut_rows(subject, [*blocks, row(1, STOP)]).answer == "holds"


def test_padding_that_is_the_stop_token_is_named_where_that_is_not_trained(subject):
    masked = row(1, 2, STOP)
    masked.labels[2] = -100
    said = [trained_tokens.stop_token(subject, [masked]).words]
    subject.many[0]["tokens"]["pad"] = STOP
    said.append(trained_tokens.stop_token(subject, [masked]).words)
    assert ["pad and eos are one token" in words for words in said] == [False, True]


def test_a_line_break_behind_a_stop_token_is_no_end_without_one(subject):
    ended = [row(1, 2, STOP, END_OF_LINE), row(3, 4, STOP, END_OF_LINE)]
    found = trained_tokens.stop_token(subject, ended)
    assert (found.answer, "each of 2 answers" in found.words) == ("holds", True)
    assert trained_tokens.stop_token(subject, [row(1, 2, 3, 4), row(1, 2)]).answer == "note"
    left_out = row(1, 2, STOP, END_OF_LINE)
    left_out.labels[2:] = [-100, -100]
    assert trained_tokens.stop_token(subject, [left_out]).answer == "broken"
