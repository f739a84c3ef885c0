"""What ends a generation: a chat model that was trained stops where its turns were trained to."""

import pytest
import torch
from accelerate import Accelerator
from small_models import tiny_llama
from transformers import AutoModelForCausalLM, AutoTokenizer

from toolkit.data.chat import shipped_templates, turn_end
from toolkit.data.tokens import load_tokenizer
from toolkit.engines.wrapped import Wrapped
from toolkit.measuring.attestation import Requested
from toolkit.measuring.recorder import Recorder
from toolkit.strategies import get_strategy
from toolkit.training.evaluation import NEW_TOKENS, Samples, continuations
from toolkit.training.generation import generation_config_of, stop_tokens
from toolkit.training.model import build_model
from toolkit.training.saving import save_model

PHI = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{{ eos_token }}"
)
LLAMA = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + ' ' + eos_token }}{% endif %}{% endfor %}"
)
NEXT_TURN = (
    "{% for m in messages %}{% if not loop.first %}{{ '<|im_end|>\n' }}{% endif %}"
    "{{ m.role + '\n' + m.content }}{% endfor %}"
)
GLM = "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content }}{% endfor %}"
PLAIN = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
STRICT = "{{ raise_exception('only with a system prompt') }}"

CHAT = [{"role": "user", "content": "say hello"}, {"role": "assistant", "content": "hello there"}]


@pytest.fixture
def tokenizer(cache):
    found = load_tokenizer(build_model())
    found.add_special_tokens(
        {"additional_special_tokens": ["<|im_start|>", "<|im_end|>", "<|end|>", "<|user|>"]}
    )
    return found


@pytest.fixture(scope="module")
def accelerator():
    return Accelerator(cpu=True)


@pytest.mark.parametrize(
    ("template", "token"),
    [
        (shipped_templates()["chatml"], "<|im_end|>"),
        (shipped_templates()["roles"], "</s>"),
        (PHI, "<|end|>"),
        (LLAMA, "</s>"),
        (NEXT_TURN, "<|im_end|>"),
        (GLM, "<|user|>"),
        (PLAIN, None),
        (STRICT, None),
        (None, None),
    ],
    ids=["chatml", "roles", "phi", "llama", "next turn", "glm", "plain", "strict", "none"],
)
def test_the_end_of_a_turn_is_found_in_a_rendered_chat(tokenizer, template, token):
    tokenizer.chat_template = template
    assert turn_end(tokenizer) == (
        None if token is None else tokenizer.convert_tokens_to_ids(token)
    )


def test_a_generation_config_that_is_right_is_left_alone(tokenizer):
    model = tiny_llama()
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    model.generation_config.eos_token_id = 2
    assert generation_config_of(model, None) is model.generation_config
    assert generation_config_of(model, tokenizer) is model.generation_config
    tokenizer.chat_template = shipped_templates()["roles"]
    assert generation_config_of(model, tokenizer) is model.generation_config
    tokenizer.chat_template = shipped_templates()["chatml"]
    assert generation_config_of(model, tokenizer).eos_token_id == [2, end]
    assert model.generation_config.eos_token_id == 2
    model.generation_config.eos_token_id = [end, 2]
    assert generation_config_of(model, tokenizer) is model.generation_config
    model.generation_config.eos_token_id = None
    assert stop_tokens(model, tokenizer) == [tokenizer.eos_token_id, end]


def taught(tokenizer, rendered):
    """The built-in model, taught one chat by heart."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(build_model(), dtype=torch.float32)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    ids = torch.tensor([rendered])
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(300):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if loss < 0.01:
            return model
    raise AssertionError(f"it learned too little: {loss}")


def test_a_chat_model_that_was_trained_stops_at_the_end_of_its_turn(
    tokenizer, accelerator, tmp_path
):
    tokenizer.chat_template = shipped_templates()["chatml"]
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    # Nothing but the end of the turn keeps it from going on.
    rendered = tokenizer.apply_chat_template([*CHAT, *CHAT], return_dict=False)
    model = taught(tokenizer, rendered)
    save_model(accelerator, model, tmp_path / "final", tokenizer=tokenizer)

    saved = AutoTokenizer.from_pretrained(tmp_path / "final")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    prompt = saved.apply_chat_template(CHAT[:1], add_generation_prompt=True, return_tensors="pt")
    written = loaded.generate(**prompt, do_sample=False, max_new_tokens=40)[0]
    new = written[prompt["input_ids"].shape[1] :].tolist()
    assert saved.decode(new) == "hello there<|im_end|>"
    loaded.generation_config.eos_token_id = tokenizer.eos_token_id
    on = loaded.generate(**prompt, do_sample=False, max_new_tokens=40)[0]
    assert on.tolist().count(end) > written.tolist().count(end)

    # So do the samples of the training itself.
    text = continuations(accelerator, model, [prompt["input_ids"][0].tolist()], tokenizer)
    assert text == ["hello there"]


def test_samples_are_taken_before_the_first_step_and_after_the_last(accelerator, tokenizer, cache):
    asked = Requested(strategy=get_strategy("single"), num_processes=1)
    recorder = Recorder(asked, rehearsal=True)
    model = tiny_llama(vocabulary=len(tokenizer))
    prompts = [tokenizer.encode("def add(a, b):\n"), tokenizer.encode("def sub")]
    samples = Samples(prompts, tokenizer, last_step=3, recorder=recorder)
    engine = Wrapped(
        accelerator=accelerator, model=model, optimizer=None, scheduler=None, report=print
    )
    samples.prepared(engine)
    before = [each["before"] for each in samples.results]
    assert [each["prompt"] for each in samples.results] == ["def add(a, b):\n", "def sub"]
    assert all(before)
    assert [each["after"] for each in samples.results] == [None, None]
    with torch.no_grad():
        model.lm_head.weight.neg_()
    samples.step_done(2)
    assert [each["after"] for each in samples.results] == [None, None]
    samples.step_done(3)
    assert [each["before"] for each in samples.results] == before
    assert all(each["after"] != each["before"] for each in samples.results)
    assert model.training
    assert model.config.use_cache is False


def test_a_prompt_leaves_room_for_what_follows_where_positions_are_few(accelerator, tokenizer):
    model = tiny_llama(vocabulary=len(tokenizer), max_position_embeddings=NEW_TOKENS + 8)
    seen = []
    model.register_forward_pre_hook(
        lambda _, args, inputs: seen.append(inputs["input_ids"].shape[1]), with_kwargs=True
    )
    (text,) = continuations(accelerator, model, [[5] * 50], tokenizer)
    assert seen[0] == 8
    assert set(seen[1:]) == {1}, "without its cache every token would be computed again"
    assert text
