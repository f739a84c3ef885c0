"""Each rule on scripts: one that has the fault, and near ones that are right."""

import ast
import sys
import textwrap

import pytest
from places import ROOT

from toolkit.configs.check.finding import table
from toolkit.configs.check.scripts import check_script
from toolkit.configs.check.signatures import renamed
from toolkit.configs.check.source import Source

LOOP = """
    import torch
    from accelerate import Accelerator
    from transformers import AutoModelForCausalLM
    accelerator = Accelerator(HERE)
    model = AutoModelForCausalLM.from_pretrained("m")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, make_loader())
"""
TRAINER = """
    from transformers import Trainer, TrainingArguments
    trainer = Trainer(model, TrainingArguments("out"))
"""
SHUFFLED = """
    import numpy
    from datasets import load_dataset
    from transformers import Trainer, set_seed
"""

FAULTS = {
    "unknown-argument": {
        "renamed": (
            """
            import transformers as tf
            args = tf.TrainingArguments(
                "out", evaluation_strategy="no"
            )
            """,
            ("error", 4, "Now: eval_strategy."),
        ),
        "of the base": (
            """
            from trl import SFTConfig
            SFTConfig(no_cuda=True)
            """,
            ("error", 3, "Now: use_cpu."),
        ),
        "moved": (
            """
            from trl import SFTTrainer
            SFTTrainer(model, max_seq_length=8)
            """,
            ("error", 3, "Now: SFTConfig(max_length=...)."),
        ),
        "misspelt": (
            """
            from peft import LoraConfig
            LoraConfig(lora_dropot=0.1)
            """,
            ("error", 3, "Did you mean lora_dropout?"),
        ),
        "of a method": (
            """
            from accelerate import Accelerator
            accelerator = Accelerator()
            accelerator.save_model(model, "out", safe_serialisation=True)
            """,
            ("error", 4, "Did you mean safe_serialization?"),
        ),
        "handed on": (
            """
            from transformers import AutoModelForCausalLM
            AutoModelForCausalLM.from_pretrained("m", load_in_8bit=True)
            """,
            ("error", 3, "Now: quantization_config=BitsAndBytesConfig(load_in_8bit=True)."),
        ),
        "too many": (
            """
            from transformers import set_seed
            set_seed(1, True, 3)
            """,
            ("error", 3, "Give them by name."),
        ),
    },
    "missing-name": {
        "moved": (
            "from trl import SFTTrainer, ORPOTrainer\n",
            ("error", 1, "Now: trl.experimental.orpo.ORPOTrainer."),
        ),
        "of transformers": (
            "from transformers import AdamW\n",
            ("error", 1, "Now: torch.optim.AdamW."),
        ),
    },
    "loss-without-count": {
        "not taken": (
            """
            from transformers import Trainer
            class Mine(Trainer):
                def compute_loss(self, model, inputs, return_outputs=False):
                    return model(**inputs).loss
            """,
            ("error", 4, "num_items_in_batch=None"),
        ),
        "not used": (
            """
            import transformers
            class Base(transformers.Trainer):
                pass
            class Mine(Base):
                def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
                    return model(**inputs).loss
            """,
            ("warning", 6, "model_accepts_loss_kwargs = False"),
        ),
    },
    "loss-divided-twice": {
        "by the accelerator": (
            LOOP.replace("HERE", "gradient_accumulation_steps=args.steps")
            + """
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            loss = loss / args.gradient_accumulation_steps
            accelerator.backward(loss)
            """,
            ("error", 13, "Leave the division"),
        ),
        "by the config": (
            LOOP.replace("HERE", "")
            + """
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss / accelerator.gradient_accumulation_steps)
            """,
            ("warning", 13, "Accelerator(gradient_accumulation_steps=...)"),
        ),
        "by the engine": (
            """
            import deepspeed
            engine, _, _, _ = deepspeed.initialize(model=model, config=config)
            for batch in loader:
                loss = engine(batch)
                loss /= accumulation_steps
                engine.backward(loss)
            """,
            ("warning", 6, "Leave the division"),
        ),
    },
    "accumulation-by-hand": {
        "": (
            LOOP.replace("HERE", "")
            + """
    for step, batch in enumerate(loader):
        loss = model(**batch).loss / 4
        loss = loss / gradient_accumulation_steps
        accelerator.backward(loss)
        if step % gradient_accumulation_steps == 0:
            optimizer.step()
            """,
            ("warning", 12, "accumulate(model)"),
        ),
    },
    "optimizer-before-adapters": {
        "": (
            """
            from torch.optim import AdamW
            from peft import get_peft_model
            optimizer = AdamW(model.parameters(), lr=1e-3)
            model = get_peft_model(model, config)
            """,
            ("error", 4, "after get_peft_model"),
        ),
    },
    "prepared-apart": {
        "": (
            """
            import torch
            from accelerate import Accelerator
            accelerator = Accelerator()
            model = accelerator.prepare(model)
            optimizer = torch.optim.SGD(model.parameters())
            """,
            ("warning", 5, "in one call"),
        ),
    },
    "clipped-by-torch": {
        "accelerate": (
            LOOP.replace("HERE", "")
            + "    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n",
            ("warning", 9, "accelerator.clip_grad_norm_(model.parameters(), ...)"),
        ),
        "deepspeed": (
            """
            import deepspeed
            from torch.nn.utils import clip_grad_norm_
            engine, *_ = deepspeed.initialize(model=model)
            engine, optimizer = deepspeed.initialize(model=model)[:2]
            engine, a, b, c = deepspeed.initialize(model=model)
            clip_grad_norm_(engine.parameters(), 1.0)
            """,
            ("warning", 7, "gradient_clipping"),
        ),
    },
    "module-of-wrapper": {
        "": (
            LOOP.replace("HERE", "") + "    model.module.config.save_pretrained('out')\n",
            ("warning", 9, "accelerator.unwrap_model(model)"),
        ),
    },
    "labels-shifted-twice": {
        "in the collator": (
            LOOP.replace("HERE", "")
            + """
    def collate(rows):
        batch = tokenizer.pad(rows)
        batch["labels"] = batch["input_ids"][:, 1:].clone()
        batch["input_ids"] = batch["input_ids"][:, :-1]
        return batch
    for batch in loader:
        outputs = model(**batch)
            """,
            ("error", 12, "both whole"),
        ),
        "in the call": (
            LOOP.replace("HERE", "")
            + """
    for input_ids in loader:
        loss = model(input_ids=input_ids[:, :-1], labels=input_ids[:, 1:]).loss
            """,
            ("error", 11, "both whole"),
        ),
    },
    "on-one-rank": {
        "collective": (
            LOOP.replace("HERE", "")
            + """
    if accelerator.is_main_process and step % 10 == 0:
        print(accelerator.gather(loss))
            """,
            ("error", 11, "outside of the condition"),
        ),
        "other ranks": (
            """
            import torch.distributed as dist
            rank = dist.get_rank()
            if rank != 0:
                dist.barrier()
            """,
            ("error", 5, "outside of the condition"),
        ),
        "evaluation": (
            TRAINER
            + """
    if trainer.is_world_process_zero():
        trainer.evaluate()
            """,
            ("error", 6, "outside of the condition"),
        ),
        "save": (
            LOOP.replace("HERE", "")
            + """
    if accelerator.is_main_process:
        accelerator.save_state("out")
            """,
            ("warning", 11, "outside of the condition"),
        ),
        "save of a trainer": (
            TRAINER
            + """
    if trainer.accelerator.is_main_process:
        trainer.save_model("out")
            """,
            ("warning", 6, "outside of the condition"),
        ),
        "forward": (
            LOOP.replace("HERE", "")
            + """
    @accelerator.on_main_process
    def evaluate(batch):
        return model(**batch)
            """,
            ("warning", 12, "outside of the condition"),
        ),
    },
    "state-of-shards": {
        "wrapped": (
            LOOP.replace("HERE", "") + "    torch.save(model.state_dict(), 'out.pt')\n",
            ("warning", 9, "get_state_dict"),
        ),
        "unwrapped": (
            LOOP.replace("HERE", "")
            + """
    plain = accelerator.unwrap_model(model)
    plain.save_pretrained("out", state_dict=plain.state_dict())
            """,
            ("warning", 11, "get_state_dict"),
        ),
    },
    "shuffled-apart": {
        "never seeded": (
            SHUFFLED
            + """
    rows = load_dataset("d")
    trainer = Trainer(model, args, train_dataset=rows["train"].map(f).shuffle())
            """,
            ("error", 7, "shuffle(seed=42, ...)"),
        ),
        "split": (
            SHUFFLED
            + """
    rows = load_dataset("d", split="train")
    rows = rows.train_test_split(test_size=0.1)
    trainer = Trainer(model, args, train_dataset=rows["train"])
            """,
            ("error", 7, "train_test_split(seed=42, ...)"),
        ),
        "seeded at times": (
            SHUFFLED
            + """
    def main(seed):
        if seed is not None:
            set_seed(seed)
        rows = load_dataset("d", split="train").shuffle()
        Trainer(model, args, train_dataset=rows)
            """,
            ("warning", 9, "shuffle(seed=42, ...)"),
        ),
    },
    "sharded-twice": {
        "": (
            """
            from accelerate import Accelerator
            from torch.utils.data import DataLoader, DistributedSampler
            accelerator = Accelerator()
            loader = DataLoader(rows, sampler=DistributedSampler(rows))
            loader = accelerator.prepare(loader)
            """,
            ("error", 6, "without a sampler"),
        ),
    },
    "epoch-not-set": {
        "": (
            """
            from torch.utils.data import DataLoader, RandomSampler
            from torch.utils.data.distributed import DistributedSampler
            sampler = RandomSampler(rows) if alone else DistributedSampler(rows)
            loader = DataLoader(rows, sampler=sampler)
            for epoch in range(3):
                for step, batch in enumerate(tqdm(loader)):
                    step(batch)
            """,
            ("warning", 4, "set_epoch(epoch)"),
        ),
    },
}

RIGHT = {
    "present names": """
        from transformers import TrainingArguments
        TrainingArguments("out", eval_strategy="no", **more)
    """,
    "a name of the file's own": """
        from transformers import TrainingArguments
        class TrainingArguments:
            def __init__(self, evaluation_strategy): ...
        TrainingArguments(evaluation_strategy="no")
    """,
    "a class that takes anything": """
        from datasets import Sequence, Value
        from transformers import BitsAndBytesConfig, AutoTokenizer
        Sequence(Value("int64"))
        BitsAndBytesConfig(load_in_8bit=True, made_up=1)
        AutoTokenizer.from_pretrained("m", use_auth_token=True)
    """,
    "a method of the class itself": """
        from transformers import Trainer
        class Mine(Trainer):
            def train(self):
                return Trainer.train(self, None, None, None)
    """,
    "another library": """
        from mine import Trainer, TrainingArguments
        Trainer(tokenizer=1, args=TrainingArguments(evaluation_strategy="no"))
    """,
    "an import with a way out": """
        try:
            from trl import ORPOTrainer
        except ImportError:
            from trl.experimental.orpo import ORPOTrainer
    """,
    "a count that is used": """
        from transformers import Trainer
        class Mine(Trainer):
            def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
                return mine(model(**inputs), num_items_in_batch)
    """,
    "a count that is handed on": """
        from transformers import Trainer
        class Mine(Trainer):
            def compute_loss(self, model, inputs, *args, **kwargs):
                return super().compute_loss(model, inputs, *args, **kwargs)
    """,
    "a loss said to be a mean": """
        from transformers import Trainer
        class Mine(Trainer):
            loss_is_scaled_for_ga = False
            def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
                return model(**inputs).loss
    """,
    "no trainer": """
        class Mine(Base):
            def compute_loss(self, model, inputs):
                return model(**inputs).loss
    """,
    "divided for the log": LOOP.replace("HERE", "gradient_accumulation_steps=4")
    + """
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            total += loss.item() / gradient_accumulation_steps
    """,
    "divided under a condition": LOOP.replace("HERE", "gradient_accumulation_steps=4")
    + """
    for batch in loader:
        loss = model(**batch).loss
        if accelerator.distributed_type == "MEGATRON_LM":
            loss = loss / gradient_accumulation_steps
        accelerator.backward(loss)
    """,
    "divided by something else": LOOP.replace("HERE", "gradient_accumulation_steps=4")
    + """
    for batch in loader:
        loss = model(**batch).loss / num_tokens
        accelerator.backward(loss)
    """,
    "an accelerator from elsewhere": """
        for batch in loader:
            loss = model(**batch).loss / gradient_accumulation_steps
            accelerator.backward(loss)
    """,
    "adapters first": """
        from torch.optim import AdamW
        from peft import get_peft_model
        model = get_peft_model(model, config)
        optimizer = AdamW(model.parameters(), lr=1e-3)
    """,
    "an optimizer made anew": """
        from torch.optim import AdamW
        from peft import get_peft_model
        optimizer = AdamW(model.parameters(), lr=1e-3)
        model = get_peft_model(model, config)
        optimizer = AdamW(model.parameters(), lr=1e-3)
    """,
    "model.to before prepare": LOOP.replace("HERE", "").replace(
        "    optimizer =", "    model = model.to(accelerator.device)\n    optimizer ="
    ),
    "a model that is only evaluated": """
        from accelerate import Accelerator
        accelerator = Accelerator()
        model = accelerator.prepare(model)
    """,
    "prepared apart for FSDP1": """
        import torch
        from accelerate import Accelerator
        accelerator = Accelerator()
        if accelerator.distributed_type == "FSDP":
            model = accelerator.prepare(model)
        optimizer = torch.optim.SGD(model.parameters())
        model, optimizer = accelerator.prepare(model, optimizer)
    """,
    "clipped by accelerate": LOOP.replace("HERE", "")
    + "    accelerator.clip_grad_norm_(model.parameters(), 1.0)\n",
    "a plain model": """
        import torch
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        torch.save(model.module.state_dict(), "out.pt")
    """,
    "a wrapper that is asked for": LOOP.replace("HERE", "")
    + "    inner = model.module if hasattr(model, 'module') else model\n",
    "labels as they should be": LOOP.replace("HERE", "")
    + """
    def collate(rows):
        batch = tokenizer.pad(rows)
        batch["labels"] = batch["input_ids"]
        return batch
    for batch in loader:
        outputs = model(**batch)
    """,
    "a loss of one's own": LOOP.replace("HERE", "")
    + """
    for input_ids in loader:
        rows = {"input_ids": input_ids[:, :-1], "labels": input_ids[:, 1:]}
        loss = torch.nn.functional.cross_entropy(model(**rows).logits, rows["labels"])
    """,
    "a model that does not shift": """
        from transformers import AutoModelForSeq2SeqLM
        model = AutoModelForSeq2SeqLM.from_pretrained("m")
        loss = model(input_ids=input_ids[:, :-1], labels=input_ids[:, 1:]).loss
    """,
    "a model of one's own": """
        model = GPT(config)
        loss = model(input_ids=input_ids[:, :-1], labels=input_ids[:, 1:]).loss
    """,
    "a collective of all": LOOP.replace("HERE", "")
    + """
    losses = accelerator.gather(loss)
    if accelerator.is_main_process:
        print(losses)
        accelerator.save(losses, "losses.pt")
        accelerator.log({"loss": losses})
    """,
    "main first": """
        import torch.distributed as dist
        if dist.get_rank() != 0:
            dist.barrier()
        prepare_rows()
        if dist.get_rank() == 0:
            dist.barrier()
    """,
    "main, and all under DeepSpeed": LOOP.replace("HERE", "")
    + """
    if accelerator.is_main_process or accelerator.distributed_type == "DEEPSPEED":
        accelerator.save_state("out")
    """,
    "a group of its own": """
        import torch.distributed as dist
        if dist.get_rank() == 0:
            dist.barrier(group=mine)
    """,
    "a state from all ranks": LOOP.replace("HERE", "")
    + """
    state = accelerator.get_state_dict(model)
    torch.save(state, "out.pt")
    torch.save(optimizer.state_dict(), "optimizer.pt")
    """,
    "a shuffle with a seed": SHUFFLED
    + """
    rows = load_dataset("d").shuffle(seed=args.seed)
    rows = rows.train_test_split(0.1, seed=1)
    other = load_dataset("d", split="test").shuffle(7)
    plain = load_dataset("d").train_test_split(0.1, shuffle=False)
    Trainer(model, args, train_dataset=rows)
    """,
    "a shuffle after set_seed": SHUFFLED
    + """
    set_seed(1)
    Trainer(model, args, train_dataset=load_dataset("d")["train"].shuffle())
    """,
    "a stream": SHUFFLED
    + """
    rows = load_dataset("d", streaming=True)["train"].shuffle()
    Trainer(model, args, train_dataset=rows)
    """,
    "one process": """
        from datasets import load_dataset
        rows = load_dataset("d")["train"].shuffle()
    """,
    "a sampler under torch": """
        from torch.utils.data import DataLoader, DistributedSampler
        sampler = DistributedSampler(rows)
        loader = DataLoader(rows, sampler=sampler)
        for epoch in range(3):
            sampler.set_epoch(epoch)
            for batch in loader:
                step(batch)
    """,
    "a sampler that keeps the order": """
        from torch.utils.data import DataLoader, DistributedSampler
        loader = DataLoader(rows, sampler=DistributedSampler(rows, shuffle=False))
        for epoch in range(3):
            for batch in loader:
                step(batch)
    """,
    "a prepared loader": """
        from accelerate import Accelerator
        from torch.utils.data import DataLoader
        accelerator = Accelerator()
        loader = accelerator.prepare(DataLoader(rows, shuffle=True))
        for epoch in range(3):
            for batch in loader:
                step(batch)
    """,
}


@pytest.fixture
def check(tmp_path):
    def checked(text, *flags):
        path = tmp_path / "train.py"
        path.write_text(textwrap.dedent(text), "utf-8")
        return check_script(path, flags=flags)

    return checked


@pytest.mark.parametrize(
    ("rule", "text", "wanted"),
    [
        pytest.param(rule, *fault, id=f"{rule} {name}".strip())
        for rule, faults in FAULTS.items()
        for name, fault in faults.items()
    ],
)
def test_a_fault_is_found_where_it_stands(check, rule, text, wanted):
    severity, line, fix = wanted
    (finding,) = check(text)
    assert (finding.rule, finding.severity, finding.line) == (rule, severity, line)
    assert fix in finding.fix


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_or_unknown_is_passed_over(check, name):
    assert check(RIGHT[name]) == []


def test_every_rule_has_a_fault_here():
    names = [*table()]
    rules = {
        (name, case["severity"])
        for name in names[names.index("missing-name") : names.index("facts")]
        for case in table()[name].values()
        if isinstance(case, dict)
    }
    found = {(rule, fault[1][0]) for rule, faults in FAULTS.items() for fault in faults.values()}
    assert rules == found | {("unknown-flag", "error")}


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda one: one.name)
def test_the_examples_have_no_finding(path):
    assert check_script(path) == []


def test_an_argument_is_renamed_where_it_stands(check, tmp_path):
    text = (
        "from transformers import TrainingArguments as A\nx = 'ä'; A('ö', evaluation_strategy=1)\n"
    )
    (finding,) = check(text)
    (edit,) = finding.edits
    assert text[: edit.start] + edit.text + text[edit.end :] == text.replace("evaluation_", "eval_")
    assert text.splitlines()[1][finding.column - 1 :].startswith("evaluation_strategy")
    (moved,) = check("from trl import SFTTrainer\nSFTTrainer(m, packing=True)\n")
    assert moved.edits == ()


def test_flags_are_held_against_the_classes_that_the_parser_reads(check):
    text = """
        from dataclasses import dataclass
        from transformers import HfArgumentParser, TrainingArguments
        @dataclass
        class Mine:
            block: int = 8
        parser = HfArgumentParser((Mine, TrainingArguments))
        mine, args = parser.parse_args_into_dataclasses()
    """
    assert (
        check(text, "--block", "4", "--output_dir=out", "--eval-strategy", "no", "--seed", "-1")
        == []
    )
    (finding,) = check(text, "--evaluation_strategy", "no", "--block", "4")
    assert (finding.rule, finding.severity, finding.line) == ("unknown-flag", "error", 7)
    assert finding.fix == "Now: --eval_strategy."
    assert check(text.replace("class Mine:", "class Mine(Other):"), "--made_up") == []
    added = text.rstrip() + "\n        parser.add_argument('--made_up')\n"
    assert check(added, "--made_up") == []


def test_a_file_that_is_no_python_is_one_finding(check):
    (finding,) = check("print 'x'\n")
    assert (finding.rule, finding.severity, finding.line) == ("unreadable", "error", 1)


def test_lines_and_columns_are_those_of_an_editor(check):
    text = "from transformers import TrainingArguments as A\r\n'\f'; A('ö', evaluation_strategy=1)"
    (finding,) = check(text)
    (edit,) = finding.edits
    assert text[edit.start : edit.end] == "evaluation_strategy"
    assert (finding.line, finding.column) == (2, 13)


def test_nothing_heavy_is_imported():
    heavy = {"torch", "transformers", "accelerate", "trl", "peft", "datasets"}
    before = heavy & {*sys.modules}
    check_script(ROOT / "examples" / "trl_sft.py")
    assert heavy & {*sys.modules} == before


def test_names_are_followed_through_the_functions_of_a_file(tmp_path):
    text = textwrap.dedent("""
        from accelerate import Accelerator
        def loop(accelerator, other):
            return accelerator, other
        def main():
            first = Accelerator()
            second = first
            loop(second, make())
        def other():
            if a:
                first = Accelerator()
            else:
                first = make()
            return first
    """)
    source = Source(tmp_path / "train.py", text)
    returned = [node.value for node in source.nodes if isinstance(node, ast.Return)]
    pair = next(one for one in returned if isinstance(one, ast.Tuple))
    assert [source.makers(one) for one in pair.elts] == [{"accelerate.Accelerator"}, {"?"}]
    either = next(one for one in returned if isinstance(one, ast.Name))
    assert source.makers(either) == {"accelerate.Accelerator", "?"}


def test_renames_of_transformers_hold_for_what_stands_on_it():
    assert renamed("trl.SFTConfig", "evaluation_strategy").new == "eval_strategy"
    assert renamed("trl.DPOTrainer", "tokenizer").new == "processing_class"
    assert renamed("trl.SFTConfig", "made_up") is None
