"""The model: a small Llama that is built here, or any causal LM, in a local folder.

Every strategy loads it by `from_pretrained`, the built-in model as well, so that sharded loading
and `zero.Init` work as with any other model.
"""

from __future__ import annotations

import logging
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.data.cache import build_once
from toolkit.data.dataset import TokenDataset
from toolkit.data.sources import standard_library_hash, standard_library_texts
from toolkit.environment import cache_root
from toolkit.errors import UsageError, sentence_of
from toolkit.training.arguments import ModelArguments
from toolkit.training.flags import local_folder
from toolkit.training.model_checks import count_parameters, read_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

BUILT_IN_MODEL = "small-llama"

_RECIPE = 2
"""Part of the cached folder's name: raise it with any change to the model or its tokenizer."""

_SEED = 20
# Sizes are multiples of 64: bitsandbytes 0.50 quantizes other rows wrongly on a CPU. Wide, with a
# small vocabulary: on short rows its states outweigh its activations, as in models that need
# sharding. So a rehearsal ranks the strategies by memory as GPUs do.
_SHAPE: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 192,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
_SPECIAL_TOKENS = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Facts of a model that are known without loading its weights."""

    path: str
    hidden_size: int | None
    vocab_size: int | None
    max_positions: int | None
    parameters: int | None
    """Counted from the headers of the safetensors files; None where there are none."""

    decoder_layer: str | None
    """Class of a layer, as the model's `_no_split_modules` names it; None for remote code."""

    def facts(self) -> dict[str, Any]:
        return asdict(self)


def resolve_model(arguments: ModelArguments) -> str:
    """Return the local folder of the model, which is built or downloaded first if need be.

    Raises:
        UsageError: there is no such folder, or the Hub can't give it.
    """
    flag, name = "--model_name_or_path", arguments.model_name_or_path
    if name is None:
        return str(build_model())
    return local_folder(flag, name) or _download(flag, name, revision=arguments.model_revision)


def resolve_tokenizer(arguments: ModelArguments) -> str:
    """Return the local folder of the tokenizer: that of the model, unless another is named.

    Raises:
        UsageError: there is no such folder, or the Hub can't give it.
    """
    flag, name = "--tokenizer_name", arguments.tokenizer_name
    if name is None:
        return resolve_model(arguments)
    return local_folder(flag, name) or _download(flag, name, revision="main")


def build_model() -> Path:
    """Return the folder of the built-in model, building it first where it is not cached.

    A Llama with a byte-level BPE tokenizer trained on the built-in data, the same files everywhere.
    """

    def build(folder: Path) -> None:
        logger.info("Building the built-in model, once")
        rows = standard_library_texts()
        _write_tokenizer(folder, [row["prompt"] + row["completion"] for row in rows])
        _write_weights(folder)

    key = f"{_RECIPE}-{standard_library_hash()[:12]}"
    return build_once(cache_root() / f"{BUILT_IN_MODEL}-{platform.python_version()}-{key}", build)


def load_model(
    arguments: ModelArguments,
    folder: str | Path,
    *,
    dtype: str = "float32",
    packed: Any = None,
    split: Any = None,
) -> PreTrainedModel:
    """Return the model in `folder`, ready to be trained.

    Under ZeRO-3 the `TrainingArguments` or the `Accelerator` have to exist by now, for the
    weights to be sharded while they are loaded; those in 4 bits are loaded whole.

    Weights are loaded in `dtype` unless `arguments` name another; with `packed`, the result of
    `quantized.in_4_bits`, they are packed. With `split`, a `DistributedConfig`, each rank loads its
    part of every matrix.

    Raises:
        UsageError: the folder doesn't hold a causal LM that can be loaded.
    """
    import torch
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {
        "dtype": getattr(torch, arguments.dtype or dtype),
        "trust_remote_code": arguments.trust_remote_code,
        "attn_implementation": arguments.attn_implementation,
        "quantization_config": packed,
        "distributed_config": split,
    }
    given = {name: value for name, value in options.items() if value is not None}
    try:
        model = AutoModelForCausalLM.from_pretrained(str(folder), **given)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"No causal LM can be loaded from {folder}: {sentence_of(error)}"
        ) from error
    # A cache of keys and values is of use in generation only.
    model.config.use_cache = False
    return model


def model_facts(folder: str | Path) -> ModelFacts:
    """Return the facts in config.json and in the headers of the weights."""
    folder = Path(folder)
    config = read_config(folder)
    # Models of text and images keep the config of their text part under this name.
    text = config.get("text_config") or config
    return ModelFacts(
        path=str(folder),
        hidden_size=_first(text, "hidden_size", "n_embd", "d_model"),
        vocab_size=_first(text, "vocab_size"),
        max_positions=_first(text, "max_position_embeddings", "n_positions", "max_seq_len"),
        parameters=count_parameters(folder),
        decoder_layer=_decoder_layer(config),
    )


def check_length(model: ModelFacts, max_length: int) -> None:
    """Check that the model has a position for each token of the longest rows.

    Raises:
        UsageError: it has fewer.
    """
    if model.max_positions is not None and max_length > model.max_positions:
        raise UsageError(
            f"--max_length {max_length} is more than the {model.max_positions} positions of the "
            f"model in {model.path}. Pass --max_length {model.max_positions} or less."
        )


def check_vocabulary(model: ModelFacts, data: TokenDataset) -> None:
    """Check that the model knows every token of the data.

    Raises:
        UsageError: the tokenizer is not the model's.
    """
    if model.vocab_size is not None and data.largest_id >= model.vocab_size:
        raise UsageError(
            f"The tokenizer gives the id {data.largest_id} and the model in {model.path} has only "
            f"{model.vocab_size} ids. Pass --tokenizer_name with the tokenizer of that model."
        )


_SMALL_FILES = ["*.json", "*.jinja", "*.model", "*.py", "*.tiktoken", "*.txt"]


def _download(flag: str, name: str, *, revision: str) -> str:
    """Return the folder of a Hub model in the Hub's own cache, which locks and resumes."""
    from huggingface_hub import snapshot_download

    def fetch(patterns: list[str]) -> Path:
        # Subfolders hold the same weights for other libraries.
        return Path(
            snapshot_download(
                name, revision=revision, allow_patterns=patterns, ignore_patterns=["*/*"]
            )
        )

    weights = flag == "--model_name_or_path"
    try:
        folder = fetch([*_SMALL_FILES, *(["*.safetensors"] if weights else [])])
        if weights and not any(folder.glob("*.safetensors")):
            folder = fetch(["*.bin"])
    # The errors for not found, gated, offline and malformed names have no closer common base.
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{flag} {name} is no folder here, and the Hub does not give it: {sentence_of(error)} "
            "Check the name and the network, or pass a local folder."
        ) from error
    return str(folder)


def _first(config: dict[str, Any], *names: str) -> int | None:
    return next((config[name] for name in names if isinstance(config.get(name), int)), None)


def _decoder_layer(config: dict[str, Any]) -> str | None:
    import transformers

    # transformers imports lazily: an unknown name, of remote code, is a missing attribute.
    model_class = getattr(transformers, next(iter(config.get("architectures") or []), ""), None)
    layers = getattr(model_class, "_no_split_modules", None)
    return min(layers) if layers else None


def _write_tokenizer(folder: Path, texts: list[str]) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=_SHAPE["vocab_size"],
            special_tokens=list(_SPECIAL_TOKENS.values()),
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    bos = _SPECIAL_TOKENS["bos_token"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=_SHAPE["max_position_embeddings"],
        padding_side="right",
        clean_up_tokenization_spaces=False,
        **_SPECIAL_TOKENS,
    ).save_pretrained(folder)


def _write_weights(folder: Path) -> None:
    import numpy as np
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    ids: dict[str, Any] = {f"{name}_id": number for number, name in enumerate(_SPECIAL_TOKENS)}
    config = LlamaConfig(**_SHAPE, **ids)
    with torch.random.fork_rng(devices=[]):
        model = LlamaForCausalLM(config).float()
    # numpy's PCG64 gives the same numbers on every processor; torch's normal_ rounds differently
    # with and without vector instructions.
    numbers = np.random.Generator(np.random.PCG64(_SEED))
    with torch.no_grad():
        for _, weight in sorted(model.named_parameters()):
            if weight.dim() > 1:
                drawn = numbers.standard_normal(tuple(weight.shape), dtype=np.float32)
                weight.copy_(torch.from_numpy(drawn * np.float32(config.initializer_range)))
            else:
                weight.fill_(1.0)
    model.save_pretrained(folder)
