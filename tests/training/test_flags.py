"""The first check of flags: it knows every flag, and needs no torch."""

import subprocess
import sys
from dataclasses import fields

import pytest
from transformers import HfArgumentParser, TrainingArguments

from toolkit.errors import UsageError
from toolkit.training.flags import checked_flags, training_argument_types


def test_the_fields_of_transformers_are_read_from_its_source():
    assert {*training_argument_types()} == {field.name for field in fields(TrainingArguments)}
    parser = HfArgumentParser(TrainingArguments)
    flags = {flag for action in parser._actions for flag in action.option_strings}
    for flag in flags - {"-h", "--help"}:
        assert "There is no flag" not in refusal(f"{flag}=1")


def refusal(*flags):
    try:
        checked_flags(flags)
    except UsageError as error:
        return str(error)
    return ""


def test_numbers_are_those_that_the_parser_takes():
    actions = HfArgumentParser(TrainingArguments)._actions
    of_parser = {a.dest: a.type.__name__ for a in actions if a.type in (int, float)}
    types = {n: kind.removesuffix(" | None") for n, kind in training_argument_types().items()}
    assert len(of_parser) > 20
    assert {n: kind for n, kind in types.items() if kind in ("int", "float")} == of_parser


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--lr", "1e-4"], "There is no flag --lr. Did you mean --learning_rate?"),
        (["--epochs=3"], "There is no flag --epochs. Did you mean --num_train_epochs?"),
        (["--learning_rte", "1"], "There is no flag --learning_rte. Did you mean --learning_rate?"),
        (["--max_len", "1"], "There is no flag --max_len. Did you mean --max_length?"),
        (["--max-step", "3"], "There is no flag --max-step. Did you mean --max_steps?"),
        (["--zzz"], "There is no flag --zzz. See --help for those there are."),
        (["--max_steps", "1e3"], "--max_steps 1e3 is not a whole number."),
        (["--learning-rate=fast"], "--learning-rate fast is not a number."),
        (["--learning_rate", "nan"], "--learning_rate nan: use 0 or more."),
        (["rows.jsonl"], "'rows.jsonl' belongs to no flag. Write flags as --name value."),
    ],
)
def test_mistakes_are_sentences(flags, sentence):
    with pytest.raises(UsageError) as error:
        checked_flags(flags)
    assert str(error.value) == sentence


def test_values_that_the_parser_takes_pass():
    flags = ["--max_steps", "-1", "--learning_rate", "1e-4", "--report_to", "none", "wandb"]
    own = checked_flags([*flags, "--eval_steps=0.5", "--bf16", "--save_total_limit", "3"])
    assert own.rest
    assert not checked_flags([]).rest


def test_a_rank_says_a_mistake_before_it_imports_torch(tmp_path):
    script = (
        "import sys; from importlib import import_module; sys.argv = ['train', '--lr', '1'];"
        "import os, toolkit.train as train; end = os._exit;"
        "os._exit = lambda code: (print(code, 'torch' in sys.modules), sys.stdout.flush(), end(0));"
        "train.main()"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (done.stdout, done.stderr) == (
        "2 False\n",
        "toolkit: There is no flag --lr. Did you mean --learning_rate?\n",
    )
