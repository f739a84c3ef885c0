"""From what a user calls a model to its shape: folders, counts, the Hub's cache, the table."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from places import ROOT

from toolkit.errors import UsageError
from toolkit.planning.models.architectures import text_part
from toolkit.planning.models.family import FAMILIES
from toolkit.planning.models.resolve import (
    _by_name,
    hub_cache,
    resolve_model,
    shape_from_count,
    well_known,
)

TINY = {
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
TINY_PARAMETERS = 2 * 128 * 64 + 64 + 2 * (4 * 64 * 64 + 3 * 64 * 96 + 2 * 64)

# As the Hub counts the tensors of each model's safetensors files, tied heads once.
PUBLISHED = {
    "meta-llama/Llama-2-7b-hf": 6_738_415_616,
    "meta-llama/Llama-2-13b-hf": 13_015_864_320,
    "meta-llama/Llama-2-70b-hf": 68_976_648_192,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.1-70B": 70_553_706_496,
    "meta-llama/Llama-3.1-405B": 405_853_388_800,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": 1_100_048_384,
    "HuggingFaceTB/SmolLM2-135M": 134_515_008,
    "HuggingFaceTB/SmolLM2-360M": 361_821_120,
    "HuggingFaceTB/SmolLM2-1.7B": 1_711_376_384,
    "HuggingFaceTB/SmolLM3-3B": 3_075_098_624,
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-3B": 3_085_938_688,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen2.5-14B": 14_770_033_664,
    "Qwen/Qwen2.5-32B": 32_763_876_352,
    "Qwen/Qwen2.5-72B": 72_706_203_648,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": 1_777_088_000,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "Qwen/Qwen1.5-MoE-A2.7B": 14_315_784_192,
    "mistralai/Mistral-7B-v0.1": 7_241_732_096,
    "mistralai/Mistral-7B-v0.3": 7_248_023_552,
    "mistralai/Mistral-Nemo-Base-2407": 12_247_782_400,
    "mistralai/Mixtral-8x7B-v0.1": 46_702_792_704,
    "google/gemma-2b": 2_506_172_416,
    "google/gemma-7b": 8_537_680_896,
    "google/gemma-2-2b": 2_614_341_888,
    "google/gemma-2-9b": 9_241_705_984,
    "google/gemma-2-27b": 27_227_128_320,
    "google/gemma-3-1b-it": 999_885_952,
    "microsoft/phi-2": 2_779_683_840,
    "microsoft/Phi-3-mini-4k-instruct": 3_821_079_552,
    "microsoft/phi-4": 14_659_507_200,
    "EleutherAI/pythia-12b": 11_846_072_320,
    "allenai/OLMo-7B-hf": 6_888_095_744,
    "allenai/OLMo-2-1124-7B": 7_298_617_344,
    "allenai/OLMo-2-1124-13B": 13_716_198_400,
    "allenai/OLMoE-1B-7B-0924": 6_919_161_856,
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """An empty working folder and an empty Hub cache."""
    monkeypatch.chdir(tmp_path)
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))


def cached(name, config=TINY, *, commit="0123abc"):
    """Put a model into the Hub's cache, as `hf download NAME config.json` does."""
    folder = hub_cache() / f"models--{name.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(commit)
    snapshot = folder / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(config))
    return folder


def refused(name):
    with pytest.raises(UsageError) as refusal:
        resolve_model(name)
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


@pytest.mark.parametrize(("name", "count"), PUBLISHED.items(), ids=PUBLISHED)
def test_well_known_models_have_the_published_number_of_parameters(name, count):
    assert resolve_model(name).parameters == count


def test_every_well_known_model_is_found_under_each_of_its_names_in_any_case():
    for entry in well_known():
        assert entry.source.startswith(("https://", "toolkit/"))
        for name in entry.ids:
            if text_part(entry.config, name)[0]["model_type"] not in FAMILIES:
                place = _by_name()[name.rpartition("/")[2].lower()]
                assert well_known()[place] is entry  # each is counted once: test_counted_models
                continue
            parameters = resolve_model(name).parameters
            assert resolve_model(name.upper()).parameters == parameters
            assert resolve_model(name.rpartition("/")[2].lower()).parameters == parameters


def test_no_name_stands_twice_in_the_table():
    names = [name.lower() for entry in well_known() for name in entry.ids]
    assert len(names) == len(set(names))


def test_a_config_that_was_not_read_itself_is_marked_and_is_one_of_several():
    """`alike` names the ids whose config is taken to be that of the others."""
    table = json.loads((ROOT / "toolkit/planning/models/wellknown.json").read_text("utf-8"))
    for entry in table["models"]:
        assert set(entry.get("alike", ())) < set(entry["ids"])


def test_the_built_in_model_is_in_the_table_as_it_is_built():
    from toolkit.training import model

    (entry,) = (entry for entry in well_known() if model.BUILT_IN_MODEL in entry.ids)
    assert entry.config == {"model_type": "llama", **model._SHAPE}


def test_a_shape_is_called_what_the_user_called_it():
    assert resolve_model("qwen3-8b").name == "qwen3-8b"
    assert resolve_model("7b").name == "7b"


def test_a_folder_with_a_config_is_a_model(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text(json.dumps(TINY))
    for name in ("mine", "./mine", tmp_path / "mine", str(tmp_path / "mine" / "config.json")):
        assert resolve_model(name).parameters == TINY_PARAMETERS


def test_a_config_file_under_any_name_is_a_model(tmp_path):
    (tmp_path / "other.json").write_bytes(b"\xef\xbb\xbf" + json.dumps(TINY).encode())
    assert resolve_model("other.json").parameters == TINY_PARAMETERS


def test_a_folder_goes_before_a_count_and_before_a_well_known_name(tmp_path):
    for name in ("7b", "gpt2"):
        (tmp_path / name).mkdir()
        assert resolve_model(name).parameters > 10**8
        (tmp_path / name / "config.json").write_text(json.dumps(TINY))
        assert resolve_model(name).parameters == TINY_PARAMETERS


def test_what_the_hub_has_cached_is_read_and_goes_before_the_table():
    cached("some/model")
    cached("gpt2")
    for name in ("some/model", "gpt2"):
        shape = resolve_model(name)
        assert (shape.parameters, shape.exact, shape.name) == (TINY_PARAMETERS, True, name)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"HF_HUB_CACHE": "/a", "HF_HOME": "/b"}, "/a"),
        ({"HUGGINGFACE_HUB_CACHE": "/a", "HF_HOME": "/b"}, "/a"),
        ({"HF_HOME": "/b"}, "/b/hub"),
        ({"HF_HOME": "$SOMEWHERE/b", "SOMEWHERE": "/c"}, "/c/b/hub"),
        ({"XDG_CACHE_HOME": "/d"}, "/d/huggingface/hub"),
        ({"HOME": "/e"}, "/e/.cache/huggingface/hub"),
    ],
)
def test_the_cache_is_where_huggingface_hub_has_it(variables, expected, monkeypatch):
    monkeypatch.delenv("HF_HOME")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert hub_cache() == Path(expected)
    script = "import huggingface_hub.constants as c; print(c.HF_HUB_CACHE)"
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert Path(found.stdout.strip()) == Path(expected)


@pytest.mark.parametrize("commit", ["../../other", "", "a/b", "0123\x00", "gone"])
def test_a_damaged_reference_in_the_cache_leads_nowhere(commit):
    folder = cached("some/model")
    (folder / "refs" / "main").write_text(commit)
    assert "no folder with a config.json" in refused("some/model")


def test_a_cached_model_that_cannot_be_planned_says_why():
    cached("some/model", {"model_type": "t5", "is_encoder_decoder": True})
    assert "some/model is an encoder-decoder" in refused("some/model")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "is no JSON that can be read"),
        (b"", "is no JSON that can be read"),
        (b"\xff\xfe\x00", "is no JSON that can be read"),
        (b'{"hidden_size": ' + b"9" * 5000 + b"}", "is no JSON that can be read"),
        (b"[" * 100_000, "is no JSON that can be read"),
        (b" " * (5 * 2**20), "so it is no model's config.json"),
        (b"[]", "It should be an object"),
        (b"null", "It should be an object"),
    ],
    ids=["cut", "empty", "not UTF-8", "many digits", "deep", "huge", "a list", "null"],
)
def test_a_file_that_holds_no_config_is_refused(content, words, tmp_path):
    (tmp_path / "config.json").write_bytes(content)
    assert words in refused(str(tmp_path))


def test_a_file_that_may_not_be_read_is_refused(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(TINY))

    def denied(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", denied)
    assert "can't be read: Permission denied" in refused(str(tmp_path))


@pytest.mark.parametrize("name", ["./absent", "/absent/model", "~/absent", ".", "..", "a\\b"])
def test_a_path_that_is_not_there_is_not_looked_for_on_the_hub(name):
    assert "it should be a folder with a config.json" in refused(name)


def test_a_missing_model_names_close_ones_and_the_ways_out(tmp_path):
    said = refused("Qwen/Qwen3-8C")
    assert "Did you mean Qwen/Qwen3-8B" in said
    assert "hf download Qwen/Qwen3-8C config.json" in said
    assert str(tmp_path / "hf" / "hub") in said
    assert "a parameter count such as 7b" in said
    assert "Did you mean meta-llama/Llama-3.1-8B" in refused("lama-3.1-8b")
    assert "Did you mean" not in refused("zzzzzz")


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("meta-llama/Llama-3-8B", "meta-llama/Meta-Llama-3-8B"),
        ("meta-llama/Meta-Lama-3-8B", "meta-llama/Meta-Llama-3-8B"),
        ("meta-llama/Lama-3.1-8B", "meta-llama/Llama-3.1-8B"),
        ("Qwen/Qwen25-7B", "Qwen/Qwen2.5-7B"),
        ("qwen/qwen3-14b-instruct", "Qwen/Qwen3-14B-Base"),
        ("google/gema-2-9b", "google/gemma-2-9b"),
        ("google/gema-3-4b", "google/gemma-3-4b-it"),
        ("mistralai/Mistal-7B-v0.1", "mistralai/Mistral-7B-v0.1"),
        ("mistralai/Mistral-7B-v0.2", "mistralai/Mistral-7B-Instruct-v0.2"),
        ("mistralai/Mistal-7B-v0.3", "mistralai/Mistral-7B-v0.3"),
    ],
)
def test_a_typo_is_answered_with_the_size_and_the_version_that_it_names(typo, meant):
    assert f"Did you mean {meant}" in refused(typo)


def test_another_size_or_version_is_suggested_after_the_same():
    hint = refused("meta-llama/Llama-3-8B").partition("Did you mean ")[2].partition("?")[0]
    first, *others = hint.split(" or ")
    assert first == "meta-llama/Meta-Llama-3-8B"
    assert all("8B" in other for other in others)


@pytest.mark.parametrize(
    "name",
    ["", " ", "a\nb", "a\0b", "x" * 10_000, "x" * 300, "a/b/c", "a//b", "b", "7q", "é/è", "-7b"],
    ids=repr,
)
def test_a_name_that_can_mean_no_model_is_refused(name):
    said = refused(name)
    assert len(said) < 600


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("7b", 7 * 10**9),
        ("7B", 7 * 10**9),
        ("1.3b", 1_300_000_000),
        ("350m", 350_000_000),
        ("350M", 350_000_000),
        ("0.5B", 500_000_000),
        ("1_000_000_000", 10**9),
        ("1,000,000,000", 10**9),
        ("6738415616", 6_738_415_616),
        ("1.5t", 1_500_000_000_000),
        ("4000k", 4_000_000),
        (" 7 b ", 7 * 10**9),
    ],
)
def test_a_count_gives_a_shape_of_that_many_parameters(text, count):
    shape = shape_from_count(text)
    assert shape.parameters == pytest.approx(count, rel=0.005)
    assert not shape.exact
    assert "assumed" in shape.note
    assert resolve_model(text).parameters == shape.parameters


def test_counts_are_met_over_the_whole_range_with_plausible_widths():
    for exponent in range(6, 13):
        for digit in (1.0, 1.7, 2.9, 4.4, 7.1, 9.9):
            shape = shape_from_count(str(int(digit * 10**exponent)))
            assert shape.parameters == pytest.approx(digit * 10**exponent, rel=0.005)
            assert shape.hidden_size == shape.heads * shape.head_dim
            assert 1.9 < shape.intermediate_size / shape.hidden_size < 3.5
            assert 15 < shape.hidden_size / shape.layers < 160
            assert shape.max_positions is None


def test_a_count_of_a_llama_gives_the_widths_of_that_llama():
    assumed, real = shape_from_count("6738415616"), resolve_model("meta-llama/Llama-2-7b-hf")
    assert assumed.tensors == real.tensors


@pytest.mark.parametrize(
    "count",
    ["0", "0b", "7", "999k", "11t", "10000000000000000", "b", "", "-7b", "1e9", "7bb", "٧b", "1.b"]
    + ["9" * 10_000],
    ids=lambda count: count[:20],
)
def test_an_absurd_count_is_refused(count):
    with pytest.raises(UsageError) as refusal:
        shape_from_count(count)
    assert len(str(refusal.value)) < 300


def test_one_model_is_one_object_so_that_what_is_worked_out_of_it_can_be_kept():
    assert resolve_model("Qwen/Qwen3-8B") is resolve_model("Qwen/Qwen3-8B")
    assert resolve_model("7b") is resolve_model("7b")


def test_resolving_imports_nothing_heavy():
    script = (
        "import sys; from toolkit.planning.models import resolve; resolve.resolve_model('gpt2')\n"
        "print([m for m in ('torch', 'transformers', 'numpy', 'huggingface_hub', 'rich')"
        " if m in sys.modules])"
    )
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "[]"


def test_the_table_is_declared_as_part_of_the_package():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "*.json" in declared["tool"]["setuptools"]["package-data"]["toolkit.planning.models"]
