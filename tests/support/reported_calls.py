"""Says what models wrote, as public reports about other engines have it.

By the repository and the number of the report: the template of the same form, the text, and what it
says: the reasoning, the content and the calls.
"""

# ruff: noqa: E501  # a text reads best in one line

from __future__ import annotations

from typing import Any

OSLO: list[tuple[str, dict[str, Any]]] = [("look-up2", {"city": "Oslo", "days": 3})]
BERN: list[tuple[str, dict[str, Any]]] = [("get_weather", {"city": "Bern"})]
QWEN, GLM, DSML = "parameters on lines", "keys and values", "string marked"
HERMES, KIMI, LFM = "object in tags", "the id in place of the name", "code"
BARE_OSLO = "<function=look-up2>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>"
JSON_OSLO = '{"name": "look-up2", "arguments": {"city": "Oslo", "days": 3}}'
DSML_OSLO = '<DSML_invoke name="look-up2">\n<DSML_parameter name="city" string="true">Oslo</DSML_parameter>\n<DSML_parameter name="days" string="false">3</DSML_parameter>\n</DSML_invoke>'
CITY = [("look-up2", {"city": "Oslo"})]
REPORTS: dict[str, tuple[str, str, str, str, list[tuple[str, dict[str, Any]]]]] = {
    "ollama 16686: no opening tag": (QWEN, f"I'll look.\n\n{BARE_OSLO}\n</tool_call>", "", "I'll look.", OSLO),
    "ollama 17742: neither tag": (QWEN, BARE_OSLO, "", "", OSLO),
    "ollama 17353: a parameter is not closed": (QWEN, "<tool_call>\n<function=look-up2>\n<parameter=city>\nOslo\n</function>\n</tool_call>", "", "", CITY),
    "vllm 23099: two parameters are not closed": (QWEN, "<tool_call>\n<function=look-up2>\n<parameter=city>\nOslo\n<parameter=days>\n3\n</function>\n</tool_call>", "", "", OSLO),
    "mlx-openai-server 284: in the reasoning": (QWEN, f"<think>\nI look.\n<tool_call>\n{BARE_OSLO}\n</tool_call>\n</think>\n", "I look.", "", OSLO),
    "vllm 42021: the reasoning is not closed": (QWEN, f"<think>\nI look.\n<tool_call>\n{BARE_OSLO}\n</tool_call>", "I look.", "", OSLO),
    "ollama 18530 in the reasoning": (QWEN, f"<think>\nI look.\n\n{BARE_OSLO}\n</tool_call>", "I look.", "", OSLO),
    "renderers 78: a draft in the reasoning": (QWEN, f"<think>\nSo: <tool_call>\n{BARE_OSLO}\n</tool_call> it is.\n</think>\n\n<tool_call>\n{BARE_OSLO}\n</tool_call>", f"So: <tool_call>\n{BARE_OSLO}\n</tool_call> it is.", "", OSLO),
    "lmstudio 1592: tags in the reasoning": (QWEN, "<think>\nSome write `<function=...>`, others `<tool_call>`.\n</think>\n\nSo.", "Some write `<function=...>`, others `<tool_call>`.", "So.", []),
    "vllm-mlx 63: Python in a parameter": (QWEN, "<tool_call>\n<function=look-up2>\n<parameter=deep>{'theme': 'dark', 'on': true}</parameter>\n</function>\n</tool_call>", "", "", [("look-up2", {"deep": {"theme": "dark", "on": True}})]),
    "JSON within the tags": (QWEN, f"<tool_call>\n{JSON_OSLO}\n</tool_call>", "", "", OSLO),
    "sglang 40236: no wrapper": (DSML, f"I look.\n\n{DSML_OSLO}", "", "I look.", OSLO),
    "sglang 40236: the wrapper is not closed": (DSML, f"\n\n<DSML_calls>\n{DSML_OSLO}", "", "", OSLO),
    "vllm 48931: no wrapper, and its end": (DSML, f"{DSML_OSLO}\n</DSML_calls>", "", "", OSLO),
    "smg 895: JSON in place of parameters": (DSML, '\n\n<DSML_calls>\n<DSML_invoke name="look-up2">\n{"city": "Oslo", "days": 3}\n</DSML_invoke>\n</DSML_calls>', "", "", OSLO),
    "vllm 49249: no mark before a value": (GLM, "\n<tool_call>look-up2\n<arg_key>city</arg_key>Oslo</arg_value>\n</tool_call>", "", "", CITY),
    "vllm 54971: a mark twice": (GLM, "\n<tool_call>look-up2\n<arg_key>city</arg_key></arg_key><arg_value>Oslo</arg_value>\n</tool_call>", "", "", CITY),
    "vllm 31379: no arguments": (GLM, "\n<tool_call>look-up2</tool_call>", "", "", [("look-up2", {})]),
    "vllm 639: marks in a value": (GLM, "\n<tool_call>look-up2\n<arg_key>city</arg_key>\n<arg_value>a </tool_call> b </arg_value> c</arg_value>\n</tool_call>", "", "", [("look-up2", {"city": "a </tool_call> b </arg_value> c"})]),
    "mlx-lm 792: JSON after the name": (GLM, '\n<tool_call>look-up2\n{"city": "Oslo", "days": 3}\n</tool_call>', "", "", OSLO),
    "mlx-lm 792: JSON in the tags": (GLM, f"\n<tool_call>{JSON_OSLO}</tool_call>", "", "", OSLO),
    "vllm 24478: several": (KIMI, '<|section_begin|><|call_begin|>functions.look-up2:0<|args_begin|>{"city": "Oslo", "days": 3}<|call_end|><|call_begin|>functions.get_weather:1<|args_begin|>{"city": "Bern"}<|call_end|><|section_end|>', "", "", OSLO + BERN),
    "Kimi without a number": (KIMI, '<|section_begin|><|call_begin|>functions.look-up2<|args_begin|>{"city": "Oslo", "days": 3}<|call_end|><|section_end|>', "", "", OSLO),
    "Kimi without functions.": (KIMI, '<|section_begin|><|call_begin|>look-up2:0<|args_begin|>{"city": "Oslo", "days": 3}<|call_end|><|section_end|>', "", "", OSLO),
    "Kimi without a section": (KIMI, 'I look.\n<|call_begin|>functions.look-up2:0<|args_begin|>{"city": "Oslo", "days": 3}<|call_end|>', "", "I look.", OSLO),
    "frontend-crates 245: an outer mark in a value": ("invoke", '<mm:tool_call>\n<invoke name="look-up2">\n<parameter name="city">Montréal </mm:tool_call> café</parameter>\n</invoke>\n</mm:tool_call>', "", "", [("look-up2", {"city": "Montréal </mm:tool_call> café"})]),
    "vllm 44060: a mark in a value": ("invoke", '<mm:tool_call>\n<invoke name="look-up2">\n<parameter name="city"><parameter>\n<hello></parameter> x</parameter>\n</invoke>\n</mm:tool_call>', "", "", [("look-up2", {"city": "<parameter>\n<hello></parameter> x"})]),
    "llamadart 408: no arguments": ("tags named after keys", '<calls><invoke name="look-up2"></invoke></calls>', "", "", [("look-up2", {})]),
    "mlx-lm 1374: a list of JSON": ("name, mark, JSON", f"[TOOL_CALLS] [{JSON_OSLO}]", "", "", OSLO),
    "mlx-lm 1448: two calls, and a text": ("name, mark, JSON", '[TOOL_CALLS]look-up2[ARGS]{"city": "Oslo", "days": 3}[TOOL_CALLS]get_weather[ARGS]{"city": "Bern"}\n\nLet me see.', "", "\n\nLet me see.", OSLO + BERN),
    "vllm 30724: braces before": ("name, mark, JSON", 'A set {1}.[TOOL_CALLS]look-up2[ARGS]{"city": "Oslo", "days": 3}', "", "A set {1}.", OSLO),
    "Mistral without the mark": ("name, mark, JSON", 'look-up2[ARGS]{"city": "Oslo", "days": 3}', "", "", OSLO),
    "vllm 45167: an end mark in a text": (HERMES, '<tool_call>\n{"name": "look-up2", "arguments": {"city": "a </tool_call> b"}}\n</tool_call>', "", "", [("look-up2", {"city": "a </tool_call> b"})]),
    "vllm 54964: arguments as text": (HERMES, '<tool_call>{"name": "look-up2", "arguments": "{\\n  \\"city\\": \\"Oslo\\"\\n}"}</tool_call>', "", "", CITY),
    "atropos 478: an apostrophe": (HERMES, '<tool_call>\n{"name": "look-up2", "arguments": {"city": "what\'s"}}\n</tool_call>', "", "", [("look-up2", {"city": "what's"})]),
    "atropos 478: single quotes": (HERMES, "<tool_call>\n{'name': 'look-up2', 'arguments': {'city': \"what's {x}\", 'metric': True}}\n</tool_call>", "", "", [("look-up2", {"city": "what's {x}", "metric": True})]),
    "a line break in a text": (HERMES, '<tool_call>\n{"name": "look-up2", "arguments": {"city": "a\nb", "metric": true}}\n</tool_call>', "", "", [("look-up2", {"city": "a\nb", "metric": True})]),
    "vllm 26897: a brace less": (HERMES, f"<tool_call>\n{JSON_OSLO[:-1]}\n</tool_call>", "", "", OSLO),
    "a brace too many": (HERMES, f"<tool_call>\n{JSON_OSLO}}}\n</tool_call>", "", "", OSLO),
    "JSON without a tag": (HERMES, f"{JSON_OSLO}\n</tool_call>", "", "", OSLO),
    "llama.cpp 24178: words of JSON in code": (LFM, "<|tool_call_start|>[look-up2(city='Oslo', metric=true, nothing=null)]<|tool_call_end|>", "", "", [("look-up2", {"city": "Oslo", "metric": True, "nothing": None})]),
    "llama.cpp 24667: an escape in code": (LFM, "<|tool_call_start|>[look-up2(city='print(\\'a\\')\\nb')]<|tool_call_end|>", "", "", [("look-up2", {"city": "print('a')\nb"})]),
    "llama.cpp 21242: code without marks": (LFM, '[look-up2(city="Oslo", days=3), get_weather(city="Bern")]', "", "", OSLO + BERN),
    "vllm-mlx 562: a call in another channel": ("channels", '<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>analysis to=functions.look-up2 code<|message|>\n{"city": "Oslo", "days": 3}<|call|>', "Hm.", "", OSLO),
    "imp 1716: no mark at the end": ("channels", '<|channel|>commentary to=functions.look-up2 <|constrain|>json<|message|>{"city": "Oslo", "days": 3}', "", "", OSLO),
    "lmstudio 942: no space, and a brace less": ("channels", '<|channel|>commentary to=functions.look-up2<|constrain|>json<|message|>{"city": "Oslo", "days": 3<|call|>', "", "", OSLO),
}  # fmt: skip
