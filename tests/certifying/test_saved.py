"""Scripts that save and resume, each with one fault: it is named by the check it belongs to."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from certificates import tiered
from places import ROOT

from toolkit.certifying.checks import CHECKS, GROUPS
from toolkit.certifying.subject import Subject
from toolkit.records.saves import Call, Saves

END = "a model at the end"

SAVED = {
    ("past_the_gathering", "zero3"): {"folders load", "saved weights", END},
    ("past_the_gathering", "fsdp"): {"saves"},
    ("past_the_gathering_by_torch", "zero3"): {"saved weights"},
    ("past_the_gathering_by_torch", "fsdp"): {"saves"},
    ("one_slice", "ddp", "--lora"): {"saved weights", END},
    ("head_beside_the_adapter", "ddp", "--lora"): {"saved weights", END},
    ("another_model", "ddp"): {"saved weights", END},
    ("untied_in_the_config", "ddp", "--tied"): {"folders load", END},
    ("layer_left_out", "ddp"): {"folders load", END},
    ("unloaded", "ddp", "--lora"): {"saved weights", END},
    ("merged_twice_as_much", "ddp", "--lora"): {"saved weights", END},
    ("a_file_in_the_way", "ddp"): {"saves"},
}
SWEPT = {
    ("past_the_gathering", "fsdp"),
    ("past_the_gathering_by_torch", "zero3"),
    ("head_beside_the_adapter", "ddp", "--lora"),
    ("another_model", "ddp"),
    ("unloaded", "ddp", "--lora"),
    ("merged_twice_as_much", "ddp", "--lora"),
    ("rate_begins_anew", "ddp"),
    ("sound", "zero3", "--tied"),
    ("sound", "fsdp", "--by", "trainer", "--lora"),
    ("sound", "ddp", "--by", "trainer", "--tied"),
    ("by_save_model", "fsdp"),
    ("nothing", "ddp"),
}
LOADED, AFTER = "state that is loaded", "steps after it"
SECOND, CUT = "second save", "cut-off checkpoints"

RESUMED = {
    # What is not read may be cut off, too.
    ("loads_the_model_alone", "ddp"): ({LOADED, AFTER, CUT}, "it begins anew"),
    ("reads_the_first_rows_again", "ddp"): ({AFTER}, "reads other rows"),
    ("rate_begins_anew", "ddp"): ({AFTER}, "the learning rate is 0.001, and was 0.000916667"),
    ("resumes_without_moments", "ddp", "--by", "trainer"): ({LOADED, AFTER, SECOND}, "anew"),
    ("takes_what_it_can_read", "ddp"): ({CUT}, "optimizer.bin cut to half: the run trains on"),
    ("forgets_its_count", "ddp"): ({SECOND}, "the first is custom_checkpoint_0.pkl"),
}
SOUND = [
    ("sound", "fsdp", "--lora"),
    ("sound", "zero3", "--tied"),
    ("sound", "zero3", "--by", "trainer", "--lora"),
    ("sound", "fsdp", "--by", "trainer", "--lora"),
    ("sound", "ddp", "--by", "trainer", "--tied"),
    ("in_bf16", "ddp"),
]
NOTED = {
    ("too_early", "ddp"): (END, "weights of step 1; those of the last step, 3, were not saved"),
    ("by_save_file", "zero3"): (END, "no tokenizer, no generation_config.json"),
    ("merged", "ddp", "--lora"): (END, "no tokenizer"),
    ("by_the_engine", "zero3"): (END, "only files were saved that a script's own code reads"),
    ("by_save_model", "fsdp"): (END, "only files were saved that a script's own code reads"),
    ("nothing", "ddp"): (END, "only files were saved that a script's own code reads"),
}
NOT_RESUMED = {
    ("no_checkpoint", "ddp", "--by", "trainer"): "the script saved no checkpoint",
    ("weights_alone", "ddp", "--by", "trainer"): "save_only_model",
}


@pytest.fixture
def certified(certificate_of, tmp_path):
    """Return the checks of one case, by their names."""

    def made(case, only=("saved", "resumed"), **launch):
        fault, strategy, *flags = case
        words = [fault, tmp_path / "made", *flags]
        options = {"only": only, "resume_flag": "--from", "strategy": strategy, **launch}
        checks, folder, said = certificate_of("faulty_saver.py", *words, **options)
        left = [*folder.rglob("*.safetensors"), *folder.rglob("saves-*"), *folder.rglob("*.bin")]
        assert left == []
        broken = {name for name, check in checks.items() if check["answer"] == "broken"}
        return checks, broken, said

    return made


@pytest.mark.parametrize("case", tiered(SAVED, SWEPT))
def test_a_fault_of_saving_is_named(case, certified):
    _, broken, said = certified(case, only=("saved",))
    assert broken == SAVED[case], said


@pytest.mark.parametrize("case", tiered(RESUMED, SWEPT))
def test_a_fault_of_resuming_is_named(case, certified):
    _, broken, said = certified(case)
    checks, words = RESUMED[case]
    assert broken == checks, said
    assert words in said


@pytest.mark.parametrize("case", tiered(SOUND, SWEPT))
def test_what_saves_and_resumes_well_holds(case, certified):
    checks, broken, said = certified(case)
    assert broken == set(), said
    for name in ("saves", "saved weights", END, "resumes", LOADED, AFTER, SECOND, CUT):
        assert checks[name]["answer"] == "holds", said
    assert ("float32 to bfloat16" in checks["saved weights"]["words"]) == (case[0] == "in_bf16")


@pytest.mark.parametrize("case", tiered(NOTED, SWEPT))
def test_what_may_be_meant_or_is_not_known_is_not_broken(case, certified):
    checks, broken, said = certified(case, only=("saved",))
    name, words = NOTED[case]
    assert broken == set(), said
    assert checks[name]["answer"] == "note"
    summed = "4 are base plus adapter, to rounding" in checks["saved weights"]["words"]
    assert summed == (case[0] == "merged")
    assert words in checks[name]["words"]


@pytest.mark.parametrize("case", NOT_RESUMED, ids=" ".join)
def test_nothing_is_claimed_of_a_script_that_was_not_resumed(case, certified):
    checks, broken, said = certified(case)
    assert broken == set(), said
    assert checks["resumes"]["answer"] == "not judged"
    assert NOT_RESUMED[case] in checks[AFTER]["words"]


def test_nothing_is_claimed_of_what_was_not_read():
    call = Call(
        name="Trainer.save_model",
        where="train.py:9",
        path="/gone",
        step=1,
        error=None,
        is_checkpoint=False,
        weights_only=False,
    )
    saves = Saves(schema=1, rank=0, first=0, calls=[call], states=[], tied={}, second=None)
    subject = Subject(many=[], folder=Path(), notes=[], saves=[saves], read_back=None)
    judges = [check.judge for check in CHECKS if check.group == GROUPS["saved"]]
    assert {judge(subject).answer for judge in judges} == {"not judged"}
    read = replace(subject, read_back=[])
    assert "broken" in {judge(read).answer for judge in judges}


@pytest.mark.parametrize("strategy", ["fsdp", "zero3"])
def test_weights_that_stay_in_parts_are_named(strategy, certified, tmp_path):
    """Under both settings a stock Trainer ends well, and leaves no model."""
    config = tmp_path / "config.yaml"
    text = (ROOT / "accelerate_configs" / f"{strategy}.yaml").read_text("utf-8")
    if strategy == "zero3":
        parts = json.loads((ROOT / "deepspeed_configs" / "zero3.json").read_text("utf-8"))
        parts["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = False
        (tmp_path / "zero3.json").write_text(json.dumps(parts), "utf-8")
        text = text.replace("deepspeed_configs/zero3.json", str(tmp_path / "zero3.json"))
    config.write_text(text.replace("FULL_STATE_DICT", "SHARDED_STATE_DICT"), "utf-8")
    case = ("sound", strategy, "--by", "trainer")
    checks, broken, said = certified(case, strategy=None, config=config)
    assert "saves" in broken or "folders load" in broken, said
    assert "FULL_STATE_DICT" in said
    assert checks["resumes"]["answer"] == "holds", said
