"""Attention of packed rows: FlashAttention within each text gives what a mask gives."""

import pytest
import torch
from small_models import small_of

from toolkit.configs.proven_models import PROVEN_MODELS
from toolkit.data.packing import packed_row
from toolkit.data.sampling_order import Collator
from toolkit.engines.pipelining.cutting import LOSS_ONLY
from toolkit.errors import UsageError
from toolkit.training.speed import UNMASKED, Speed, attention, layers, lean_batches
from toolkit.training.speed.attention import (
    BORDERS,
    choose_kernels,
    no_flash_4,
    tell_caches_of_kernels,
    text_borders,
)
from toolkit.training.speed.lean_batches import POSITIONS, block_causal_mask
from toolkit.training.speed_arguments import (
    CHUNK_TOKENS,
    COMPILED_CHUNK_TOKENS,
    SpeedArguments,
)

TEXTS = ((5, 3, 9), (1, 1, 7), (12,), (2, 4))
"""Lengths of the texts in each row."""


WITH_SDPA = sorted(PROVEN_MODELS.keys() - {"Gemma2ForCausalLM"})  # which caps its scores


def packed():
    numbers = torch.Generator().manual_seed(3)
    rows = []
    for number, lengths in enumerate(TEXTS):
        texts = [torch.randint(3, 60, (n,), generator=numbers).tolist() for n in lengths]
        ids, labels, positions = packed_row((text, text) for text in texts)
        row = {"input_ids": ids, "labels": labels, "position_ids": positions}
        rows.append(row | {"sample_id": number})
    return rows


def flash_of_texts(query, key, value, borders, other, most, _, *, scale, window_size, **options):
    """What `varlen_attn` computes, text by text, on a CPU."""
    assert window_size == (-1, 0)
    assert other is borders
    assert borders.dtype == torch.int32
    pieces = []
    for begin, end in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True):
        assert 0 < end - begin <= most
        states = (each[begin:end].transpose(0, 1).unsqueeze(0) for each in (query, key, value))
        pieces.append(
            torch.nn.functional.scaled_dot_product_attention(
                *states, is_causal=True, scale=scale, enable_gqa=True
            )[0].transpose(0, 1)
        )
    return torch.cat(pieces)


@pytest.fixture
def flash(monkeypatch):
    """Count the calls of a FlashAttention that runs on a CPU."""
    calls = []

    def counted(*args, **options):
        calls.append(args[0].dtype)
        return flash_of_texts(*args, **options)

    monkeypatch.setattr(attention, "varlen_attn", counted)
    monkeypatch.setattr(lean_batches, "has_flash", lambda device: True)
    return calls


def learned(kind, dtype, *, borders):
    model = small_of(kind, "sdpa").to(dtype)
    speed = Speed(SpeedArguments(lean_masks=True))
    speed.apply(model)
    batch = speed.collating(Collator(pad_token_id=0))(packed())
    del batch["sample_id"]
    takes = BORDERS in batch
    if not borders:
        batch.pop(BORDERS, None)
    loss = model(**batch).loss
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten().float() for p in model.parameters()]), takes


@pytest.mark.parametrize("architecture", WITH_SDPA)
def test_every_proven_family_learns_from_texts_what_it_learns_with_a_mask(architecture, flash):
    kind = PROVEN_MODELS[architecture]
    loss, gradient, takes = learned(kind, torch.bfloat16, borders=True)
    calls = len(flash)
    masked_loss, masked, _ = learned(kind, torch.bfloat16, borders=False)
    assert calls == (2 if takes else 0)  # a call a layer; families with windows need masks
    assert loss == pytest.approx(masked_loss, rel=2e-3)
    assert (gradient - masked).norm() / masked.norm() < 2e-2


def test_most_families_take_it(flash):
    kinds = {name: PROVEN_MODELS[name] for name in WITH_SDPA}
    taking = {n for n, kind in kinds.items() if learned(kind, torch.bfloat16, borders=True)[2]}
    assert "LlamaForCausalLM" in taking
    assert len(taking) > len(PROVEN_MODELS) / 2


def test_in_fp32_a_mask_is_made_of_the_borders(flash):
    loss, gradient, _ = learned("llama", torch.float32, borders=True)
    masked_loss, masked, _ = learned("llama", torch.float32, borders=False)
    assert not flash
    assert loss == pytest.approx(masked_loss, rel=1e-6)
    torch.testing.assert_close(gradient, masked)


def test_texts_that_saw_each_other_would_not_pass(flash, monkeypatch):
    one_text = lambda positions: torch.tensor([0, positions.numel()], dtype=torch.int32)  # noqa: E731
    masked_loss, masked, _ = learned("llama", torch.bfloat16, borders=False)
    monkeypatch.setattr(lean_batches, "text_borders", one_text)
    monkeypatch.setattr(
        attention,
        "varlen_attn",
        lambda *args, **options: flash_of_texts(*args[:5], 10**6, 0, **options),
    )
    _, gradient, _ = learned("llama", torch.bfloat16, borders=True)
    assert (gradient - masked).norm() / masked.norm() > 0.1


def test_borders_are_those_of_the_texts_and_padding_is_one():
    batch = Collator(pad_token_id=0)(packed())
    width = batch["input_ids"].shape[1]
    begins = text_borders(batch["position_ids"]).tolist()
    expected = []
    for row, lengths in enumerate(TEXTS):
        at = row * width
        for length in lengths:
            expected.append(at)
            at += length
        if at < (row + 1) * width:
            expected.append(at)
    assert begins == [*expected, len(TEXTS) * width]
    within = attention._mask_within(torch.tensor(begins, dtype=torch.int32), len(TEXTS), width)
    mask = block_causal_mask(batch["position_ids"])
    real = torch.tensor([[at < sum(lengths) for at in range(width)] for lengths in TEXTS])
    assert torch.equal(within[:, 0][real], mask[:, 0][real])


def test_rotations_in_fp32_are_cast_as_autocast_casts_them_for_sdpa(flash):
    model = small_of("llama", "sdpa")
    speed = Speed(SpeedArguments(lean_masks=True))
    speed.apply(model)
    batch = speed.collating(Collator(pad_token_id=0))(packed())
    del batch["sample_id"]
    with torch.autocast("cpu", torch.bfloat16):
        model(**batch).loss.backward()
    assert set(flash) == {torch.bfloat16}
    assert speed.on["lean_masks"] == UNMASKED


def test_a_flash_attention_that_is_not_there_is_refused_with_its_name():
    with pytest.raises(UsageError, match="--flash_attention FA4: .*Install its package"):
        choose_kernels(cudnn=False, flash="FA4")
    choose_kernels(cudnn=False, flash="FA2")
    assert torch.nn.attention.current_flash_attention_impl() is None


@pytest.mark.parametrize(
    ("torch_version", "installed", "capability", "reason"),
    [
        ("2.11.0+cu130", "4.0.0b18", (9, 0), None),
        ("2.11.0+cu130", "4.0.0b18", (8, 9), "it is for an H100, H200 or B200"),
        ("2.11.0+cu130", "4.0.0b19", (9, 0), "flash-attn-4 is 4.0.0b19, and 4.0.0b18 was measured"),
        ("2.11.0+cu130", None, (9, 0), "not installed, and 4.0.0b18 was measured with torch 2.11"),
        ("2.14.1", "4.0.0b18", (9, 0), "it was not measured with torch 2.14"),
    ],
)
def test_flash_attention_4_is_chosen_where_it_was_measured(
    torch_version, installed, capability, reason, monkeypatch
):
    def version(name):
        assert name == "flash-attn-4"
        if installed is None:
            raise attention.PackageNotFoundError
        return installed

    monkeypatch.setattr(torch, "__version__", torch_version)
    monkeypatch.setattr(attention, "version", version)
    why_not = no_flash_4(capability)
    assert why_not is None if reason is None else reason in why_not


def test_a_cache_of_compiled_layers_knows_which_kernels_were_allowed():
    config, tags = torch.compiler.config, []
    with config.patch(cache_key_tag="mine"):
        for cudnn in (False, True, False):
            torch.backends.cuda.enable_cudnn_sdp(cudnn)
            tell_caches_of_kernels()
            tags.append(config.cache_key_tag)
    assert tags[0] == tags[2] != tags[1]
    assert all(tag.startswith("mine") for tag in tags)
    assert "cudnn" in tags[1]


def test_layers_are_compiled_for_the_kernels_that_are_allowed_then(monkeypatch):
    told = []
    monkeypatch.setattr(layers, "tell_caches_of_kernels", lambda: told.append(True))
    layers.compile_blocks(small_of("llama", "sdpa"), backend="aot_eager")
    assert told == [True]


def test_a_stage_of_a_pipeline_hands_its_decoder_nothing_that_the_collator_added():
    assert {POSITIONS, BORDERS} <= LOSS_ONLY


def test_a_compiled_loss_has_longer_chunks_and_a_flag_wins():
    assert SpeedArguments().chunk_tokens == CHUNK_TOKENS < COMPILED_CHUNK_TOKENS
    assert SpeedArguments(compile_blocks=True).chunk_tokens == COMPILED_CHUNK_TOKENS
    assert SpeedArguments(compile_blocks=True, loss_chunk_tokens=7).chunk_tokens == 7
