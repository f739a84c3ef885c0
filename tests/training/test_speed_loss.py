"""The chunked loss: the same loss and gradients, and never the logits of a whole batch."""

import copy
import math

import pytest
import torch
from datasets import Dataset
from small_models import small_of, tiny_llama
from torch.utils._python_dispatch import TorchDispatchMode

from toolkit.configs.proven_models import PROVEN_MODELS
from toolkit.data.sampling_order import Collator
from toolkit.errors import UsageError
from toolkit.records.evidence import IGNORED
from toolkit.training.speed import Speed
from toolkit.training.speed.chunked_loss import (
    LogitsOf,
    chunked_cross_entropy,
    compiled_chunk,
    use_chunked_loss,
)
from toolkit.training.speed.lean_batches import POSITIONS, LeanCollator
from toolkit.training.speed_arguments import SpeedArguments

LENGTHS = (9, 23, 5, 16)


def rows(vocabulary=60):
    numbers = torch.Generator().manual_seed(1)
    ids = [torch.randint(vocabulary, (n,), generator=numbers).tolist() for n in LENGTHS]
    labels = [[IGNORED] * (len(text) // 2) + text[len(text) // 2 :] for text in ids]
    return [
        {"input_ids": text, "labels": wanted, "sample_id": number}
        for number, (text, wanted) in enumerate(zip(ids, labels, strict=True))
    ]


def batch(*, chunked, vocabulary=60):
    collate = Collator(pad_token_id=0)
    if chunked:
        collate = LeanCollator(collate=collate, names_positions=True, drops_masks=False)
    made = collate(rows(vocabulary))
    del made["sample_id"]
    return made


def learned(model, inputs, **options):
    model.zero_grad()
    out = model(**inputs, **options)
    out.loss.backward()
    return out, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def gap(one, other):
    assert one.keys() == other.keys()
    size = max(each.abs().max() for each in one.values())
    return max(float((one[name] - other[name]).abs().max() / size) for name in one)


@pytest.mark.parametrize("architecture", sorted(PROVEN_MODELS))
def test_the_architectures_that_are_taken_learn_the_same(architecture):
    model = small_of(PROVEN_MODELS[architecture], "eager")
    items = torch.tensor(31)
    full, wanted = learned(model, batch(chunked=False), num_items_in_batch=items)
    use_chunked_loss(model, chunk_tokens=7)
    chunked, found = learned(model, batch(chunked=True), num_items_in_batch=items)
    assert full.logits is not None
    assert chunked.logits is None
    assert chunked.loss.item() == pytest.approx(full.loss.item(), rel=1e-6)
    assert gap(wanted, found) < 1e-5


@pytest.mark.parametrize("change", ["scale", "softcap"])
def test_a_family_whose_own_part_were_left_out_would_not_pass(change):
    kind = {"scale": "granite", "softcap": "gemma2"}[change]
    values = {"scale": {"logits_scaling": 3.0}, "softcap": {"final_logit_softcapping": 0.05}}
    model = small_of(kind, "eager", **values[change])
    full, wanted = learned(model, batch(chunked=False))
    use_chunked_loss(model, chunk_tokens=7)
    chunked, found = learned(model, batch(chunked=True))
    assert chunked.loss.item() == pytest.approx(full.loss.item(), rel=1e-6)
    assert gap(wanted, found) < 1e-5
    plain = small_of(kind, "eager", **values[change])
    plain.config.logits_scaling, plain.config.final_logit_softcapping = 1.0, None
    assert abs(learned(plain, batch(chunked=False))[0].loss.item() - full.loss.item()) > 1e-3


@pytest.mark.parametrize("chunk", [1, 5, 53, 4096])
@pytest.mark.parametrize("items", [None, 31, torch.tensor(31)])
def test_the_size_of_a_chunk_changes_nothing(chunk, items):
    model = tiny_llama()
    options = {} if items is None else {"num_items_in_batch": items}
    full, wanted = learned(model, batch(chunked=False), **options)
    use_chunked_loss(model, chunk_tokens=chunk)
    for named in (True, False):
        chunked, found = learned(model, batch(chunked=named), **options)
        assert chunked.loss.item() == pytest.approx(full.loss.item(), rel=1e-6)
        assert gap(wanted, found) < 1e-5


def test_tied_and_frozen_heads_get_the_gradients_that_are_theirs():
    model = tiny_llama(tie_word_embeddings=True)
    _, wanted = learned(model, batch(chunked=False))
    use_chunked_loss(model, chunk_tokens=7)
    _, found = learned(model, batch(chunked=True))
    assert gap(wanted, found) < 1e-5
    frozen = tiny_llama()
    frozen.lm_head.weight.requires_grad_(False)
    _, wanted = learned(frozen, batch(chunked=False))
    use_chunked_loss(frozen, chunk_tokens=7)
    _, found = learned(frozen, batch(chunked=True))
    assert "lm_head.weight" not in found
    assert gap(wanted, found) < 1e-5


class Zeros(TorchDispatchMode):
    """Notes the shapes of tensors that are made to be added to."""

    def __init__(self):
        super().__init__()
        self.shapes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if func.overloadpacket._qualified_op_name.startswith("aten::zeros"):
            self.shapes.add(tuple(made.shape))
        return made


@pytest.mark.parametrize("trained", [True, False])
def test_a_frozen_head_has_no_gradient_in_memory_either(trained):
    model = tiny_llama()
    model.lm_head.weight.requires_grad_(trained)
    use_chunked_loss(model, chunk_tokens=7)
    with Zeros() as zeros:
        learned(model, batch(chunked=True))
    assert (tuple(model.lm_head.weight.shape) in zeros.shapes) == trained


def test_half_precision_learns_the_same_as_the_whole_logits_do():
    for dtype, autocast in ((torch.bfloat16, False), (torch.float32, True)):
        model = tiny_llama().to(dtype)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            full, wanted = learned(model, batch(chunked=False))
        use_chunked_loss(model, chunk_tokens=7)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            chunked, found = learned(model, batch(chunked=True))
        assert chunked.loss.dtype == torch.float32
        assert chunked.loss.item() == pytest.approx(full.loss.item(), rel=1e-4)
        assert {each.dtype for each in found.values()} == {dtype}
        assert gap(wanted, found) < 0.02


def test_rows_that_train_nothing_have_a_loss_of_zero_and_every_gradient():
    model = tiny_llama()
    use_chunked_loss(model, chunk_tokens=7)
    idle = batch(chunked=True)
    idle["labels"].fill_(IGNORED)
    idle[POSITIONS] = idle[POSITIONS][:0]
    out, found = learned(model, idle, num_items_in_batch=torch.tensor(4))
    assert out.loss.item() == 0
    assert found.keys() == dict(model.named_parameters()).keys()
    assert all(not each.any() for each in found.values())


def test_without_labels_the_model_answers_as_before():
    model = tiny_llama().eval()
    ids = batch(chunked=False)["input_ids"]
    before = model(input_ids=ids).logits
    use_chunked_loss(model, chunk_tokens=7)
    assert torch.equal(model(input_ids=ids).logits, before)
    with torch.no_grad():
        assert model(**batch(chunked=True)).loss.requires_grad is False


def test_a_copy_computes_with_its_own_weights():
    model = tiny_llama().eval()
    use_chunked_loss(model, chunk_tokens=7)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
        ids = batch(chunked=False)["input_ids"]
        assert not copied(input_ids=ids).logits.any()
        assert copied(**batch(chunked=True)).loss.item() == pytest.approx(math.log(64))


# peft 0.21 asks by the old name (peft/mixed_model.py, peft_model.py).
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("wrapped", [False, True])
def test_adapters_learn_the_same_within_the_model_and_around_it(wrapped):
    from peft import LoraConfig, get_peft_model, inject_adapter_in_model

    def injected(model, config):
        return inject_adapter_in_model(config, model)

    def adapted(speed):
        model = tiny_llama()
        torch.manual_seed(5)
        config = LoraConfig(
            r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM"
        )
        model = (get_peft_model if wrapped else injected)(model, config)
        Speed(speed).apply(model)
        return model

    full, wanted = learned(adapted(SpeedArguments()), batch(chunked=False))
    chunked, found = learned(
        adapted(SpeedArguments(tuned=True, loss_chunk_tokens=7)), batch(chunked=True)
    )
    assert chunked.logits is None
    assert chunked.loss.item() == pytest.approx(full.loss.item(), rel=1e-6)
    assert len(found) == 2 * 7 * 2
    assert gap(wanted, found) < 1e-5


class Largest(TorchDispatchMode):
    """The most elements of a tensor as wide as the vocabulary; the head's own are left out."""

    def __init__(self, vocabulary, hidden):
        super().__init__()
        self.shape, self.most = (vocabulary, hidden), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for each in torch.utils._pytree.tree_leaves(found):
            if isinstance(each, torch.Tensor) and self.shape[0] in each.shape:
                self.most = max(
                    self.most, 0 if set(each.shape) == set(self.shape) else each.numel()
                )
        return found


def test_no_more_logits_are_held_than_those_of_a_chunk():
    vocabulary, chunk = 997, 8
    model = tiny_llama(vocabulary=vocabulary)
    whole = batch(chunked=True)["input_ids"].numel() * vocabulary
    with Largest(vocabulary, 32) as full:
        learned(model, batch(chunked=False))
    assert full.most >= whole
    use_chunked_loss(model, chunk_tokens=chunk)
    with Largest(vocabulary, 32) as found:
        learned(model, batch(chunked=True))
    assert 0 < found.most <= chunk * vocabulary


def test_gradients_that_fp16_would_lose_are_kept_until_they_are_scaled():
    """The loss of many tokens divides each gradient beyond what fp16 can hold."""
    torch.manual_seed(0)
    hidden = torch.randn(64, 16, dtype=torch.float16, requires_grad=True)
    weight = (torch.randn(50, 16) / 4).half().requires_grad_()
    targets = torch.randint(50, (64,))
    scale = 2.0**16
    loss = chunked_cross_entropy(hidden, weight, targets, items=10_000_000, chunk_tokens=16)
    (loss * scale).backward()
    exact = hidden.detach().double().requires_grad_()
    reference = torch.nn.functional.cross_entropy(
        exact @ weight.detach().double().t(), targets, reduction="sum"
    )
    (reference / 10_000_000 * scale).backward()
    assert torch.allclose(hidden.grad.double(), exact.grad, rtol=0.02, atol=1e-6)


def test_a_factor_beyond_fp16_does_no_harm():
    hidden = torch.randn(4, 16, dtype=torch.float16, requires_grad=True)
    weight = (torch.randn(50, 16) / 4000).half().requires_grad_()
    loss = chunked_cross_entropy(hidden, weight, torch.arange(4), items=1, chunk_tokens=16)
    (loss * 2.0**17).backward()
    assert hidden.grad.isfinite().all()
    assert hidden.grad.any()


def test_a_second_backward_is_an_error_and_no_wrong_gradient():
    hidden, weight = (torch.randn(n, 4, requires_grad=True) for n in (6, 9))
    loss = chunked_cross_entropy(hidden, weight, torch.arange(6), chunk_tokens=2)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace operation|second time"):
        loss.backward()


def test_the_transforms_of_logits_have_the_gradient_of_autograd():
    transformed = LogitsOf(scale=0.3, softcap=2.0)
    hidden, weight = (torch.randn(n, 4, dtype=torch.float32, requires_grad=True) for n in (6, 9))
    targets = torch.tensor([0, 3, IGNORED, 8, 1, 1])
    chunked_cross_entropy(hidden, weight, targets, chunk_tokens=4, logits_of=transformed).backward()
    found = hidden.grad.clone(), weight.grad.clone()
    hidden.grad = weight.grad = None
    logits = 2.0 * torch.tanh(hidden @ weight.t() * 0.3 / 2.0)
    torch.nn.functional.cross_entropy(logits, targets, ignore_index=IGNORED).backward()
    assert torch.allclose(found[0], hidden.grad, atol=1e-6)
    assert torch.allclose(found[1], weight.grad, atol=1e-6)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (lambda: small_of("opt", "eager"), "not proven for OPTForCausalLM"),
        (lambda: small_of("mixtral", "eager", output_router_logits=True), "routers' loss"),
    ],
)
def test_models_that_might_lose_a_part_of_their_loss_are_refused(model, says):
    with pytest.raises(UsageError, match=f"{says}.*Pass --loss_impl full"):
        use_chunked_loss(model(), chunk_tokens=8)


def test_a_head_of_another_kind_is_refused():
    model = tiny_llama()
    model.lm_head = torch.nn.Sequential(model.lm_head)
    with pytest.raises(UsageError, match="plain linear head"):
        use_chunked_loss(model, chunk_tokens=8)


def test_the_positions_are_those_whose_next_token_is_learned():
    made = batch(chunked=True)
    labels = made["labels"]
    shifted = torch.nn.functional.pad(labels, (0, 1), value=IGNORED)[:, 1:].flatten()
    assert shifted[made[POSITIONS]].ne(IGNORED).all()
    assert len(made[POSITIONS]) == (labels[:, 1:] != IGNORED).sum()
    assert Dataset.from_list(rows()).num_rows == len(labels)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("logits_of", [LogitsOf(), LogitsOf(scale=0.5, softcap=5.0)])
def test_a_compiled_chunk_has_the_loss_and_gradients_of_one_that_is_not(logits_of, dtype):
    numbers = torch.Generator().manual_seed(2)
    hidden = torch.randn(50, 16, generator=numbers).to(dtype)
    weight = torch.randn(40, 16, generator=numbers).to(dtype)
    targets = torch.randint(40, (50,), generator=numbers)
    targets[::7] = IGNORED
    torch._dynamo.reset()
    stats = torch._dynamo.utils.counters["stats"]
    before, found = stats["unique_graphs"], []
    for of_chunk in (None, compiled_chunk("aot_eager")):
        inputs = [each.clone().requires_grad_() for each in (hidden, weight)]
        loss = chunked_cross_entropy(
            *inputs, targets, chunk_tokens=16, logits_of=logits_of, of_chunk=of_chunk
        )
        loss.backward()
        found.append((loss.item(), *(each.grad for each in inputs)))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-6)
    for one, two in zip(found[0][1:], found[1][1:], strict=True):
        assert (one - two).norm() / one.norm() < (1e-6 if dtype == torch.float32 else 5e-3)
    # Three chunks of 16 tokens and a last one of 2.
    assert stats["unique_graphs"] - before == 1
    torch._dynamo.reset()


def test_without_gradients_a_compiled_chunk_has_the_loss_alone():
    hidden, weight, targets = torch.randn(9, 4), torch.randn(7, 4), torch.arange(9) % 7
    expected = torch.nn.functional.cross_entropy(hidden @ weight.t(), targets)
    with torch.no_grad():
        found = chunked_cross_entropy(
            hidden, weight, targets, chunk_tokens=4, of_chunk=compiled_chunk("aot_eager")
        )
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    torch._dynamo.reset()
