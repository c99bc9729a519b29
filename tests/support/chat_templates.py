"""Chat templates written by hand, one or more for each form in which published ones write tool
calls.

`TEMPLATES` has them by name. Each is small: roles are marked in its own way, tools are listed, and
an answer may have reasoning, content and calls.
"""

# ruff: noqa: E501  # a template reads best in one line

from __future__ import annotations

_TOOLS = "{% if tools %}<tools>{{ tools | tojson }}</tools>\n{% endif %}"


def _template(
    calls: str,
    *,
    user: str = "<|im_start|>user\n{{ m.content }}<|im_end|>\n",
    header: str = "<|im_start|>assistant\n",
    said: str = "{{ m.content }}",
    end: str = "<|im_end|>\n",
    opened: str = "",
    macros: str = "",
    tools: str = _TOOLS,
) -> str:
    """Returns a template; `calls` is what an answer's calls are written by."""
    return (
        macros
        + tools
        + "{% for m in messages %}{% if m.role != 'assistant' %}"
        + user
        + "{% else %}"
        + header
        + said
        + calls
        + end
        + "{% endif %}{% endfor %}{% if add_generation_prompt %}"
        + header
        + opened
        + "{% endif %}"
    )


def _each(call: str, *, before: str = "", between: str = "", after: str = "") -> str:
    return (
        "{% if m.tool_calls %}"
        + before
        + "{% for c in m.tool_calls %}{% set f = c.function %}"
        + call
        + "{% if not loop.last %}"
        + between
        + "{% endif %}{% endfor %}"
        + after
        + "{% endif %}"
    )


def _items(item: str, *, between: str = "") -> str:
    return (
        "{% for k, v in f.arguments.items() %}"
        + item
        + "{% if not loop.last %}"
        + between
        + "{% endif %}{% endfor %}"
    )


THOUGHT = "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
EMPTY_THOUGHT = "<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n"
BARE = "{{ v if v is string else v | tojson }}"
_JSON = '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}'
_CODE = (
    "{% macro lit(v) %}{% if v is string %}{{ v | tojson }}{% elif v is true %}True"
    "{% elif v is false %}False{% elif v is none %}None{% else %}{{ v }}{% endif %}{% endmacro %}"
)
_QUOTED = (
    "{% macro val(v) %}{% if v is string %}<|q|>{{ v }}<|q|>{% elif v is boolean %}"
    "{{ 'true' if v else 'false' }}{% elif v is mapping %}{{ '{' }}{% for k, w in v | dictsort %}{{ k }}:{{ val(w) }}"
    "{% if not loop.last %},{% endif %}{% endfor %}{{ '}' }}{% elif v is none %}null{% elif v is number %}{{ v }}"
    "{% else %}[{% for w in v %}{{ val(w) }}{% if not loop.last %},{% endif %}{% endfor %}]{% endif %}{% endmacro %}"
)
_TAGS = (
    "{% macro tag(v) %}{% if v is mapping %}{% for k, w in v.items() %}<{{ k }}>{{ tag(w) }}</{{ k }}>{% endfor %}"
    "{% elif v is string or v is number or v is boolean or v is none %}{{ v if v is string else v | tojson }}"
    "{% else %}{% for w in v %}<item>{{ tag(w) }}</item>{% endfor %}{% endif %}{% endmacro %}"
)

TEMPLATES = {
    # a JSON object a call
    "object in tags": _template(_each("\n<tool_call>\n" + _JSON + "\n</tool_call>"), said=THOUGHT + "{{ m.content }}"),
    "object in tags, always thought": _template(
        _each("\n<call>" + _JSON + "</call>"), said=EMPTY_THOUGHT + "{{ m.content }}", opened="<think>\n"
    ),
    "answer in tags": _template(
        _each("\n<tool_call>\n" + _JSON + "\n</tool_call>\n"),
        said=EMPTY_THOUGHT + "{% if m.content %}<response>\n{{ m.content }}\n</response>\n{% endif %}",
        opened="<think>\n{% if enable_thinking is defined and not enable_thinking %}\n</think>\n\n{% endif %}",
    ),
    "objects in one tag": _template(_each(_JSON, before="<|calls|>", between="\n", after="<|/calls|>")),
    "object with other keys": _template(
        _each('<act>{"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}</act>')
    ),
    "object without a tag, one only": _template(
        "{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif %}{% set f = m.tool_calls[0].function %}"
        '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}{% endif %}',
        said="{% if not m.tool_calls %}{{ m.content }}{% endif %}",
    ),
    "object of Python": _template(_each("<t>{{ {'name': f.name, 'arguments': f.arguments} }}</t>")),
    "arguments as text in an object": _template(_each('<t>{{ {"name": f.name, "arguments": f.arguments | tojson} | tojson }}</t>')),
    # an array of all calls
    "array behind a mark": _template(
        _each('{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}, "id": "{{ c.id }}"}', before="[TOOL_CALLS] [", between=", ", after="]"),
        user="[INST] {{ m.content }}[/INST]",
        header="",
        end="</s>",
    ),
    "array in tags": _template(
        _each(_JSON, before="\n\n<TOOLCALL>[", between=", ", after="]</TOOLCALL>"),
        user="<S11>User\n{{ m.content }}\n",
        header="<S11>Assistant\n",
        end="\n<S12>\n",
        said="{{ m.content.split('</think>')[-1] }}",
        opened="{% if enable_thinking is defined and not enable_thinking %}<think></think>{% else %}<think>\n{% endif %}",
    ),
    "array with names as keys": _template(
        _each('{"{{ f.name }}": {{ f.arguments | tojson }}}', before="<|tools_prefix|>[", between=", ", after="]<|tools_suffix|>"),
        header="<|assistant_start|>",
        end="<|assistant_end|>",
    ),
    "array, channels and an open end": _template(
        "{% if m.tool_calls %}<|START_THINKING|>{{ m.reasoning_content }}<|END_THINKING|><|START_ACTION|>[\n"
        '{% for c in m.tool_calls %}    {"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}'
        "{% if not loop.last %},{% endif %}\n{% endfor %}]<|END_ACTION|>{% else %}<|START_RESPONSE|>{{ m.content }}<|END_RESPONSE|>{% endif %}",
        user="<|TURN|><|USER|>{{ m.content }}<|END|>",
        header="<|TURN|><|CHATBOT|>",
        said="",
        end="<|END|>",
    ),
    "array on lines": _template(
        _each('    {\n        "tool_name": "{{ f.name }}",\n        "parameters": {{ f.arguments | tojson }}\n    }', before="\nAction: ```json\n[\n", between=",\n", after="\n]\n```")
    ),
    # the name, then JSON
    "name, mark, JSON": _template(
        _each("[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}"),
        user="[INST]{{ m.content }}[/INST]",
        header="",
        said="{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
        "{% if p.type == 'thinking' %}[THINK]{{ p.thinking }}[/THINK]{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}",
        end="</s>",
    ),
    "name, id, JSON": _template(
        _each(
            "{% if c.id | length != 9 %}{{ raise_exception('nine letters') }}{% endif %}[TOOL_CALLS]{{ f.name }}[CALL_ID]{{ c.id }}[ARGS]{{ f.arguments | tojson }}"
        ),
        user="[INST]{{ m.content }}[/INST]",
        header="",
        end="</s>",
    ),
    "an id before the name": _template(_each("<tool id={{ c.id[:9] }} name={{ f.name }}>{{ f.arguments | tojson }}</tool>")),
    "function tag around JSON": _template(_each("<function={{ f.name }}>{{ f.arguments | tojson }}</function>")),
    "a recipient and a line": _template(
        _each(">>>{{ f.name }}\n{{ f.arguments | tojson }}").replace(
            "{% if m.tool_calls %}", "{% if m.tool_calls %}{% set ns.all = m.content %}"
        ).replace(">>>{{ f.name }}", "{% if ns.all or not loop.first %}>>>{% endif %}{{ f.name }}"),
        user="<|h|>user<|/h|>\n\n{{ m.content }}<|eot|>",
        header="<|h|>assistant<|/h|>\n\n>>>",
        said="{% if m.content %}all\n{{ m.content }}{% endif %}",
        end="<|eot|>",
        macros="{% set ns = namespace(all='') %}",
    ),
    "the id in place of the name": _template(
        _each(
            "<|call_begin|>{{ c.id }}<|args_begin|>{{ f.arguments | tojson }}<|call_end|>",
            before="<|section_begin|>",
            after="<|section_end|>",
        ),
        said="{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% else %}<think></think>{% endif %}{{ m.content }}",
    ),
    "a fenced block": _template(
        _each("<|call|>function<|sep|>{{ f.name }}\n```json\n{{ f.arguments if f.arguments is string else f.arguments + '' }}\n```<|/call|>", before="<|calls|>", between="\n", after="<|/calls|>"),
        said="{{ m.content.split('</think>')[-1] }}",
        opened="<think>\n",
    ),
    "channels": _template(
        "{% if m.tool_calls %}{% if m.reasoning_content %}<|channel|>analysis<|message|>{{ m.reasoning_content }}<|end|><|start|>assistant"
        "{% elif m.content %}<|channel|>analysis<|message|>{{ m.content }}<|end|><|start|>assistant{% endif %}"
        "{% set f = m.tool_calls[0].function %} to=functions.{{ f.name }}<|channel|>commentary json<|message|>{{ f.arguments | tojson }}<|call|>"
        "{% else %}{% if m.reasoning_content %}<|channel|>analysis<|message|>{{ m.reasoning_content }}<|end|><|start|>assistant{% endif %}"
        "<|channel|>final<|message|>{{ m.content }}<|return|>{% endif %}",
        user="<|start|>user<|message|>{{ m.content }}<|end|>",
        header="<|start|>assistant",
        said="",
        end="",
    ),
    # tagged arguments
    "parameters on lines": _template(
        _each(
            "\n<tool_call>\n<function={{ f.name }}>\n" + _items("<parameter={{ k }}>\n" + BARE + "\n</parameter>\n") + "</function>\n</tool_call>"
        ),
        said=EMPTY_THOUGHT + "{{ m.content }}",
        opened="<think>\n",
    ),
    "values of Python": _template(
        _each("<tool_call><function={{ f.name }}>" + _items("<parameter={{ k }}>{{ v }}</parameter>") + "</function></tool_call>")
    ),
    "keys and values": _template(
        _each("\n<tool_call>{{ f.name }}\n" + _items("<arg_key>{{ k }}</arg_key>\n<arg_value>" + BARE + "</arg_value>\n") + "</tool_call>"),
        user="{% if m.role == 'tool' %}<|observation|>\n<tool_response>\n{{ m.content }}\n</tool_response>{% else %}<|user|>\n{{ m.content }}{% endif %}",
        header="<|assistant|>",
        said="{% if m.reasoning_content %}\n<think>{{ m.reasoning_content }}</think>{% else %}\n<think></think>{% endif %}{% if m.content %}{{ '\\n' + m.content }}{% endif %}",
        end="",
        opened="{% if enable_thinking is defined and not enable_thinking %}\n<think></think>{% endif %}",
    ),
    "invoke": _template(
        _each('<invoke name="{{ f.name }}">\n' + _items('<parameter name="{{ k }}">' + BARE + "</parameter>\n") + "</invoke>\n", before="\n<mm:tool_call>\n", after="</mm:tool_call>"),
        user="]~b]user\n{{ m.content }}[e~[\n",
        header="]~b]ai\n",
        said=THOUGHT + "{{ m.content }}",
        end="[e~[\n",
        opened="<think>\n",
    ),
    "string marked": _template(
        _each('<DSML_invoke name="{{ f.name }}">\n' + _items('<DSML_parameter name="{{ k }}" string="{{ \'true\' if v is string else \'false\' }}">' + BARE + "</DSML_parameter>", between="\n") + "\n</DSML_invoke>\n", before="\n\n<DSML_calls>\n", after="</DSML_calls>"),
        user="<U>{{ m.content }}<A><think>",
        header="",
        said="{{ m.reasoning_content or '' }}</think>{{ m.content }}",
        end="<E>",
    ),
    "types and numbered calls": _template(
        _each(
            '<|open|>call tool="{{ f.name }}" index="{{ loop.index }}"<|sep|>'
            + _items('<|open|>argument key="{{ k }}" type="{% if v is boolean %}boolean{% elif v is none %}null{% elif v is number %}number{% elif v is string %}string{% elif v is mapping %}object{% else %}array{% endif %}"<|sep|>' + BARE + "<|close|>argument<|sep|>")
            + "<|close|>call<|sep|>",
            before="<|open|>tools<|sep|>",
            after="<|close|>tools<|sep|>",
        ),
        user='<|open|>message role="user"<|sep|>{{ m.content }}<|close|>message<|sep|><|eom|>',
        header='<|open|>message role="assistant"<|sep|>',
        said="<|open|>think<|sep|>{{ m.reasoning_content }}<|close|>think<|sep|><|open|>response<|sep|>{{ m.content }}<|close|>response<|sep|>",
        end="<|close|>message<|sep|><|eom|>",
        opened="<|open|>think<|sep|>",
    ),
    "strings in CDATA": _template(
        _each('<function name="{{ f.name }}">' + _items('<param name="{{ k }}">{% if v is string %}<![CDATA[{{ v }}]]>{% else %}{{ v | tojson }}{% endif %}</param>') + "</function>")
    ),
    "tags named after keys": _template(
        _each('<invoke name="{{ f.name }}">{{ tag(f.arguments) }}</invoke>', before="<calls>", after="</calls>"), macros=_TAGS
    ),
    "an id after the name": _template(
        _each('<call name="{{ f.name }}" id="{{ c.id[:9] }}">' + _items('<arg name="{{ k }}">' + BARE + "</arg>") + "</call>")
    ),
    "entities": _template(
        _each('<call name="{{ f.name }}">' + _items('<arg name="{{ k }}">{% if v is string %}{{ v | e }}{% else %}{{ v | tojson }}{% endif %}</arg>') + "</call>")
    ),
    # a call in code
    "code": _template(
        _each("{{ f.name }}(" + _items("{{ k }}={{ lit(v) }}", between=", ") + ")", before="<|tool_call_start|>[", between=", ", after="]<|tool_call_end|>"),
        macros=_CODE,
    ),
    "code without a mark": _template(
        _each("{{ f.name }}(" + _items("{{ k }}={{ lit(v) }}", between=", ") + ")", before="[", between=", ", after="]"), macros=_CODE
    ),
    "code after text in tags": _template(
        _each("{{ f.name }}(" + _items("{{ k }}={{ v | tojson }}", between=", ") + ")", before="<|python_end|>[", between=", ", after="]"),
        said="{% if m.tool_calls %}<|python_start|>{% endif %}{{ m.content }}",
    ),
    "quotes of its own": _template(
        _each("<|tool_call>call:{{ f.name }}{{ '{' }}" + _items("{{ k }}:{{ val(v) }}", between=",") + "{{ '}' }}<tool_call|>"), macros=_QUOTED
    ),
    "a response in the same answer": _template(
        _each("<|tool_call>call:{{ f.name }}{{ '{' }}" + _items("{{ k }}:{{ val(v) }}", between=",") + "{{ '}' }}<tool_call|>") + "{{ m.content }}",
        macros=_QUOTED,
        user="{% if m.role == 'tool' %}<|tool_response>response:{{ m.name }}{{ '{' }}value:{{ val(m.content) }}{{ '}' }}<tool_response|>{% else %}<|turn>user\n{{ m.content }}<turn|>\n{% endif %}",
        header="<|turn>model\n",
        said="",
        end="{% if not m.tool_calls %}<turn|>\n{% elif loop.last %}<|tool_response>{% endif %}",
    ),
    # no published form, but easily one
    "the whole list as it is": _template("{% if m.tool_calls %}<calls>{{ m.tool_calls | tojson }}</calls>{% endif %}"),
    "attributes": _template(_each('<call name="{{ f.name }}"' + _items(' {{ k }}="{{ (v if v is string else v | tojson) | e }}"') + "/>")),
    "separators alone": _template(_each("<|fn|>{{ f.name }}<|args|>" + _items("{{ k }}<|is|>" + BARE, between="<|and|>") + "<|end_fn|>")),
    "lines": _template(_each("<tool>{{ f.name }}\n" + _items("{{ k }}: {{ v | tojson }}\n") + "</tool>")),
    # reasoning in words
    "steps": _template(
        _each("\n<tool_calls>[" + _JSON + "]</tool_calls>"),
        said="{{ m.content.split('[BEGIN FINAL RESPONSE]')[-1] }}",
        opened="Here are my reasoning steps:\n",
    ),
}  # fmt: skip
NO_TOOLS = _template("", said="{{ m.content }}")
UNCLEAR = _template(_each("{{ f.name }} {{ f.arguments | length }}"))


def template_with_form(
    example: str, *, tools: str = "{{ t | string }}\n", call: str = "", said: str = ""
) -> str:
    """Returns a template that tells how calls are written, and passes over those of a message.

    `tools` writes a tool, `call` a call, and `said` the content, if it is not written as it is.
    """
    listed = "<tools>\n{% for t in tools %}" + tools + "{% endfor %}</tools>\n\n"
    shown = (
        "{% if tools %}<|im_start|>system\n"
        + listed
        + "Write each call so:\n"
        + example
        + "<|im_end|>\n{% endif %}"
    )
    skipped = "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n{% endif %}"
    return _template(call, tools=shown, said=said or "{{ m.content }}", opened=skipped)


_HERMES = '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
# By names: a template, and a call of `look-up2` as it tells to write one.
REPORTED = {
    "as SmolLM3": (
        template_with_form("An object within <tool_call></tool_call> tags:\n" + _HERMES),
        '<tool_call>\n{"name": "look-up2", "arguments": {"city": "it\'s {x}", "days": 3}}\n</tool_call>',
    ),
    "with an example, the arguments first": (
        template_with_form(
            '[CALL] {"parameters": {"key": "a value", "other": {"k": 1}}, "tool_name": "the name of a tool"} [/CALL]',
            tools='<tool>{{ {"name": t.function.name, "parameters": t.function.parameters} | tojson }}</tool>\n',
        ),
        '[CALL] {"parameters": {"city": "it\'s {x}", "days": 3}, "tool_name": "look-up2"} [/CALL]',
    ),
    "from start to end": (
        template_with_form('<|call_start|>{\n  "function": $NAME,\n  "args": {...}\n}<|call_end|>'),
        '<|call_start|>{\n  "function": "look-up2",\n  "args": {"city": "it\'s {x}", "days": 3}\n}<|call_end|>',
    ),
}
UNTOLD = {
    "nothing": template_with_form("A call is a JSON object."),
    "an object without marks": template_with_form('{"name": <name>, "arguments": <arguments>}'),
    "marks of two kinds": template_with_form(
        '<call>{"name": <name>, "arguments": <arguments>}</done>'
    ),
    "no closing mark": template_with_form('<call>{"name": <name>, "arguments": <arguments>}'),
    "a further key": template_with_form(
        '<call>{"name": <name>, "arguments": <arguments>, "id": <id>}</call>'
    ),
    "no key of arguments": template_with_form(
        '<answer>{"name": <name>, "content": <text>}</answer>'
    ),
    "two ways": template_with_form(
        _HERMES + '\nor <call>{"tool": <name>, "args": <arguments>}</call>'
    ),
    "only a tool": template_with_form(
        "",
        tools='<tool>{{ {"name": t.function.name, "parameters": t.function.parameters} | tojson }}</tool>\n',
    ),
    "whether there are tools or not": _HERMES + "\n" + template_with_form(_HERMES),
    "no tools": template_with_form(_HERMES, tools=""),
    "another content": template_with_form(
        _HERMES, said="{{ m.content | replace('tool_call', 'call') }}"
    ),
}
# It renders calls in another way than it tells, and the model has learnt what is rendered.
REPORTED_OTHERWISE = template_with_form(_HERMES, call=_each("\n<call>" + _JSON + "</call>"))

_SHOWS = (
    "{% if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools>MARK\n{% endif %}"
)
# Templates that show tools and render no calls. By the name of the form that their model writes: a
# template, and a call of `look-up2`.
HINTED = {
    "lfm2": (
        _template("", tools=_SHOWS.replace("<tools>", "<|tool_list_start|>").replace("MARK", "<|tool_list_end|>")),
        """<|tool_call_start|>[look-up2(city="it's {x}", days=3)]<|tool_call_end|>""",
    ),
    "granite": (
        _template("", tools=_SHOWS.replace("MARK", "To call a tool, write <|tool_call|> and a JSON list.")),
        """<|tool_call|>[{"name": "look-up2", "arguments": {"city": "it's {x}", "days": 3}}]""",
    ),
    "minicpm5": (
        _template("", tools=_SHOWS.replace("MARK", 'Write <function name="f"><param name="k">value</param></function>.')),
        """<function name="look-up2"><param name="city">it's {x}</param>\n<param name="days">3</param></function>""",
    ),
}  # fmt: skip
# It tells what to write around reasoning and an answer, if it is asked for reasoning.
REPORTED_TO_THINK = _template(
    "",
    tools="{% if thinking %}Think within <think></think>, and answer within <response></response>.\n{% endif %}",
)
# As Gemma 4: the mark after reasoning is dropped from an earlier answer, wherever it stands.
STRAY = TEMPLATES["a response in the same answer"].replace(
    "{{ m.content }}{% if not m.tool_calls %}", "{{ strip(m.content) }}{% if not m.tool_calls %}"
).replace(
    "{% for m in messages %}",
    "{% macro strip(text) %}{% for part in text.split('<channel|>') %}{{ part.split('<|channel>')[0] }}{% endfor %}{% endmacro %}"
    "{% for m in messages %}", 1
).removesuffix("{% endif %}") + "{% if not enable_thinking %}<|channel>thought\n<channel|>{% endif %}{% endif %}"  # fmt: skip

# As Qwen3.5's: calls are objects in tags, reasoning comes before them, a variable turns it off, and
# a message of the system may only come first.
STRICT_QWEN = """\
{% if tools %}<|im_start|>tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{% for m in messages %}{% if m.role == 'system' and not loop.first %}\
{{ raise_exception('System message must be at the beginning.') }}{% endif %}\
{% if m.role not in ('system', 'user', 'assistant', 'tool') %}\
{{ raise_exception('Unexpected message role.') }}{% endif %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}{% if m.reasoning_content %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}
<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}{% else %}{{ m.content }}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""
