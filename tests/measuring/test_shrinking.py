"""Large models that a script loads become small ones of the same architecture."""

import pytest
import torch
from small_models import tiny_llama
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GenerationConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)
from transformers.utils.logging import disable_progress_bar

from toolkit import environment
from toolkit.errors import UsageError
from toolkit.measuring.meta_model import Unfilled
from toolkit.measuring.shrinking import LARGEST, most_parameters, shrinking, small_sizes
from toolkit.planning.models.architectures import text_part
from toolkit.planning.models.family import FAMILIES
from toolkit.planning.models.resolve import well_known

KNOWN = {entry.ids[0]: text_part(entry.config, "")[0] for entry in well_known()}
LARGE = {config["model_type"]: config for config in reversed(KNOWN.values())}
LARGE["gemma3"] = next(e.config for e in well_known() if e.config["model_type"] == "gemma3")
LATER = ("falcon_h1", "lfm2", "longcat_flash", "mamba2", "minimax")
"""Types without a well-known config here, by their defaults."""

TOKENS = torch.arange(10, 34).view(2, 12)


@pytest.fixture(autouse=True)
def no_progress_bars():
    disable_progress_bar()


@pytest.fixture
def large(tmp_path):
    """A folder with the config of a large model and without its weights."""

    def made(kind="llama", **changes):
        folder = tmp_path / kind
        config = (
            AutoConfig.for_model(**LARGE[kind]) if kind in LARGE else AutoConfig.for_model(kind)
        )
        config.update(changes)
        config.save_pretrained(folder)
        GenerationConfig(eos_token_id=[2, 7]).save_pretrained(folder)
        return folder

    return made


KINDS = [kind if kind in FAMILIES else pytest.param(kind, marks=pytest.mark.long) for kind in LARGE]


@pytest.mark.parametrize("kind", [*KINDS, *LATER])
def test_every_architecture_trains_small_with_its_vocabulary_and_positions(kind, large, tmp_path):
    folder = large(kind)
    was = AutoConfig.from_pretrained(folder).get_text_config(decoder=True)
    with shrinking(tmp_path / "small"):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").train()
    assert model.num_parameters() <= LARGEST
    config = model.config.get_text_config(decoder=True)
    for kept in ("vocab_size", "max_position_embeddings", "eos_token_id", "pad_token_id"):
        assert getattr(config, kept, None) == getattr(was, kept, None), kept
    # One layer of each kind stays.
    kinds = set(getattr(was, "layer_types", None) or ())
    assert set(getattr(config, "layer_types", None) or ()) == kinds
    loss = model(input_ids=TOKENS, labels=TOKENS).loss
    loss.backward()
    assert torch.isfinite(loss)


def test_all_well_known_sizes_of_a_family_become_small():
    """Sizes that depend on each other differ within a family."""
    for name, known in KNOWN.items():
        config = AutoConfig.for_model(**known)
        small = type(config).from_dict(small_sizes(config.to_dict()))
        with torch.device("meta"), Unfilled():
            model = AutoModelForCausalLM.from_config(small)
        assert model.num_parameters() <= LARGEST, name


def test_the_same_weights_every_time_whatever_the_script_has_drawn(large, tmp_path):
    folder = large()
    drawn = []
    with shrinking(tmp_path / "small"):
        for draws in (1, 5):
            torch.randn(draws)
            before = torch.get_rng_state()
            drawn.append(AutoModelForCausalLM.from_pretrained(folder))
            assert torch.equal(before, torch.get_rng_state())
    one, other = (model.state_dict() for model in drawn)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not (tmp_path / "small").exists()


def test_nobody_asked_and_only_what_does_not_fit_becomes_small(large, tmp_path, capsys):
    folder = large(num_hidden_layers=4, hidden_size=1024, vocab_size=32000)
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        parameters = AutoModelForCausalLM.from_config(config).num_parameters()
    assert parameters > LARGEST
    with shrinking(tmp_path / "small", only_above=parameters), torch.device("meta"):
        assert AutoModelForCausalLM.from_config(config).num_parameters() == parameters
    assert capsys.readouterr().out == ""
    with shrinking(tmp_path / "small", only_above=parameters - 1):
        assert AutoModelForCausalLM.from_config(config).num_parameters() < LARGEST
    assert "too many to train here as it is; trained is a random model" in capsys.readouterr().out


def test_each_rank_of_a_rehearsal_holds_a_whole_model(monkeypatch):
    monkeypatch.setattr(environment, "memory_bytes", lambda: 64 * 2**30)
    assert most_parameters(2, rehearsal=True) == 2**30
    assert most_parameters(4, rehearsal=True) == 2**29


def test_it_is_loaded_as_the_script_asks(large, tmp_path):
    folder = large(dtype="bfloat16")
    with shrinking(tmp_path / "small"):
        auto = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        eager = LlamaForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", device_map="cpu"
        )
        scores = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
        new = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    assert auto.dtype == torch.bfloat16
    assert eager.dtype == torch.float32
    assert eager.config._attn_implementation == "eager"
    assert auto.generation_config.eos_token_id == [2, 7]
    assert scores.score.out_features == 1
    assert new.num_parameters() <= LARGEST
    # Nothing is left in the library.
    assert PreTrainedModel.from_pretrained.__func__.__module__ == "transformers.modeling_utils"


def test_a_small_model_stays_as_it_is(tmp_path, capsys):
    model = tiny_llama()
    model.save_pretrained(tmp_path / "own")
    with shrinking(tmp_path / "small") as small:
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "own")
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    assert small.most_tokens() is None
    assert "--shrink" not in capsys.readouterr().out


def test_what_was_done_is_said_and_what_cannot_be_is_refused_by_name(large, tmp_path, capsys):
    folder = large()
    with shrinking(tmp_path / "small") as small:
        AutoModelForCausalLM.from_pretrained(folder)
        AutoModelForCausalLM.from_pretrained(folder)
        vocabulary = LARGE["llama"]["vocab_size"]
        assert 0 < (small.most_tokens() or 0) < 2**40 // vocabulary
        said = capsys.readouterr().out
        assert said.count("--shrink: ") == 1
        assert f"2 of {LARGE['llama']['num_hidden_layers']} layers, hidden size 64 of " in said
        stored = large("qwen2", quantization_config={"quant_method": "gptq", "bits": 4})
        with pytest.raises(UsageError, match="stored quantized"):
            AutoModelForCausalLM.from_pretrained(stored)
        with pytest.raises(UsageError, match="GGUF"):
            LlamaForCausalLM.from_pretrained(folder, gguf_file="model.gguf")
        unlike = large("inkling_text")  # its sizes have names of their own
        with pytest.raises(UsageError, match="no small model of inkling_text can be made"):
            AutoModelForCausalLM.from_pretrained(unlike)
