"""Chat templates rendered by a process of their own: transformers' text, for what clients send, and
a process that is replaced.
"""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import psutil
import pytest

from jaxpage.serving.wire.errors import ApiError
from jaxpage.serving.wire.exchange import open_chat
from jaxpage.serving.wire.rendering import Renderers, WorkerProcess
from jaxpage.serving.wire.templates import RENDER_BYTES
from tests.support.wire import CHATML, context, with_template

USER = {"role": "user", "content": "Où, \u2028 \U0001f600 </s> {{ x }}"}
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "f", "arguments": {"a": 1.5, "b": [None, "ü"]}},
}
CALLED = [
    {"role": "system", "content": "Be brief."},
    USER,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "7", "tool_call_id": "call_1"},
]
TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "",
        "parameters": {"type": "object", "properties": {"b": {}, "a": {}}},
    },
}
TEMPLATES = {
    "chatml": CHATML,
    "tokens": "{{ bos_token }}{% for m in messages %}{{ m.content | trim }}{{ eos_token }}{% endfor %}{{ pad_token }}",
    "tools": "{{ tools | tojson(indent=2) }}{{ messages | tojson }}{{ 'tool_calls' in messages[-2] }}",
    "marked": "{%- for m in messages %}{% generation %}{{ m['content'] }}{% endgeneration %}{% break %}{%- endfor %}\n",
    "absent": "{{ messages[0].content is defined }}{{ messages[2].content is defined }}{{ documents }}{{ missing }}",
    "space": "  {% if enable_thinking is defined %}\n  {{ enable_thinking }}\n{% endif %}\n \n",
    "refuses": "{{ raise_exception('no ' ~ messages[0].role) }}",
    "fails": "{{ messages[0].content.nothing() }}{{ 1 / 0 }}",
    "has no end": "{% if %}",
}


@pytest.mark.parametrize(
    "messages", [[USER], CALLED, [*CALLED, {"role": "assistant", "content": "So"}]], ids=len
)
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_a_prompt_is_what_transformers_makes(template, messages):
    tokenizer = with_template(template)
    tools = [TOOL] if "tools" in template else None
    continues = messages[-1]["role"] == "assistant"
    flags = {"add_generation_prompt": not continues, "continue_final_message": continues}
    variables = {"enable_thinking": True} if "enable_thinking" in template else {}
    sent = json.loads(json.dumps(messages))
    for message in sent:
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    shown = [
        {**message, **({"content": ""} if message["content"] is None else {})}
        for message in messages
    ]
    body = {
        "model": "demo",
        "messages": sent,
        "tools": tools,
        "chat_template_kwargs": variables,
        **flags,
    }
    try:
        expected = tokenizer.apply_chat_template(
            shown, tools=tools, tokenize=False, **flags, **variables
        )
    except Exception as error:
        with pytest.raises(ApiError) as refused:
            open_chat(body, context(tokenizer=tokenizer, tool_parser="hermes"))
        assert refused.value.status == 400 and refused.value.param == "messages"
        assert str(error) in refused.value.message
    else:
        assert (
            open_chat(body, context(tokenizer=tokenizer, max_model_len=4096, tool_parser="hermes"))
            .prompts[0]
            .prompt
            == expected
        )


def request_of(template: str) -> dict[str, Any]:
    return {
        "template": template,
        "special_tokens": {},
        "messages": [USER],
        "tools": None,
        "add_generation_prompt": True,
        "continue_final_message": False,
        "variables": {},
    }


def test_a_process_that_is_gone_is_replaced(monkeypatch):
    """Killed from outside, it or its child.

    A child that its limits end is replaced by the process itself.
    """
    renderers = Renderers()
    started: list[WorkerProcess] = []
    real = WorkerProcess.__init__
    monkeypatch.setattr(
        WorkerProcess,
        "__init__",
        lambda self, *arguments: started.append(self) or real(self, *arguments),
    )

    def text(template: str) -> str:
        return renderers.render(request_of(template), 2.0, RENDER_BYTES)

    def processes() -> list[int]:
        process = started[-1]._process.pid
        return [process, *(each.pid for each in psutil.Process(process).children())]

    assert text("{{ 1 + 1 }}") == "2"
    first = processes()
    for template in ("{{ 'a' * 9999999999 }}", "{{ 'é' * (8 * 1024 * 1024 + 1) }}"):
        with pytest.raises(
            ValueError, match="takes more than 256 MiB of memory|has 8388609 characters, more than"
        ):
            text(template)
    assert text("{{ 1 + 1 }}") == "2" and len(started) == 1 and processes()[1] != first[1]
    started[0].kill()
    assert text("{{ 1 + 1 }}") == "2" and len(started) == 2
    os.kill(processes()[1], signal.SIGKILL)  # its child: the process ends, too
    assert text("{{ 1 + 1 }}") == "2" and len(started) == 3

    def kill_first(self: WorkerProcess, *arguments: Any) -> Any:
        self.kill()
        return requested_worker(self, *arguments)

    requested_worker = WorkerProcess.ask
    with monkeypatch.context() as patch:
        patch.setattr(WorkerProcess, "ask", kill_first)
        with pytest.raises(ValueError, match="256 MiB of memory, or crashes"):
            text("{{ 1 + 1 }}")
    assert text("{{ 1 + 1 }}") == "2"
