"""Fail of each cause that a single process without a GPU can fail of, with the real libraries.

    python fail_in_many_ways.py FOLDER

Prints a line `===== <cause>` before each failure. A function has the name of its cause, with
underscores, and a number where a cause has several messages.
"""

import argparse
import ctypes.util
import datetime
import json
import os
import re
import resource
import signal
import subprocess
import sys
import traceback
import types
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

FOLDER = Path(sys.argv[1])
SECOND = datetime.timedelta(seconds=1)


@contextmanager
def limited(kind, value):
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (value, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


@contextmanager
def variables(**values):
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def no_nvcc():
    """Hide CUDA's compiler from torch, as on a machine that has none."""
    from torch.utils import cpp_extension

    before, cpp_extension.CUDA_HOME = cpp_extension.CUDA_HOME, None
    try:
        yield
    finally:
        cpp_extension.CUDA_HOME = before


class Dies(torch.utils.data.Dataset):
    def __init__(self, how):
        self.how = how

    def __len__(self):
        return 3

    def __getitem__(self, index):
        self.how()


class Half(nn.Module):
    """Uses one of its layers."""

    def __init__(self, *, whole=False):
        super().__init__()
        self.used, self.unused = nn.Linear(3, 5), nn.Linear(3, 5)
        self.whole = whole

    def forward(self, rows):
        return self.used(rows) + (self.unused(rows) if self.whole else 0)


def two_steps(model):
    for _ in range(2):
        model(torch.ones(1, 3)).sum().backward()


def mesh():
    return dist.init_device_mesh("cpu", (1,), mesh_dim_names=("dp_shard",))


def shared_memory():
    list(
        torch.utils.data.DataLoader(
            Dies(lambda: os.kill(os.getpid(), signal.SIGBUS)), num_workers=1
        )
    )


def data_worker_died():
    list(torch.utils.data.DataLoader(Dies(lambda: os._exit(3)), num_workers=1))


def host_out_of_memory():
    torch.empty(2**52)


def port_taken():
    store = dist.TCPStore("127.0.0.1", 0, 1, True)
    dist.TCPStore("127.0.0.1", store.port, 1, True)


def rank_missing():
    dist.TCPStore("127.0.0.1", 0, 2, True, timeout=SECOND)


def meeting_point_unreachable():
    dist.TCPStore("127.0.0.1", 1, 2, False, timeout=SECOND)


def network_interface():
    with variables(GLOO_SOCKET_IFNAME="nosuch0"):
        dist.new_group([0])


def no_backend_for_device():
    dist.all_reduce(torch.ones(3), group=dist.new_group([0], backend="cuda:gloo"))


def unused_parameters():
    two_steps(nn.parallel.DistributedDataParallel(Half()))


def slow_unused_parameters():
    model = nn.parallel.DistributedDataParallel(Half(whole=True), find_unused_parameters=True)
    two_steps(model)


def nothing_to_train():
    nn.parallel.DistributedDataParallel(nn.ReLU())


def inference_tensors():
    with torch.inference_mode():
        gathered = torch.ones(2)
    torch.ones(2, requires_grad=True) * gathered


def no_gradient_to_follow():
    torch.ones(2).sum().backward()


def recomputed(layer):
    from torch.utils.checkpoint import checkpoint

    checkpoint(layer, torch.ones(7, requires_grad=True), use_reentrant=False).backward()


def recomputed_differently():
    sizes = iter((3, 5))

    def layer(rows):
        return rows[: next(sizes)].square().sum()

    recomputed(layer)


def recomputed_differently_2():
    powers = iter((2, 1))

    def layer(rows):
        for _ in range(next(powers)):
            rows = rows.square()
        return rows.sum()

    recomputed(layer)


def refused():
    from toolkit.rehearse import print_reason

    print_reason(3, "refused: what engaged is not what was asked. zero_stage: asked 3, engaged 0")


def guard():
    from toolkit.rehearse import print_reason

    print_reason(1, "stopped by a guard: ranks read the data in a different order at step 3.")


def not_finite():
    torch.multinomial(torch.tensor([float("nan"), 1.0]), 1)


def not_finite_2():
    from toolkit.errors import GuardError

    raise GuardError("The loss of step 7 is not finite: nan on rank 1.")


def mismatched(config, sizes=types.MappingProxyType({"hidden_size": 3})):
    from transformers import TrainingArguments
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    arguments = TrainingArguments(output_dir=str(FOLDER), use_cpu=True)
    config = HfTrainerDeepSpeedConfig({"zero_optimization": {"stage": 2}} | config)
    config.trainer_config_process(arguments)
    model = types.SimpleNamespace(config=types.SimpleNamespace(**sizes))
    config.trainer_config_finalize(arguments, model, 260)


def deepspeed_config_mismatch():
    mismatched({"gradient_accumulation_steps": 4})


def deepspeed_config_mismatch_2():
    mismatched({"train_micro_batch_size_per_gpu": "8"})


def yaml_and_json_conflict():
    from accelerate.utils import DeepSpeedPlugin

    file = FOLDER / "zero2.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    given = "deepspeed_config_file,zero_stage,mixed_precision"
    with variables(ACCELERATE_CONFIG_DS_FIELDS=given, ACCELERATE_DEEPSPEED_CONFIG_FILE=str(file)):
        DeepSpeedPlugin(hf_ds_config=str(file))


def unknown_yaml_keys():
    from accelerate.commands.config.config_args import load_config_from_file

    file = FOLDER / "ddp.yaml"
    file.write_text("distributed_type: MULTI_GPU\nnum_proceses: 2\n")
    load_config_from_file(str(file))


def deepspeed_config(**content):
    from deepspeed.runtime.config import DeepSpeedConfig

    DeepSpeedConfig(content)


def deepspeed_config_mismatch_3():
    from accelerate.utils import DeepSpeedPlugin

    plugin = DeepSpeedPlugin(
        hf_ds_config={"train_batch_size": 8, "zero_optimization": {"stage": 2}}
    )
    plugin.deepspeed_config_process(must_match=True, train_batch_size=3)


def deepspeed_auto():
    deepspeed_config(train_batch_size="auto")


def deepspeed_auto_2():
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    deepspeed_config(**dict.fromkeys(names, "auto"))


def deepspeed_hidden_size():
    mismatched({"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}}, sizes={})


def deepspeed_file():
    from accelerate.utils import DeepSpeedPlugin

    DeepSpeedPlugin(hf_ds_config=str(FOLDER / "nowhere.json"))


def deepspeed_file_of(path):
    """What a missing file's path gives in base64, by how many of its letters count there."""
    from deepspeed.runtime.config import DeepSpeedConfig

    DeepSpeedConfig(path)


def deepspeed_file_2():
    deepspeed_file_of("zero2.json")


def deepspeed_file_3():
    deepspeed_file_of("my_zero2.json")


def deepspeed_file_4():
    deepspeed_file_of("a/zero2.json")


def deepspeed_file_5():
    deepspeed_file_of("zéro2.json")


def deepspeed_keys_twice():
    from deepspeed.runtime.config import DeepSpeedConfig

    file = FOLDER / "twice.json"
    file.write_text('{"train_batch_size": 3, "train_batch_size": 5}')
    DeepSpeedConfig(str(file))


def warmup_steps():
    from deepspeed.runtime.lr_schedules import WarmupLR

    WarmupLR(torch.optim.SGD(nn.Linear(3, 5).parameters()), warmup_num_steps=0)


def two_precisions():
    deepspeed_config(train_batch_size=1, fp16={"enabled": True}, bf16={"enabled": True})


def two_precisions_2():
    from transformers import TrainingArguments

    TrainingArguments(str(FOLDER), use_cpu=True, bf16=True, fp16=True)


def weights_in_fp16():
    model = nn.Linear(3, 5).half()
    optimizer, scaler = torch.optim.SGD(model.parameters()), torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(1, 3).half()).sum()).backward()
    scaler.unscale_(optimizer)


def device_ids():
    nn.parallel.DistributedDataParallel(nn.Linear(3, 5), device_ids=[0])


def package_too_old():
    from transformers.utils.versions import require_version

    require_version("torch>=99.0")


def packages_do_not_fit():
    from torch import NoSuchTensor  # noqa: F401


def moved_name():
    exec(compile("from transformers import AdamW", "train.py", "exec"))


class Unmoved(nn.Module):
    """Has a loss that does not depend on its weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, input, **_):
        return {"loss": (self.weight * 0 * input).sum() + 1}


def nothing_learned():
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments(
        str(FOLDER / "unmoved"),
        use_cpu=True,
        report_to="none",
        remove_unused_columns=False,
        disable_tqdm=True,
        logging_steps=1,
        max_steps=4,
    )
    rows = [{"input": torch.ones(2)}] * 32
    Trainer(model=Unmoved(), args=args, train_dataset=rows).train()


def other_release():
    from transformers import TrainingArguments

    TrainingArguments(output_dir=str(FOLDER / "release"), evaluation_strategy="no")


def other_release_2():
    from transformers import Trainer, TrainingArguments

    class Own(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False):
            return model(**inputs).sum()

    args = TrainingArguments(
        str(FOLDER / "release"), use_cpu=True, report_to="none", remove_unused_columns=False
    )
    rows = [{"input": torch.ones(2)}] * 8
    Own(model=nn.Linear(2, 2), args=args, train_dataset=rows).train()


def other_release_3():
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments(str(FOLDER / "release"), use_cpu=True, report_to="none")
    Trainer(model=nn.Linear(2, 2), args=args).tokenizer.decode([1])


def deepspeed_batch_sizes():
    sizes = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 3}
    deepspeed_config(**sizes, gradient_accumulation_steps=1)


def deepspeed_no_batch_size():
    deepspeed_config()


def deepspeed_removed_feature():
    deepspeed_config(train_batch_size=1, elasticity={"enabled": True})


def deepspeed_unknown_key():
    deepspeed_config(train_batch_size=1, zero_optimization={"stage": 2, "overlap_com": True})


def deepspeed_value():
    deepspeed_config(train_batch_size=1, zero_optimization={"stage": 7})


def no_zero_section():
    from accelerate.utils import DeepSpeedPlugin

    DeepSpeedPlugin(hf_ds_config={"train_batch_size": 1})


def fsdp2(**settings):
    from accelerate.utils import FullyShardedDataParallelPlugin

    FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False, **settings)


def keys_of_fsdp1():
    fsdp2(reshard_after_forward="FULL_SHARD")


def keys_of_fsdp1_2():
    fsdp2(state_dict_type="LOCAL_STATE_DICT")


def keys_of_fsdp1_3():
    fsdp2(forward_prefetch=False)


def unknown_flag():
    argparse.ArgumentParser().parse_args(["--no_such", "3"])


def strategies_of_saving_and_evaluating():
    from transformers import TrainingArguments

    strategies = {"eval_strategy": "steps", "save_strategy": "epoch"}
    TrainingArguments(str(FOLDER), use_cpu=True, load_best_model_at_end=True, **strategies)


def strategies_of_saving_and_evaluating_2():
    from transformers import TrainingArguments

    steps = {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 3, "save_steps": 5}
    TrainingArguments(str(FOLDER), use_cpu=True, load_best_model_at_end=True, **steps)


def parallelism_config():
    from accelerate.parallelism_config import ParallelismConfig

    ParallelismConfig(dp_replicate_size=2, tp_size=2)


def parallelism_config_2():
    from accelerate.parallelism_config import ParallelismConfig

    ParallelismConfig(cp_size=2, sp_size=2)


def mesh_dimensions():
    mesh()["dp_replicate", "tp"]


def wrapped_class():
    from accelerate.utils import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoder"],
        cpu_ram_efficient_loading=False,
    )
    plugin.set_auto_wrap_policy(nn.Linear(3, 5))


def mixed():
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3).bfloat16())


def uniform_dtype():
    flattened(mixed())


def uniform_dtype_2():
    model = mixed()
    fully_shard(model, mesh=mesh())
    model(torch.ones(1, 3))


def flattened(model):
    FullyShardedDataParallel(model, device_id=torch.device("cpu"))


def frozen_beside_trained():
    model = nn.Linear(3, 5)
    model.bias.requires_grad = False
    flattened(model)


def integer_parameters_2():
    packed = nn.Parameter(torch.zeros(3, dtype=torch.uint8), requires_grad=False)
    flattened(nn.ParameterList([packed]))


def integer_parameters():
    nn.Parameter(torch.zeros(3, dtype=torch.uint8))


def no_bf16():
    from transformers import TrainingArguments

    TrainingArguments(str(FOLDER), bf16=True)


def no_bf16_2():
    from transformers import TrainingArguments

    TrainingArguments(str(FOLDER), use_cpu=True, tf32=True)


def types_differ():
    nn.Linear(3, 5).bfloat16()(torch.ones(1, 3))


def types_differ_2():
    torch.bmm(torch.ones(1, 3, 3), torch.ones(1, 3, 3).half())


def types_differ_3():
    ones = torch.ones(1, 1, 3, 5)
    nn.functional.scaled_dot_product_attention(ones, ones.half(), ones)


def no_sync_under_fsdp2():
    fully_shard(nn.Linear(2, 2), mesh=mesh()).no_sync()


def attribute_of_wrapped_model():
    nn.parallel.DistributedDataParallel(nn.Linear(2, 2)).save_pretrained(FOLDER / "wrapped")


def sharded_weights_saved():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, vocab_size=32, **sizes))
    fully_shard(model, mesh=mesh())
    model.save_pretrained(FOLDER / "sharded")


def gradient_types_differ():
    torch._chunk_cat([torch.ones(2, 2), torch.ones(2, 2, dtype=torch.bfloat16)], 0, 1)


def tensor_and_dtensor():
    from torch.distributed.tensor import Replicate, distribute_tensor

    distribute_tensor(torch.ones(3), mesh(), [Replicate()]) + torch.ones(3)


def stepped(model):
    """Return the model's optimizer, in 8 bits for large parameters, after a step."""
    import bitsandbytes

    optimizer = bitsandbytes.optim.AdamW8bit(model.parameters())
    model(torch.ones(1, model.in_features)).sum().backward()
    optimizer.step()
    return optimizer


def sharded(size):
    model = nn.Linear(size, size)
    fully_shard(model, mesh=mesh())
    return model


def bitsandbytes_under_fsdp2():
    stepped(sharded(64))


def bitsandbytes_under_fsdp2_2():
    stepped(sharded(3))


def bitsandbytes_under_fsdp1():
    cpu = torch.device("cpu")
    model = FullyShardedDataParallel(nn.Linear(3, 5), device_id=cpu, use_orig_params=False)
    optimizer = stepped(model)
    states = FullyShardedDataParallel.optim_state_dict(model, optimizer)
    FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, states)


def meta_weights():
    nn.Linear(3, 5, device="meta").to("cpu")


def size_zero_weights():
    nn.functional.embedding(torch.tensor([0]), torch.empty(0))


def size_zero_weights_2():
    nn.functional.linear(torch.ones(2, 3), torch.empty(0))


def size_zero_weights_3():
    nn.Linear(3, 5, bias=False).load_state_dict({"weight": torch.empty(0)})


def other_shapes():
    nn.Linear(3, 5, bias=False).load_state_dict({"weight": torch.empty(7, 3)})


def loss_scale():
    import deepspeed
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    scaler = DynamicLossScaler(
        init_scale=2,
        scale_window=9,
        min_scale=1,
        delayed_shift=1,
        consecutive_hysteresis=False,
        raise_error_at_min_scale=True,
        dtype=torch.half,
    )
    for _ in range(3):
        scaler.update_scale(True)


def dataset_script():
    import datasets

    (FOLDER / "my_data.py").write_text("rows = []\n")
    datasets.load_dataset(str(FOLDER / "my_data.py"))


def empty_dataset():
    torch.utils.data.DataLoader([], shuffle=True)


def empty_dataset_2():
    import datasets

    (FOLDER / "empty").mkdir()
    datasets.load_dataset(str(FOLDER / "empty"))


def other_columns():
    import datasets

    files = [FOLDER / "one.jsonl", FOLDER / "other.jsonl"]
    for file, column in zip(files, ("text", "prompt"), strict=True):
        file.write_text(json.dumps({column: "a"}) + "\n")
    datasets.load_dataset("json", data_files=[str(file) for file in files])


def words():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    table = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    return PreTrainedTokenizerFast(tokenizer_object=table)


def no_text():
    words()([None])


def no_text_2():
    words()(["a", 3])


def generation_config():
    from transformers import GenerationConfig

    GenerationConfig(do_sample=False, temperature=0.5).save_pretrained(FOLDER)


def config_file():
    import yaml

    yaml.safe_load("strategy: [")


def no_pad_token():
    words()(["a", "a b"], padding=True)


def rows_of_other_types():
    import datasets

    (FOLDER / "broken.jsonl").write_text('{"text": 1}\n{"text":\n')
    datasets.load_dataset("json", data_files=str(FOLDER / "broken.jsonl"))


def column_not_there():
    import datasets

    datasets.Dataset.from_dict({"text": ["a"]}).remove_columns("prompt")


def row_function_failed():
    import datasets

    datasets.Dataset.from_dict({"text": [0]}).map(lambda row: {"share": 1 / row["text"]})


def no_chat_template():
    words().apply_chat_template([{"role": "user", "content": "a"}])


def chat_template_refuses():
    template = "{{ raise_exception('Conversation roles must alternate') }}"
    words().apply_chat_template([{"role": "user", "content": "a"}], chat_template=template)


def label_out_of_range():
    nn.functional.cross_entropy(torch.ones(2, 3), torch.tensor([1, 7]))


def backward_graph():
    loss = torch.ones(3, requires_grad=True).exp().sum()
    loss.backward()
    loss.backward()


def backward_graph_2():
    output = torch.ones(3, requires_grad=True).exp()
    output += 1
    output.sum().backward()


def shapes_differ():
    torch.ones(2, 3) @ torch.ones(2, 3)


def arguments_of_torch():
    torch.empty((2,), dtype="float32")


def arguments_of_torch_2():
    torch.full((2,), "a")


def code_of_other_release():
    nn.Linear(3, 5)(torch.ones(3), None, None)


def states_do_not_fit():
    nn.Linear(3, 5).load_state_dict({})


def states_do_not_fit_2():
    model = nn.Linear(3, 5)
    saved = torch.optim.AdamW([model.weight]).state_dict()
    torch.optim.AdamW(model.parameters()).load_state_dict(saved)


def muon_shapes():
    torch.optim.Muon([nn.Parameter(torch.ones(3))])


def lora_targets():
    from peft import LoraConfig, get_peft_model

    get_peft_model(nn.Sequential(nn.Linear(3, 5)), LoraConfig(target_modules=["q_proj"]))


def not_a_model_folder():
    from transformers import AutoConfig

    (FOLDER / "bare").mkdir()
    AutoConfig.from_pretrained(FOLDER / "bare")


def settings_refused():
    from transformers import TrainingArguments

    TrainingArguments(str(FOLDER), use_cpu=True, eval_strategy="steps", eval_steps=1.5)


def model_newer_than_transformers():
    from transformers import AutoConfig

    (FOLDER / "new").mkdir()
    (FOLDER / "new" / "config.json").write_text(json.dumps({"model_type": "tomorrow"}))
    AutoConfig.from_pretrained(FOLDER / "new")


def uneven_rows():
    list(torch.utils.data.DataLoader([torch.ones(3), torch.ones(5)], batch_size=2))


def token_out_of_range():
    nn.functional.embedding(torch.tensor([9]), torch.ones(3, 5))


def disk_full():
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with limited(resource.RLIMIT_FSIZE, 4000):
        torch.save(torch.ones(9999), FOLDER / "large.pt")


def disk_full_2():
    with open("/dev/full", "w") as file:
        file.write("x" * 99999)


def zero_checkpoint_without_tag():
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    get_fp32_state_dict_from_zero_checkpoint(str(FOLDER))


def checkpoint_of_other_backend():
    from torch.distributed import checkpoint

    checkpoint.load({"weight": torch.ones(3)}, checkpoint_id=str(FOLDER / "nowhere"))


def resumed(checkpoint):
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(str(FOLDER / "run"), use_cpu=True)
    trainer = Trainer(nn.Linear(3, 5), arguments, train_dataset=[1])
    trainer.train(resume_from_checkpoint=checkpoint)


def checkpoint_not_found():
    resumed(True)


def checkpoint_not_found_2():
    resumed(str(FOLDER / "nowhere"))


def checkpoint_torn():
    from safetensors.torch import save_model

    folder = FOLDER / "run" / "checkpoint-3"
    folder.mkdir(parents=True)
    save_model(nn.Linear(3, 5), folder / "model.safetensors")
    resumed(True)


def half_of(file):
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])


def file_cut_off():
    torch.save(torch.ones(999), FOLDER / "weights.pt")
    half_of(FOLDER / "weights.pt")
    torch.load(FOLDER / "weights.pt")


def file_cut_off_2():
    from safetensors.torch import load_file, save_file

    file = FOLDER / "weights.safetensors"
    save_file({"weight": torch.ones(999)}, file)
    half_of(file)
    load_file(file)


def weights_only():
    torch.save(Path("any"), FOLDER / "object.pt")
    torch.load(FOLDER / "object.pt")


def tied_weights_saved():
    from safetensors.torch import save_file

    weight = torch.ones(3)
    save_file({"embedding": weight, "head": weight}, FOLDER / "tied.safetensors")


def compiled(source):
    from torch.utils import cpp_extension

    cpp_extension.load_inline("broken", cpp_sources=source, build_directory=str(FOLDER))


def build_failed():
    compiled("#include <no_such_header.h>\n")


def no_compiler():
    with variables(CXX="no-such-compiler"):
        compiled("int one() { return 1; }\n")


def no_python_headers():
    subprocess.run(["c++", "-x", "c++", "-c", "-"], input=b"#include <Python.h>\n", cwd=FOLDER)


def no_ninja():
    from torch.utils.cpp_extension import verify_ninja_availability

    with variables(PATH="/nowhere"):
        verify_ninja_availability()


def no_cuda_compiler():
    from deepspeed.ops.op_builder.builder import installed_cuda_version

    with no_nvcc():
        installed_cuda_version()


def no_cuda_compiler_2():
    from torch.utils import cpp_extension

    with no_nvcc():
        cpp_extension._join_cuda_home("nvcc")


def flash_attention():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 6, "intermediate_size": 10, "vocab_size": 7}
    config = LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=1)
    LlamaForCausalLM._from_config(config, attn_implementation="flash_attention_2")


def use_a_gpu():
    torch.ones(3).cuda()


if torch.version.cuda is None:
    torch_without_cuda = use_a_gpu
elif ctypes.util.find_library("cuda") is None:
    driver = use_a_gpu
else:
    gpu_not_there = use_a_gpu  # hidden by the test


def hub_unreachable():
    from transformers import AutoConfig

    AutoConfig.from_pretrained("some/model-that-is-not-there")


def file_not_there():
    Path("no/such/file.json").read_text()


def missing_package():
    import no_such_package  # noqa: F401


def too_many_open_files():
    with limited(resource.RLIMIT_NOFILE, 60):
        [os.dup(0) for _ in range(99)]


def main():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    ways = list(globals().items())
    first = next(index for index, (name, _) in enumerate(ways) if name == "shared_memory")
    helpers = {
        "mismatched",
        "deepspeed_config",
        "deepspeed_file_of",
        "mixed",
        "resumed",
        "flattened",
        "recomputed",
        "stepped",
        "sharded",
        "half_of",
        "compiled",
        "main",
        "fsdp2",
        "use_a_gpu",
        "words",
    }
    for name, way in ways[first:]:
        if name in helpers or way is main or isinstance(way, type):
            continue
        cause = re.sub(r"_\d$", "", name).replace("_", "-")
        sys.stdout.write(f"===== {cause}\n")
        sys.stdout.flush()
        try:
            way()
        except BaseException:  # torch.distributed.checkpoint has such ones
            traceback.print_exc()
        sys.stderr.flush()


if __name__ == "__main__":
    main()
