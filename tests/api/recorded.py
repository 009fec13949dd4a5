"""Outputs of models as they are in the wild. In RECORDED: (format, text, content, [(name, arguments)]); arguments None: broken off."""
# ruff: noqa: E501
# A text of a model is best read in one line.

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "zip": {"type": "string"},
                "tags": {"type": "array"},
            },
        },
    },
}
TIME = {
    "type": "function",
    "function": {"name": "get_time", "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}}},
}
TOOLS = [WEATHER, TIME]

PARIS, TOKYO = ("get_weather", {"city": "Paris"}), ("get_weather", {"city": "Tōkyō ☂"})
UTC = ("get_time", {"zone": "UTC"})
NESTED = ("get_weather", {"city": 'a "quoted" \\ </tool_call> {brace', "deep": {"list": [1, -2.5e3, None, True, {"x": []}]}})
_NESTED_TEXT = r'{"city": "a \"quoted\" \\ </tool_call> {brace", "deep": {"list": [1, -2.5e3, null, true, {"x": []}]}}'

RECORDED: list[tuple[str, str, str, list]] = [
    # tagged: Hermes, Qwen
    ("tagged", '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>', "", [PARIS]),
    ("tagged", 'Let me look.\n\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>', "Let me look.", [PARIS]),
    (
        "tagged",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n<tool_call>\n'
        '{"arguments": {"zone": "UTC"}, "name": "get_time"}\n</tool_call>',
        "",
        [PARIS, UTC],
    ),
    ("tagged", f'<tool_call>{{"name": "get_weather", "arguments": {_NESTED_TEXT}}}</tool_call>', "", [NESTED]),
    ("tagged", '<tool_call>{"name": "get_weather", "arguments": {"city": "T\\u014dky\\u014d ☂"}}</tool_call> done', " done", [TOKYO]),
    ("tagged", '<tool_call>{"name": "get_time"}</tool_call>', "", [("get_time", {})]),
    ("tagged", '<tool_call>{"name": "get_time", "arguments": null}</tool_call>', "", [("get_time", {})]),
    ("tagged", '<tool_call>{"name": "get_time", "arguments": "{\\"zone\\": \\"UTC\\"}"}</tool_call>', "", [UTC]),
    ("tagged", '<tool_call>{"type": "function", "function": {"name": "get_time", "arguments": {"zone": "UTC"}}}</tool_call>', "", [UTC]),
    ("tagged", '<tool_call>\n[{"name": "get_time", "arguments": {"zone": "UTC"}}, {"name": "get_time"}]</tool_call>', "", [UTC, ("get_time", {})]),
    # forgiven: brackets missing or too many, raw line breaks, no closing tag
    ("tagged", '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}\n</tool_call>', "", [PARIS]),
    ("tagged", '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"</tool_call>', "", [PARIS]),
    ("tagged", '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}}\n</tool_call>', "", [PARIS]),
    ("tagged", '<tool_call>{"name": "get_weather", "arguments": {"city": "two\nlines"}}</tool_call>', "", [("get_weather", {"city": "two\nlines"})]),
    ("tagged", '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}', "", [PARIS]),
    (
        "tagged",
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}\n<tool_call>{"name": "get_time"}</tool_call>',
        "",
        [PARIS, ("get_time", {})],
    ),
    # broken off, or no call at all
    ("tagged", '<tool_call>{"name": "get_weather", "arguments": {"city": "Par', "", [("get_weather", None)]),
    ("tagged", '<tool_call>{"name": "get_wea', '<tool_call>{"name": "get_wea', []),
    ("tagged", "<tool_call>not JSON</tool_call>", "<tool_call>not JSON</tool_call>", []),
    ("tagged", "<tool_call>{'name': 'get_weather'}</tool_call>", "<tool_call>{'name': 'get_weather'}</tool_call>", []),
    ("tagged", "a < b and <tool> is no <tool_calls>", "a < b and <tool> is no <tool_calls>", []),
    ("tagged", "plain text  \n", "plain text  \n", []),
    ("tagged", "", "", []),
    # tagged: without the tags, as Qwen2.5-Coder does
    ("tagged", '```json\n{\n  "name": "get_weather",\n  "arguments": {\n    "city": "Paris"\n  }\n}\n```', "", [PARIS]),
    ("tagged", '{"name": "get_weather", "arguments": {"city": "Paris"}}', "", [PARIS]),
    ("tagged", '{{"name": "get_weather", "arguments": {"city": "Paris"}}}', "", [PARIS]),
    ("tagged", '```json\n{{"name": "get_weather", "arguments": {"city": "Paris"}}}\n```', "", [PARIS]),
    ("tagged", '<tool_call>\n{{"name": "get_weather", "arguments": {"city": "Paris"}}}\n</tool_call> done', " done", [PARIS]),
    ("tagged", '{{"name": "Ada", "arguments": {"for": 1}}}', '{{"name": "Ada", "arguments": {"for": 1}}}', []),
    ("tagged", '{"name": "Ada", "arguments": {"for": 1}}', '{"name": "Ada", "arguments": {"for": 1}}', []),
    # tagged: Qwen3-Coder, GLM
    (
        "tagged",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "<parameter=zip>\n075\n</parameter>\n<parameter=tags>\n[\"a\", 1]\n</parameter>\n</function>\n</tool_call>",
        "",
        [("get_weather", {"city": "Paris", "days": 3, "zip": "075", "tags": ["a", 1]})],
    ),
    ("tagged", "<tool_call>\n<function=get_time>\n</function>\n</tool_call>", "", [("get_time", {})]),
    (
        "tagged",
        "On it.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>3</arg_value>\n<arg_key>zip</arg_key>\n<arg_value>12</arg_value>\n</tool_call>",
        "On it.",
        [("get_weather", {"city": "Paris", "days": 3, "zip": "12"})],
    ),
    ("tagged", "<tool_call>get_time\n</tool_call>", "", [("get_time", {})]),
    # Llama 3
    ("llama3", '{"name": "get_weather", "parameters": {"city": "Paris"}}<|eot_id|>', "", [PARIS]),
    ("llama3", '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}<|eom_id|>', "", [PARIS]),
    ("llama3", '{"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": "get_time", "parameters": {"zone": "UTC"}}', "", [PARIS, UTC]),
    ("llama3", '{"type": "function", "name": "get_time", "parameters": {"zone": "UTC"}}', "", [UTC]),
    ("llama3", '{"name": "John", "parameters": {"age": 3}}', '{"name": "John", "parameters": {"age": 3}}', []),
    ("llama3", '{"answer": 42}', '{"answer": 42}', []),
    ("llama3", "It is sunny.<|eot_id|>", "It is sunny.", []),
    ("llama3", '<|python_tag|>brave_search.call(query="x")', 'brave_search.call(query="x")', []),
    # Mistral
    ("mistral", '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}}]</s>', "", [PARIS]),
    ("mistral", '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "get_time", "arguments": {"zone": "UTC"}}]', "", [PARIS, UTC]),
    ("mistral", 'Sure.[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]get_time[CALL_ID]abc123xyz[ARGS]{"zone": "UTC"}</s>', "Sure.", [PARIS, UTC]),
    ("mistral", 'Sure.[TOOL_CALLS]get_weather{"city": "Paris"}', "Sure.", [PARIS]),
    ("mistral", "[TOOL_CALLS] nothing", "[TOOL_CALLS] nothing", []),
    # DeepSeek
    (
        "deepseek",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{\"city\": \"Paris\"}\n```<｜tool▁call▁end｜>\n"
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_time\n```json\n{\"zone\": \"UTC\"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>",
        "",
        [PARIS, UTC],
    ),
    (
        "deepseek",
        "Looking.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{\"city\": \"Paris\"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "Looking.",
        [PARIS],
    ),
    (
        "deepseek-dsml",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        "",
        [("get_weather", {"city": "Paris", "days": 3})],
    ),
    (
        "minimax",
        'Hm.\n<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n</invoke>\n<invoke name="get_time">\n'
        '<parameter name="zone">UTC</parameter>\n</invoke>\n</minimax:tool_call>',
        "Hm.",
        [PARIS, UTC],
    ),
    # Kimi
    (
        "kimi",
        '<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"city": "Paris"}<|tool_call_end|>'
        '<|tool_call_begin|>functions.get_time:1<|tool_call_argument_begin|>{"zone": "UTC"}<|tool_call_end|><|tool_calls_section_end|>',
        "",
        [PARIS, UTC],
    ),
    # Cohere, Granite, Phi
    (
        "cohere",
        '<|START_ACTION|>[\n {"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Paris"}}\n]<|END_ACTION|>',
        "",
        [PARIS],
    ),
    ("listed", '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]', "", [PARIS]),
    # gpt-oss
    (
        "gpt-oss",
        "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{\"city\": \"Paris\"}<|call|>",
        "",
        [PARIS],
    ),
    (
        "gpt-oss",
        " to=functions.get_weather<|channel|>commentary json<|message|>{\"city\": \"Paris\"}<|call|>",
        "",
        [PARIS],
    ),
    ("gpt-oss", "<|channel|>final<|message|>Hello, world.<|return|>", "Hello, world.", []),
    (
        "gpt-oss",
        "<|channel|>commentary<|message|>First this.<|end|><|start|>assistant<|channel|>commentary to=functions.get_time<|message|>{\"zone\": \"UTC\"}<|call|>",
        "First this.",
        [UTC],
    ),
    ("gpt-oss", "no channels here", "no channels here", []),
    # plain JSON and models of unknown habits
    ("json", '{"name": "get_weather", "arguments": {"city": "Paris"}}', "", [PARIS]),
    ("json", '```json\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n```', "", [PARIS]),
    ("json", '[{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "get_time", "arguments": {"zone": "UTC"}}]', "", [PARIS, UTC]),
    ("json", '[{"name": "get_weather", "arguments": {"city": "Paris"}}, {"what": 1}]', '{"what": 1}]', [PARIS]),
    ("json", '```json\n{"a": 1}\n```', '```json\n{"a": 1}\n```', []),
    ("json", "[1, 2]", "[1, 2]", []),
    ("generic", '{"name": "get_time", "parameters": {"zone": "UTC"}}', "", [UTC]),
    ("generic", 'Yes.\n<tool_call>\n{"name": "get_time", "arguments": {"zone": "UTC"}}\n</tool_call>', "Yes.", [UTC]),
]  # fmt: skip

# (opened by the prompt, text, reasoning, content)
THOUGHTS: list[tuple[bool, str, str, str]] = [
    (False, "<think>\nLet me see.\n\nYes.\n</think>\n\nIt is 4.", "Let me see.\n\nYes.", "It is 4."),
    (False, "\n<think>\n\n</think>\n\nIt is 4.", "", "It is 4."),
    (True, "Let me see.\n</think>\n\nIt is 4.", "Let me see.", "It is 4."),
    (True, "<think>Let me see.</think>It is 4.", "Let me see.", "It is 4."),
    (True, "never done", "never done", ""),
    (False, "<think>a < b, </thin> is no end", "a < b, </thin> is no end", ""),
    (False, "  It is 4. <think>no</think>", "", "  It is 4. <think>no</think>"),
    (False, "<thin", "", "<thin"),
]

# Parts of outputs, to be mixed at random.
SOUP = [
        *('<tool_call>', '</tool_call>', '{"name": "get_time"', ', "arguments": {', '"zone": "UTC"', "}", "}}", "]", "[", ",", ":", '"', "\\"),
        *("<function=get_time>", "</function>", "<parameter=zone>", "</parameter>", "get_time", "<arg_key>", "</arg_key>", "<arg_value>"),
        *("</arg_value>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "function"),
        *("<｜tool▁call▁end｜>", "```json", "```", "<|channel|>", "commentary to=functions.f", "analysis", "final", "<|message|>", "<|call|>"),
        *("<|end|>", "<|start|>", "assistant", "<think>", "</think>", " ", "\n", "x", "é", "<", "{", "1.5e", "null", "tru", "\\u12", "\x01"),
        *("<invoke ", 'name="f"', ">", "<parameter ", "</invoke>", "<minimax:tool_call>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>"),
        *("<|tool_call_end|>", "<|START_ACTION|>", "<|tool_call|>", '[{"name": "f", "parameters": {"a": [1, {', "</s>", '{"name": "f", "arguments": "'),
    ]  # fmt: skip
