"""Count the known families of models again, and write what the planner ships of them.

Each family is built on the meta device in generic widths, with every setting of its config that
changes its parameters or what autograd keeps; what is counted is read as formulas in the widths.
The settings are then counted again in other widths, which no formula was read from.
Run it when a new release of transformers counts otherwise (tests/planning/test_known_models.py).

    python benchmarks/known_models.py [FAMILY or encoders ...]
"""

from __future__ import annotations

import gzip
import itertools
import json
import logging
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig

from toolkit.engines.described import decoder_layers, describe, splits_of
from toolkit.jobs.kept import FormTable, KeptForms
from toolkit.measuring.meta_forms import FEATURES, GENERIC, KEYS, ROWS, Reader
from toolkit.measuring.meta_model import build, passes
from toolkit.measuring.meta_model_layers import DTYPES, Sizes

KNOWN = Path(__file__).parents[1] / "toolkit/planning/models/known"

LAYERS = 8
"""So many that each kind of layer is among them."""

SWITCHES: Mapping[str, tuple[str, ...]] = {
    "llama": ("attention_bias", "mlp_bias"),
    "smollm3": ("attention_bias", "mlp_bias"),
    "granite": ("attention_bias", "mlp_bias"),
    "mistral": (),
    "ministral3": (),
    "qwen2": (),
    "qwen3": ("attention_bias",),
    "olmo": ("attention_bias",),
    "olmo2": ("attention_bias",),
    "olmo3": ("attention_bias",),
    "ernie4_5": ("use_bias",),
    "seed_oss": ("attention_bias", "attention_out_bias", "mlp_bias"),
    "phi3": (),
    "gemma": ("attention_bias",),
    "gemma2": ("attention_bias",),
    "gemma3_text": ("attention_bias",),
    "mixtral": (),
    "qwen2_moe": ("qkv_bias",),
    "qwen3_moe": ("attention_bias",),
    "olmoe": ("attention_bias",),
    "granitemoe": ("attention_bias",),
    "gpt_oss": ("attention_bias",),
    "gpt2": (),
    "gptj": (),
    "gpt_neox": ("attention_bias",),
    "bloom": (),
    "opt": (
        *("do_layer_norm_before", "projected", "enable_bias", "layer_norm_elementwise_affine"),
        "_remove_final_layer_norm",
    ),
    "falcon": ("new_decoder_architecture", "multi_query", "parallel_attn", "two_norms", "bias"),
    "phi": ("qk_layernorm",),
    "starcoder2": ("use_bias",),
}
"""Families, with the settings of a config that decide which parameters a model has."""

KEEPING = (
    *("do_layer_norm_before", "projected", "new_decoder_architecture", "multi_query"),
    *("parallel_attn", "two_norms", "qk_layernorm"),
)
"""Those of them that change more than biases."""

OTHER: Mapping[str, int] = {
    **{"hidden": 96, "heads": 6, "kv_heads": 2, "head_dim": 16, "ffn": 212, "vocab": 331},
    **{"positions": 512, "experts": 8, "active": 3, "expert": 52, "shared": 116},
    **{"embedding": 40, "sequence": 48, "rank": 16},
}
"""Widths to hold the formulas against."""

DERIVED_HEADS = ("gpt2", "gptj", "gpt_neox", "bloom", "opt", "falcon")
"""Families that don't read the width of a head, or the number of key heads but for Falcon."""

ATTENTION: Mapping[str, tuple[tuple[str, ...], str]] = {
    "gpt_neox": (("query_key_value",), "attention.dense"),
    "gptj": (("q_proj", "k_proj", "v_proj"), "attn.out_proj"),
}
"""Of these that transformers has a tensor-parallel plan for: what reads and writes the stream."""

OLD_NAMES = {"bloom": {"hidden_size": "n_embed"}, "falcon": {"hidden_size": "n_embed"}}
"""Keys of old files that a config class reads as well."""

DROPOUT = (
    *("attention_dropout", "attn_pdrop", "resid_pdrop", "hidden_dropout", "dropout"),
    "residual_dropout",
)


class Counter:
    """Counts one family."""

    def __init__(self, model_type: str) -> None:
        self.model_type = model_type
        self.default = AutoConfig.for_model(model_type)
        self.kind = type(self.default)
        self.table = FormTable()
        self.tensors: dict[str, int] = {}
        self.keys = self._keys()
        self.facts: dict[str, Any] = {}

    def _keys(self) -> dict[str, str]:
        names = getattr(self.kind, "attribute_map", {})
        keys: dict[str, str] = {}
        for role, spelled in {"layers": ("num_hidden_layers",), **KEYS}.items():
            if self.model_type in DERIVED_HEADS and role in ("kv_heads", "head_dim"):
                spelled = [name for name in spelled if name == "num_kv_heads"]
            for name in spelled:
                # Some classes read the width of a head and have no default for it.
                if hasattr(self.default, name) or name == "head_dim":
                    keys[role] = names.get(name, name)
                    break
        if "experts" in keys and "expert" not in keys:
            keys["expert"] = keys["ffn"]
        return keys

    def config(
        self, widths: Mapping[str, int], switches: Mapping[str, bool], layers: int = LAYERS
    ) -> dict[str, Any]:
        """Return a config.json of these widths."""
        widths = {**widths, "layers": layers}
        if self.keys.get("expert") == self.keys.get("ffn"):
            widths["ffn"] = widths["expert"]
        if self.model_type in ATTENTION:  # some heads more than are kept: see `cut_heads`
            widths["heads"] += 1 + widths["heads"] // 4
        # Phi's norms of heads don't read the width of a head.
        derived = switches.get("qk_layernorm") or switches.get("derived")
        if "head_dim" not in self.keys or derived:
            widths["hidden"] = widths["heads"] * widths["head_dim"]
        of_falcon = switches.get("multi_query"), switches.get("new_decoder_architecture")
        if not switches.get("grouped", True) or of_falcon == (False, False):
            widths["kv_heads"] = widths["heads"]
        config: dict[str, Any] = {
            "model_type": self.model_type,
            "tie_word_embeddings": False,
            **{key: widths[role] for role, key in self.keys.items()},
        }
        if getattr(self.default, "pad_token_id", None) is not None:
            config["pad_token_id"] = 0
        for key in ("sliding_window", "attention_chunk_size"):
            if getattr(self.default, key, None) is not None:
                config[key] = 10**6
        config |= {key: 0.1 if switches.get("dropout") else 0.0 for key in self.dropout}
        config |= {"embd_pdrop": config["attn_pdrop"]} if "attn_pdrop" in config else {}
        for name, on in switches.items():
            match name:
                case "dropout" | "grouped" | "derived":
                    pass
                case "projected":
                    config["word_embed_proj_dim"] = widths["embedding" if on else "hidden"]
                case "two_norms":
                    config["num_ln_in_parallel_attn"] = 2 if on else 1
                case _:
                    config[name] = on
        if "decoder_sparse_step" in vars(self.default):
            config |= {"decoder_sparse_step": 2, "mlp_only_layers": []}
        rope = getattr(self.default, "rope_parameters", None)
        if isinstance(rope, dict) and "partial_rotary_factor" in rope:
            config["rope_parameters"] = {**rope, "partial_rotary_factor": 1.0}
        if getattr(self.default, "rotary_dim", None):
            config["rotary_dim"] = widths["head_dim"]
        return config

    @property
    def dropout(self) -> list[str]:
        return [key for key in DROPOUT if hasattr(self.default, key)]

    def widths(self, widths: Mapping[str, int], switches: Mapping[str, bool]) -> dict[str, int]:
        """Return the widths that a model of `config` has."""
        config = self.config(widths, switches)
        read = {role: config[key] for role, key in self.keys.items() if role != "layers"}
        if "head_dim" not in self.keys:
            read["head_dim"] = read["hidden"] // read["heads"]
        if self.model_type in ATTENTION:
            read["heads"] = widths["heads"]
        if "kv_heads" not in self.keys:
            read["kv_heads"] = read["heads"]
        if not switches.get("projected"):
            read["embedding"] = read["hidden"]
        else:
            read["embedding"] = widths["embedding"]
        return read | {key: widths[key] for key in ("sequence", "rank")}

    def parameters(self, switches: Mapping[str, bool]) -> dict[str, Any]:
        """Return the tensors of a model with these settings."""
        model = build(self.config(GENERIC, switches), torch.bfloat16)
        stack, layers = decoder_layers(model)
        answer = describe(model, stack, layers)
        reader = Reader(self.widths(GENERIC, switches), self.table)
        before: list[int] = []
        after: list[int] = []
        of_layers: list[list[int]] = [[] for _ in layers]
        splits = splits_of(model, stack)
        for name, shape, kind, layer in answer["tensors"]:
            split = splits.get(name)
            if layer is not None:
                name = name.removeprefix(f"{stack}.{layer}.")
            dims = [self.table.number(reader.elements(size)) for size in shape]
            text = json.dumps([name, dims, kind, split])
            number = self.tensors.setdefault(text, len(self.tensors))
            place = of_layers[layer] if layer is not None else after if of_layers[0] else before
            place.append(number)
        self.facts |= {"architecture": answer["architecture"], "stack": stack}
        self.labels = [self.label(layer, of_layers[number]) for number, layer in enumerate(layers)]
        held = getattr(getattr(layers[0], "self_attention", None), "num_kv_heads", None)
        return {
            "before": before,
            "layers": of_layers,
            "after": after,
            "kv_heads": {None: "kv_heads", 1: 1, GENERIC["heads"]: "heads"}.get(held, "kv_heads"),
            **{key: answer[key] for key in ("norms_per_layer", "qk_norm", "gated", "rotary")},
        }

    def rows(
        self, switches: Mapping[str, bool], widths: Mapping[str, int], *, eager: bool
    ) -> Iterator[tuple[str, Any]]:
        """Yield the counts of a model, by the keys of its regimes."""
        for size, dtype in DTYPES.items():
            model = build(self.config(widths, switches), dtype, eager=eager)
            self.cut_heads(model, widths)
            for regime, targets, count in passes(model, size, widths["rank"]):
                count.run(ROWS, widths["sequence"])
                self.facts["grouped"] = self.facts.get("grouped", False) or count.grouped
                for compiled in (False, True):
                    key = replace(regime, compiled=compiled).key(targets, fused=not eager)
                    yield key, (count, count.compiled if compiled else count.kept)

    def cut_heads(self, model: Any, widths: Mapping[str, int]) -> None:
        """Take heads out of attention, so that all of them are not as wide as the hidden state.

        As the ranks of a tensor group have it. Other families read the width of a head instead.
        """
        if self.model_type not in ATTENTION:
            return
        reading, writing = ATTENTION[self.model_type]
        width = widths["heads"] * widths["head_dim"]
        for name, module in model.named_modules():
            part = name.rpartition(".")[2]
            if part in reading:
                module.out_features = width * (3 if "query_key_value" in part else 1)
                module.weight = nn.Parameter(module.weight[: module.out_features].detach())
                if module.bias is not None:
                    module.bias = nn.Parameter(module.bias[: module.out_features].detach())
            elif name.endswith(writing):
                module.in_features = width
                module.weight = nn.Parameter(module.weight[:, :width].detach())
            elif hasattr(module, "num_attention_heads"):
                module.num_attention_heads = widths["heads"]

    def kept(self, switches: Mapping[str, bool], *, eager: bool) -> dict[str, Any]:
        reader = Reader(self.widths(GENERIC, switches), self.table)
        rows: dict[str, Any] = {}
        for key, (count, kept) in self.rows(switches, GENERIC, eager=eager):
            layers = [reader.layer(kept[twin]) for twin in count.twins]
            rows[key] = [reader.number(count.outside), *layers]
        return rows

    def held_out(
        self, switches: Mapping[str, bool], rows: Mapping[str, Any], *, eager: bool
    ) -> tuple[int, float]:
        """Return the values in widths that no formula was read from, and their largest error."""
        forms = KeptForms(features=FEATURES, forms=self.table.flat(), rows=rows)
        compared, worst = 0, 0.0
        widths = OTHER
        env = self.widths(widths, switches)
        tokens = ROWS * widths["sequence"]
        for key, (count, kept) in self.rows(switches, widths, eager=eager):
            pairs = []
            for number, twin in enumerate(count.twins):
                found = forms.of_layer(key, number, env)
                names = ("saved", "boundary", "products", "every_second", "backward_peak")
                values = zip(names, kept[twin].per_token(tokens), strict=True)
                pairs += [(getattr(found, name), value) for name, value in values]
            outside = sum(size * n for size, n in count.outside.items()) / tokens
            pairs.append((forms.outside(key, env), outside))
            for found, counted in pairs:
                compared += 1
                error = abs(found - counted) / max(counted, 1)
                if error > worst:
                    worst = error
                    print("   ", key, switches, found, counted, f"{error:.5f}", flush=True)
        return compared, worst

    def label(self, layer: Any, tensors: list[int]) -> str:
        """Return the word for a kind of layer that a config decides on by its number."""
        names = list(self.tensors)
        if "experts" in self.keys:
            return "sparse" if any('"experts"' in names[number] for number in tensors) else "dense"
        rotates = getattr(getattr(layer, "self_attn", None), "use_rope", True)
        return "rotated" if rotates else "unrotated"

    def merge_kinds(self, parameters: dict[str, Any], kept: dict[str, Any]) -> list[str]:
        """Keep one of the layers that are alike, and return the kinds that are left."""
        labels = self.labels
        chosen = [labels.index(label) for label in dict.fromkeys(labels)]
        for number, label in enumerate(labels):
            first = labels.index(label)
            for rows in kept.values():
                assert all(row[1 + number] == row[1 + first] for row in rows.values()), label
        for variant in parameters.values():
            variant["layers"] = [variant["layers"][number] for number in chosen]
        for rows in {id(rows): rows for rows in kept.values()}.values():
            for key, row in rows.items():
                rows[key] = [row[0], *(row[1 + number] for number in chosen)]
        return [labels[number] for number in chosen]

    def read_keys(self) -> set[str]:
        """Return the keys of a config.json that are read."""
        switches = set(SWITCHES[self.model_type]) - {"projected", "two_norms"}
        keys = {*self.keys.values(), *self.dropout, *switches, "tie_word_embeddings"}
        more = ("decoder_sparse_step", "no_rope_layer_interval", "final_logit_softcapping")
        return keys | {key for key in more if hasattr(self.default, key)}

    def aliases(self) -> dict[str, str]:
        """Return the other name of a key, for those that have one."""
        names = getattr(self.kind, "attribute_map", {})
        other = {name: canonical for canonical, name in names.items()}
        other |= OLD_NAMES.get(self.model_type, {})
        return {key: other[key] for key in self.keys.values() if key in other}


def count(model_type: str) -> dict[str, Any]:
    """Return what the planner ships of a family."""
    start = time.process_time()
    one = Counter(model_type)
    names = SWITCHES[model_type]
    parameters = {}
    for values in itertools.product((False, True), repeat=len(names)):
        key = "".join(str(int(value)) for value in values)
        parameters[key] = one.parameters(dict(zip(names, values, strict=True)))
    keeping = [name for name in names if name in KEEPING] + ["dropout"]
    grouped = "kv_heads" in one.keys and model_type != "falcon"
    kept: dict[str, Any] = {}
    again: dict[str, str] = {}
    compared, worst = 0, 0.0
    for number, values in enumerate(itertools.product((False, True), repeat=len(keeping))):
        switches = dict(zip(keeping, values, strict=True))
        bits = "".join(str(int(value)) for value in values)
        # Falcon doesn't read some settings beside others, or doesn't run with them.
        if switches.get("new_decoder_architecture"):
            switches |= {"multi_query": False, "parallel_attn": True}
        elif "two_norms" in switches:
            switches["two_norms"] = False
        same = "".join(str(int(switches[name])) for name in keeping)
        if same != bits:
            again[bits] = same
            continue
        for attention in ("flash", "eager", *(["alone"] if grouped else [])):
            if switches["dropout"] and attention == "flash" and len(one.dropout) == 1:
                kept[f"{bits}-flash"] = kept[f"{bits[:-1]}0-flash"]  # it is in the kernel
                continue
            chosen = switches | ({"grouped": False} if attention == "alone" else {})
            chosen["derived"] = model_type == "olmoe"  # it runs with no other width of a head
            rows = one.kept(chosen, eager=attention != "flash")
            kept[f"{bits}-{attention}"] = rows
            # A third of what many settings make is enough.
            if number % 3 == 0 or (number < 2 and attention == "eager"):
                found, error = one.held_out(chosen, rows, eager=attention != "flash")
                compared, worst = compared + found, max(worst, error)
    for bits, same in again.items():
        kept |= {f"{bits}-{how}": kept[f"{same}-{how}"] for how in ("flash", "eager")}
    seconds = time.process_time() - start
    print(f"{model_type}: {compared} held out, error {worst:.2%}, {seconds:.0f} s", flush=True)
    kinds = one.merge_kinds(parameters, kept)
    default = {key: getattr(one.kind, key, None) for key in one.read_keys()}
    return {
        **one.facts,
        "keys": one.keys,
        "aliases": one.aliases(),
        "defaults": {key: value for key, value in default.items() if value is not None},
        "dropout": one.dropout,
        "softcap": "final_logit_softcapping"
        if hasattr(one.default, "final_logit_softcapping")
        else "",
        "switches": names,
        "keeping": keeping,
        "kinds": kinds,
        "tensors": [json.loads(text) for text in one.tensors],
        "parameters": parameters,
        "kept": kept,
        "features": FEATURES,
        "forms": one.table.flat(),
    }


class EncoderBlock(nn.Module):
    """A layer of DeepSpeedExamples' training/bf16_master_weight/train.py.

    Its `nn.MultiheadAttention` returns weights, so that torch computes the scores.
    """

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.in_proj = nn.Linear(hidden, 3 * hidden)
        self.out_proj = nn.Linear(hidden, hidden)
        self.ff = nn.Sequential(
            nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden)
        )
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        rows, length, hidden = stream.shape
        parts = self.in_proj(stream).unflatten(-1, (3, hidden)).movedim(-2, 0).contiguous()
        heads = (rows, length, self.heads, hidden // self.heads)
        query, key, value = (part.view(heads).transpose(1, 2) for part in parts)
        scores = (query * heads[-1] ** -0.5) @ key.transpose(-2, -1)
        attended = (torch.softmax(scores, dim=-1) @ value).transpose(1, 2).reshape(stream.shape)
        stream = self.norm1(stream + self.out_proj(attended))
        return self.norm2(stream + self.ff(stream))


class Encoder(nn.Module):
    """The model of that file."""

    def __init__(self, hidden: int, heads: int, vocab: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, hidden)
        self.layers = nn.ModuleList([EncoderBlock(hidden, heads)])
        self.output_proj = nn.Linear(hidden, vocab)

    def forward(self, input_ids: torch.Tensor, **_: object) -> torch.Tensor:
        stream = self.embedding(input_ids)
        for layer in self.layers:
            stream = layer(stream)
        return self.output_proj(stream)

    def get_output_embeddings(self) -> nn.Module:
        return self.output_proj


def encoders() -> dict[str, Any]:
    """Return the counts of two encoders, which published rows of memory are of."""
    from transformers import BertConfig, BertForSequenceClassification

    widths = {key: GENERIC[key] for key in ("heads", "head_dim", "sequence", "vocab")}
    widths["hidden"] = widths["heads"] * widths["head_dim"]
    widths["embedding"] = widths["hidden"]
    table = FormTable()
    reader = Reader(widths, table)
    config = BertConfig(
        hidden_size=widths["hidden"],
        num_attention_heads=widths["heads"],
        intermediate_size=4 * widths["hidden"],
        num_hidden_layers=1,
        max_position_embeddings=widths["sequence"],
    )

    def bert(eager: bool) -> Any:
        how = "eager" if eager else "sdpa"
        return BertForSequenceClassification._from_config(config, attn_implementation=how)

    def blocks(eager: bool) -> Any:
        return Encoder(widths["hidden"], widths["heads"], widths["vocab"])

    found: dict[str, Any] = {}
    for name, make in {"bert": bert, "blocks": blocks}.items():
        rows: dict[str, Any] = {}
        for eager in (False, True):
            for size, dtype in DTYPES.items():
                with torch.device("meta"):
                    model = make(eager).to(dtype).train()
                for regime, targets, count in passes(model, size):
                    if targets == "none":
                        count.run(ROWS, widths["sequence"])
                        key = regime.key(targets, fused=not eager)
                        # Of the first tokens alone, a classifier keeps a few vectors.
                        outside = {
                            size: n
                            for size, n in count.outside.items()
                            if size % reader.tokens == 0
                        }
                        rows[key] = [reader.number(Sizes(outside)), reader.layer(count.kept[0])]
        found[name] = rows
    return {"features": FEATURES, "forms": table.flat(), "rows": found}


ENCODERS = Path(__file__).parents[1] / "tests/helpers/encoders.json"


def main() -> None:
    """Count the families that are named, or all, and write each as it is done."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    KNOWN.mkdir(exist_ok=True)
    asked = sys.argv[1:] or ["encoders", *SWITCHES]
    if "encoders" in asked:
        ENCODERS.write_text(json.dumps(encoders(), separators=(",", ":")) + "\n")
    for model_type in [name for name in sys.argv[1:] if name != "encoders"] or [
        *([] if sys.argv[1:] else SWITCHES)
    ]:
        text = json.dumps(count(model_type), separators=(",", ":"))
        path = KNOWN / f"{model_type}.json.gz"
        # Another zlib packs the same text otherwise: the same count leaves the file as it is.
        if not path.exists() or gzip.decompress(path.read_bytes()) != text.encode():
            path.write_bytes(gzip.compress(text.encode(), mtime=0))


if __name__ == "__main__":
    main()
