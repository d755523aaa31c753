# ruff: noqa: E501
"""Chat templates in the manner of known families of models, and conversations for them.

Run as a program in an environment with `transformers`, it writes how that renders them, which tests compare with:

    pip install transformers jinja2
    python tests/support/language/chat_templates.py > tests/openai/rendered/transformers.json
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from typing import Any

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tell the weather: <b>now</b> & 'später'.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
DOCUMENTS = [{"title": "Fjord", "text": "A long, narrow inlet."}]

TEMPLATES = {
    "chatml": (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "qwen": (
        "{%- if tools is not none %}\n"
        "    {{- '<|im_start|>system\n# Tools\n' }}\n"
        "    {%- for tool in tools %}\n        {{- tool | tojson }}\n        {{- '\n' }}\n    {%- endfor %}\n"
        "{%- endif %}\n"
        "{%- for m in messages %}\n"
        "    {%- if m.role == 'assistant' and m.tool_calls %}\n"
        "        {{- '<|im_start|>assistant' }}\n"
        "        {%- for call in m.tool_calls %}\n"
        "            {%- if call.function is defined %}{%- set call = call.function %}{%- endif %}\n"
        '            {{- \'\n<tool_call>\n{"name": "\' + call.name + \'", "arguments": \' }}\n'
        "            {{- call.arguments | tojson }}\n            {{- '}\n</tool_call>' }}\n        {%- endfor %}\n"
        "    {%- else %}\n        {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}\n    {%- endif %}\n"
        "{%- endfor %}\n"
        "{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\n' }}\n{%- endif %}\n"
    ),
    "llama2": (
        "{% set ns = namespace(first=true) %}{% for m in messages %}"
        "{% if m.role == 'user' %}{% if ns.first %}{{ bos_token }}{% set ns.first = false %}{% endif %}"
        "{{ '[INST] ' + m.content.strip() + ' [/INST]' }}{% elif m.role == 'assistant' %}"
        "{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
    ),
    "llama3": (
        "{{- bos_token }}\n{%- if not date_string is defined %}\n    {%- set date_string = '26 Jul 2024' %}\n{%- endif %}\n"
        "{{- 'Today Date: ' + date_string + '\n\n' }}\n"
        "{%- if tools is not none %}\n    {%- for t in tools %}\n        {{- t | tojson(indent=4) }}\n"
        "        {{- '\n\n' }}\n    {%- endfor %}\n{%- endif %}\n"
        "{%- for m in messages %}\n    {%- if 'tool_calls' in m %}\n"
        '        {{- \'{"name": "\' + m.tool_calls[0].function.name + \'", "parameters": \' }}\n'
        "        {{- m.tool_calls[0].function.arguments | tojson }}\n        {{- '}<|eot_id|>' }}\n    {%- else %}\n"
        "        {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}\n"
        "    {%- endif %}\n{%- endfor %}\n"
    ),
    "mistral": (
        "{{ bos_token }}{% for m in messages %}"
        "{% if m.role == 'user' %}{% if loop.last and tools %}{{ '[AVAILABLE_TOOLS] ' + (tools | tojson) }}{% endif %}"
        "{{ '[INST] ' ~ m.content ~ '[/INST]' }}{% elif m.role == 'tool' %}"
        "{{ '[TOOL_RESULTS] ' ~ ({'content': m.content} | tojson) }}"
        "{% elif m.tool_calls is defined and m.tool_calls is not none %}"
        "{{ '[TOOL_CALLS] ' ~ (m.tool_calls[0].function | tojson) ~ eos_token }}"
        "{% elif m.role == 'assistant' %}{{ m.content ~ eos_token }}{% else %}"
        "{{ raise_exception('Only user, assistant and tool') }}{% endif %}{% endfor %}"
    ),
    "gemma": (
        "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
        "{% for m in messages %}{% set role = 'model' if m.role == 'assistant' else m.role %}"
        "{{ '<start_of_turn>' + role + '\n' + m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
    ),
    "phi": (
        "{% for m in messages %}{% if loop.index > 6 %}{% break %}{% endif %}{% if m.role == 'tool' %}{% continue %}{% endif %}"
        "{{ '<|' + m.role + '|>' }}\n{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
    ),
    "smol": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}"
        "{% endgeneration %}{% else %}<{{ m.role }}>\n    {{ m.content }}\n{% endif %}{% endfor %}"
    ),
    "command": (
        "{{ bos_token }}{% for d in documents or [] %}Document {{ loop.index0 }}: {{ d.title }}\n{{ d.text }}\n{% endfor %}"
        "{% if documents is none %}no documents{% endif %}{% for m in messages %}|{{ m.role | upper }}|{{ m.content | e }}"
        "{% endfor %}"
    ),
    "granite": (
        "{% macro turn(role, text) %}<|{{ role }}|>{{ text }}{% endmacro %}"
        "{%- for m in messages -%}{{ turn(m['role'], m.get('content', '')) }}{{ missing }}{% if not loop.last %}, {% endif %}"
        "{%- endfor -%}{{ {'b': 1, 'a': 'ä'} | tojson(sort_keys=true, separators=(',', ':')) }}{{ pad_token }}"
    ),
}


def conversations(seed: int) -> Iterator[list[dict[str, Any]]]:
    """Yield conversations, with calls of tools and texts that somebody might escape."""
    rng = random.Random(seed)
    texts = ["hi", "  spaced\n", "<b> & 'q' \"w\"", "größe 中文", "", "{{ messages }} {% if %}", "a\\nb"]
    for _ in range(12):
        told: list[dict[str, Any]] = []
        if rng.random() < 0.3:
            told.append({"role": "system", "content": rng.choice(texts)})
        for _ in range(rng.randrange(1, 4)):
            told.append({"role": "user", "content": rng.choice(texts)})
            if rng.random() < 0.5:
                called = {"name": "weather", "arguments": {"city": rng.choice(texts), "n": [1.5, None, True]}}
                told.append(
                    {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": called}]}
                )
                told.append({"role": "tool", "content": rng.choice(texts)})
            if rng.random() < 0.7:
                told.append({"role": "assistant", "content": rng.choice(texts)})
        yield told


def cases() -> Iterator[tuple[str, list[dict[str, Any]], dict[str, Any]]]:
    """Yield each template with each conversation and what it gets beside that."""
    for number, messages in enumerate(conversations(7)):
        for name in TEMPLATES:
            yield (
                name,
                messages,
                {"tools": TOOLS if number % 2 else None, "documents": DOCUMENTS if number % 3 else None},
            )


def main() -> None:
    """Write what `transformers` makes of all cases."""
    from transformers.utils.chat_template_utils import (  # type: ignore[import-not-found, unused-ignore]
        render_jinja_template,
    )

    rendered = []
    for name, messages, more in cases():
        try:
            texts, _ = render_jinja_template(
                [messages], chat_template=TEMPLATES[name], add_generation_prompt=True, **more, **TOKENS
            )
            rendered.append(texts[0])
        except Exception as error:
            rendered.append(f"{type(error).__name__}: {error}")
    json.dump(rendered, sys.stdout, indent=0, ensure_ascii=False)
    print()


if __name__ == "__main__":
    main()
