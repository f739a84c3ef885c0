"""Models counted on the meta device: against real autograd, and from a folder."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import cache as cache_of_calls

import psutil
import pytest
import torch
from test_activations_measured import FAMILIES, REGIMES, count_of_two_layers, one_thread
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from toolkit.cli import app
from toolkit.engines.described import decoder_layers
from toolkit.errors import UsageError
from toolkit.jobs.kept import Regime
from toolkit.measuring.meta_counting import LiveStorages, OnGpu
from toolkit.measuring.meta_model import build, count_model, passes
from toolkit.planning.job import PlannedJob
from toolkit.planning.memory.activations import activations_at_most, activations_of
from toolkit.planning.memory.layers import layer_bytes
from toolkit.planning.models import counted, resolve
from toolkit.planning.models.resolve import resolve_model
from toolkit.planning.plan import plan
from toolkit.strategies import STRATEGIES

__all__ = ["one_thread"]

ROWS, SEQUENCE = 2, 48
COHERE = {
    "model_type": "cohere",
    "vocab_size": 331,
    "hidden_size": 96,
    "intermediate_size": 212,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "logit_scale": 0.0625,
}
GLM_MOE = {
    "model_type": "glm4_moe",
    "vocab_size": 331,
    "hidden_size": 96,
    "intermediate_size": 212,
    "moe_intermediate_size": 52,
    "num_hidden_layers": 4,
    "first_k_dense_replace": 1,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "pad_token_id": 0,
}
BAMBA = {
    "model_type": "bamba",
    "vocab_size": 331,
    "hidden_size": 96,
    "intermediate_size": 212,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "attn_layer_indices": [1],
    "mamba_n_heads": 12,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "pad_token_id": 0,
}
OF_TWO_LAYERS = {"vocab_size": 331, "num_hidden_layers": 2, "pad_token_id": 0}
OF_HEADS = OF_TWO_LAYERS | {
    "hidden_size": 96,
    "intermediate_size": 208,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
DELTA = OF_HEADS | {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
LATENT = OF_HEADS | {
    "num_key_value_heads": 6,
    "head_dim": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
SHARED_KEYS = OF_HEADS | {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 331,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
MAMBA = OF_TWO_LAYERS | {"hidden_size": 96, "state_size": 8}
SCANS = {
    "bamba": BAMBA,
    "mamba": MAMBA,
    "mamba2": MAMBA | {"num_heads": 12, "head_dim": 16, "n_groups": 2},
    "falcon_h1": OF_HEADS | {"mamba_d_ssm": 192, "mamba_n_heads": 12, "mamba_d_head": 16},
    "jamba": OF_HEADS | {"mamba_d_state": 8, "attn_layer_period": 2, "attn_layer_offset": 1},
    "recurrent_gemma": OF_HEADS | {"lru_width": 96, "block_types": ["recurrent", "attention"]},
    "qwen3_5_text": DELTA,
    "olmo_hybrid": DELTA,
    "qwen3_next": DELTA | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
}
TOKEN_BY_TOKEN = {"mamba", "jamba", "recurrent_gemma"}
"""Their scans have no chunks in torch's operations: few tokens show what each one keeps."""
WITHOUT_SCANS = {
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "glm4_moe_lite": LATENT,
    "lfm2": OF_HEADS | {"layer_types": ["conv", "full_attention"]},
    "gemma3n_text": SHARED_KEYS
    | {"laurel_rank": 8, "activation_sparsity_pattern": [0.95, 0.0] * 2},
    "gemma4_text": SHARED_KEYS | {"global_head_dim": 32, "use_double_wide_mlp": True},
}
UNKNOWN = [COHERE, GLM_MOE, BAMBA]
OPTIONS = ["--json", "--gpu", "L4"]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("TOOLKIT_CACHE", str(folder))
    return folder


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """A folder, what the command said of it, and the cache where it left its count."""
    folder = folder_of(COHERE, tmp_path_factory.mktemp("cold"))
    command = [sys.executable, "-m", "toolkit.cli", "plan", str(folder), *OPTIONS]
    variables = os.environ | {"TOOLKIT_CACHE": str(folder / "cache")}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    return folder, done, folder / "cache"


@pytest.fixture(scope="module")
def answers(planned, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    saved(BAMBA).save_pretrained(folder)
    (file,) = planned[2].rglob("*.json")
    text = json.dumps(resolve._read(folder / "config.json"), sort_keys=True)
    return {"cohere": json.loads(file.read_text()), "bamba": counted_here(text)}


@pytest.fixture(scope="module")
def answer(answers):
    return answers["cohere"]


def counted_here(text, *_):
    """Count as the process that the planner starts does, from what it gets to what it prints."""
    return json.loads(counted_once(text))


@cache_of_calls
def counted_once(text):
    return json.dumps(count_model(json.loads(text)))


def folder_of(config, tmp_path):
    folder = tmp_path / config["model_type"]
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def saved(config):
    values = {key: value for key, value in config.items() if key != "model_type"}
    return AutoConfig.for_model(config["model_type"], **values)


@pytest.mark.parametrize("config", UNKNOWN, ids=lambda config: config["model_type"])
def test_a_folder_of_an_unknown_architecture_is_planned_with_its_exact_parameters(
    config, tmp_path, monkeypatch, planned
):
    if config is COHERE:
        folder, done, cache = planned
        code, said = done.returncode, done.stdout
        assert "on the meta device, which takes 15 to 30 seconds" in done.stderr
        monkeypatch.setenv("TOOLKIT_CACHE", str(cache))
    else:  # one process that imports all to count is enough
        folder = folder_of(config, tmp_path)
        saved(config).save_pretrained(folder)  # an infinity of Bamba's as transformers writes it
        monkeypatch.setattr(counted, "_count", counted_here)
        done = CliRunner().invoke(app, ["plan", str(folder), *OPTIONS], catch_exceptions=False)
        code, said = done.exit_code, done.stdout
    assert code == 0, done.stderr
    answer = json.loads(said)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(saved(config))
    assert answer["model"]["parameters"] == sum(p.numel() for p in model.parameters())
    assert "counted from its config" in answer["notes"][0]
    assert ("BambaMixer" in answer["notes"][0]) == (config is BAMBA)
    (row, *_) = plan(folder, gpus=1, strategies="single").rows
    (kept,) = (term for term in row.memory.terms if term.name == "kept for backward")
    assert (kept.bytes.high > 4 * kept.bytes.low) == (config is BAMBA)
    for method in ("full", "lora", "qlora"):  # the count is in the cache now
        for attention in ("flash", "eager"):
            for checkpointing in (False, True):
                made = plan(
                    folder, gpus=2, method=method, attention=attention, checkpointing=checkpointing
                )
                assert all(row.memory.allocated.high > 0 for row in made.rows)


def test_layers_of_an_unknown_architecture_keep_what_autograd_really_keeps(
    answer, tmp_path, monkeypatch
):
    monkeypatch.setattr(counted, "_count", lambda *_: answer)
    shape = resolve_model(folder_of(COHERE, tmp_path))
    widths = {k: v for k, v in COHERE.items() if k not in ("model_type", "num_hidden_layers")}
    monkeypatch.setitem(FAMILIES, "cohere", widths)
    for regime in ("fp32", "bf16"):
        for attention in ("sdpa", "eager"):
            real = count_of_two_layers("cohere", attention=attention, regime=regime)
            planned = layer_bytes(shape, REGIMES[regime], 32, fused=attention == "sdpa")
            assert 2 * planned.saved == pytest.approx(real, rel=0.02)


def kept_on_a_cpu(config, dtype, length):
    """Bytes a token that autograd holds of each layer in a real step, with eager attention."""
    model = AutoModelForCausalLM.from_config(
        saved(config), dtype=dtype, attn_implementation="eager"
    ).train()
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    counts = []

    def counting(forward):
        def run(*args, **kwargs):
            kept = {}

            def pack(tensor):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in own:
                    kept[storage.data_ptr()] = storage
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                out = forward(*args, **kwargs)
            counts.append(sum(storage.nbytes() for storage in kept.values()) / ROWS / length)
            return out

        return run

    _, layers = decoder_layers(model)
    for layer in layers:
        layer.forward = counting(layer.forward)
    model(input_ids=torch.arange(ROWS * length).reshape(ROWS, length) % 300, use_cache=False)
    return counts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("model_type", [*SCANS, *WITHOUT_SCANS])
def test_layers_without_kernels_keep_what_a_real_step_keeps(model_type, dtype):
    """Scans, linear attention, latent attention, and layers that share keys: no constant is fitted.

    What is made outside of a layer, such as a bias of a mask, is of no layer's count.
    """
    config = {"model_type": model_type, **(SCANS | WITHOUT_SCANS)[model_type]}
    model = build(config, dtype, eager=True)
    found = [
        count
        for regime, targets, count in passes(model, dtype.itemsize)
        if targets == "none" and not regime.autocast and regime.scans == (model_type in SCANS)
    ]
    length = 40 if model_type in TOKEN_BY_TOKEN else 160
    for real, count in zip([kept_on_a_cpu(config, dtype, length)], found, strict=True):
        count.run(ROWS, length)
        counted = [count.kept[twin].per_token(ROWS * length)[0] for twin in count.twins]
        assert counted == pytest.approx(real, rel=0.08), (counted, real)
        assert sum(counted) == pytest.approx(sum(real), rel=0.05)


def test_a_plan_reaches_from_kernels_for_scans_to_torchs_own_operations(answers):
    shape = counted.shape_of(answers["bamba"], "bamba")
    assert shape.scans
    job = PlannedJob(
        model=shape, strategy=STRATEGIES["single"], gpus=1, sequence=512, precision="no"
    )
    real = sum(kept_on_a_cpu(BAMBA, torch.float32, 512)) * ROWS * 512
    on_gpu = replace(job, batch=ROWS, attention="eager")
    least = activations_of(on_gpu)
    assert 2 * least.saved < real
    assert activations_at_most(on_gpu, least).saved == pytest.approx(real, rel=0.05)
    on_cpu = replace(on_gpu, on_cpu=True)
    exact = activations_of(on_cpu)
    assert exact.saved == activations_at_most(on_cpu, exact).saved
    assert exact.saved == pytest.approx(real, rel=0.05)
    adapted = replace(on_gpu, method="lora")
    frozen = activations_of(adapted)
    more = activations_at_most(adapted, frozen).saved - frozen.saved
    assert more == pytest.approx(activations_at_most(on_gpu, least).saved - least.saved)


def test_a_known_model_without_formulas_is_counted_by_its_text_part(answer, monkeypatch):
    asked = []

    def count(config, name):
        asked.append(config)
        return counted.shape_of(answer, name)

    monkeypatch.setattr(counted, "counted_shape", lambda config, *, name: count(config, name))
    resolve._well_known_shape.cache_clear()
    note = resolve_model("google/gemma-4-E2B-it").note
    assert asked[0]["model_type"] == "gemma4_text"
    assert "The text part alone" in note
    assert "counted from its config" in note
    resolve._well_known_shape.cache_clear()


@pytest.mark.parametrize(
    "model_type", ["mamba2", "falcon_h1", "bamba", "nemotron_h", "granitemoehybrid"]
)
def test_a_saved_infinity_is_read_as_transformers_reads_it(model_type, tmp_path):
    AutoConfig.for_model(model_type).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    assert "__float__" in file.read_text()
    config = AutoConfig.from_pretrained(tmp_path)
    assert resolve._read(file) == config._dict_from_json_file(file)
    assert resolve._read(file)["time_step_limit"] == list(config.time_step_limit)


@pytest.mark.parametrize(("targets", "adapted"), [("all-linear", 7), ("attention", 4)])
@pytest.mark.parametrize("config", [COHERE, BAMBA], ids=["in all widths", "in its own"])
def test_adapters_of_a_higher_rank_keep_more_in_each_adapted_layer(
    config, tmp_path, monkeypatch, answers, targets, adapted
):
    monkeypatch.setattr(counted, "_count", lambda *_: answers[config["model_type"]])
    model = resolve_model(folder_of(config, tmp_path))
    runs_in = Regime(compute=2, weight=2, autocast=False, adapter=2)
    kind = model.layer_kinds[1]  # Bamba's layer of attention
    low, high = (
        layer_bytes(model, runs_in, SEQUENCE, fused=True, adapters=rank, targets=targets, kind=kind)
        for rank in (16, 56)
    )
    for name in ("saved", "products"):
        more = getattr(high, name) - getattr(low, name)
        assert more == pytest.approx(2 * (56 - 16) * adapted, rel=0.01), name
    # At the fullest moment the last adapter has let go of its part.
    assert high.backward_peak - low.backward_peak >= 2 * (56 - 16) * (adapted - 1)


@pytest.mark.parametrize(("share", "held"), [(0.1, 15 * (2 + 1)), (0.0, 0)])
def test_dropout_holds_its_result_and_a_mask_of_a_byte_an_element(share, held):
    given = torch.empty(3, 5, device="meta", dtype=torch.bfloat16, requires_grad=True)
    live = LiveStorages([])
    with OnGpu(live, autocast=False), live:
        out = torch.nn.functional.dropout(given, share)
    assert (out.dtype, out.shape) == (given.dtype, given.shape)
    assert sum(live.sizes[serial] for serial in live.living(0)) == held


def test_a_constant_that_a_models_code_computes_again_keeps_its_value():
    with LiveStorages([]):
        for _ in range(2):
            assert torch.all(torch.ones(3) > 0).item()


def test_dense_and_sparse_layers_are_counted_one_by_one():
    def count(dense):
        model = build(GLM_MOE | {"first_k_dense_replace": dense}, torch.bfloat16)
        _, _, counted = next(passes(model, 2))
        counted.run(ROWS, SEQUENCE)
        return [counted.kept[twin].per_token(ROWS * SEQUENCE) for twin in counted.twins]

    sparse_only, mixed, dense_only = count(0), count(1), count(4)
    assert sparse_only[0][0] > 1.2 * dense_only[0][0]
    assert mixed == [dense_only[0], *sparse_only[1:]]


def test_a_count_is_kept_and_another_config_is_another_count(answer, tmp_path, cache, monkeypatch):
    folder = folder_of(COHERE, tmp_path)
    monkeypatch.setattr(counted, "_count", lambda *_: answer)
    first = resolve_model(folder)
    assert len(list(cache.rglob("*.json"))) == 1
    monkeypatch.undo()
    monkeypatch.setenv("TOOLKIT_CACHE", str(cache))
    monkeypatch.setattr(counted, "WORKER", "no.such.module")
    assert resolve_model(folder).tensors == first.tensors
    (folder / "config.json").write_text(json.dumps(COHERE | {"vocab_size": 337}))
    with pytest.raises(UsageError, match="'cohere' failed .*no.such"):
        resolve_model(folder)


def test_a_cache_that_takes_no_files_is_no_error(answer, tmp_path, cache, monkeypatch):
    cache.write_text("a file in the place of the folder")
    monkeypatch.setattr(counted, "_count", lambda *_: answer)
    assert resolve_model(folder_of(COHERE, tmp_path)).layers == 3


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "nonesuch", "auto_map": {"AutoConfig": "a.b"}}, "runs none"),
        ({"model_type": "vit", "hidden_size": 64}, "can't build it as a causal LM"),
    ],
    ids=["own code", "no causal LM"],
)
def test_a_model_that_cannot_be_built_is_a_sentence_and_status_2(config, words, tmp_path):
    folder = folder_of(config, tmp_path)
    command = [sys.executable, "-m", "toolkit.cli", "plan", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


def test_what_transformers_lists_as_causal_is_read_from_its_source_without_an_import():
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    assert all(map(counted._is_listed, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
    assert not any(map(counted._is_listed, ["vit", "clip", "nonesuch", "t5", None, 7]))


def test_a_model_whose_layers_cannot_be_counted_is_refused_with_the_reason(
    answer, tmp_path, monkeypatch
):
    broken = answer | {"rows": {}, "uncounted": "RuntimeError: no data"}
    monkeypatch.setattr(counted, "_count", lambda *_: broken)
    with pytest.raises(UsageError, match="RuntimeError: no data"):
        resolve_model(folder_of(COHERE, tmp_path))


def test_a_count_that_takes_too_long_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(counted, "SECONDS", 0.2)
    with pytest.raises(UsageError, match="took longer than 0 seconds"):
        resolve_model(folder_of(COHERE, tmp_path))


def test_the_count_ends_with_the_planner(tmp_path):
    folder = folder_of(COHERE, tmp_path)
    command = [sys.executable, "-m", "toolkit.cli", "plan", str(folder)]
    planner = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    children = []
    while not children:
        assert planner.poll() is None
        children = [
            process
            for process in psutil.Process(planner.pid).children(recursive=True)
            if counted.WORKER in process.cmdline()
        ]
        time.sleep(0.02)
    planner.send_signal(signal.SIGKILL)
    planner.wait()
    end = time.monotonic() + 20
    while any(child.is_running() and child.status() != "zombie" for child in children):
        assert time.monotonic() < end
        time.sleep(0.05)
