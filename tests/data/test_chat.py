"""Chats: which tokens of a conversation are learned, told from the ids that come out."""

import importlib.util
import json
from itertools import groupby
from pathlib import Path

import launches
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from toolkit.data.arguments import DataArguments
from toolkit.data.chat import (
    MODELS_OWN,
    ChatTokeniser,
    Template,
    find_template,
    shipped_templates,
)
from toolkit.data.dataset import prepare_data
from toolkit.data.formats import Chat, Format
from toolkit.data.tokens import Tally, load_tokenizer
from toolkit.errors import UsageError
from toolkit.records.evidence import IGNORED
from toolkit.training.model import build_model

SPECIAL = [
    *("<|im_start|>", "<|im_end|>", "<start_of_turn>", "<end_of_turn>", "<|end|>"),
    *("<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|user|>", "<|assistant|>"),
]

CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hi there"},
    {"role": "assistant", "content": "one two"},
    {"role": "user", "content": "go on"},
    {"role": "assistant", "content": "three"},
]

NULL = {"role": "assistant", "content": None}

CHATML_WITHOUT_MARKERS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture
def plain(cache):
    """The built-in tokenizer: no chat template, and no tokens for chats."""
    return load_tokenizer(build_model())


@pytest.fixture
def tokenizer(plain):
    """The same with the special tokens of many chat models."""
    plain.add_special_tokens({"additional_special_tokens": SPECIAL})
    return plain


def tokeniser(tokenizer, template, *, loss_on="assistant", kind="chat", max_length=999, tally=None):
    columns = ("prompt", "completion") if kind != "chat" else ("messages",)
    found = Format(kind=kind, columns=columns, loss_on=loss_on, features=dict.fromkeys(columns))
    return ChatTokeniser(
        tokenizer,
        template,
        found,
        max_length=max_length,
        name="x",
        tally=Tally() if tally is None else tally,
    )


def learned_parts(tokenizer, template, messages=CHAT, *, prompt=0, **options):
    """Return the text of each run of learned tokens."""
    made = tokeniser(tokenizer, template, **options)
    ids, learned = made.tokens(Chat(messages=messages, prompt=prompt, tools=None), where="Row 0")
    assert len(ids) == len(learned)
    runs = groupby(zip(ids, learned, strict=True), key=lambda pair: pair[1])
    return [tokenizer.decode([token for token, _ in run]) for kept, run in runs if kept]


def unmarked(text=CHATML_WITHOUT_MARKERS):
    return Template(name="unmarked", text=text)


# The assistant's turns


@pytest.mark.parametrize("name", ["chatml", "roles"])
def test_shipped_templates_learn_each_turn_of_the_assistant_and_its_end(tokenizer, name):
    end = "<|im_end|>" if name == "chatml" else tokenizer.eos_token
    template = find_template(tokenizer, name)
    assert template.marks_turns
    assert learned_parts(tokenizer, template) == [f"one two{end}", f"three{end}"]


@pytest.mark.parametrize("name", ["chatml", "roles"])
def test_markers_and_incremental_rendering_find_the_same_tokens(tokenizer, name):
    marked = find_template(tokenizer, name)
    text = marked.text.replace("{%- generation -%}", "").replace("{%- endgeneration -%}", "")
    chat = Chat(messages=CHAT, prompt=0, tools=None)
    without = Template(name="x", text=text)
    assert not without.marks_turns
    expected = tokeniser(tokenizer, marked).tokens(chat, where="Row 0")
    assert tokeniser(tokenizer, without).tokens(chat, where="Row 0") == expected


def test_the_start_of_the_next_turn_is_not_learned_where_it_is_the_end_of_text_too(tokenizer):
    tokenizer.bos_token = tokenizer.eos_token
    text = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ bos_token }}{% generation %}"
        "{{ m.content }}{% endgeneration %}{{ eos_token }}{% else %}{{ bos_token + m.content }}"
        "{% endif %}{% endfor %}"
    )
    end = tokenizer.eos_token
    parts = learned_parts(tokenizer, Template(name="x", text=text))
    assert parts == [f"one two{end}", f"three{end}"]


@pytest.mark.parametrize("name", ["chatml", "roles"])
def test_what_opens_a_chat_is_no_reply_with_markers_and_without(tokenizer, name):
    marked = find_template(tokenizer, name)
    text = marked.text.replace("{%- generation -%}", "").replace("{%- endgeneration -%}", "")
    chat = Chat(messages=CHAT[2:], prompt=0, tools=None)
    ids, learned = tokeniser(tokenizer, marked).tokens(chat, where="Row 0")
    without = tokeniser(tokenizer, Template(name="x", text=text)).tokens(chat, where="Row 0")
    assert without == (ids, learned)
    parts = learned_parts(tokenizer, marked, CHAT[2:])
    assert len(parts) == 1
    assert parts[0].startswith("three")


def test_a_template_without_markers_gets_no_empty_mask(tokenizer):
    assert learned_parts(tokenizer, unmarked()) == ["one two<|im_end|>", "three<|im_end|>"]


def test_a_token_that_reaches_from_the_header_into_the_turn_is_learned(tokenizer):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "\n\n    b"}]
    parts = learned_parts(tokenizer, unmarked(), messages)
    assert len(parts) == 1
    assert parts[0].endswith("b<|im_end|>")
    assert parts[0].strip("\n ") == "b<|im_end|>"


def test_tokenizers_that_tell_no_places_find_the_same_tokens(tokenizer, monkeypatch):
    chat = Chat(messages=CHAT, prompt=0, tools=None)
    wanted = tokeniser(tokenizer, unmarked()).tokens(chat, where="Row 0")
    monkeypatch.setattr(type(tokenizer), "is_fast", False)
    assert tokeniser(tokenizer, unmarked()).tokens(chat, where="Row 0") == wanted
    marked = find_template(tokenizer, "chatml")  # whose markers need places as well
    assert tokeniser(tokenizer, marked).tokens(chat, where="Row 0") == wanted


def trl_template(name):
    folder = Path(importlib.util.find_spec("trl").submodule_search_locations[0]) / "chat_templates"
    return Template(name=name, text=(folder / f"{name}.jinja").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "name",
    ["qwen2_5", "qwen3_instruct_2507", "llama3", "gemma", "gemma3", "lfm2", "phi3", "phi3_5"],
)
def test_templates_of_models_give_what_trl_marks_in_them(tokenizer, name):
    """TRL patches markers into the templates of models; we find the same turns without them."""
    stock, marked = trl_template(name), trl_template(f"{name}_training")
    assert marked.marks_turns
    assert not stock.marks_turns
    found = learned_parts(tokenizer, stock, CHAT[1:])
    # A line break after the end of a turn is all that TRL learns beside it.
    assert [part.strip() for part in found] == [
        part.strip() for part in learned_parts(tokenizer, marked, CHAT[1:])
    ]
    assert [part.partition("<")[0] for part in found] == ["one two", "three"]
    assert all(">" in part for part in found)


@pytest.mark.parametrize("name", ["qwen3", "gptoss", "nemotron_3_nano"])
def test_a_template_whose_turns_change_later_is_refused_with_the_way_out(tokenizer, name):
    with pytest.raises(UsageError, match="differently when more follow.*--chat_template FILE"):
        learned_parts(tokenizer, trl_template(name), CHAT[1:])


def test_the_end_of_a_turn_is_learned_where_markers_leave_it_out(tokenizer):
    text = CHATML_WITHOUT_MARKERS.replace(
        "m.content +", "'' }}{% generation %}{{ m.content }}{% endgeneration %}{{"
    )
    marked = [{"role": "assistant", "content": content} for content in ("opening", "a", "b")]
    parts = learned_parts(tokenizer, Template(name="x", text=text), marked)
    assert parts == ["a<|im_end|>", "b<|im_end|>"]


NEXT_TURN = (
    "{% for m in messages %}{% if not loop.first %}{{ '<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_end|>\n<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.mark.parametrize("marked", [False, True], ids=["without markers", "with markers"])
@pytest.mark.parametrize("between", ["", "\n"], ids=["", "after a line break"])
def test_the_end_of_each_turn_is_learned_where_the_template_puts_it_into_the_next(
    tokenizer, marked, between
):
    tokenizer.eos_token = "<|im_end|>"
    text = NEXT_TURN.replace("'<|im_end|>\n", f"'{between}<|im_end|>\n")
    if marked:
        text = text.replace(
            "+ m.content }}",
            "}}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
            "{% else %}{{ m.content }}{% endif %}",
        )
    template = Template(name="next turn", text=text)
    assert template.marks_turns is marked
    parts = learned_parts(tokenizer, template, CHAT[1:])
    assert parts == [f"one two{between}<|im_end|>", "three<|im_end|>"]


def test_the_ends_of_glm_s_replies_and_calls_are_learned_as_trl_learns_them(tokenizer):
    tokenizer.add_special_tokens({"additional_special_tokens": [*SPECIAL, "<|observation|>"]})
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        *CHAT[1:4],
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        *CHAT[4:],
    ]
    found = learned_parts(tokenizer, trl_template("glm4moe"), messages)
    marked = learned_parts(tokenizer, trl_template("glm4moe_training"), messages)
    assert [part[part.rindex("<") :] for part in found] == ["<|user|>", "<|observation|>", "</s>"]
    assert [part.split() for part in found[:2]] == [part.split() for part in marked[:2]]


def test_a_turn_that_ends_by_itself_gets_no_second_end(tokenizer):
    """Llama 3.1 ends a call of a tool with another token than a reply."""
    text = (
        "{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n'"
        " + m.content + ('<|end|>' if m.content == 'one two' else '<|eot_id|>') }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n' }}"
        "{% endif %}"
    )
    assert learned_parts(tokenizer, unmarked(text)) == ["one two<|end|>", "three<|eot_id|>"]


def test_a_chat_that_ends_without_a_special_token_gets_the_end_of_text(plain):
    text = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    text += "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    parts = learned_parts(plain, unmarked(text), CHAT[1:])
    assert [part.strip() for part in parts] == ["one two", "three\n</s>"]


def test_the_end_is_learned_where_it_is_also_the_padding():
    """Like GPT-2's: `pad == eos`, and the loss still has the end of each turn."""
    words = ["</s>", "<|", "user", "assistant", "|>", "a", "b"]
    inner = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="</s>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", pad_token="</s>")
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    made = tokeniser(tokenizer, find_template(tokenizer, None))
    ids, learned = made.tokens(Chat(messages=messages, prompt=0, tools=None), where="Row 0")
    kept = [token for token, wanted in zip(ids, learned, strict=True) if wanted]
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 0
    assert kept == [words.index("b"), 0]


# Completions, and everything


def test_of_messages_as_prompt_and_completion_only_the_completion_is_learned(tokenizer):
    parts = learned_parts(
        tokenizer,
        find_template(tokenizer, "chatml"),
        prompt=4,
        kind="chat prompt and completion",
        loss_on="completion",
    )
    assert parts == ["three<|im_end|>"]


def test_all_of_a_chat_can_be_learned(tokenizer):
    (part,) = learned_parts(tokenizer, find_template(tokenizer, "chatml"), loss_on="all")
    assert part.startswith("<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user")
    assert part.endswith("three<|im_end|>")


def test_tool_calls_reach_the_template_as_they_are(tokenizer):
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": None}}}
    messages = [
        {"role": "user", "content": "1"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "3"},
    ]
    first, second = learned_parts(tokenizer, find_template(tokenizer, "chatml"), messages)
    assert (
        json.loads(first.partition("<tool_call>")[2].partition("</tool_call>")[0])
        == (call["function"])
    )
    assert second == "3<|im_end|>"


# Rows that can't be learned from


def rows_of(made, *chats):
    return made({"messages": list(chats)}, range(len(chats)))


def test_a_whole_row_without_a_learned_token_is_named(tokenizer):
    made = tokeniser(tokenizer, find_template(tokenizer, "chatml"))
    with pytest.raises(UsageError, match="Row 1 of x has no turn of the assistant.*--loss_on all"):
        rows_of(made, CHAT, CHAT[:2])


def test_markers_that_mark_nothing_are_an_error_and_no_healthy_loss(tokenizer):
    text = CHATML_WITHOUT_MARKERS + "{% if false %}{% generation %}{% endgeneration %}{% endif %}"
    made = tokeniser(tokenizer, Template(name="broken", text=text))
    with pytest.raises(UsageError, match=r"Row 0 .* the chat template \(broken\) marks none in it"):
        rows_of(made, CHAT)


def test_rows_cut_before_the_first_turn_are_left_out_and_counted(tokenizer):
    tally = Tally()
    made = tokeniser(tokenizer, find_template(tokenizer, "chatml"), max_length=16, tally=tally)
    long = [{"role": "user", "content": "many words " * 20}, CHAT[-1]]
    short = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows = rows_of(made, long, short)
    assert rows["sample_id"] == [1]
    assert tally.truncated == 1
    assert IGNORED in rows["labels"][0]


def test_messages_that_a_template_refuses_are_named(tokenizer):
    text = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(UsageError, match="Row 0 does not go through.*roles must alternate"):
        learned_parts(tokenizer, unmarked(text))


# Which template


def test_the_models_own_template_goes_before_the_shipped_ones(tokenizer):
    tokenizer.chat_template = CHATML_WITHOUT_MARKERS
    assert find_template(tokenizer, None) == Template(name=MODELS_OWN, text=CHATML_WITHOUT_MARKERS)
    assert find_template(tokenizer, "roles").text == shipped_templates()["roles"]


def test_without_one_the_tokenizer_decides(plain):
    assert plain.chat_template is None
    assert find_template(plain, None).name == "roles"
    with pytest.raises(UsageError, match="chatml needs <.im_start.>.*--chat_template roles"):
        find_template(plain, "chatml")
    plain.add_special_tokens({"additional_special_tokens": SPECIAL})
    assert find_template(plain, None).name == "chatml"


def test_a_template_that_is_not_there(plain, tmp_path):
    with pytest.raises(UsageError, match="no.jinja is no file.*chatml, roles"):
        find_template(plain, str(tmp_path / "no.jinja"))


@pytest.mark.parametrize("name", ["chatml", "roles"])
def test_shipped_templates_ask_for_a_reply_as_they_learn_it(tokenizer, name):
    template = find_template(tokenizer, name)
    asked = tokenizer.apply_chat_template(
        CHAT[:2], chat_template=template.text, tokenize=False, add_generation_prompt=True
    )
    whole = tokenizer.apply_chat_template(CHAT[:3], chat_template=template.text, tokenize=False)
    assert whole.startswith(asked)
    assert whole.removeprefix(asked).startswith("one two")


# From a file to final/


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def sharegpt(messages, names):
    return [{"from": names[each["role"]], "value": each["content"]} for each in messages]


@pytest.mark.parametrize(
    "names",
    [
        {"system": "system", "user": "human", "assistant": "gpt"},
        {"system": "system", "user": "user", "assistant": "chatgpt"},
        {"system": "system", "user": "Human", "assistant": "assistant"},
    ],
)
def test_both_styles_of_messages_give_the_same_tokens(tmp_path, cache, names):
    folder = build_model()
    openai = write_rows(tmp_path / "openai.jsonl", [{"messages": CHAT}] * 2)
    other = write_rows(tmp_path / "s.jsonl", [{"conversations": sharegpt(CHAT, names)}] * 2)
    first = prepare_data(DataArguments(train_file=openai), folder)
    second = prepare_data(DataArguments(train_file=other), folder)
    assert first.tokens_hash == second.tokens_hash
    assert (first.format, first.loss_on, first.template["name"]) == ("chat", "assistant", "roles")
    named = write_rows(tmp_path / "named.jsonl", [{"text": "a", "talk": CHAT}] * 2)
    third = prepare_data(DataArguments(train_file=named, messages_column="talk"), folder)
    assert third.tokens_hash == first.tokens_hash


def test_tools_and_mixed_messages_of_a_file_come_through(tmp_path, cache):
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"x": {"y": 1}}}}]
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    rows = [
        {
            "messages": [
                {"role": "user", "content": "1"},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "content": "2"},
                {"role": "assistant", "content": "3"},
            ],
            "tools": tools,
        },
        {"messages": CHAT[1:], "tools": None},
    ]
    folder = build_model()
    path = write_rows(tmp_path / "rows.jsonl", rows)
    prepared = prepare_data(DataArguments(train_file=path, max_length=400), folder)
    tokenizer = load_tokenizer(folder)
    with_tools, without = (tokenizer.decode(ids) for ids in prepared.load()["input_ids"])
    assert json.dumps(tools[0]) in with_tools
    assert '{"name": "add", "arguments": {"a": 1}}' in with_tools
    assert "tool" not in without
    assert "None" not in with_tools + without


def test_template_mask_and_packing_are_in_the_hash_of_the_tokens(tmp_path, cache):
    folder = build_model()
    path = write_rows(tmp_path / "rows.jsonl", [{"messages": CHAT}, {"messages": CHAT[1:]}])
    other = tmp_path / "other.jinja"
    other.write_text(shipped_templates()["roles"].replace("'<|' + m", "'<1' + m"))
    made = [
        prepare_data(DataArguments(train_file=path, **options), folder)
        for options in (
            {},
            {"chat_template": str(other)},
            {"loss_on": "all"},
            {"packing": "best_fit"},
            {"packing": "fixed", "max_length": 16},
        )
    ]
    assert len({each.tokens_hash for each in made}) == len(made)
    assert len({each.hash for each in made}) == 1
    other.write_text(shipped_templates()["roles"].replace("'<|' + m", "'<2' + m"))
    changed = prepare_data(DataArguments(train_file=path, chat_template=str(other)), folder)
    assert changed.tokens_hash not in {each.tokens_hash for each in made}


def test_a_template_of_the_model_s_own_or_of_the_user_s_choice_is_no_news(tmp_path, cache):
    folder = tmp_path / "model"
    tokenizer = load_tokenizer(build_model())
    tokenizer.chat_template = shipped_templates()["roles"]
    tokenizer.save_pretrained(folder)
    path = write_rows(tmp_path / "rows.jsonl", [{"messages": CHAT}])
    own = prepare_data(DataArguments(train_file=path), folder)
    asked = prepare_data(DataArguments(train_file=path, chat_template="roles"), build_model())
    assert (own.notes(), asked.notes()) == ([], [])
    assert prepare_data(DataArguments(train_file=path), build_model()).brought_template == "roles"


def test_the_template_is_saved_with_the_tokenizer(tmp_path, cache):
    folder = build_model()
    path = write_rows(tmp_path / "rows.jsonl", [{"messages": CHAT}])
    prepared = prepare_data(DataArguments(train_file=path), folder)
    tokenizer = load_tokenizer(folder, chat_template=prepared.chat_template())
    tokenizer.save_pretrained(tmp_path / "final")
    again = load_tokenizer(tmp_path / "final")
    assert again.chat_template == shipped_templates()["roles"]
    text = write_rows(tmp_path / "text.jsonl", [{"text": "a b"}])
    without = prepare_data(DataArguments(train_file=text), folder)
    assert without.chat_template() is None


def test_a_template_that_the_toolkit_brings_is_named_before_the_training_after_it_and_in_the_card(
    tmp_path, launch_environment
):
    long = [{"role": "user", "content": "many words " * 99}, CHAT[-1]]
    path = write_rows(tmp_path / "rows.jsonl", [{"messages": CHAT}] * 8 + [{"messages": long}])
    flags = ["--train_file", path, "--max_length", 128, "--max_steps", 1, "--engine", "loop"]
    done = launches.run(
        [*launches.TRAIN, *flags, "--output_dir", tmp_path / "o"], environment=launch_environment
    )
    assert done.returncode == 0, done.stdout
    before, trained, after = done.stdout.partition("step 1/1: ")
    assert trained
    said = "toolkit: the model has no chat template: the chats of rows.jsonl are trained with roles"
    assert before.count(said) == 1
    assert before.count("toolkit: rows.jsonl: 1 of 9 rows are left out, without a token to ") == 1
    assert after.count("toolkit: final/ has the chat template roles of the toolkit") == 1
    card = (tmp_path / "o" / "final" / "README.md").read_text()
    said = "| chat template | roles, brought by the toolkit, for the base model has none |"
    assert said in card.splitlines()
    saved = load_tokenizer(tmp_path / "o" / "final")
    assert saved.chat_template == shipped_templates()["roles"]


@pytest.mark.parametrize(
    ("rows", "options", "says"),
    [
        ([{"messages": [{"from": "alien", "value": "a"}]}], {}, "Row 0 .*'alien'; known are"),
        ([{"messages": [{"who": "a"}]}], {}, "Row 0 .*the fields who: write role and content"),
        ([{"messages": CHAT}, {"messages": [*CHAT[:4], NULL]}], {}, "Row 1 .*'assistant' .*null"),
        ([{"messages": [CHAT[0], NULL]}] * 2, {}, "Row 0 .*'assistant' whose content is null"),
        ([{"messages": [{"role": "user", "content": None}, CHAT[2]]}], {}, "'user' .*is null"),
        (
            [{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": None}]}],
            {},
            "Row 0 .*'gpt' whose value is null. Write what it says",
        ),
        (
            [{"messages": [CHAT[1], {"role": "assistant", "content": " "}]}],
            {},
            "Row 0 .*nothing to learn but the end of a turn",
        ),
        ([{"messages": []}, {"messages": CHAT}], {}, "Row 0 of rows.jsonl has no messages"),
        ([{"messages": CHAT}], {"loss_on": "completion"}, "rows are chat: use assistant or all"),
        ([{"text": "a"}], {"loss_on": "assistant"}, "rows are text: use all"),
        ([{"text": "a"}], {"chat_template": "roles"}, "--chat_template is for chats"),
        ([{"text": "a"}], {"messages_column": "text"}, "not messages.*--text_column"),
        ([{"talk": CHAT}], {}, "columns are: talk.*--messages_column"),
        ([{"messages": CHAT}], {"text_column": "messages"}, "not text.*--messages_column"),
        ([{"prompt": "a", "completion": CHAT}], {}, "one holds text and the other messages"),
    ],
)
def test_chats_that_are_none_are_told_so(rows, options, says, tmp_path, cache):
    path = write_rows(tmp_path / "rows.jsonl", rows)
    with pytest.raises(UsageError, match=says):
        prepare_data(DataArguments(train_file=path, **options), build_model())
