"""What `--tuned` decides by GPU, model and length of the run; GPUs are named, not there."""

import importlib.util
import json

import pytest

from toolkit import environment
from toolkit.errors import UsageError
from toolkit.planning.models.architectures import shape_from_config
from toolkit.strategies import STRATEGIES
from toolkit.training import tuning
from toolkit.training.arguments import own_arguments
from toolkit.training.request import Launch, check_request
from toolkit.training.tuning import COMPILE_SECONDS, Tuning

GIB = 2**30
H200 = environment.InstalledGpu(name="NVIDIA H200", memory_bytes=140 * GIB, capability=(9, 0))
LARGE = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "head_dim": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": True,
}


@pytest.fixture
def tuned(cache, monkeypatch):
    """Return the Tuning of flags under a strategy, on GPUs that are named."""

    def of(*flags, strategy="single", gpus=(H200,), ranks=1, rehearsal=False, **shape):
        own = own_arguments(["--bf16", "true", "--max_steps", "8", *map(str, flags)])
        launch = Launch(
            strategies=(STRATEGIES[strategy],), num_processes=ranks, rehearsal=rehearsal
        )
        request = check_request(own, launch)
        monkeypatch.setattr(environment, "gpus", lambda: list(gpus))
        monkeypatch.setattr(tuning, "find_spec", lambda name: name == "triton")
        made = Tuning(
            request=request, strategy=STRATEGIES[strategy], values=request.values[strategy]
        )
        if shape:  # plan a model of another size than the one whose data were prepared
            config = json.loads((tuning.Path(request.model.path) / "config.json").read_text())
            large = shape_from_config(config | shape, name="large")
            vars(made)["job"] = made.job.with_(model=large, sequence=2048)
            vars(made)["config"] = config | shape
        return made

    return of


def batch_of(values):
    return values["per_device_train_batch_size"], values["gradient_accumulation_steps"]


def test_the_largest_micro_batch_that_fits_takes_the_place_of_several(tuned, capsys):
    flags = ("--tuned", "--per_device_train_batch_size", 2, "--gradient_accumulation_steps", 32)
    values, why_not = tuned(*flags, **LARGE).with_micro_batch()
    rows, micro_batches = batch_of(values)
    assert rows * micro_batches == 64
    assert 8 <= rows < 64
    assert not why_not
    assert f"micro-batches of {rows} rows, by --auto_batch: 2 were asked" in capsys.readouterr().out
    small = environment.InstalledGpu(name="L4", memory_bytes=24 * GIB, capability=(8, 9))
    fewer, _ = tuned(*flags, gpus=(H200, small), **LARGE).with_micro_batch()
    assert batch_of(fewer)[0] < rows  # the GPU with the least decides


def test_a_micro_batch_that_does_not_fit_is_cut(tuned):
    flags = ("--tuned", "--per_device_train_batch_size", 256, "--gradient_accumulation_steps", 1)
    rows, micro_batches = batch_of(tuned(*flags, **LARGE).with_micro_batch()[0])
    assert rows < 256 == rows * micro_batches


@pytest.mark.parametrize(
    ("flags", "options", "reason"),
    [
        (("--tuned",), {"rehearsal": True}, "no GPU trains here"),
        (("--auto_batch",), {"gpus": ()}, "no GPU trains here"),
        (("--tuned",), {"gpus": (H200,), "hidden_size": 2**16, "intermediate_size": 2**18},
         "the planner calls no micro-batch safe"),
        (("--tuned", "--optim", "adafactor"), {}, "not predicted: the optimizer is adafactor"),
    ],
)  # fmt: skip
def test_where_none_is_known_to_fit_the_batch_stays_and_a_reason_is_given(
    flags, options, reason, tuned
):
    made = tuned(*flags, **options)
    values, why_not = made.with_micro_batch()
    assert batch_of(values) == batch_of(made.values)
    assert reason in why_not["auto_batch"]


@pytest.mark.parametrize("flags", [(), ("--tuned", "--auto_batch", "false")])
def test_off_is_off(flags, tuned):
    made = tuned(*flags, "--gradient_accumulation_steps", 8)
    assert made.with_micro_batch() == (made.values, {})
    chosen, _ = tuned("--tuned", "--compile_blocks", "false", **LARGE).with_kernels(10**6)
    assert chosen.own.speed.compile_blocks is False


def test_layers_are_compiled_where_the_run_is_long_enough_to_pay_for_it(tuned, capsys):
    short, why_not = tuned("--tuned", **LARGE).with_kernels(2)
    assert short.own.speed.compile_blocks is False
    assert (
        f"compiling takes about {COMPILE_SECONDS:.0f} s and wins about 0 of 1 s"
        in (why_not["compile_blocks"])
    )
    capsys.readouterr()
    long, why_not = tuned("--tuned", **LARGE).with_kernels(20_000)
    assert long.own.speed.compile_blocks is True
    assert "compile_blocks" not in why_not
    assert "compiling takes about" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "options", "reason"),
    [
        (("--tuned",), {"strategy": "zero3", "ranks": 2}, "gains nothing under ZeRO-3"),
        (("--tuned",), {"gpus": (environment.InstalledGpu(
            name="GeForce 9999", memory_bytes=GIB, capability=(9, 0)),)}, "There is no GPU"),
    ],
)  # fmt: skip
def test_layers_stay_as_they_are_with_a_reason(flags, options, reason, tuned):
    chosen, why_not = tuned(*flags, **options).with_kernels(10**6)
    assert chosen.own.speed.compile_blocks is False
    assert reason in why_not["compile_blocks"]


def test_without_triton_nothing_is_compiled(tuned, monkeypatch):
    made = tuned("--tuned", **LARGE)
    monkeypatch.setattr(tuning, "find_spec", importlib.util.find_spec)
    monkeypatch.setitem(importlib.import_module("sys").modules, "triton", None)
    monkeypatch.setattr(tuning, "find_spec", lambda name: None)
    assert "triton, which is not installed" in made.with_kernels(10**6)[1]["compile_blocks"]


def test_flash_attention_is_chosen_by_tuned_alone_and_only_where_it_was_measured(
    tuned, monkeypatch
):
    attention = importlib.import_module("toolkit.training.speed.attention")
    monkeypatch.setattr(attention, "no_flash_4", lambda capability: None)

    def chosen(*flags, **shape):
        request, why_not = tuned(*flags, **LARGE | shape).with_kernels(1)
        return request.own.model.flash_attention, why_not.get("flash_attention", "")

    assert chosen("--tuned") == ("FA4", "")
    assert chosen() == (None, "")
    assert chosen("--tuned", "--flash_attention", "FA2") == ("FA2", "")
    assert chosen("--tuned", attn_pdrop=0.1)[1].endswith("which the model's attn_pdrop asks for")
    assert chosen("--tuned", "--dropout", "off", attn_pdrop=0.1) == ("FA4", "")
    assert chosen("--tuned", head_dim=96)[1].endswith("it was not measured with heads of 96")
    monkeypatch.setattr(attention, "no_flash_4", lambda capability: f"of {capability}")
    assert chosen("--tuned")[1] == "--flash_attention FA4: of (9, 0)"


def test_switches_without_a_value_are_on(cache):
    own = own_arguments(["--compile_blocks", "--bf16_weights", "--lean_masks", "--bf16"])
    assert own.speed.compile_blocks is own.speed.bf16_weights is own.speed.lean_masks is True
    assert own_arguments(["--compile_blocks", "no"]).speed.compile_blocks is False
    with pytest.raises(UsageError):
        own_arguments(["--compile_blocks", "perhaps"])
