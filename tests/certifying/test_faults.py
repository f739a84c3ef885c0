"""Scripts with one fault each: a certificate names it by the check it belongs to, and no other."""

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
from certificates import broken, tiered
from places import ROOT, SCRIPTS
from rich.console import Console

from toolkit.certifying import read_rows, trained_parameters, trained_tokens
from toolkit.certifying.certify import certify
from toolkit.certifying.checks import CHECKS, GROUPS
from toolkit.certifying.options import CertifyOptions
from toolkit.certifying.subject import Subject
from toolkit.errors import UsageError

LOOP = {
    "packed_texts_leak": {"packed rows"},
    "packed_beside_a_cache": {"packed rows"},
    "new_tokens_frozen": {"new tokens"},
    "begins_twice": {"token of beginning"},
    "nothing_trained": {"tokens to learn"},
    "some_rows_empty": {"tokens to learn"},
    "stop_left_out": {"stop token"},
    "padding_is_eos": {"stop token"},
    # One shift moves the stop token's label, too.
    "shifted_by_the_script": {"label shift", "stop token"},
    "mask_by_value": {"attention mask"},
    "padding_trained": {"padding"},
    "shuffled_apart": {"same data"},
    "split_by_hand": {"same data"},
    "every_rank_the_same_rows": {"each row once"},
    # One process writes as often as both ranks together.
    "frozen_written": {"frozen parameters", "first step"},
    "left_out_of_the_optimizer": {"attested", "trained parameters"},
    "optimizer_of_another_model": {"trained parameters", "one model"},
    "not_prepared": {"prepared"},
    "evaluation_mode": {"training mode"},
    "called_past_its_wrapper": {"one model", "first step"},
    "not_reduced": {"one model", "first step"},
    "clips_on_one_rank": {"one model", "first step"},
    "times_the_ranks": {"size of the loss", "first step"},
    # Found by others: TrainCheck (stackoverflow-60335387), NVlabs/LongLive#71, trl#6700.
    "gradients_kept": {"optimizer"},
    "samplers_seeded_apart": {"same draws"},
    "frozen_when_prepared": {"attested"},
    "other_loss_on_one_rank": {"size of the loss", "first step"},
}
SWEPT = {
    "packed_beside_a_cache",
    "some_rows_empty",
    "padding_is_eos",
    "split_by_hand",
    "frozen_written",
    "left_out_of_the_optimizer",
    "called_past_its_wrapper",
    "not_reduced",
    "samplers_seeded_apart",
    "frozen_when_prepared",
    "divided_by_all",
}

TRAINER = {
    "means_added_up": {"size of the loss", "logged loss"},
    "divided_by_all": {"size of the loss", "logged loss"},
    "logs_another_loss": {"logged loss"},
}


@pytest.mark.parametrize("fault", tiered(LOOP, SWEPT))
def test_a_fault_of_a_loop_is_named(fault, certificate_of):
    """Where the ranks' work differs from that of one process, this is named beside its cause."""
    # Whether two runs are the same is asked of sound scripts, of those of the sweep, and in
    # test_repeated.py.
    only = () if fault in SWEPT else tuple(GROUPS.keys() - {"repeated"})
    checks, _, said = certificate_of("faulty_loop.py", fault, only=only)
    # Which rows two orders have in common is chance.
    chance = {"each row once"} if fault.endswith("_apart") else set()
    assert broken(checks) - chance == LOOP[fault], said
    weighted = fault == "other_loss_on_one_rank"
    assert (checks.get("weight of a token", {}).get("answer") == "note") == weighted, said


@pytest.mark.parametrize(("kind", "answer"), [("one_order", "note"), ("two_epochs", "holds")])
def test_passes_that_begin_with_the_same_rows_are_noted(kind, answer, certificate_of):
    checks, _, said = certificate_of("faulty_loop.py", kind)
    assert broken(checks) == set(), said
    assert checks["new order"]["answer"] == answer, said


def test_a_choice_that_may_be_meant_is_noted(certificate_of):
    checks, _, said = certificate_of("faulty_loop.py", "norms_alone_on_joined_rows")
    assert broken(checks) == set(), said
    for name, words in (
        ("trained parameters", "only norms and biases are trained, 160 of "),
        ("each row once", "batches of 2 rows reach the model as 1"),
    ):
        assert checks[name]["answer"] == "note", said
        assert words in checks[name]["words"]


def test_a_known_cause_is_said_of_a_script_that_fails(as_launched, tmp_path):
    said = io.StringIO()
    script = [str(SCRIPTS / "faulty_loop.py"), "size_0"]
    options = CertifyOptions(strategy="zero3", output=tmp_path)
    assert certify(script, options, console=Console(file=said, width=200)) == 3
    words = " ".join(said.getvalue().split())
    assert "or has weights of size 0, of which there is nothing to gather" in words


@pytest.mark.parametrize(("begins", "answer"), [(-100, "note"), (7, "holds")])
def test_a_prompt_that_is_masked_by_its_column_is_noted(begins, answer):
    """The longest row of a batch has no padding in front, and its prompt is masked."""
    batch = {
        "step": 1,
        "tokens": [[7, 8, 9, 4], [0, 0, 8, 4]],
        "labels": [[begins, -100, 9, 4], [-100, -100, 8, 4]],
        "mask": [[1, 1, 1, 1], [0, 0, 1, 1]],
    }
    seen = {"rank": 0, "batches": [batch]}
    subject = Subject(many=[seen], folder=Path(), notes=[])
    assert trained_tokens.padding(subject, subject.rows).answer == answer


def test_rows_that_fill_up_the_last_batch_are_not_read_twice():
    """Accelerate gives a rank that runs out earlier the first rows again."""
    first, second = [[1, 2], [5, 6], [9, 1]], [[3, 4], [7, 8], [2, 3]]

    def judged(*of_ranks):
        many = [{"rows": rows, "steps": len(rows), "joined": None} for rows in of_ranks]
        return read_rows.each_once(Subject(many=many, folder=Path(), notes=[]))

    assert judged(first, second).answer == "holds"
    assert judged(first, [*second[:1], [1, 2], *second[2:]]).answer == "broken"
    assert judged(first, first).answer == "broken"


def test_packed_texts_that_are_kept_apart_hold(certificate_of):
    checks, _, said = certificate_of("faulty_loop.py", "packed", strategy="fsdp")
    assert broken(checks) == set(), said
    assert checks["packed rows"]["answer"] == "holds", said


@pytest.mark.parametrize("fault", tiered(TRAINER, SWEPT))
def test_a_fault_of_a_trainer_is_named(fault, certificate_of, tmp_path):
    checks, _, said = certificate_of("faulty_trainer.py", fault, tmp_path)
    assert broken(checks) == TRAINER[fault], said


@pytest.mark.parametrize("sound", [[], ["--sound"]])
@pytest.mark.parametrize(
    ("kind", "names"),
    [("counts_tokens", {"label shift", "stop token"}), ("adapters", {"same data"})],
)
def test_the_fault_of_an_official_example_is_named(kind, names, sound, certificate_of, tmp_path):
    checks, _, said = certificate_of("faulty_examples.py", kind, "--output_dir", tmp_path, *sound)
    # Which rows two orders have in common is chance.
    chance = {"each row once"} if kind == "adapters" and not sound else set()
    assert broken(checks) - chance == (set() if sound else names), said


@pytest.mark.parametrize(
    ("fault", "names"),
    [
        ("divided_twice", {"size of the loss"}),
        ("schedule_by_micro_batch", {"learning rate", "first step"}),
    ],
)
def test_a_fault_of_accumulation_is_named(fault, names, certificate_of):
    checks, _, said = certificate_of("faulty_loop.py", fault, "--accumulation", 2)
    assert broken(checks) == names, said


def test_a_limit_that_deepspeed_does_not_take_from_the_script_is_named(certificate_of):
    """`gradient_clipping: auto` means 1.0 outside of the Trainer."""
    checks, _, said = certificate_of("faulty_loop.py", "sound", "--clip", 0.5, strategy="zero2")
    assert broken(checks) == {"clipping"}, said


def test_what_no_release_takes_any_more_is_named_before_it_runs(certificate_of, tmp_path):
    script = tmp_path / "old.py"
    text = (SCRIPTS / "faulty_trainer.py").read_text("utf-8")
    script.write_text(
        text + "if fault == 'never':\n    TrainingArguments(evaluation_strategy='no')\n"
    )
    checks, _, said = certificate_of(script, "own", tmp_path / "out")
    assert broken(checks) == {"rules"}, said
    assert "old.py:" in checks["rules"]["words"]
    assert "evaluation_strategy" in checks["rules"]["words"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({}, "Name the launch by --strategy or by --config"),
        ({"strategy": "ddp", "config": Path("x.yaml")}, "one of the two"),
        ({"strategy": "ddp", "only": ("saves",)}, "--only knows no saves; it takes rules, tokens"),
        ({"config": Path("no.yaml")}, "--config no.yaml is not there"),
        ({"strategy": "ddp", "script": ["gone.py"]}, "There is no script gone.py"),
        ({"strategy": "ddp", "script": []}, "Name the script behind --"),
        ({"strategy": "ddp", "output": ROOT / "tests"}, "is not empty"),
        (
            {"strategy": "ddp", "script": ["x.py", "--output_dir", str(ROOT)]},
            "holds files, and the script would write a model of a few steps there",
        ),
        (
            {"strategy": "ddp", "script": ["x.py", f"--save_dir={ROOT}"]},
            "Name another folder for the certificate",
        ),
    ],
)
def test_a_mistake_is_one_sentence_and_starts_nothing(options, sentence):
    script = options.get("script", [str(SCRIPTS / "faulty_loop.py"), "sound"])
    given = {name: value for name, value in options.items() if name != "script"}
    with pytest.raises(UsageError, match=re.escape(sentence)):
        certify(script, CertifyOptions(**given), console=Console(file=io.StringIO()))


def test_label_smoothing_that_fsdp_computes_otherwise_is_named(certificate_of, tmp_path):
    """transformers 5.24 asks for the class by its name, which FSDP2 changes."""
    checks, _, said = certificate_of("faulty_trainer.py", "smoothed", tmp_path, strategy="fsdp")
    assert broken(checks) == {"first step"}, said
    assert "backward began with" in checks["first step"]["words"]


@pytest.mark.short
@pytest.mark.parametrize("strategy", ["ddp", "zero3", "fsdp"])
def test_a_sound_loop_is_not_blamed(strategy, certificate_of):
    flags = ["--accumulation", 2, "--ragged"] if strategy == "ddp" else []
    # The script's own precision, which FSDP2 rounds to in other places than autocast does.
    own = ["--precision", "bf16"] if strategy == "fsdp" else []
    script = ("faulty_loop.py", "sound", *flags, *own)
    checks, folder, said = certificate_of(*script, strategy=strategy)
    assert broken(checks) == set(), said
    assert checks["first step"]["answer"] == "holds", said
    # Ranks that average means of unequally many tokens are a note, with the size of it.
    weight = checks["weight of a token"]
    assert (weight["answer"] == "note") == bool(flags)
    assert ("times one of the largest" in weight["words"]) == bool(flags)
    page = (folder / "certificate.html").read_text("utf-8")
    assert "<mark>It is " in page
    assert f"Nothing is broken: of {len(CHECKS)} checks" in page
    assert [*folder.rglob("*.safetensors"), *folder.rglob("observed-*")] == []
    assert "⟦It is " in (folder / "certificate.md").read_text("utf-8")


def test_trainers_that_are_sound_are_not_blamed(certificate_of, tmp_path):
    for script, name, strategy in (
        ("faulty_trainer.py", "own", "zero2"),
        (ROOT / "examples" / "trl_sft.py", "--output_dir", "fsdp"),
        (ROOT / "examples" / "toolkit_trainer.py", "--output_dir", "zero3"),
    ):
        checks, folder, said = certificate_of(
            script, name, tmp_path / strategy, strategy=strategy, hide_rows=True
        )
        assert broken(checks) == set(), said
        assert checks["first step"]["answer"] == "holds", said
        assert "<mark>" not in (folder / "certificate.html").read_text("utf-8")


def test_nothing_is_claimed_of_ranks_that_were_not_compared():
    """Ranks on GPUs don't compare what they trained; a script that was cut is said to be."""
    seen = {"model": "LlamaForCausalLM", "cut": True}
    on_gpus = Subject(many=[seen, seen], folder=Path(), notes=["attested ddp"])
    rehearsed = replace(on_gpus, is_rehearsal=True)
    assert trained_parameters.one_model(on_gpus).answer == "not judged"
    assert trained_parameters.one_model(rehearsed).answer == "holds"
    assert "was cut" in trained_parameters.is_prepared(rehearsed).words
