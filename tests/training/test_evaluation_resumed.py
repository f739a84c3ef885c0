"""What was evaluated and sampled before a checkpoint is known to a run that resumes from it."""

import pytest
from accelerate import Accelerator
from datasets import Dataset
from small_models import tiny_llama

from toolkit.data.sampling_order import Collator
from toolkit.data.tokens import load_tokenizer
from toolkit.engines.wrapped import Wrapped
from toolkit.measuring.attestation import Requested
from toolkit.measuring.recorder import Recorder
from toolkit.strategies import get_strategy
from toolkit.training.evaluation import BeforeAndAfter
from toolkit.training.evaluation_plan import EvaluationPlan, Schedule
from toolkit.training.model import build_model

LAST = 3


@pytest.fixture
def run(cache, capsys):
    """Return a call that trains no step, and returns what its record says and what it printed."""
    tokenizer = load_tokenizer(build_model())
    texts = ("def add(a, b):\n    return a", "class Sum:\n    pass")
    ids = [tokenizer.encode(text) for text in texts]
    rows = [{"input_ids": one, "labels": one, "sample_id": at} for at, one in enumerate(ids)]
    model, accelerator = tiny_llama(vocabulary=len(tokenizer)), Accelerator(cpu=True)

    def run(*, done, steps=(), checkpoint=None, rows_hash="these", prompts=ids, save=None):
        plan = EvaluationPlan(
            rows=Dataset.from_list(rows),
            data={"tokens_hash": rows_hash},
            batch_rows=1,
            schedule=Schedule(last=LAST),
            prompts=prompts,
        )
        recorder = Recorder(
            Requested(strategy=get_strategy("single"), num_processes=1), rehearsal=True
        )
        recorder.resumed_after(done)
        results = BeforeAndAfter(
            plan,
            Collator(pad_token_id=0),
            tokenizer=tokenizer,
            recorder=recorder,
            checkpoint=checkpoint,
        )
        engine = Wrapped(
            accelerator=accelerator,
            model=model,
            optimizer=None,
            scheduler=None,
            report=lambda step, values: None,
        )
        results.prepared(engine)
        for step in steps:
            results.step_done(step)
        if save is not None:
            save.mkdir()
            results.write_so_far(save)
        recorder.close()
        record = results.with_results({"not_measured": {}})
        return record, capsys.readouterr().out

    return run


def test_a_run_that_goes_on_has_what_was_found_before(run, tmp_path):
    first, _ = run(done=0, save=tmp_path / "first")
    (start,) = first["evaluation"]
    assert [(each["before"] is None, each["after"]) for each in first["samples"]] == [
        (False, None),
        (False, None),
    ]
    resumed, said = run(
        done=1, steps=(2, LAST), checkpoint=tmp_path / "first", save=tmp_path / "last"
    )
    assert resumed["evaluation"][0] == start
    assert [each["step"] for each in resumed["evaluation"]] == [0, LAST]
    before = [each["before"] for each in first["samples"]]
    assert [each["before"] for each in resumed["samples"]] == before
    assert said.count("evaluation ") == 1

    # Saved after the last step, there is nothing left to do.
    again, said = run(done=LAST, checkpoint=tmp_path / "last")
    assert again == resumed
    assert said == ""


def test_what_is_not_of_the_same_rows_and_prompts_is_left_out(run, tmp_path):
    run(done=0, save=tmp_path / "checkpoint-1")
    prompt = [[5, 6, 7]]
    other, said = run(
        done=1,
        steps=(2, LAST),
        checkpoint=tmp_path / "checkpoint-1",
        rows_hash="others",
        prompts=prompt,
    )
    assert [each["step"] for each in other["evaluation"]] == [LAST]
    assert other["samples"][0]["before"] is None
    assert "toolkit: the evaluations before checkpoint-1 were of other rows" in said
    assert ": before not known, after '" in said
    of_an_older_toolkit = tmp_path / "checkpoint-2"
    of_an_older_toolkit.mkdir()
    old, said = run(done=1, steps=(LAST,), checkpoint=of_an_older_toolkit)
    assert [each["step"] for each in old["evaluation"]] == [LAST]
    assert "of other rows" not in said
