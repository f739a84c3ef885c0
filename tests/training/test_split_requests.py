"""What has no rows to split is refused before a rank starts, in a sentence."""

import pytest
import torch
from small_models import small_of
from test_preflight import ROWS

from toolkit.comparing.bisect.running import _strategy_and_engine
from toolkit.comparing.run.options import CompareOptions
from toolkit.errors import UsageError
from toolkit.training.preflight import preflight
from toolkit.training.split_requests import _ring_problem, model_problem

LENGTH = 64


def problem(kind, *, size=2, attention="sdpa", **config):
    with torch.device("meta"):
        return model_problem(small_of(kind, attention, **config), size=size, length=LENGTH)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gpt_neox", "granite", "olmo2"])
def test_attention_that_is_called_by_name_can_be_replaced(kind):
    assert problem(kind) is None


@pytest.mark.parametrize(
    ("kind", "config", "said"),
    [
        ("llama", {"size": 4}, "its 2 key-value heads don't divide by the 4 ranks"),
        ("llama", {"size": 3}, "its 4 attention heads don't divide by the 3 ranks"),
        ("llama", {"attention": "eager"}, "its attention is eager"),
        ("mistral", {"sliding_window": LENGTH - 1}, "would see all 64 without a mask.*4177"),
        ("qwen3_next", {}, "linear_attention of its layers would see a piece of a row alone"),
        ("gpt_bigcode", {}, "is not told the positions of its tokens"),
    ],
)
def test_a_model_whose_rows_cannot_be_split_is_named_with_the_reason(kind, config, said):
    with pytest.raises(AssertionError, match=said):
        assert not (found := problem(kind, **config)), found


def test_a_window_that_no_row_fills_is_none():
    assert problem("mistral", sliding_window=LENGTH) is None
    assert problem("mistral", sliding_window=None) is None


@pytest.mark.parametrize(
    ("flags", "ranks", "said"),
    [
        (["--packing", "best_fit"], 2, "--packing best_fit, since nothing would keep the texts"),
        (["--lean_masks", "true"], 2, "--lean_masks, since it needs no masks"),
        (
            ["--attn_implementation", "eager"],
            2,
            "eager, where sdpa or flash_attention_2",
        ),
        ([], 3, "heads don't divide by the 3 ranks that share a row"),
    ],
)
def test_flags_that_do_not_go_with_split_rows_are_refused(flags, ranks, said):
    flags = [*ROWS, "--engine", "loop", *flags]
    with pytest.raises(UsageError, match=said):
        preflight(flags, num_processes=1, strategies=["ulysses"], ranks={"ulysses": [ranks]})


@pytest.mark.parametrize(
    ("kind", "said"),
    [("gpt_neox", "do not call their attention self_attn"), ("mistral", "has a window")],
)
def test_a_mask_that_accelerate_would_leave_to_the_ring_is_refused(kind, said):
    with torch.device("meta"):
        model = small_of(kind, "sdpa")
    assert said in _ring_problem(model)
    with torch.device("meta"):
        assert _ring_problem(small_of("llama", "sdpa")) is None
        drops = small_of("llama", "sdpa", attention_dropout=0.1)
    assert "a dropout of 0.1" in _ring_problem(drops)
    assert _ring_problem(drops, drops=False) is None


def test_a_bisection_refuses_what_splits_rows():
    for name in ("context", "ulysses-loop"):
        with pytest.raises(UsageError, match=f"{name} splits rows over ranks"):
            _strategy_and_engine(name, CompareOptions())
