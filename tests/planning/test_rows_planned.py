"""Rows that are split over GPUs are planned: what a GPU holds, and how long a row may be."""

import pytest

from toolkit.errors import UsageError
from toolkit.planning.plan import plan
from toolkit.planning.recommend import recommend
from toolkit.planning.render.commands import paste_line
from toolkit.planning.search import LONG_ROW

MODEL = "meta-llama/Llama-3.1-8B"
LONG = {"gpu": "H100", "sequence": 131072}
LEAN = {"checkpointing": True, "chunked_loss": True}


def test_a_gpu_holds_a_share_of_a_rows_activations_and_logits():
    found = plan(MODEL, gpus=8, strategies="fsdp,context,zero3,ulysses", checkpointing=True, **LONG)

    def bytes_of(name, category):
        return found.row(name).memory.by_category()[category].low

    for whole, split in (("fsdp", "context"), ("zero3", "ulysses")):
        for category in ("activations", "logits"):
            share = bytes_of(split, category) / bytes_of(whole, category)
            assert share == pytest.approx(1 / 8, rel=0.2), (split, category)
        assert found.row(split).job.readers == 1
        assert found.row(split).job.step_tokens == LONG["sequence"]


@pytest.mark.parametrize("name", ["context", "ulysses"])
def test_the_longest_row_grows_with_the_gpus_that_share_it(name):
    asked = {"gpu": "A100-40GB", "sequence": 4096, "method": "lora", "strategies": name, **LEAN}
    two, four = (plan(MODEL, gpus=gpus, **asked).row(name).longest_sequence for gpus in (2, 4))
    assert four > 1.9 * two > 0


def test_heads_that_do_not_divide_are_refused_and_the_ring_does_not_mind():
    with pytest.raises(UsageError, match="8 key-value heads don't divide by the 16 ranks"):
        plan(MODEL, gpus=16, strategies="ulysses", **LONG)
    assert plan(MODEL, gpus=16, strategies="context", **LONG).row("context").job.gpus == 16


@pytest.mark.parametrize("name", ["context", "ulysses"])
def test_what_splits_no_rows_is_refused_by_name(name):
    for asked, said in (({"attention": "eager"}, "no mask"), ({"method": "qlora"}, "not proven")):
        with pytest.raises(UsageError, match=said):
            plan(MODEL, gpus=8, strategies=name, **LONG, **asked)


def test_rows_that_no_gpu_holds_are_split_where_they_are_long():
    found = recommend(MODEL, gpus=8, global_batch=8, **LONG)
    job = found.choice.job
    assert (job.strategy.name, job.method, job.readers) == ("context", "full", 1)
    assert job.batch * job.accumulation == 8
    assert any("1 group of 8 GPUs x" in reason for reason in found.reasons)
    line = paste_line(found.options[0])
    assert "--parallelism_config_cp_size 8" in line
    assert "--engine loop" in line
    short = recommend(MODEL, gpus=8, gpu="H100", sequence=LONG_ROW - 1, global_batch=8)
    assert not short.choice.job.strategy.splits_rows


def test_one_gpu_is_told_that_several_can_share_a_row():
    found = recommend(MODEL, gpus=1, global_batch=8, **LONG)
    assert any("Several GPUs can share each row" in reason for reason in found.reasons)
