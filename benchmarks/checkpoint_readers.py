"""`toolkit checkpoint merge` beside zero_to_fp32.py and `accelerate merge-weights`: time and RAM.

    python benchmarks/checkpoint_readers.py --hidden 1024 --layers 8 --output FOLDER

Two ranks write a ZeRO-2, a ZeRO-3 and an FSDP2 checkpoint of a random Llama with the libraries
themselves; then each tool makes a model of each in a process of its own, one after the other, and
the tensors of both models are compared. Ours runs twice: beside a model with weights, and with the
config alone, which transformers has to make a model of. RAM is the peak of the process, with and
without the pages of files that are mapped, which the system takes back when it needs them.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil

KINDS = ("zero2", "zero3", "fsdp_sharded")

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "scripts"), str(ROOT / "tests" / "helpers")]


def write_checkpoints(arguments):
    import save_with_libraries as libraries
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=arguments.hidden,
        intermediate_size=4 * arguments.hidden,
        num_hidden_layers=arguments.layers,
        num_attention_heads=16,
    )

    def model():
        torch.manual_seed(0)
        return LlamaForCausalLM(config)

    if not (arguments.output / "model").is_dir():
        model().save_pretrained(arguments.output / "model")
    libraries.odd_gpt2, libraries.STEPS, libraries.LAYER = model, 1, "LlamaDecoderLayer"
    libraries.KINDS = {arguments.write: libraries.KINDS[arguments.write]}
    libraries.main(arguments.output, hold=False)


def measured(command):
    """Run a command; return its seconds, those of the CPU, and the peaks of its RAM in MiB."""
    begun, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.Popen(
        [*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=ROOT
    )
    watched, whole, own = psutil.Process(process.pid), 0, 0
    while process.poll() is None:
        try:
            info = watched.memory_info()
            whole, own = max(whole, info.rss), max(own, info.rss - info.shared)
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            break
        time.sleep(0.01)
    said = process.communicate()[0].decode()
    if process.returncode:
        raise SystemExit(f"{command} ended with {process.returncode}:\n{said[-2000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "seconds": round(time.monotonic() - begun, 2),
        "cpu_seconds": round(sum(after[:2]) - sum(before[:2]), 2),
        "rss": whole >> 20,
        "without_mapped": own >> 20,
    }


def is_same(ours, theirs):
    """Whether two folders hold the same tensors; a tied or further name may be missing."""
    import torch

    from toolkit.checkpoints.torch_files import whole_weights

    one, other = whole_weights(ours), whole_weights(theirs)
    both = one.keys() & other.keys()
    return len(both) == len(one) and all(torch.equal(one[n].read(), other[n].read()) for n in both)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--kinds", nargs="+", default=KINDS, help="checkpoints to write and read")
    parser.add_argument("--write", help="only write the checkpoint of one kind")
    arguments = parser.parse_args()
    if arguments.write is not None:
        write_checkpoints(arguments)
        return
    arguments.output.mkdir(parents=True, exist_ok=True)
    output = arguments.output.resolve()
    os.environ["PYTHONPATH"] = str(ROOT)
    for kind in arguments.kinds:
        subprocess.run([sys.executable, __file__, *sys.argv[1:], "--write", kind], check=True)
        (output / "store").unlink(missing_ok=True)
    accelerate = Path(sys.executable).with_name("accelerate")
    theirs = {
        "zero2": [sys.executable, output / "zero2" / "zero_to_fp32.py", output / "zero2"],
        "zero3": [sys.executable, output / "zero3" / "zero_to_fp32.py", output / "zero3"],
        "fsdp_sharded": [accelerate, "merge-weights"],
    }
    theirs["zero2"] += [output / "zero2-theirs", "--safe_serialization"]
    theirs["zero3"] += [output / "zero3-theirs", "--safe_serialization"]
    theirs["fsdp_sharded"] += [output / "fsdp_sharded" / "pytorch_model_fsdp_0"]
    theirs["fsdp_sharded"] += [output / "fsdp_sharded-theirs"]
    config = output / "config"
    config.mkdir(exist_ok=True)
    shutil.copyfile(output / "model" / "config.json", config / "config.json")
    start = measured([sys.executable, "-c", "import torch, transformers, accelerate"])
    print(json.dumps({"cpus": os.cpu_count(), "load": os.getloadavg()[0], "imports": start}))
    for kind in arguments.kinds:
        made = output / f"{kind}-ours"
        ours = [sys.executable, "-m", "toolkit.cli", "checkpoint", "merge", output / kind]
        row = {
            "kind": kind,
            "theirs": measured(theirs[kind]),
            "ours": measured([*ours, "--output", made, "--base", output / "model"]),
            "with_config_alone": measured([*ours, "--output", made, "--base", config]),
        }
        ratios = {key: round(row["ours"][key] / row["theirs"][key], 2) for key in row["ours"]}
        row |= {"ratios": ratios, "same": is_same(made, output / f"{kind}-theirs")}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
