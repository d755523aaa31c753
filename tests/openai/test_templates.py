"""Chat templates are rendered as the `transformers` library renders them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("jinja2")

from pytriton.openai._errors import OpenAIError
from pytriton.openai._templates import DEFAULT_TEMPLATE, ChatTemplate
from support.language.chat_templates import TEMPLATES, TOKENS, cases

RENDERED = Path(__file__).parent / "rendered" / "transformers.json"


def test_texts_are_those_of_transformers() -> None:
    theirs = json.loads(RENDERED.read_text())
    config = json.dumps({**TOKENS, "pad_token": None, "eos_token": {"content": TOKENS["eos_token"], "lstrip": False}})
    differences = []
    for (name, messages, more), wanted in zip(cases(), theirs, strict=True):
        try:
            got = ChatTemplate.read(TEMPLATES[name], config).render(messages, more, "m")
        except OpenAIError as error:
            got = error.message
        if wanted.startswith(("TemplateError", "UndefinedError")):
            fits = wanted.partition(": ")[2] in got
        else:
            fits = got == wanted
        if not fits:
            differences.append((name, messages, wanted, got))
    assert not differences, differences[0]
    assert len(theirs) > 100


def test_what_a_template_asks_for() -> None:
    assert ChatTemplate(TEMPLATES["qwen"]).shows("tools")
    assert not ChatTemplate(TEMPLATES["gemma"]).shows("tools")
    assert not ChatTemplate("{% oops").shows("tools")


def test_the_configuration_of_a_tokenizer_has_a_template_and_tokens() -> None:
    config = json.dumps({"chat_template": "{{ bos_token }}{{ messages[0].content }}", "bos_token": {"content": "<s>"}})
    assert ChatTemplate.read(None, config).render([{"content": "x"}], {}, "m") == "<s>x"
    assert ChatTemplate.read("own", config).text == "own"
    assert ChatTemplate.read(None, None).text == DEFAULT_TEMPLATE
    for wrong in ("{", "[]"):
        with pytest.raises(ValueError, match="its tokenizer_config is no JSON"):
            ChatTemplate.read(None, wrong)


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_that_work_are_found_right(name: str) -> None:
    ChatTemplate(TEMPLATES[name], tuple(TOKENS.items())).check()


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% oops %}", "cannot be parsed"),
        ("{{ messages[0].content + 1 }}", "fails for a conversation: TypeError"),
        ("{{ tools[0].nothing.more if tools }}", "fails for a conversation with tools"),
        (
            "{{ tools and '' }}{{ messages[1].tool_calls[0].args.x if messages | length > 1 }}",
            "fails for calls of tools",
        ),
        ("{{ strftime_then('%Y') }}", "'strftime_then' is undefined"),
    ],
)
def test_templates_that_would_fail_are_told_before(template: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        ChatTemplate(template).check()


def test_the_sandbox_holds() -> None:
    for template in ("{{ messages.__class__.__mro__ }}", "{{ messages.append(1) }}"):
        with pytest.raises(OpenAIError, match="SecurityError"):
            ChatTemplate(template).render([{"content": ""}], {}, "m")


def test_the_date_is_that_of_now() -> None:
    assert len(ChatTemplate("{{ strftime_now('%Y-%m-%d') }}").render([], {}, "m")) == 10
