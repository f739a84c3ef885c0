"""Logs of all shapes: the first failure is found in them, and none where there is none."""

import io

import pytest

from toolkit.causes.diagnosis import diagnose, doubts, slow_causes
from toolkit.causes.failures import read_failures
from toolkit.causes.lines import PIECE_BYTES, lines_of, read_lines
from toolkit.launching.step_lines import StepLines

OUT = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
CLOSED = "RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:57563."


def traceback(error, *, function="<module>", before=""):
    lines = ["Traceback (most recent call last):"]
    lines += [f'  File "train.py", line 3, in {function}', "    step()", error]
    return "\n".join(before + line for line in lines) + "\n"


def log_of(text):
    return read_failures(read_lines(io.BytesIO(text.encode())))


def name_in(text):
    diagnosis = diagnose(log_of(text))
    return None if diagnosis is None else diagnosis.name


STEPS = "".join(f"{{'loss': '2.{step}', 'grad_norm': '1.5'}}\n" for step in range(5))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n\n",
        STEPS,
        "Guarding against CUDA out of memory. Set NCCL_DEBUG=INFO on NCCL errors.\n" + STEPS,
        "[WARNING] async_io requires the dev libaio .so object and headers but these were not "
        "found.\n" + STEPS,
        "If you see 'No space left on device' or EADDRINUSE, read the docs.\n" + STEPS,
        "W1121 api.py: retrying after Connection reset by peer\n" + STEPS,
        "Skipping import: ModuleNotFoundError: No module named 'apex'\n" + STEPS,
        "The port was killed and the Killed process restarted.\n" + STEPS,
        traceback("ConnectionError: wandb is away") + STEPS,
        traceback(OUT) + "Retrying with a batch of 2.\n" + STEPS,
        traceback("KeyError: 'x'") + "{'train_runtime': '3.1', 'train_loss': '2.1'}\n",
        "{'loss': 'nan', 'grad_norm': 'nan'}\n" + STEPS,
        "100%|##| 5/5 [00:01<00:00]\rnan is no loss here: loss: 2.5\n",
        STEPS + "[INFO] [launch.py:367:main] Process 71 exits with return code = 0\n",
    ],
)
def test_a_healthy_log_gives_no_cause(text):
    log = log_of(text)
    assert diagnose(log) is None
    assert slow_causes(log) == []


def without_head(text):
    return text.split("\n", 1)[1]


BOX = f"""╭──────────── Traceback (most recent call last) ────────────╮
│ /v/torch/autograd/graph.py:824 in _run_backward           │
│ ❱ 824 │   run()                                           │
╰───────────────────────────────────────────────────────────╯
{OUT}
"""
NOTEBOOK = f"""OutOfMemoryError                          Traceback (most recent call last)
Cell In[7], line 1
----> 1 trainer.train()

File /v/torch/autograd/graph.py:824, in Node._run_backward(self, **more)
    823 try:
--> 824     run()

{OUT}
"""


@pytest.mark.parametrize(
    "text",
    [
        without_head(traceback(OUT)),
        without_head(traceback(OUT, before="(Worker pid=9) ")),
        without_head(traceback(OUT)).replace("  ", " "),
        BOX,
        "".join(f"(Worker pid=9) {line}\n" for line in BOX.splitlines()),
        NOTEBOOK,
        traceback(OUT, before="ERROR core.py:3 ").replace("Trace", "it failed: Trace"),
        f"{OUT}\nwhatever\nfollows\n",
        f"2026-11-26 10:00:00 - ERROR - trainer - {OUT}\nwhatever\n",
        f"[rank0]:[rank0]:[E128 13:23:00.7 ProcessGroupNCCL.cpp:1897] ended: {OUT}\nwhatever\n",
    ],
)
def test_an_error_is_found_whatever_stands_around_it(text):
    for log in (text, text + "  0%|      | 0/9 [00:00<?, ?it/s]\n" * 5):
        assert name_in(log) == "cuda-out-of-memory"


def test_the_frames_of_a_box_and_of_a_notebook_are_read():
    for text in (BOX, NOTEBOOK):
        assert log_of(text).failures[0].frames[-1].endswith("in _run_backward")
        assert "It was in backward" in diagnose(log_of(text)).text


def test_an_error_without_a_traceback_counts_behind_those_with_one():
    assert name_in(f"{OUT}\nwhatever\n\n{traceback('ValueError: the flux is off')}") == "unknown"
    assert name_in(f"ERROR: {OUT}\n{traceback(CLOSED)}") == "cuda-out-of-memory"
    assert name_in(f"UserWarning: it ended with {OUT}\nwhatever\n") is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("ValueError: the flux is off\nwhatever\n", "does not show whether it ended the run"),
        ("12:00 ERROR the flux is off\nwhatever\n", "does not show whether it ended the run"),
        (traceback(OUT).rsplit("\n", 2)[0] + "\n", "breaks off in a traceback of a rank"),
    ],
)
def test_an_error_that_may_not_have_ended_the_run_is_a_reason_to_doubt(text, says):
    assert diagnose(log_of(text)) is None
    (found,) = doubts(log_of(text))
    assert found.name == "unknown"
    assert says in found.text
    assert doubts(log_of(text + STEPS)) == []


def test_an_error_that_several_ranks_wrote_into_one_line_is_found():
    said = "assert param.ds_status == ZeroParamStatus.AVAILABLE, param.ds_summary()"
    for torn in (f"{said}AssertionError   \n", f"    AssertionError{said}\n{said}\n"):
        assert name_in(torn + "tensor.shape:\n") == "zero3-weights-not-there"


def test_a_stack_that_is_no_exceptions_is_none():
    stack = without_head(traceback("Model: tiny")) + "one\ntwo\nthree\nfour\n"
    assert (diagnose(log_of(stack)), doubts(log_of(stack))) == (None, [])
    assert name_in(stack + f"{OUT}\n") == "cuda-out-of-memory"


def test_an_assertion_without_words_is_shown_with_its_condition():
    text = traceback("AssertionError").replace("step()", "assert len(rows) == 2")
    found = diagnose(log_of(text))
    assert found is not None
    assert found.text.endswith("AssertionError at assert len(rows) == 2")


def test_a_loss_that_ends_in_nan_is_named():
    assert name_in(STEPS + "{'loss': '0.0', 'grad_norm': 'nan'}\n") == "not-finite"
    assert name_in(STEPS + '{"loss": NaN}\n') == "not-finite"


OURS = StepLines(9, tokens_per_step=None, peak=lambda: None)
RATE = {"learning_rate": 1e-5}
NAN = float("nan")
LOSS = "{{'loss': '{}', 'grad_norm': '{}', 'epoch': '0.1'}}\n"
END = "{'train_runtime': '3.1', 'train_loss': '0.0'}\n"


@pytest.mark.parametrize(
    ("text", "name", "says"),
    [
        (LOSS.format("0.0", "nan") * 5 + END, "not-finite", "The last grad_norm in the log is nan"),
        (LOSS.format("0.0", "0.0") * 5 + END, "nothing-learned", "norm is 0.0 in each of 5 lines"),
        (LOSS.format("2.5", "0.0") * 5 + END, "nothing-learned", "norm is 0.0 in each of 5 lines"),
        ("{'loss': '0.0'}\n" * 3 + END, "nothing-learned", "The loss is 0.0 in each of 3 lines"),
        (STEPS + "{'eval_loss': 'nan', 'epoch': '1.0'}\n", "not-finite", "The last eval_loss"),
        (
            STEPS + LOSS.format("2.1", "0.0") * 3,
            "nothing-learned",
            "norm is 0.0 in the last 3 lines",
        ),
        (" iteration 5/ 9 | grad norm: nan | nan iterations: 0 |\n", "not-finite", "grad_norm"),
        (
            "  train_loss     =    0.0\n",
            "nothing-learned",
            "mean loss of the whole training is 0.0",
        ),
        ("loss: tensor(nan, device='cuda:0')\n", "not-finite", "The last loss"),
        (OURS.of(2, {"loss": 2.5}) + "\n" + OURS.of(3, RATE | {"loss": NAN}), "not-finite", "nan"),
        (
            "Step | Training Loss\n-- | --\n1 | 0.0\n2 | 0.0\n3 | 0.0\n",
            "nothing-learned",
            "loss is 0.0",
        ),
        (
            "Epoch\tTraining Loss\tValidation Loss\n1\t2.4\tnan\n",
            "not-finite",
            "The last eval_loss",
        ),
    ],
)
def test_a_run_that_learned_nothing_did_not_go_well(text, name, says):
    found = diagnose(log_of(text))
    assert found is not None
    assert found.name == name
    assert says in found.text
    assert found.evidence[0].startswith("line ")


def test_reasons_to_doubt_a_run_are_named_where_there_is_no_error():
    constant = LOSS.format("11.93", "1.5") * 4
    assert [found.name for found in doubts(log_of(constant))] == ["nothing-learned"]
    assert doubts(log_of(STEPS)) == []
    lost = (LOSS.format("2.5", "nan") + LOSS.format("2.4", "1.5")) * 3
    assert [found.name for found in doubts(log_of(lost))] == ["not-finite"]
    # The first steps in fp16 overflow until the loss scale has shrunk.
    assert doubts(log_of(LOSS.format("2.5", "nan") + LOSS.format("2.5", "inf") * 2 + STEPS)) == []
    rewarded = LOSS.replace("}}", ", 'reward': 1}}")
    assert name_in(STEPS + rewarded.format("0.0", "0.0") * 3) is None
    # A policy's first steps: the loss is 0 and its gradient is not.
    policy = "".join(LOSS.format("0.0", f"0.{step}1") for step in range(4))
    assert (name_in(policy), doubts(log_of(policy))) == (None, [])
    for line, name in (
        (
            "Some weights of LlamaForCausalLM were not initialized from the model checkpoint at a "
            "and are newly initialized: ['lm_head.weight']",
            "new-weights",
        ),
        (
            "- MISSING\t:those params were newly initialized because missing from the checkpoint. "
            "Consider training on your downstream task.",
            "new-weights",
        ),
        (
            "return_assistant_tokens_mask==True but chat template does not contain "
            "`{% generation %}` keyword.",
            "template-without-marks",
        ),
        (
            "UserWarning: Could not find response key `a` in the following instance: b. This "
            "instance will be ignored in loss calculation.",
            "rows-dropped",
        ),
    ):
        log = log_of(f"{line}\n{STEPS}")
        assert diagnose(log) is None
        assert [found.name for found in doubts(log)] == [name]
        assert name_in(f"{line}\n{traceback(OUT)}") == "cuda-out-of-memory"


@pytest.mark.parametrize("before", [5, PIECE_BYTES - 60, 10 * PIECE_BYTES])
def test_an_error_inside_a_line_of_megabytes_is_found(before):
    line = f"{'x' * before} {OUT} {'y' * 10 * PIECE_BYTES}"
    found = diagnose(log_of(f"{STEPS}{line}\n"))
    assert found is not None
    assert found.name == "cuda-out-of-memory"
    assert found.evidence[0].startswith("line 6: torch.OutOfMemoryError: CUDA out of memory.")
    assert name_in(f"Guarding against {OUT}\n{STEPS}") is None


RELEASES = {
    "TypeError: SFTTrainer.__init__() got an unexpected keyword argument 'tokenizer'": (
        "other-release"
    ),
    "TypeError: compute_loss() got an unexpected keyword argument 'num_items_in_batch'": (
        "other-release"
    ),
    "AttributeError: 'SFTConfig' object has no attribute 'max_seq_length'": "other-release",
    "ImportError: cannot import name 'AdamW' from 'transformers' (/v/__init__.py)": "moved-name",
    "ImportError: cannot import name 'is_a' from 'torch.b' (/v/b.py)": "packages-do-not-fit",
    "ValueError: Passing a custom data collator is not supported when using padding-free.": (
        "padding-free"
    ),
    "ValueError: DeepSpeed Zero-3 is not compatible with passing a `device_map`.": "device-map",
    "AssertionError: FSDP reduce-scatter expects uniform gradient dtype but got {torch.float32}": (
        "gradient-types-differ"
    ),
    "RuntimeError: Detected a disagreement on list contents between rank0 and rank3: ": (
        "zero3-ranks-differ"
    ),
    "AssertionError: {'id': 853, 'status': 'NOT_AVAILABLE', 'numel': 0, 'ds_numel': 0}": (
        "zero3-weights-not-there"
    ),
    "RuntimeError: You're using `assistant_only_loss=True`, but at least one example has no "
    "assistant tokens. This usually means": "no-assistant-tokens",
    "AttributeError: 'LLaDAModelLM' object has no attribute 'all_tied_weights_keys'": (
        "model-code-of-transformers-4"
    ),
    "ValueError: `token_type_ids` is required as a model input when training": (
        "token-types-required"
    ),
    'torch._dynamo.exc.Unsupported: ... ValueError("token_type_ids is required as a model input '
    'when training")': "token-types-required",
    "AssertionError: count_used_parameters_in_backward requires internal PyTorch APIs that are not "
    "available in this PyTorch build.": "deepspeed-needs-newer-torch",
    "AttributeError: 'NoneType' object has no attribute 'next_functions'": (
        "deepspeed-needs-newer-torch"
    ),
    "TypeError: SFTConfig.__init__() got an unexpected keyword argument\n'max_seq_length'": (
        "other-release"
    ),
    "ValueError: Processor was not found, please check and update your model file.": (
        "processor-not-found"
    ),
    "ValueError: FSDP+TP is not supported yet": "fsdp-with-tensor-parallel",
    "TypeError: step() got an unexpected keyword argument 'flux'": "unknown",
}
"""Messages in the form of the cited sources, and their cause."""


@pytest.mark.parametrize(("error", "name"), RELEASES.items())
def test_errors_of_releases_and_of_sharding_are_named(error, name):
    assert name_in(traceback(error)) == name


KINDS = {
    "ValueError: Target modules {'a'} not found in the base model. Please check": "lora-targets",
    "ValueError: No available memory for the cache blocks. Try": "vllm-memory",
    "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.": (
        "host-out-of-memory"
    ),
    "ray.exceptions.ActorDiedError: The actor died": "ray-worker-died",
    "jinja2.exceptions.TemplateError: Conversation roles must alternate": "chat-template-refuses",
    "ValueError: Cannot use chat template functions because tokenizer.chat_template is not set": (
        "no-chat-template"
    ),
    "pyarrow.lib.ArrowInvalid: offset overflow while concatenating arrays": "arrow-overflow",
    "ValueError: Not able to read records in the JSON file at a.json.": "rows-of-other-types",
    "KeyError: 'messages'": "column-not-there",
    "hydra.errors.ConfigCompositionException: Could not override 'a.b'.": "config-file",
    "ValueError: Image features and image tokens do not match: tokens: 3, features 2": (
        "images-and-tokens"
    ),
    "ValueError: The global train batch size (2) must be evenly divisible by the number of "
    "generations per prompt (8).": "generations-and-batch",
    "ValueError: Total number of attention heads (28) must be divisible by tensor parallel size "
    "(8).": "parallel-sizes",
    "ValueError: Packing is not compatible with context parallelism (`cp_size > 1`).": (
        "settings-do-not-go-together"
    ),
    "RuntimeError: NCCL error in: a.cpp\nError while creating shared memory segment /dev/shm/n": (
        "shared-memory"
    ),
    "ValueError: loaded state dict has a different number of parameter groups": (
        "states-do-not-fit"
    ),
    "OSError: a does not appear to have a file named config.json.": "not-a-model-folder",
    "ValueError: The repository a contains custom code which must be executed to load": (
        "custom-code"
    ),
    "ValueError: has type `a` but Transformers does not recognize this architecture.": (
        "model-newer-than-transformers"
    ),
    "RuntimeError: FlashAttention only supports Ampere GPUs or newer.": "attention-not-there",
    "RuntimeError: cuDNN error: CUDNN_STATUS_NOT_INITIALIZED": "cudnn",
    "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 9": (
        "kernel-too-large"
    ),
    "wandb.errors.errors.UsageError: api_key not configured (no-tty).": "tracker-refused",
    "RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x1 and 3x2)": "shapes-differ",
    "TypeError: empty() received an invalid combination of arguments - got (str)": (
        "arguments-of-torch"
    ),
    "RuntimeError: CUDA error: an illegal instruction was encountered": "cuda-error",
    "ValueError: Default process group has not been initialized, please make sure": (
        "no-process-group"
    ),
    "RuntimeError: Trying to backward through the graph a second time": "backward-graph",
    "ValueError: The current `device_map` had weights offloaded to the disk.": (
        "quantized-model-moved"
    ),
}
"""Messages in the form of the cited sources, and their cause. None was reproduced."""


@pytest.mark.parametrize(("error", "name"), KINDS.items())
def test_errors_of_models_data_and_kernels_are_named(error, name):
    assert name_in(traceback(error)) == name


def test_a_general_cause_is_told_by_the_place_of_its_error():
    def at(error, frame):
        return name_in(traceback(error).replace('"train.py", line 3, in <module>', frame))

    wrong = "TypeError: forward() takes 2 positional arguments but 4 were given"
    assert at(wrong, '"/v/site-packages/torch/m.py", line 3, in call') == "code-of-other-release"
    assert at(wrong, '"a.py", line 3, in call') == "unknown"
    refused = "ValueError: the flux is no argument of this trainer"
    assert at(refused, '"/v/trl/trainer/a.py", line 3, in __init__') == "settings-refused"
    assert at(refused, '"/v/trl/trainer/a.py", line 3, in train') == "unknown"
    mapped = '"/v/datasets/arrow_dataset.py", line 3, in _map_single'
    assert at("ZeroDivisionError: division by zero", mapped) == "row-function-failed"
    muon = '"/v/optimizer.py", line 3, in zeropower_via_newtonschulz5'
    assert at("AssertionError", muon) == "muon-shapes"


def test_weights_that_are_not_gathered_are_told_by_the_function():
    mixed = "RuntimeError: aten.embedding.default: got mixed torch.Tensor and DTensor, need to"
    assert name_in(traceback(mixed, function="generate")) == "generate-under-fsdp2"
    assert name_in(traceback(mixed)) == "tensor-and-dtensor"
    empty = "IndexError: index 0 is out of bounds for dimension 0 with size 0"
    assert name_in(traceback(empty, function="_init_weights")) == "padding-index-under-zero3"
    assert name_in(traceback(empty)) == "unknown"
    listed = "AttributeError: 'list' object has no attribute 'keys'"
    keys = "get_expanded_tied_weights_keys"
    assert name_in(traceback(listed, function=keys)) == "tied-keys-as-list"
    assert name_in(traceback(listed)) == "unknown"


def test_colours_bars_times_and_carriage_returns_are_no_obstacle():
    coloured = traceback(OUT).replace("Trace", "\x1b[31mTrace").replace("torch.", "\x1b[1mtorch.")
    bar = "\r 10%|#    | 1/9 [00:01<00:09,  1.0s/it]\r 20%|##   | 2/9 [00:02<00:08,  1.0s/it]"
    assert name_in(bar + coloured) == "cuda-out-of-memory"
    assert name_in(f"{bar}{traceback(OUT)}\r") == "cuda-out-of-memory"
    dated = traceback(OUT, before="2026-11-21T10:39:00Z ")
    assert name_in(dated.replace("00Z", "01Z", 1)) == "cuda-out-of-memory"
    assert name_in(traceback(OUT).replace("\n", "\r\n")) == "cuda-out-of-memory"
    for before in ("trainer | ", " " * 6, "ERROR "):
        assert name_in(traceback(OUT, before=before)) == "cuda-out-of-memory"
    assert name_in(traceback(OUT).encode().decode() + "\udcff".encode(errors="replace").decode())


def test_the_first_failing_ranks_own_error_wins_over_echoes_and_the_launcher():
    echo = traceback(CLOSED, before="[rank0]: ")
    own = traceback("ValueError: the flux is off", before="[rank1]: ")
    wall = traceback("torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ")
    wall += "=====\ntrain.py FAILED\n-----\nRoot Cause (first observed failure):\n[0]:\n"
    wall += "  rank      : 1 (local_rank: 1)\n  exitcode  : 1 (pid: 7)\n====="
    for text in (echo + own + wall, own + echo + wall):
        diagnosis = diagnose(log_of(text))
        assert diagnosis is not None
        assert (diagnosis.name, diagnosis.ranks) == ("unknown", (1,))
        assert "ValueError: the flux is off" in diagnosis.text
        assert diagnosis.evidence[0].endswith("rank 1: ValueError: the flux is off")


def test_lines_of_two_ranks_that_mix_are_told_apart():
    first = traceback("ValueError: off", before="[rank1]: ").splitlines()
    second = traceback(OUT, before="[rank0]: ").splitlines()
    mixed = "\n".join(line for pair in zip(second, first, strict=True) for line in pair)
    diagnosis = diagnose(log_of(mixed))
    assert diagnosis is not None
    assert (diagnosis.name, diagnosis.ranks) == ("cuda-out-of-memory", (0,))
    assert diagnosis.text.startswith("On rank 0 alone: ")
    both = diagnose(log_of(mixed + "\n" + traceback(OUT, before="[rank1]: ")))
    assert both is not None
    assert both.text.startswith("On every rank: ")


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("save_pretrained", "It was saving"),
        ("from_pretrained", "It was loading"),
        ("cross_entropy", "It was computing the loss"),
        ("evaluate", "It was evaluating"),
        ("backward", "It was in backward"),
        ("adamw", "It was in the optimizer's step"),
        ("forward", "It was in forward"),
    ],
)
def test_the_part_of_the_run_that_ran_out_of_memory_is_named(function, words):
    diagnosis = diagnose(log_of(traceback(OUT, function=function)))
    assert diagnosis is not None
    assert words in diagnosis.text


def test_an_exception_behind_another_is_one_failure_with_the_cause_in_it():
    text = traceback(OUT) + "\nDuring handling of the above exception, another exception occurred:"
    text += "\n\n" + traceback("RuntimeError: cleaning up failed")
    log = log_of(text)
    assert len(log.failures) == 1
    assert name_in(text) == "cuda-out-of-memory"


def test_an_error_without_words_is_known_by_its_function_alone():
    engine = 'File "/v/deepspeed/runtime/engine.py", line 9, in _load_zero_checkpoint'
    silent = traceback("AssertionError")
    loading = silent.replace('File "train.py", line 3, in <module>', engine)
    assert name_in(loading) == "zero-checkpoint-does-not-fit"
    assert name_in(silent) == "unknown"
    assert name_in(loading.replace("AssertionError", "AssertionError: too few rows")) == "unknown"


def test_nccl_errors_are_named_and_those_of_a_lost_rank_are_echoes():
    error = "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:341, "
    assert name_in(traceback(f"{error}unhandled system error")) == "nccl"
    remote = f"{error}remote process exited or there was a network error\nncclRemoteError: A call"
    assert name_in(traceback(remote)) == "neighbour-gone"


def test_an_error_of_nccl_after_a_timeout_of_the_same_rank_follows_from_it():
    error = traceback("RuntimeError: NCCL error in: a.cpp:38, unhandled cuda error")
    named = {
        watchdog(0, 7) + error: "collective-not-reached",
        watchdog(0, 7) + error.replace("\n", "\n[rank0]: "): "collective-not-reached",
        error + watchdog(0, 7): "nccl",
        watchdog(0, 7) + traceback("RuntimeError: NCCL error in: a", before="[rank1]: "): "nccl",
    }
    assert {text: name_in(text) for text in named} == named


def test_devices_and_the_order_of_modules_are_named():
    """In the form of the cited lines, not reproduced."""
    devices = "RuntimeError: Expected all tensors to be on the same device, but found at least two "
    diagnosis = diagnose(log_of(traceback(f"{devices}devices, cuda:0 and cpu!")))
    assert diagnosis is not None
    assert diagnosis.name == "several-devices"
    assert "cuda:0 and cpu" in diagnosis.text
    order = "RuntimeError: tracing error at step 6: \nmodule id: 1, training: True\nexpected the"
    assert name_in(traceback(order)) == "zero3-order-of-modules"


REFUSED = {
    "RepositoryNotFoundError: 404 Client Error. (Request ID: 7)": "hub-refused",
    "RemoteEntryNotFoundError: 404 Client Error. (Request ID: 7)": "hub-refused",
    "HTTPStatusError: 429 Too Many Requests for url https://huggingface.co/a/resolve/main/b": (
        "hub-refused"
    ),
    "OSError: a/b is not a local folder and is not a valid model identifier": "hub-refused",
    "GatedRepoError: 401 Client Error. (Request ID: 7)": "gated-model",
    "LocalEntryNotFoundError: outgoing traffic has been disabled": "hub-unreachable",
}
"""Errors of the Hub's client, in the form of its installed source, and their cause."""


@pytest.mark.parametrize(("error", "name"), REFUSED.items())
def test_a_hub_that_refuses_is_told_from_one_that_is_not_reached(error, name):
    assert name_in(traceback(f"huggingface_hub.errors.{error}")) == name


def watchdog(rank, number, before=""):
    line = f"[Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={number})"
    return f"{before}[E1121 ProcessGroupNCCL.cpp:629] {line}\n"


def test_the_rank_that_others_waited_for_is_named():
    bar = " 20%|##   | 2/9 [00:02<00:08,  1.0s/it]"
    behind = watchdog(5, 7, before="[rank5]:") + watchdog(0, 9, before=f"{bar}[rank0]:")
    diagnosis = diagnose(log_of(behind))
    assert diagnosis is not None
    assert (diagnosis.name, diagnosis.ranks) == ("collective-not-reached", (0, 5))
    assert "Rank 5 was the furthest behind, in collective 7 " in diagnosis.text
    alike = diagnose(log_of(watchdog(0, 7) + watchdog(1, 7) + watchdog(0, 8)))
    assert alike is not None
    assert alike.ranks == (0, 1)
    assert alike.text.endswith("before its time limit.")
    barrier = "RuntimeError: [Rank 0]: Ranks 1, 3 failed to pass monitoredBarrier in 3000 ms"
    named = diagnose(log_of(traceback(barrier, before="[rank0]: ")))
    assert named is not None
    assert named.text.endswith("Ranks 1 and 3 did not get there.")


def test_an_exit_code_without_an_error_is_unknown_and_a_signal_is_named():
    ended = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
    report = "Root Cause (first observed failure):\n  rank      : 3 (local_rank: 1)\n"
    for code, name in ((-9, "killed"), (-7, "bus-error"), (5, "unknown"), (-6, "unknown")):
        report_of = f"{report}  exitcode  : {code} (pid: 7)\n"
        diagnosis = diagnose(log_of(traceback(ended) + report_of))
        assert diagnosis is not None
        assert (diagnosis.name, diagnosis.ranks) == (name, (3,))


def test_an_exit_code_is_read_from_any_part_of_the_launchers_report():
    old = "ERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: {}) "
    old += "local_rank: 2 (pid: 7)"
    part = "  rank      : 2 (local_rank: 2)\n  exitcode  : {} (pid: 7)\n"
    for report in (old, part):
        assert name_in(report.format(-9)) == "killed"
        left = diagnose(log_of(f"the last words\n====================\n{report.format(1)}"))
        assert left is not None
        assert (left.name, left.ranks) == ("unknown", (2,))
        assert "its traceback went elsewhere" in left.text
        assert left.evidence[0] == "line 1: the last words"


def test_a_rank_that_was_killed_after_its_own_error_did_not_lack_one():
    ended = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
    report = "Root Cause (first observed failure):\n  rank      : {} (local_rank: 1)\n"
    errors = traceback(OUT, before="[rank1]: ") + traceback(OUT, before="[rank0]: ")
    for rank, name in ((0, "cuda-out-of-memory"), (1, "cuda-out-of-memory"), (2, "killed")):
        killed = f"{traceback(ended)}{report.format(rank)}  exitcode  : -9 (pid: 7)\n"
        assert name_in(errors + killed) == name


def test_an_error_without_its_traceback_counts_where_the_log_ends_with_it():
    assert name_in(f"step 3 of 9\n{OUT}\n") == "cuda-out-of-memory"
    assert name_in("step 3 of 9\nValueError: the flux is off\n\n") == "unknown"
    assert name_in("ValueError: the flux is off\nwhatever\n") is None


def test_an_exception_in_native_code_is_one_of_its_rank():
    def aborted(message):
        begin = "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n"
        return f"step 3 of 9\n{begin}  what():  {message}\ntoolkit: ddp engaged\n"

    sizes = "[enforce fail at pair.cc:456] op.preamble.length <= op.nbytes. 34528 vs 4."
    assert name_in(aborted(sizes)) == "collective-mismatch"
    other = diagnose(log_of(aborted("the flux is off")))
    assert other is not None
    assert other.name == "unknown"
    assert "The first error of a rank: the flux is off" in other.text
    assert other.evidence == ("line 3: the flux is off",)


def test_the_watchdogs_line_is_found_without_an_exception():
    line = "toolkit: nothing has progressed for 10 s (no step, batch, save, build or compile), and "
    line += "the run was ended; saved files stay: rank 1 is missing: it is stopped (SIGSTOP)"
    found = diagnose(log_of(f"{STEPS}{line}\ntoolkit: rank 0, after step 3, is at a.py:1 f\n"))
    assert found is not None
    assert found.name == "hang"
    assert "rank 1 is missing: it is stopped (SIGSTOP)" in found.text


SLURM = "slurmstepd: error: *** JOB 7 ON node1 CANCELLED AT 2026-11-24T10:00:00 DUE TO "
OUTSIDE = {
    f"{SLURM}TIME LIMIT ***": ("slurm-cancelled", "(reason: TIME LIMIT)"),
    f"{SLURM}PREEMPTION ***": ("slurm-cancelled", "(reason: PREEMPTION)"),
    f"{SLURM}NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***": (
        "slurm-cancelled",
        "(reason: NODE FAILURE)",
    ),
    f"{SLURM.removesuffix(' DUE TO ')} ***": ("slurm-cancelled", "(reason: not named)"),
    "slurmstepd: error: Detected 2 oom-kill event(s) in StepId=7.0. Some of your processes may "
    "have been killed by the cgroup out-of-memory handler.": ("slurm-out-of-memory", "RAM"),
    "error: StepId=7.0 exceeded memory limit (734003200 > 52428800), being killed": (
        "slurm-out-of-memory",
        "RAM",
    ),
    "      Reason:       OOMKilled": ("pod-out-of-memory", "limit"),
    "Message: The node was low on resource: memory. ": ("pod-evicted", "memory"),
    "NVRM: Xid (PCI:0000:2b:00): 79, GPU has fallen off the bus.": ("gpu-failed", "failed"),
}
"""Lines in the form of the cited sources. None was reproduced."""


@pytest.mark.parametrize(("line", "expected"), OUTSIDE.items())
def test_the_machine_or_scheduler_counts_before_what_the_ranks_made_of_it(line, expected):
    name, words = expected
    stopped = traceback(
        "torch.distributed.elastic.multiprocessing.api.SignalException: Process 7 got signal: 15"
    )
    ended = "Root Cause (first observed failure):\n  rank      : 1 (local_rank: 1)\n"
    ended += "  exitcode  : -9 (pid: 7)\n"
    for text in (f"{line}\n{stopped}", f"{stopped}{line}\n", f"{ended}{line}\n"):
        found = diagnose(log_of(STEPS + text))
        assert found is not None
        assert found.name == name
        assert words in found.text
        assert line.strip()[:60] in found.evidence[0]


DRIVER = {
    "RuntimeError: The NVIDIA driver on your system is too old (found version 11040).": "driver",
    "RuntimeError: Found no NVIDIA driver on your system. Please check": "driver",
    "RuntimeError: CUDA unknown error - this may be due to an incorrectly set up env": "driver",
    "torch.AcceleratorError: CUDA error: invalid device ordinal": "gpu-not-there",
    "RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable": "gpu-busy",
    "RuntimeError: CUDA error: all CUDA-capable devices are busy or unavailable": "gpu-busy",
    "torch.AcceleratorError: CUDA error: device-side assert triggered": "device-side-assert",
    "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`": "cublas",
    "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:275, invalid usage\n"
    "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 10": "nccl-shared-gpu",
}
"""Messages in the form of the cited sources, and their cause. None was reproduced."""


@pytest.mark.parametrize(("error", "name"), DRIVER.items())
def test_errors_of_cuda_and_its_driver_are_told_apart(error, name):
    assert name_in(traceback(error)) == name


def test_paged_states_on_the_gpu_end_a_process_by_a_line_of_bitsandbytes():
    """In the form of the cited thread, not reproduced: the process then leaves with code 1."""
    line = "Error invalid argument at line 12 in file /src/csrc/pythonInterface.cpp"
    assert name_in(STEPS + line + "\n") == "paged-states-on-gpu"
    assert name_in(f" 0%|    | 0/4 [00:00<?, ?it/s]{line}\n") == "paged-states-on-gpu"
    assert name_in(line.replace("pythonInterface", "other") + "\n" + STEPS) is None


def test_a_size_that_differs_is_one_of_bitsandbytes_in_fsdp1s_saving_alone():
    error = "RuntimeError: The size of tensor a (5) must match the size of tensor b (3) at"
    saving = 'File "/v/torch/distributed/fsdp/_optim_utils.py", line 9, in _convert_all_state_info'
    elsewhere = traceback(error)
    assert name_in(elsewhere) == "shapes-differ"
    named = elsewhere.replace('File "train.py", line 3, in <module>', saving)
    assert name_in(named) == "bitsandbytes-under-fsdp1"


def test_deepspeeds_own_times_tell_of_communication():
    def breakdown(reduce):
        return f"time (ms) | fwd: 30.0 | bwd: 60.0 | bwd_allreduce: {reduce} | step: 10.0\n"

    (slow,) = slow_causes(log_of(breakdown(44.0) * 3))
    assert slow.name == "slow-communication"
    assert "44% of the step" in slow.text
    assert slow_causes(log_of(breakdown(4.0) * 3)) == []


def test_numbers_of_lines_are_those_of_the_file_whatever_its_size():
    bar = "\r".join(f"{step}/99 [00:01<00:02]" for step in range(200_000))
    assert len(bar) > 2 * PIECE_BYTES
    diagnosis = diagnose(log_of(f"begin\n{bar}\nmiddle\n{traceback(OUT)}"))
    assert diagnosis is not None
    assert diagnosis.evidence == (f"line 7: {OUT}",)


def test_many_failures_are_kept_in_little_room():
    log = log_of(traceback("ValueError: off") * 999)
    assert len(log.failures) == 200
    assert log.lines == 4 * 999


def test_lines_of_a_text_are_numbered_from_one():
    assert [line.number for line in lines_of(["a", "b"])] == [1, 2]


@pytest.mark.parametrize(
    ("error", "code", "named"),
    [
        (CLOSED, -9, ("killed", (1,))),
        (CLOSED, -15, ("neighbour-gone", (0,))),
        ("ValueError: no such column", -9, ("unknown", (0,))),
    ],
)
def test_a_rank_that_was_killed_is_named_where_its_neighbour_was_seen_to_end_first(
    error, code, named
):
    one = "[{rank}]:\n  rank      : {rank} (local_rank: {rank})\n  exitcode  : {code} (pid: 7)\n"
    report = one.format(rank=1, code=code) + "Root Cause (first observed failure):\n"
    text = traceback(error, before="[rank0]: ") + report + one.format(rank=0, code=1)
    diagnosis = diagnose(log_of(text))
    assert (diagnosis.name, diagnosis.ranks) == named
