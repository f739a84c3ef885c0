"""Sizes of tensors, read as sums of a model's widths."""

import pytest
from transformers import LlamaConfig, MixtralConfig

from toolkit.jobs.kept import FormTable
from toolkit.measuring.meta_forms import FEATURES, GENERIC, Reader, UnreadSizeError, keys_of


def test_a_size_is_a_sum_of_two_widths_of_up_to_four_times_each():
    reader = Reader({**GENERIC, "embedding": 0}, FormTable())
    hidden, ffn = FEATURES.index("hidden"), FEATURES.index("ffn")
    of_hidden, of_ffn = GENERIC["hidden"], GENERIC["ffn"]
    assert reader.elements(4 * of_hidden) == {hidden: 4.0}
    assert reader.elements(4 * of_hidden + 4 * of_ffn) == {hidden: 4.0, ffn: 4.0}
    with pytest.raises(UnreadSizeError):
        reader.elements(5 * of_hidden)


def test_an_expert_s_width_is_that_of_a_model_with_experts_alone():
    assert "expert" not in keys_of(LlamaConfig())
    assert keys_of(MixtralConfig())["expert"] == "intermediate_size"
